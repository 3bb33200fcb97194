"""The passes of softmax and relational attention by native code; attention.cpp has the equations.

Memory is O(t).  The arguments and the outputs are saved, and of each query and head what normalises its scores: the
largest score, and one over the sum of exponentials relative to it.  The logarithm of both in one number would lose the
sum if all scores are -1e9.
"""

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.kernel import Gradients, Outputs
from polyhead.ops.native import library
from polyhead.ops.native.structs import (
    BACKWARD,
    FORWARD,
    LANES,
    BiasGradientStruct,
    MasksStruct,
    RowsStruct,
    backward_parts,
    bias_gradient,
    fields,
    masks_struct,
    openmp_entry,
    rows_struct,
    sum_key_parts,
    thread_count,
    to_compute_dtype,
)
from polyhead.spec import RELATION_ACTS


class AttentionCallStruct(Structure):
    """The struct AttentionCall of native/attention.cpp, with the fields in the same order."""

    _fields_ = fields(
        ("b t s h g d e r p", c_int64),
        ("q k q_rel k_rel symbols dretrieved drelated", RowsStruct),
        ("retrieved related stats delta dq dk dq_rel dk_rel dsymbols", c_void_p),
        ("masks", MasksStruct),
        ("dbias", BiasGradientStruct),
        ("symbol_columns", c_void_p),
        ("num_columns dsymbols_part sample_parts key_parts", c_int64),
        ("scale relation_scale", c_double),
        ("act", c_int32),
        ("openmp_entry", c_void_p),
        ("threads", c_int64),
    )
    owners: list[Tensor]
    """The tensors whose memory the struct points into: they must live as long as it does."""


def call_struct(call: AttentionCall, pass_: int) -> AttentionCallStruct:
    """The inputs of a pass."""
    dtype = library.COMPUTE_DTYPES[call.q.dtype]
    q, k = to_compute_dtype(call.q, dtype), to_compute_dtype(call.k, dtype)
    (b, t, h, d), (s, g), e = q.shape, k.shape[1:3], call.v.shape[-1]
    masks = masks_struct(call, dtype)
    struct = AttentionCallStruct(b=b, t=t, s=s, h=h, g=g, d=d, e=e, r=0, p=1)
    struct.q, struct.k, struct.masks = rows_struct(q), rows_struct(k), masks
    struct.owners = [q, k, *masks.owners]

    if call.q_rel is not None and call.k_rel is not None:
        q_rel, k_rel = to_compute_dtype(call.q_rel, dtype), to_compute_dtype(call.k_rel, dtype)
        struct.r, struct.p = q_rel.shape[2:]
        struct.q_rel, struct.k_rel = rows_struct(q_rel), rows_struct(k_rel)
        struct.owners += [q_rel, k_rel]

    if call.v.ndim == 4:
        symbols = to_compute_dtype(call.v, dtype)
        struct.symbols = rows_struct(symbols)
    else:
        # Symbols by offset as (g e columns), so that lanes read one column after the other; the forward pass, with
        # queries in the lanes, reads them backwards.
        symbols = call.v.to(dtype).permute(1, 2, 0)
        if pass_ == FORWARD:
            symbols = symbols.flip(-1)
        # Lanes read LANES columns at once, past the last one, too.
        symbols = F.pad(symbols, (0, LANES)).contiguous()
        struct.symbol_columns, struct.num_columns = symbols.data_ptr(), symbols.shape[-1]
    struct.owners.append(symbols)

    struct.scale, struct.relation_scale = call.score_scale, struct.p**-0.5
    struct.act = RELATION_ACTS.index(call.act)
    struct.openmp_entry, struct.threads = openmp_entry(), thread_count()
    return struct


def empty_outputs(call: AttentionCall) -> Outputs:
    """Empty tensors like the outputs of `forward_pass`."""
    b, t, h, _ = call.q.shape
    num_relations = 0 if call.q_rel is None else call.q_rel.shape[2]
    dtype = library.COMPUTE_DTYPES.get(call.q.dtype, torch.float32)
    shapes = (b, t, h, call.v.shape[-1]), (b, t, h, num_relations), (b, h, t, 2)
    return [call.q.new_empty(shape, dtype=dtype) for shape in shapes]


def forward_pass(call: AttentionCall) -> Outputs:
    """The sums over symbols (b t h e) and over relations (b t h r), and the statistics of the scores (b h t 2).

    The statistics are the largest score, and one over the sum of exponentials relative to it.
    """
    retrieved, related, stats = empty_outputs(call)
    if call.k.numel() == 0:
        return [retrieved.zero_(), related.zero_(), stats.zero_()]
    if call.q.numel() > 0:
        struct = call_struct(call, FORWARD)
        struct.retrieved, struct.related, struct.stats = retrieved.data_ptr(), related.data_ptr(), stats.data_ptr()
        library.call("attention", stats.dtype, struct, FORWARD)
    return [retrieved, related, stats]


def backward_pass(call: AttentionCall, grad_outputs: Outputs) -> Gradients:
    """The gradients by name.  `grad_outputs`: the gradients of the outputs, then the outputs themselves."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return {}
    dtype = library.COMPUTE_DTYPES[call.q.dtype]
    dretrieved, drelated = to_compute_dtype(grad_outputs[0], dtype), to_compute_dtype(grad_outputs[1], dtype)
    retrieved, related, stats = grad_outputs[3:]
    struct = call_struct(call, BACKWARD)
    stats = stats.contiguous()  # vmap may expand it
    # The sum over keys of a da, which the gradient of a softmax subtracts: from the outputs, without another pass.
    delta = (dretrieved * retrieved).sum(-1)  # (b t h)
    if struct.r:
        delta += (drelated * related).sum(-1)
        struct.drelated = rows_struct(drelated)
    delta = delta.transpose(1, 2).contiguous()  # (b h t)
    struct.dretrieved = rows_struct(dretrieved)
    struct.stats, struct.delta = stats.data_ptr(), delta.data_ptr()
    struct.sample_parts, struct.key_parts = backward_parts(struct.b, struct.s, call.bias)

    dq = torch.zeros(struct.key_parts, *call.q.shape, dtype=dtype)  # a sum of its own for each part of the keys
    dk = torch.empty(call.k.shape, dtype=dtype)
    struct.dq, struct.dk = dq.data_ptr(), dk.data_ptr()
    if call.q_rel is not None and call.k_rel is not None:
        dq_rel = torch.zeros(struct.key_parts, *call.q_rel.shape, dtype=dtype)
        dk_rel = torch.empty(call.k_rel.shape, dtype=dtype)
        struct.dq_rel, struct.dk_rel = dq_rel.data_ptr(), dk_rel.data_ptr()
    # Threads add to symbols by offset from all keys, so each part has its own sum.
    is_by_offset = call.v.ndim == 3
    if is_by_offset:
        parts = struct.sample_parts, struct.key_parts
        dsymbols = torch.zeros(*parts, struct.g, struct.e, struct.num_columns, dtype=dtype)
        struct.dsymbols_part = dsymbols[0, 0].numel()
    else:
        dsymbols = torch.empty(call.v.shape, dtype=dtype)
    struct.dsymbols = dsymbols.data_ptr()
    dbias, struct.dbias = bias_gradient(call.bias, struct.sample_parts, struct.key_parts, struct.t)
    library.call("attention", dtype, struct, BACKWARD)

    if is_by_offset:
        dsymbols = dsymbols.sum((0, 1))[..., : struct.num_columns - LANES].permute(2, 0, 1)
    gradients = {"q": sum_key_parts(dq), "k": dk, "v": dsymbols}
    if call.q_rel is not None:
        gradients |= {"q_rel": sum_key_parts(dq_rel), "k_rel": dk_rel}
    if dbias is not None:
        gradients["bias"] = dbias.sum((0, 1))
    return gradients
