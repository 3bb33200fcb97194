"""Linear attention on a CPU by native code in chunks of 16 queries; ops/native/linear.cpp has the equations.

Time and memory are O(t); only the arguments are saved.  The activation of the values is applied before the call.
Katharopoulos et al. 2020, "Transformers are RNNs", eq. 16 to 20.
"""

import ctypes
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead.ops.native.library as native
import polyhead.ops.native.structs as structs
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.latent_code import act as activation, emptied
from polyhead.ops.native.check import check
from polyhead.ops.native.threads import pool, threads
from polyhead.ops.tiles import stateless


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    return stateless(x) or backward_only(x) or native.unready("linear", x.q)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference and chunks?

    Forward and backward, 8 heads, one core with AVX2, CPU time of native code over that of chunks: causal 0.4 to 0.7 at
    every length from 8 on (b = 1 to 128, d = 2 to 64), full 1.1 to 2.4.  Causal, over that of the reference: 0.5 at
    t = 128, d = 8, 0.7 to 1.0 at t = 128, d = 64, 0.8 at t = 48, d = 16 and t = 64, d = 32; 1.1 to 1.2 at t = 32,
    d = 16, at t = 64, d = 64 and at t = 64, d = 8 of one sample.
    """
    (b, t, _, d), causal = x.q.shape, x.causal
    return x.q.device.type == "cpu" and causal and t >= max(48, 2 * d) and b * t >= 128


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Linear attention by native code.  If `twice`, the reference computes second derivatives; otherwise they raise."""
    return _op(replace(x, k=emptied(x.mask, x.k), v=activation(x.act)(x.v), mask=None, act="identity"), twice)[0]


class LinearCallStruct(ctypes.Structure):
    """The struct LinearCall of native/linear.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "btshgde"),
        *((name, structs.RowsStruct) for name in ("q", "k", "v", "dout")),
        *((name, ctypes.c_void_p) for name in ("out", "dq", "dk", "dv", "edges")),
        ("sequences", ctypes.c_int64),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


def _call(x: AttentionCall) -> tuple[LinearCallStruct, list[Tensor | None]]:
    """The struct for both passes, and the tensors that own its memory."""
    dtype = native.NUMBERS[x.q.dtype]
    q, k, v = (structs.numbers(a, dtype) for a in (x.q, x.k, x.v))
    (b, t, h, d), (s, g, e) = q.shape, v.shape[1:]
    edges = None
    if x.cu_seqlens is not None:
        # Rows before the first edge belong to the first sequence; those behind the last are one.
        edges = F.pad(F.pad(x.cu_seqlens[1:], (1, 0)), (0, 1), value=t).clamp(0, t).cummax(0).values.to(torch.int32)
    call = LinearCallStruct(
        b, t, s, h, g, d, e, structs.rows(q), structs.rows(k), structs.rows(v),
        edges=None if edges is None else edges.data_ptr(), sequences=0 if edges is None else len(edges) - 1,
        causal=x.causal, scale=x.factor, pool=pool(), threads=threads(),
    )  # fmt: skip
    return call, [q, k, v, edges]


def _forward(x: AttentionCall) -> list[Tensor]:
    dtype = native.NUMBERS[x.q.dtype]
    out = torch.empty(*x.q.shape[:3], x.v.shape[-1], dtype=dtype)
    if not x.v.numel():
        out.zero_()
    elif out.numel():
        call, _kept = _call(x)
        call.out = out.data_ptr()
        native.call("linear", dtype, call, structs.FORWARD)
    return [out.to(x.q.dtype)]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    if not douts[0].numel() or not x.k.numel():
        return {}
    call, _kept = _call(x)
    dtype = native.NUMBERS[x.q.dtype]
    dout = structs.numbers(douts[0], dtype)
    call.dout = structs.rows(dout)
    dq, dk, dv = (torch.empty(a.shape, dtype=dtype) for a in (x.q, x.k, x.v))
    call.dq, call.dk, call.dv = (a.data_ptr() for a in (dq, dk, dv))
    native.call("linear", dtype, call, structs.BACKWARD)
    return {"q": dq, "k": dk, "v": dv}


_op = custom_op(Kernel("linear", "native", _forward, _backward, device_types="cpu"))


def examples() -> list[AttentionCall]:
    """Calls for the check of native code: partial chunks, packed sequences, more keys than queries and fewer."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = draw(1, 53, 6, 5), draw(1, 53, 2, 5), draw(1, 53, 2, 19)
    edges = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
    plain = AttentionCall(q, k, v, normalise="identity", causal=True)
    return [
        plain,
        replace(plain, cu_seqlens=edges),
        replace(plain, cu_seqlens=edges, causal=False),
        replace(plain, q=q[:, :21], act="relu"),
        replace(plain, k=k[:, :21], v=v[:, :21]),
        replace(plain, causal=False, mask=draw(1, 1, 1, 53) < 1),
    ]


check("linear", "linear", forward, examples)
