"""What the table of mechanisms says of a function, read off the function: names, order, axes, defaults."""

import inspect

from polyhead import spec


def dims(annotation):
    """The axes of all jaxtyping annotations in a type, without those of one array twice."""
    parts = getattr(annotation, "__args__", None) or (annotation,)
    texts = [part.dim_str for part in parts if hasattr(part, "dim_str")]
    return [text for part in parts if not hasattr(part, "dim_str") and part is not type(None) for text in dims(part)] \
        if not texts and len(parts) > 1 else list(dict.fromkeys(texts))  # fmt: skip


def described(function):
    """(tensors with axes, axes of optional arrays, defaults of the rest) as the signature has them."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    tensors = {p.name: dims(p.annotation)[0] for p in parameters if p.default is p.empty}
    return tensors, {p.name: p.default for p in parameters if p.default is not p.empty}


def check(function, row):
    """The function has the row's arguments, in its order, with its axes and defaults, and none besides."""
    tensors, defaults = described(function)
    assert tensors == row.tensors
    assert list(tensors) == list(row.tensors)
    assert defaults == {**spec.COMMON, **row.options, **dict.fromkeys(row.optional)}
