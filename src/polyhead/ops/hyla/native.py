"""HYLA on a CPU by native code, which mixes heads in registers; ops/native/hyla.cpp has the equations.

Memory is O(t); only the arguments are saved.  There are no atomic additions: results are deterministic for a given
number of threads.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6.
"""

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.kernel import Gradients, Outputs, unsupported_by_kernels
from polyhead.ops.native import library
from polyhead.ops.native.check import seeded_randn
from polyhead.ops.native.structs import (
    BACKWARD,
    FEW_QUERIES,
    FORWARD,
    ONE_QUERY,
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
from polyhead.spec import NORMALISE, RELATION_ACTS, RMS_HEADS_EPS, SOFTMAX_AXIS

MIN_PAIRS = 1 << 12
"""Pairs b t s from which on native code is no slower than the reference and tiles."""

MIN_PAIRS_FEW_QUERIES = 1 << 8
"""The same for fewer than FEW_QUERIES queries."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    if call.value_weight is not None:
        return "takes no value_weight"
    return unsupported_by_kernels(call) or library.unsupported_tensor("hyla", call.q)


def is_preferred(call: AttentionCall) -> bool:
    """Whether native code was measured to be no slower than the reference and tiles.

    On one core with AVX2 that is so from MIN_PAIRS on, and for a few queries from MIN_PAIRS_FEW_QUERIES on.  One query
    with a softmax over keys takes longer than the reference.
    """
    if call.q.device.type != "cpu":
        return False
    b = call.q.shape[0]
    t, s = call.lengths
    if t == 1 and not is_one_query(call):
        return False
    if t < FEW_QUERIES:
        return b * t * s >= MIN_PAIRS_FEW_QUERIES
    return b * t * s >= MIN_PAIRS


def is_one_query(call: AttentionCall) -> bool:
    """Whether C++ takes its pass of one query, which holds keys in its SIMD lanes and reads each key once."""
    return call.q.shape[1] == 1 and SOFTMAX_AXIS.get(call.normalise) != "s"


class HylaCallStruct(Structure):
    """The struct HylaCall of native/hyla.cpp, with the fields in the same order."""

    _fields_ = fields(
        ("b t s h g d e", c_int64),
        ("q k v dout", RowsStruct),
        ("out dq dk dv", c_void_p),
        ("masks", MasksStruct),
        ("dbias", BiasGradientStruct),
        ("sample_parts key_parts", c_int64),
        ("scale eps", c_double),
        ("normalise act", c_int32),
        ("openmp_entry", c_void_p),
        ("threads", c_int64),
    )
    owners: list[Tensor]
    """The tensors whose memory the struct points into: they must live as long as it does."""


def call_struct(call: AttentionCall, dtype: torch.dtype) -> HylaCallStruct:
    """The inputs of both passes."""
    q = to_compute_dtype(call.q, dtype)
    k = to_compute_dtype(call.k, dtype)
    v = to_compute_dtype(call.v, dtype)
    masks = masks_struct(call, dtype)
    b, t, h, d = q.shape
    s, g, e = v.shape[1:]
    struct = HylaCallStruct(b=b, t=t, s=s, h=h, g=g, d=d, e=e)
    struct.q, struct.k, struct.v = rows_struct(q), rows_struct(k), rows_struct(v)
    struct.masks = masks
    struct.scale = call.score_scale
    struct.eps = RMS_HEADS_EPS
    struct.normalise = NORMALISE.index(call.normalise)
    struct.act = RELATION_ACTS.index(call.act)
    struct.openmp_entry = openmp_entry()
    struct.threads = thread_count()
    struct.owners = [q, k, v, *masks.owners]
    return struct


def forward_pass(call: AttentionCall) -> Outputs:
    """The output (b t h e)."""
    dtype = library.COMPUTE_DTYPES[call.q.dtype]
    sample_parts, key_parts, pass_ = 1, 1, FORWARD
    if is_one_query(call):  # threads share the keys
        sample_parts, key_parts = backward_parts(call.q.shape[0], call.k.shape[1], None)
        pass_ = ONE_QUERY
    out = torch.empty(key_parts, *call.q.shape[:3], call.v.shape[-1], dtype=dtype)
    if call.v.numel() == 0:
        out.zero_()  # no keys
    elif out.numel() > 0:
        struct = call_struct(call, dtype)
        struct.out = out.data_ptr()
        struct.sample_parts, struct.key_parts = sample_parts, key_parts
        library.call("hyla", dtype, struct, pass_)
    return [sum_key_parts(out).to(call.q.dtype)]


def backward_pass(call: AttentionCall, grad_outputs: Outputs) -> Gradients:
    """The gradients of q, k, v and bias from that of the output; {} if there is no pair of query and key."""
    if grad_outputs[0].numel() == 0 or call.k.numel() == 0:
        return {}
    dtype = library.COMPUTE_DTYPES[call.q.dtype]
    struct = call_struct(call, dtype)
    dout = to_compute_dtype(grad_outputs[0], dtype)
    struct.dout = rows_struct(dout)
    struct.sample_parts, struct.key_parts = backward_parts(struct.b, struct.s, call.bias)

    # Keys lie in lanes: each part of the keys has its own dq, and they are added below.
    dq = torch.zeros(struct.key_parts, *call.q.shape, dtype=dtype)
    dk = torch.empty(call.k.shape, dtype=dtype)
    dv = torch.empty(call.v.shape, dtype=dtype)
    struct.dq, struct.dk, struct.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    dbias, struct.dbias = bias_gradient(call.bias, struct.sample_parts, struct.key_parts, struct.t)
    library.call("hyla", dtype, struct, BACKWARD)

    gradients = {"q": sum_key_parts(dq), "k": dk, "v": dv}
    if dbias is not None:
        gradients["bias"] = dbias.sum((0, 1))
    return gradients


def examples() -> list[AttentionCall]:
    """Calls for the check of native code (native/check.py), in float64."""
    randn = seeded_randn()
    # 8 heads have specialised code, 6 heads in 3 groups have not; 37, 18 and 33 rows fill no tile.
    q8, k8, v8 = randn(3, 1, 37, 8, 5)
    q6, k6, v6 = randn(2, 18, 6, 3), randn(2, 33, 3, 3), randn(2, 33, 3, 17)
    bias = randn(1, 6, 18, 33).masked_fill(randn(1, 6, 18, 33) > 1, -torch.inf)
    mask = randn(2, 6, 18, 33) < 1
    keep = (randn(1, 1, 18, 33) < 1).double() / 0.8
    cu_seqlens = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    bias_by_offset = randn(8, 73)
    first = slice(1)
    return [
        AttentionCall(q8, k8, v8, bias_by_offset, Masks(causal=True), normalise="rms_heads", act="relu"),
        AttentionCall(q6, k6, v6, bias, Masks(window=9), normalise="softmax_rms_heads", act="gelu"),
        AttentionCall(9 * q6, k6, v6, None, Masks(mask), keep, normalise="softmax_heads", act="silu"),
        AttentionCall(q8, q8, v8, masks=Masks(cu_seqlens=cu_seqlens), normalise="softmax", act="gelu_tanh"),
        AttentionCall(
            q6[:, first], k6, v6, None, Masks(mask[:, :, first], window=9), keep[:, :, first], normalise="rms_heads"
        ),
    ]
