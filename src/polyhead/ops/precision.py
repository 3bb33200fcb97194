"""Autocast: an op casts its tensors once, then computes as usual for that dtype.

    op(q, k, v)  under autocast   =   op(q.to(dtype), k.to(dtype), v.to(dtype))  without,    dtype of the autocast

This is the rule of PyTorch's own scaled_dot_product_attention: floating tensors are cast, except float64.  `bias`,
`keep` and `state` (float32) may have another dtype and are not cast.  Without autocast nothing is cast, and tensors of
different dtypes are an error.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

OWN = ("bias", "keep", "state")
"""Arguments whose dtype may differ from that of the others."""
CASTING = [kind for kind in ("cpu", "cuda", "mps", "xpu", "mtia", "hpu") if torch.amp.is_autocast_available(kind)]
"""Device types with autocast.  Computed at import, because torch.compile of torch 2.11 cannot trace the query."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of `x`, or None where it is off."""
    kind = x.device.type
    if kind not in CASTING or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of `x`: that of autocast, which leaves float64 unchanged, or its own."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def autocasting(function: Function) -> Function:
    """Decorator: under autocast, cast the arguments as PyTorch's own attention does.  The first argument gives the
    device.

    >>> from polyhead.ops import hyla
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     hyla(q, k.bfloat16(), v).dtype
    torch.bfloat16
    """
    names = list(inspect.signature(function).parameters)
    own = {*OWN, *(place for place, name in enumerate(names) if name in OWN)}

    @functools.wraps(function)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        like = args[0] if args else kwargs.get(names[0])
        dtype = autocast_dtype(like) if isinstance(like, Tensor) else None
        if like is None or dtype is None:
            return function(*args, **kwargs)
        given = [x if place in own else _cast(x, like, dtype) for place, x in enumerate(args)]
        named = {name: x if name in own else _cast(x, like, dtype) for name, x in kwargs.items()}
        with torch.autocast(like.device.type, enabled=False):
            return function(*given, **named)

    return cast(Function, lowered)


@contextlib.contextmanager
def casting(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Under autocast: the tensors in its dtype, with autocast off inside the block.  Otherwise the tensors
    unchanged."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        yield tensors
        return
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield tuple(_cast(x, tensors[0], dtype) for x in tensors)


def _cast(x: Any, like: Tensor, dtype: torch.dtype) -> Any:
    castable = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if castable and x.device == like.device else x
