"""Relational attention on a CPU by native code; ops/native/relational.cpp has the equations.

Memory is O(t).  The arguments, the outputs and the log-sum-exp of each query and head are saved.  Autograd
differentiates the map from relations to a head's output.  Altabaa and Lafferty 2024.
"""

import ctypes
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

import polyhead.ops.native.library as native
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.latent_code import retrieved_and_related
from polyhead.ops.native.check import CHECKS
from polyhead.ops.native.threads import pool, threads
from polyhead.ops.tiles import refuse
from polyhead.spec import RELATION_ACTS
from polyhead.spec.shapes import one_of


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    if x.act == "softmax":
        return "takes no relation_act='softmax'"
    return backward_only(x) or native.unready("relational", x.q)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference, tiles and PyTorch's kernels?

    Forward and backward, 8 heads, 8 relations as wide as keys, one core with AVX2, CPU time of native code over that of
    the reference: 0.9 to 1.4 at 2^12 pairs b t s, at 2^17 0.8 to 0.9 (t = 32, d = 16) and 0.5 to 0.6 (t = 128, d = 32),
    0.4 to 0.7 at 2^18 (d = 64).  Over that of PyTorch's kernels, relations of width 1: 0.6 causal and 1.0 full (t = 512
    and 1024).  SIMD lanes hold 16 queries, or 16 keys for calls of fewer than 8 queries.  Forward of one query: 0.8 to
    0.9 at 2^10 pairs, 0.4 from 2^11 pairs of at least 8 samples on; of 4 to 7 queries of one sample 1.2 to 1.3.
    """
    b, (t, s) = x.q.shape[0], x.lengths
    few = t < native.FEW and (t == 1 or b >= 8)
    return x.q.device.type == "cpu" and b * t * s >= (1 << 10 if few else 1 << 16) and (few or t >= native.FEW)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Relational attention by native code, with gradients of everything but masks.

    If `twice`, the reference computes second derivatives; otherwise they raise RuntimeError.
    """
    one_of("relational_attention", "relation_act", x.act, RELATION_ACTS)
    refuse("relational_attention", "native", unsupported_reason(x))
    retrieved, related, _ = (a.to(x.q.dtype) for a in _op(x, twice))
    return retrieved + einsum(x.relation_map, related, "h e r, b t h r -> b t h e")


class Call(ctypes.Structure):
    """The struct RelationalCall of native/relational.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "btshgderp"),
        *((name, native.Rows) for name in ("q", "k", "q_rel", "k_rel", "symbols", "dretrieved", "drelated")),
        *((name, ctypes.c_void_p) for name in ("retrieved", "related", "logs", "delta")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dq_rel", "dk_rel", "dsymbols")),
        ("limits", native.Limits),
        ("dbias", native.BiasGrad),
        ("turned", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("columns", "dsymbols_part", "slots", "strips")),
        *((name, ctypes.c_double) for name in ("scale", "factor")),
        ("act", ctypes.c_int32),
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


def _call(x: AttentionCall, what: int) -> tuple[Call, list[Tensor | None]]:
    """The struct for all passes, and the tensors that own its memory."""
    dtype = native.NUMBERS[x.q.dtype]
    q, k, q_rel, k_rel = (native.numbers(a, dtype) for a in (x.q, x.k, *x.related))
    (b, t, h, d), (s, g), (r, p), e = q.shape, k.shape[1:3], q_rel.shape[2:], x.symbols.shape[-1]
    symbols, turned, columns = None, None, 0
    if x.symbols.ndim == 4:
        symbols = native.numbers(x.symbols, dtype)
    elif what == native.FEW_QUERIES:
        symbols, columns = native.numbers(x.symbols.expand(1, -1, -1, -1), dtype), len(x.symbols)
    else:
        turned = x.symbols.to(dtype).permute(1, 2, 0)
        turned = F.pad(turned.flip(-1) if what == native.FORWARD else turned, (0, native.LANES)).contiguous()
        columns = turned.shape[-1]
    limits, kept = native.limits(x, dtype)
    call = Call(
        b, t, s, h, g, d, e, r, p, *(native.rows(a) for a in (q, k, q_rel, k_rel, symbols)), limits=limits,
        turned=None if turned is None else turned.data_ptr(), columns=columns, scale=x.factor, factor=p**-0.5,
        act=RELATION_ACTS.index(x.act), pool=pool(), threads=threads(),
    )  # fmt: skip
    return call, [q, k, q_rel, k_rel, symbols, turned, *kept]


def _forward(x: AttentionCall, *, tiles: bool = False) -> list[Tensor]:
    """The sums over symbols (b t h e) and over relations (b t h r), and the log-sum-exp (b h t).

    `tiles`: take the kernel for many queries even for few, because it rounds scores as the backward pass does."""
    slots, strips, what = (1, 1, native.FORWARD) if tiles else native.forward_shares(x)
    *like, logs = (torch.empty_like(a) for a in _like(x))
    parts = [torch.empty(strips, *a.shape, dtype=a.dtype) for a in like]
    if not x.k.numel():
        return [a.zero_() for a in (*like, logs)]
    if x.q.numel():
        call, _kept = _call(x, what)
        call.slots, call.strips = slots, strips
        call.retrieved, call.related, call.logs = (a.data_ptr() for a in (*parts, logs))
        native.call("relational", logs.dtype, call, what)
    return [*map(native.added, parts), logs]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    if not x.q.numel() or not x.k.numel():
        return {}
    dtype = native.NUMBERS[x.q.dtype]
    call, _kept = _call(x, native.BACKWARD)
    dretrieved, drelated = (native.numbers(a, dtype) for a in douts[:2])
    # A score that is rounded in two ways is off by so much of itself, and the sum over keys of ds is no longer 0.
    few = x.q.shape[1] < native.FEW
    retrieved, related, logs = _forward(x, tiles=True) if few else douts[3:]
    delta = (dretrieved * retrieved).sum(-1).add_((drelated * related).sum(-1)).transpose(1, 2).contiguous()
    call.dretrieved, call.drelated = native.rows(dretrieved), native.rows(drelated)
    call.logs, call.delta = logs.data_ptr(), delta.data_ptr()
    call.slots, call.strips = native.shares(call.b, call.s, x.bias)
    dq, dq_rel = (torch.zeros(call.strips, *a.shape, dtype=dtype) for a in (x.q, x.related[0]))
    dk, dk_rel = (torch.empty(a.shape, dtype=dtype) for a in (x.k, x.related[1]))
    if call.turned is None:
        dsymbols = torch.empty(x.symbols.shape, dtype=dtype)
    else:
        dsymbols = torch.zeros(call.slots, call.strips, call.g, call.e, call.columns, dtype=dtype)
        call.dsymbols_part = dsymbols[0, 0].numel()
    names = ("dq", "dk", "dq_rel", "dk_rel", "dsymbols")
    for name, grad in zip(names, (dq, dk, dq_rel, dk_rel, dsymbols), strict=True):
        setattr(call, name, grad.data_ptr())
    parts, call.dbias = native.bias_grad(x.bias, call.slots, call.strips, call.t)
    native.call("relational", dtype, call, native.BACKWARD)
    if call.turned is not None:
        dsymbols = dsymbols.sum((0, 1))[..., : call.columns - native.LANES].permute(2, 0, 1)
    grads = {"q": native.added(dq), "k": dk, "q_rel": native.added(dq_rel), "k_rel": dk_rel, "v": dsymbols}
    return grads if parts is None else grads | {"bias": parts.sum((0, 1))}


def _like(x: AttentionCall) -> list[Tensor]:
    (b, t, h, _), dtype = x.q.shape, native.NUMBERS.get(x.q.dtype, torch.float32)
    sizes = (b, t, h, x.symbols.shape[-1]), (b, t, h, x.related[0].shape[2]), (b, h, t)
    return [x.q.new_empty(size, dtype=dtype) for size in sizes]


_op = custom_op(
    Kernel(
        "relational", "native", "relational_attention", _forward, _backward, _like, retrieved_and_related,
        saves_outputs=True, device_types="cpu",
    )
)  # fmt: skip


def examples() -> list[AttentionCall]:
    """Calls for the check of native code: partial tiles, symbols by key and by offset, all kinds of limits."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few, keys, weight = draw(2, 18, 6, 3), draw(2, 33, 3, 3), draw(6, 7, 5)
    hidden = draw(1, 6, 18, 33).masked_fill(draw(1, 6, 18, 33) > 1, -torch.inf)
    mask, keep = draw(2, 6, 18, 33) < 1, (draw(1, 1, 18, 33) < 1).double() / 0.8
    one = AttentionCall(few, keys, draw(2, 33, 3, 7), hidden, window=9, relation_weight=weight, act="gelu")
    two = AttentionCall(9 * few, keys, draw(50, 3, 7), None, mask, keep, relation_weight=weight, act="tanh")
    q, q_rel = draw(1, 37, 6, 5), draw(1, 37, 5, 6)
    last = AttentionCall(q, q, draw(1, 37, 6, 7), draw(6, 73), causal=True, relation_weight=weight, act="relu")
    q_rel_few, k_rel = draw(2, 18, 5, 2), draw(2, 33, 5, 2)
    calls = [*(replace(x, q_rel=q_rel_few, k_rel=k_rel) for x in (one, two)), replace(last, q_rel=q_rel, k_rel=q_rel)]
    v, mask, keep = draw(37, 3, 7), mask[:, :, :5], keep[:, :, :5]
    return [*calls, replace(calls[1], q=few[:, :5], v=v, q_rel=q_rel_few[:, :5], mask=mask, keep=keep)]


CHECKS["relational"] = forward, examples
