"""Autocast: an op casts its tensors once and is then what it is for tensors of that dtype.

    op(q, k, v)  under autocast   =   op(q.to(dtype), k.to(dtype), v.to(dtype))  without,    dtype of the autocast

The rule of PyTorch's own scaled_dot_product_attention: every floating tensor is cast, float64 stays as it is.  What an
op reads beside its tensors in a dtype of its own (bias, keep, a state, which is in float32) is left alone.  Without
autocast nothing is cast, and tensors of several dtypes are an error.
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
"""Arguments that may have a dtype of their own."""
CASTING = [kind for kind in ("cpu", "cuda", "mps", "xpu", "mtia", "hpu") if torch.amp.is_autocast_available(kind)]
"""Kinds of devices with autocast.  Known at import: torch.compile of torch 2.11 cannot ask."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of `x`, or None where it is off."""
    kind = x.device.type
    if kind not in CASTING or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocasting(function: Function) -> Function:
    """An op that does under autocast what PyTorch's own attention does; its first argument says where it is.

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
    """Under autocast the tensors in its dtype, and no autocast; otherwise nothing changes."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        yield tensors
        return
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield tuple(_cast(x, tensors[0], dtype) for x in tensors)


def _cast(x: Any, like: Tensor, dtype: torch.dtype) -> Any:
    castable = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if castable and x.device == like.device else x
