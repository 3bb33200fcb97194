"""HYLA on a CPU by native code, which mixes heads in registers; ops/native/hyla.cpp has the equations.

Memory is O(t); only the arguments are saved.  There are no atomic additions: results are deterministic for a given
number of threads.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6.
"""

import ctypes
import functools

import torch
from torch import Tensor

import polyhead.ops.native.library as native
import polyhead.ops.native.structs as structs
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.native.check import check
from polyhead.ops.native.threads import pool, threads
from polyhead.spec import NORMALISE, RELATION_ACTS, RMS_HEADS_EPS


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    if x.value_weight is not None:
        return "takes no value_weight"
    return backward_only(x) or native.unready("hyla", x.q)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference and tiles?

    Forward and backward, 8 heads, bidirectional with a bias by offset, one core with AVX2, CPU time of the reference
    over that of native code: 1.8 at 2^12 pairs b t s (d = 8), at 2^17 8.0 (d = 2), 3.4 (d = 8), 3.6 (d = 16), 2.3 with
    a softmax over keys (d = 2).  SIMD lanes hold 16 queries, or 16 keys for calls of fewer than 8 queries.  Forward of
    one query: 1.1 to 3.7 at 2^8 pairs, 1.4 to 6.3 at 2^10.
    """
    t, s = x.lengths
    return x.q.device.type == "cpu" and x.q.shape[0] * t * s >= (1 << 12 if t >= structs.FEW else 1 << 8)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """HYLA by native code, with gradients of q, k, v and bias.

    If `twice`, the reference computes second derivatives; otherwise they raise RuntimeError."""
    return _op(x, twice)[0]


class HylaCallStruct(ctypes.Structure):
    """The struct HylaCall of native/hyla.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "btshgde"),
        *((name, structs.RowsStruct) for name in ("q", "k", "v", "dout")),
        *((name, ctypes.c_void_p) for name in ("out", "dq", "dk", "dv")),
        ("limits", structs.LimitsStruct),
        ("dbias", structs.BiasGradStruct),
        *((name, ctypes.c_int64) for name in ("slots", "strips")),
        *((name, ctypes.c_double) for name in ("scale", "eps")),
        *((name, ctypes.c_int32) for name in ("normalise", "act")),
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


def _call(x: AttentionCall) -> tuple[HylaCallStruct, list[Tensor | None]]:
    """The struct for both passes, and the tensors that own its memory."""
    dtype = native.NUMBERS[x.q.dtype]
    q, k, v = (structs.numbers(a, dtype) for a in (x.q, x.k, x.v))
    (b, t, h, d), (s, g, e) = q.shape, v.shape[1:]
    limits, kept = structs.limits(x, dtype)
    call = HylaCallStruct(
        b, t, s, h, g, d, e, structs.rows(q), structs.rows(k), structs.rows(v),
        limits=limits, scale=x.factor, eps=RMS_HEADS_EPS,
        normalise=NORMALISE.index(x.normalise), act=RELATION_ACTS.index(x.act),
        pool=pool(), threads=threads(),
    )  # fmt: skip
    return call, [q, k, v, *kept]


def _forward(x: AttentionCall) -> list[Tensor]:
    dtype = native.NUMBERS[x.q.dtype]
    slots, strips, what = structs.forward_shares(x)
    outs = torch.empty(strips, *x.q.shape[:3], x.v.shape[-1], dtype=dtype)
    if not x.v.numel():
        outs.zero_()
    elif outs.numel():
        call, _kept = _call(x)
        call.out, call.slots, call.strips = outs.data_ptr(), slots, strips
        native.call("hyla", dtype, call, what)
    return [structs.added(outs).to(x.q.dtype)]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    if not douts[0].numel() or not x.k.numel():
        return {}
    call, _kept = _call(x)
    dtype = native.NUMBERS[x.q.dtype]
    dout = structs.numbers(douts[0], dtype)
    call.dout = structs.rows(dout)
    call.slots, call.strips = structs.shares(call.b, call.s, x.bias)
    dq = torch.zeros(call.strips, *x.q.shape, dtype=dtype)
    dk, dv = (torch.empty(a.shape, dtype=dtype) for a in (x.k, x.v))
    call.dq, call.dk, call.dv = (a.data_ptr() for a in (dq, dk, dv))
    parts, call.dbias = structs.bias_grad(x.bias, call.slots, call.strips, call.t)
    native.call("hyla", dtype, call, structs.BACKWARD)
    grads = {"q": structs.added(dq), "k": dk, "v": dv}
    return grads if parts is None else grads | {"bias": parts.sum((0, 1))}


_op = custom_op(Kernel("hyla", "native", _forward, _backward, device_types="cpu"))


def examples() -> list[AttentionCall]:
    """Calls for the check of native code: specialised and other numbers of heads, partial tiles, all kinds of
    limits."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = draw(3, 1, 37, 8, 5)
    few, keys, values = draw(2, 18, 6, 3), draw(2, 33, 3, 3), draw(2, 33, 3, 17)
    hidden = draw(1, 6, 18, 33).masked_fill(draw(1, 6, 18, 33) > 1, -torch.inf)
    mask, keep = draw(2, 6, 18, 33) < 1, (draw(1, 1, 18, 33) < 1).double() / 0.8
    edges = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    return [
        AttentionCall(q, k, v, draw(8, 73), causal=True, normalise="rms_heads", act="relu"),
        AttentionCall(few, keys, values, hidden, window=9, normalise="softmax_rms_heads", act="gelu"),
        AttentionCall(9 * few, keys, values, None, mask, keep, normalise="softmax_heads", act="silu"),
        AttentionCall(q, q, v, cu_seqlens=edges, normalise="softmax", act="gelu_tanh"),
        AttentionCall(
            few[:, :5], keys, values, None, mask[:, :, :5], keep[:, :, :5], window=9, normalise="softmax_rms_heads"
        ),
    ]


check("hyla", "hyla", forward, examples)
