"""What the table of mechanisms states, read from a function: names, order, axes, defaults."""

import inspect

from polyhead import spec


def axes(annotation):
    """Those of the first array that a type allows."""
    while not hasattr(annotation, "dim_str"):
        annotation = annotation.__args__[0]
    return annotation.dim_str


def check(function, row, torch_only=()):
    """The function has the row's arguments, in its order, with its axes and defaults, and none besides."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    tensors = {name: axes(p.annotation) for name, p in parameters.items() if p.default is p.empty}
    assert list(tensors.items()) == list(row.tensors.items())
    assert {name: axes(parameters[name].annotation) for name in row.optional} == row.optional
    defaults = {name: p.default for name, p in parameters.items() if name not in tensors}
    assert defaults == {**spec.COMMON, **row.options, **dict.fromkeys((*row.optional, *torch_only))}
