"""HYLA on a CPU by native code (ops/native/hyla.cpp, where the equations are): heads are mixed in registers.

Memory grows with t; only the arguments are saved.  Nothing is added atomically: with the same number of threads,
results are the same every time.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import polyhead.ops.native.library as native
from polyhead.ops.custom_op_rules import (
    REFERENCES,
    backward_only,
    by_reference,
    check_backward,
    no_second_derivative,
    vmapped,
)
from polyhead.ops.latent_code import Inputs
from polyhead.ops.tiles import given, refuse
from polyhead.spec import ACTS, NORMALISE, RELATION_ACTS, RMS_HEADS_EPS
from polyhead.spec.shapes import one_of


def refusal(inputs: Inputs) -> str | None:
    """Why native code does not take the inputs, or None; the first call that is not refused for itself builds it."""
    if inputs.value_weight is not None:
        return "takes no value_weight"
    return backward_only(inputs) or native.unready("hyla", inputs.q)


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference and tiles?

    Forward and backward, 8 heads, bidirectional with a bias by offset, one core with AVX2, CPU time of the reference
    over that of native code: 1.8 at 2^12 pairs b t s (d = 8), at 2^17 8.0 (d = 2), 3.4 (d = 8), 3.6 (d = 16), 2.3 with
    a softmax over keys (d = 2).  Queries lie in lanes, 16 at a time: few of them leave lanes empty.
    """
    b, t = inputs.q.shape[:2]
    return inputs.q.device.type == "cpu" and t >= 8 and b * t * inputs.k.shape[1] >= 1 << 12


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    normalise: str = "rms_heads",
    act: str = "relu",
    value_weight: Tensor | None = None,
    twice: bool = False,
) -> Tensor:
    """HYLA by native code.  Gradients for q, k, v and bias; a second derivative by the reference if `twice`, else it is
    refused."""
    one_of("hyla", "normalise", normalise, NORMALISE)
    one_of("hyla", "act", act, ACTS)
    refuse("hyla", "native", refusal(Inputs(q, k, v, keep=keep, value_weight=value_weight)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    absent = q.new_empty(0)
    full = [x if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (mask, keep)]
    limits = [absent if x is None else x for x in (bias, *full, cu_seqlens)]
    options = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
    return torch.ops.polyhead.hyla_native([q, k, v, limits[0]], limits[1:], **options, twice=twice)


class Call(ctypes.Structure):
    """HylaCall in native/hyla.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "btshgde"),
        *((name, native.Rows) for name in ("q", "k", "v", "dout")),
        *((name, ctypes.c_void_p) for name in ("out", "dq", "dk", "dv", "dbias")),
        ("limits", native.Limits),
        *((f"dbias_{name}", ctypes.c_int64) for name in ("b", "h", "q", "k", "slot", "strip")),
        *((name, ctypes.c_int64) for name in ("slots", "strips")),
        *((name, ctypes.c_double) for name in ("scale", "eps")),
        *((name, ctypes.c_int32) for name in ("normalise", "act")),
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


def _call(tensors: list[Tensor], limits: list[Tensor | None], options: dict[str, Any]) -> tuple[Call, list[Any]]:
    """What both passes are told, and the tensors whose memory that is."""
    bias, mask, keep, cu_seqlens = limits
    dtype = native.NUMBERS[tensors[0].dtype]
    q, k, v = (native.numbers(x, dtype) for x in tensors)
    (b, t, h, d), (s, g, e) = q.shape, v.shape[1:]
    bias, keep = (None if x is None else x.to(dtype) for x in (bias, keep))
    look = native.sight(t, s, options["causal"], options["window"], cu_seqlens)
    call = Call(
        b, t, s, h, g, d, e, native.rows(q), native.rows(k), native.rows(v),
        limits=native.limits(look, bias, keep, mask, t, s), scale=options["scale"], eps=RMS_HEADS_EPS,
        normalise=NORMALISE.index(options["normalise"]), act=RELATION_ACTS.index(options["act"]),
        pool=native.pool(), threads=native.threads(),
    )  # fmt: skip
    return call, [q, k, v, bias, keep, mask, look]


@torch.library.custom_op("polyhead::hyla_native", mutates_args=(), device_types="cpu")
def _forward(
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    normalise: str,
    act: str,
    twice: bool = False,
) -> Tensor:
    """Of q, k, v, bias; mask, keep, cu_seqlens."""
    q, _, v, bias = tensors
    dtype = native.NUMBERS[q.dtype]
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype)
    if not v.numel():
        out.zero_()
    elif out.numel():
        options = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
        call, _kept = _call(tensors[:3], given([bias, *limits]), options)
        call.out = out.data_ptr()
        native.call("hyla", dtype, call, 0)
    return out.to(q.dtype)


@_forward.register_fake
def _(tensors, limits, *, causal, window=None, scale, normalise, act, twice=False):  # type: ignore[no-untyped-def]
    return tensors[0].new_empty(*tensors[0].shape[:3], tensors[2].shape[-1])


@torch.library.custom_op("polyhead::hyla_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    dout: Tensor,
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    normalise: str,
    act: str,
) -> list[Tensor]:
    """Gradients of q, k, v and bias; empty if it is not given."""
    q, k, v, bias = tensors
    if not dout.numel() or not k.numel():
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
    options = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
    call, _kept = _call([q, k, v], given([bias, *limits]), options)
    dtype = native.NUMBERS[q.dtype]
    dout = native.numbers(dout, dtype)
    call.dout = native.rows(dout)
    call.slots, call.strips = native.shares(call.b, call.s, bias)
    dq = torch.zeros(call.strips, *q.shape, dtype=dtype)
    dk, dv = (torch.empty(x.shape, dtype=dtype) for x in (k, v))
    call.dq, call.dk, call.dv = (x.data_ptr() for x in (dq, dk, dv))
    dbias = torch.zeros_like(bias)
    if bias.numel():
        parts, steps = native.bias_grad(bias, call.slots, call.strips, call.t, dtype)
        call.dbias = parts.data_ptr() + steps.pop("first") * parts.itemsize
        for name, step in steps.items():
            setattr(call, f"dbias_{name}", step)
    native.call("hyla", dtype, call, 1)
    if bias.numel():
        dbias = parts.sum((0, 1))
    grads = zip((dq.sum(0) if call.strips > 1 else dq[0], dk, dv, dbias), tensors, strict=True)
    return [x.to(like.dtype) for x, like in grads]


@_backward.register_fake
def _(dout, tensors, limits, *, causal, window=None, scale, normalise, act):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _grad(ctx, dout):  # type: ignore[no-untyped-def]
    check_backward("hyla", "native")
    saved = list(ctx.saved_tensors)  # once: checkpointing unpacks them once only
    tensors, limits, options = saved[:4], saved[4:], dict(ctx.options)
    if options.pop("twice", False) and torch.is_grad_enabled():
        grads = by_reference(lambda own: [_anew(own, limits, options)], tensors, [dout])
    else:
        grads = torch.ops.polyhead.hyla_native_backward(dout, tensors, limits, **options)
    return grads, [None] * len(limits)


def _anew(tensors: list[Tensor], limits: list[Tensor], options: dict[str, Any]) -> Tensor:
    """The forward pass by the reference."""
    bias, mask, keep, cu_seqlens = given([*tensors[3:], *limits])
    extra = {"bias": bias, "mask": mask, "keep": keep, "cu_seqlens": cu_seqlens}
    return REFERENCES["hyla"](*tensors[:3], **extra, **options)


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(no_second_derivative("hyla", "native"))
_forward.register_vmap(vmapped(_forward))


def check(dtype: torch.dtype) -> float:
    """The largest error beside the reference, with heads of a template and others, and tiles that are not full."""
    cases: list[tuple[list[tuple[int, ...]], dict[str, Any]]] = [
        ([(1, 37, 8, 5), (1, 37, 8, 5), (1, 37, 8, 7), (8, 73)], {"causal": True}),
        ([(2, 18, 6, 3), (2, 33, 3, 3), (2, 33, 3, 17), (1, 6, 18, 33)], {
            "window": 9, "mask": torch.arange(33) % 5 < 4, "normalise": "softmax_rms_heads", "act": "gelu"
        }),
    ]  # fmt: skip
    return max(
        native.worst_error(_biased(forward, how), _biased(REFERENCES["hyla"], how), sizes, dtype)
        for sizes, how in cases
    )


def _biased(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    return lambda q, k, v, bias: function(q, k, v, bias=bias, **options)


native.CHECKS["hyla"] = check
