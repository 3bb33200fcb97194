"""What the table of mechanisms states, read from a function: names, order, axes, defaults; and foreign names."""

import inspect

from polyhead import spec
from polyhead.spec.names import ELSEWHERE, OF_A_HEAD

OURS_ALONE = ("Batch", "Taps")  # no other library makes them
LAYERS = ("MultiHeadAttention", "TransformerBlock", "Transformer")


def axes(annotation):
    """Those of the first array that a type allows."""
    while not hasattr(annotation, "dim_str"):
        annotation = annotation.__args__[0]
    return annotation.dim_str


def check(function, row):
    """The function has the row's arguments, in its order, with its axes and defaults, and none besides."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    tensors = {name: axes(p.annotation) for name, p in parameters.items() if p.default is p.empty}
    assert list(tensors.items()) == list(row.tensors.items())
    assert {name: axes(parameters[name].annotation) for name in row.optional} == row.optional
    defaults = {name: p.default for name, p in parameters.items() if name not in tensors}
    assert defaults == {**spec.COMMON, **row.options, **dict.fromkeys(row.optional)}


def answered(where, call):
    """What each class and op of the module `where`, and each layer's method `call`, says to other libraries' names of
    its arguments: who, the name, the error."""
    callers = [(name, getattr(where, name), ()) for name in where.__all__ if name not in OURS_ALONE]
    ops = where.__name__.rpartition(".")[2] in ("ops", "jaxside")
    callers = [one for one in callers if callable(one[1]) and (ops or isinstance(one[1], type))]
    layers = [getattr(where, name) for name in LAYERS if hasattr(where, name)]
    callers += [(f"{kind.__name__}.{call}", getattr(kind, call), (object.__new__(kind),)) for kind in layers]
    for name, function, first in callers:
        names = inspect.signature(function.__init__ if isinstance(function, type) else function).parameters
        for theirs, ours in ELSEWHERE.items():
            if theirs not in names and theirs not in OF_A_HEAD and not names.keys().isdisjoint(ours):
                yield name, theirs, said(function, *first, **{theirs: None})


def said(function, *given, **named):
    """The error of a call."""
    try:
        return function(*given, **named)
    except TypeError as error:
        return str(error)
