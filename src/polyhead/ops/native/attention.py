"""The passes of softmax and relational attention by native code; attention.cpp has the equations.

Memory is O(t).  The arguments and the outputs are saved, and of each query and head what normalises its scores: the
largest, and one over the sum.  The logarithm of both in one number would lose the sum if all scores are -1e9.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead.ops.native.library as native
import polyhead.ops.native.structs as structs
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients
from polyhead.ops.native.threads import pool, threads
from polyhead.spec import RELATION_ACTS


class AttentionCallStruct(ctypes.Structure):
    """The struct AttentionCall of native/attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "btshgderp"),
        *((name, structs.RowsStruct) for name in ("q", "k", "q_rel", "k_rel", "symbols", "dretrieved", "drelated")),
        *((name, ctypes.c_void_p) for name in ("retrieved", "related", "stats", "delta")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dq_rel", "dk_rel", "dsymbols")),
        ("limits", structs.LimitsStruct),
        ("dbias", structs.BiasGradStruct),
        ("turned", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("columns", "dsymbols_part", "slots", "strips")),
        *((name, ctypes.c_double) for name in ("scale", "factor")),
        ("act", ctypes.c_int32),
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


def _call(x: AttentionCall, what: int) -> tuple[AttentionCallStruct, list[Tensor | None]]:
    """The struct for all passes, and the tensors that own its memory."""
    dtype = native.NUMBERS[x.q.dtype]
    q, k = (structs.numbers(a, dtype) for a in (x.q, x.k))
    q_rel, k_rel = (None if a is None else structs.numbers(a, dtype) for a in (x.q_rel, x.k_rel))
    (b, t, h, d), (s, g), e = q.shape, k.shape[1:3], x.v.shape[-1]
    r, p = (0, 1) if q_rel is None else q_rel.shape[2:]
    symbols, turned, columns = None, None, 0
    if x.v.ndim == 4:
        symbols = structs.numbers(x.v, dtype)
    elif what == structs.FEW_QUERIES:
        symbols, columns = structs.numbers(x.v.expand(1, -1, -1, -1), dtype), len(x.v)
    else:
        turned = x.v.to(dtype).permute(1, 2, 0)
        turned = F.pad(turned.flip(-1) if what == structs.FORWARD else turned, (0, structs.LANES)).contiguous()
        columns = turned.shape[-1]
    limits, kept = structs.limits(x, dtype)
    call = AttentionCallStruct(
        b, t, s, h, g, d, e, r, p, *(structs.rows(a) for a in (q, k, q_rel, k_rel, symbols)), limits=limits,
        turned=None if turned is None else turned.data_ptr(), columns=columns, scale=x.factor, factor=p**-0.5,
        act=RELATION_ACTS.index(x.act), pool=pool(), threads=threads(),
    )  # fmt: skip
    return call, [q, k, q_rel, k_rel, symbols, turned, *kept]


def forward(x: AttentionCall, *, tiles: bool = False) -> list[Tensor]:
    """The sums over symbols (b t h e) and over relations (b t h r); the largest score, and one over the sum of
    exponentials relative to it (b h t 2).

    `tiles`: take the kernel for many queries even for few, because it rounds scores as the backward pass does."""
    slots, strips, what = (1, 1, structs.FORWARD) if tiles else structs.forward_shares(x)
    *outs, stats = (torch.empty_like(a) for a in like(x))
    parts = [torch.empty(strips, *a.shape, dtype=a.dtype) for a in outs]
    if not x.k.numel():
        return [a.zero_() for a in (*outs, stats)]
    if x.q.numel():
        call, _kept = _call(x, what)
        call.slots, call.strips = slots, strips
        call.retrieved, call.related, call.stats = (a.data_ptr() for a in (*parts, stats))
        native.call("attention", stats.dtype, call, what)
    return [*map(structs.added, parts), stats]


def backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    """The gradients by name.  `douts`: the gradients of the outputs, then the outputs themselves."""
    if not x.q.numel() or not x.k.numel():
        return {}
    dtype = native.NUMBERS[x.q.dtype]
    call, _kept = _call(x, structs.BACKWARD)
    dretrieved, drelated = (structs.numbers(a, dtype) for a in douts[:2])
    # A score that is rounded in two ways is off by so much of itself, and the sum over keys of ds is no longer 0.
    few = x.q.shape[1] < structs.FEW
    retrieved, related, stats = forward(x, tiles=True) if few else douts[3:]
    stats = stats.contiguous()  # vmap may expand it
    delta = (dretrieved * retrieved).sum(-1)
    if call.r:
        delta += (drelated * related).sum(-1)
        call.drelated = structs.rows(drelated)
    delta = delta.transpose(1, 2).contiguous()
    call.dretrieved = structs.rows(dretrieved)
    call.stats, call.delta = stats.data_ptr(), delta.data_ptr()
    call.slots, call.strips = structs.shares(call.b, call.s, x.bias)
    grads = {"q": torch.zeros(call.strips, *x.q.shape, dtype=dtype), "k": torch.empty(x.k.shape, dtype=dtype)}
    if x.q_rel is not None and x.k_rel is not None:
        grads["q_rel"] = torch.zeros(call.strips, *x.q_rel.shape, dtype=dtype)
        grads["k_rel"] = torch.empty(x.k_rel.shape, dtype=dtype)
    if call.turned is None:
        dsymbols = torch.empty(x.v.shape, dtype=dtype)
    else:
        dsymbols = torch.zeros(call.slots, call.strips, call.g, call.e, call.columns, dtype=dtype)
        call.dsymbols_part = dsymbols[0, 0].numel()
    for name, grad in (*grads.items(), ("symbols", dsymbols)):
        setattr(call, f"d{name}", grad.data_ptr())
    parts, call.dbias = structs.bias_grad(x.bias, call.slots, call.strips, call.t)
    native.call("attention", dtype, call, structs.BACKWARD)
    if call.turned is not None:
        dsymbols = dsymbols.sum((0, 1))[..., : call.columns - structs.LANES].permute(2, 0, 1)
    grads = {name: structs.added(a) if name in ("q", "q_rel") else a for name, a in grads.items()} | {"v": dsymbols}
    return grads if parts is None else grads | {"bias": parts.sum((0, 1))}


def like(x: AttentionCall) -> list[Tensor]:
    """Empty tensors like the outputs."""
    (b, t, h, _), dtype = x.q.shape, native.NUMBERS.get(x.q.dtype, torch.float32)
    relations = 0 if x.q_rel is None else x.q_rel.shape[2]
    sizes = (b, t, h, x.v.shape[-1]), (b, t, h, relations), (b, h, t, 2)
    return [x.q.new_empty(size, dtype=dtype) for size in sizes]
