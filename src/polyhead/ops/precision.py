"""Autocast: an op casts its tensors once, then computes as usual for that dtype.

    op(q, k, v)  under autocast   =   op(q.to(dtype), k.to(dtype), v.to(dtype))  without,    dtype of the autocast

This is the rule of PyTorch's own scaled_dot_product_attention: floating tensors are cast, except float64.  `bias`,
`sinks`, `keep` and `state` (float32) may have another dtype and are not cast.  Without autocast nothing is cast, and
tensors of different dtypes are an error.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall

AUTOCAST_DEVICES: list[str] = []
"""Device types with autocast.  Computed at import, because torch.compile of torch 2.11 cannot trace the query."""
for _device_type in ("cpu", "cuda", "mps", "xpu", "mtia", "hpu"):
    if torch.amp.is_autocast_available(_device_type):
        AUTOCAST_DEVICES.append(_device_type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of `x`, or None where it is off."""
    device_type = x.device.type
    if device_type not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of `x`: that of autocast, which leaves float64 unchanged, or its own."""
    if x.dtype == torch.float64:
        return x.dtype
    return autocast_dtype(x) or x.dtype


@contextlib.contextmanager
def casting(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Under autocast: the tensors in its dtype, with autocast off inside the block.  Otherwise the tensors themselves.

    >>> with torch.autocast("cpu", torch.bfloat16), casting(torch.zeros(3)) as (x,):
    ...     x.dtype
    torch.bfloat16
    """
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        yield tensors
        return
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield tuple(_cast(tensor, tensors[0].device, dtype) for tensor in tensors)


def cast_call(call: AttentionCall) -> AttentionCall:
    """Under autocast: the call with its tensors in the dtype of autocast.  Otherwise the call itself."""
    dtype = autocast_dtype(call.q)
    if dtype is None:
        return call
    tensors = {}
    for name, tensor in call.learned_tensors().items():
        if name not in ("bias", "sinks"):
            tensors[name] = _cast(tensor, call.q.device, dtype)
    return call.with_tensors(tensors)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without autocast on the device of `x`; it does nothing where autocast is off already."""
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _cast(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A floating tensor on `device` in `dtype`; float64 and everything else unchanged."""
    if tensor.device != device or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
