"""The table of backends: names, errors, and the choice that "auto" makes."""

import numpy as np
import pytest
import torch
from compilers import IMPLS, READY
from refusals import refusing

from polyhead import ops
from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.dispatch import choose
from polyhead.ops.registry import OPS, TENSORS, resolve
from polyhead.spec.shapes import check_window


def qkv(t=5, s=5, d=4, e=4, b=1, h=2):
    return torch.zeros(b, t, h, d), torch.zeros(b, s, h, d), torch.zeros(b, s, h, e)


def name_of(op, run):
    """The impl that `choose` has returned."""
    if run is OPS[op].reference:
        return "reference"
    return next(impl for impl, backend in OPS[op].backends.items() if backend.forward == run)


def chosen(op, *, sizes=None, relations=(3, 2), **options):
    """Name of the impl that auto takes."""
    q, k, v = qkv(**(sizes or {}))
    if op in ("relational", "disentangled"):
        options["q_rel"], options["k_rel"] = (x.new_zeros(*x.shape[:2], *relations) for x in (q, k))
        options["relation_weight"] = q.new_zeros(2, 4, relations[0])
    masks = Masks(causal=options.pop("causal", False))
    return name_of(op, choose(OPS[op], AttentionCall(q, k, v, masks=masks, **options)))


def test_unknown_names_are_one_line():
    assert resolve("hyla") is ops.hyla
    with refusing("hyla: unknown impl 'bloked'; did you mean 'blocked'? (choose from auto,"):
        resolve("hyla", "bloked")
    with refusing("polyhead.ops: unknown op 'hylla'; did you mean 'hyla'?"):
        resolve("hylla")


KEEP = {"keep": torch.ones(1, 1, 1, 1)}
LONG, ONE = {"t": 512, "s": 512}, {"t": 1, "s": 2048}
CHOICES = [
    # what a backend refuses
    ("softmax", {}, KEEP, "reference"),
    ("linear", {}, KEEP | {"normalise": "identity"}, "reference"),
    ("linear", {}, {"normalise": "softmax"}, "reference"),
    ("relational", LONG, {"act": "softmax"}, "reference"),
    ("abstractor", {}, {"act": "relu"}, "reference"),
    ("pooled", {"b": 3, "t": 4096, "s": 4096, "d": 1, "e": 1}, {"pool": "max", "network": "sequence"}, "reference"),
    # what was measured to be faster
    ("relational", LONG, {"act": "relu", "relations": (3, 1)}, "native or blocked"),
    ("relational", LONG, {"causal": True, "relations": (8, 4)}, "native or blocked"),
    ("relational", LONG, {"causal": True, "relations": (8, 1)}, "native or sdpa"),
    ("softmax", {"b": 128, "t": 4, "s": 512}, {}, "sdpa"),
    ("linear", LONG, {"causal": True, "normalise": "identity"}, "chunked"),
    ("hyla", LONG, {"causal": True, "normalise": "rms_heads"}, "native or blocked"),
    ("hyla", ONE, {"normalise": "rms_heads"}, "native or reference"),
    ("hyla", ONE, {"normalise": "softmax"}, "reference"),
    ("abstractor", LONG, {"causal": True, "act": "softmax"}, "sdpa"),
    *(
        (op, {"t": t, "s": t, "d": 65, "e": 65, "h": 1}, KEEP | {"causal": causal, **options}, impl)
        for op, options in (("softmax", {}), ("linear", {"normalise": "rms_heads"}), ("disentangled", {}))
        for t, causal, impl in ((1023, True, "reference"), (1024, True, "blocked"), (1024, False, "reference"))
    ),
    *(
        ("softmax", {"b": 4, "t": t, "s": 128, "d": d}, {"causal": causal}, impl)
        for d, t, causal, impl in (
            (8, 128, False, "native or sdpa"), (8, 127, False, "sdpa"), (9, 128, False, "sdpa"),
            (64, 128, True, "native or sdpa"), (64, 127, True, "sdpa"), (65, 128, True, "sdpa"),
        )
    ),
    ("softmax", {"b": 128, "t": 32, "s": 32, "d": 64}, {"bias": torch.zeros(2, 63)}, "native or reference"),
]  # fmt: skip
"""Op, sizes, options, what "auto" takes; "native or X" is X without a compiler."""


@pytest.mark.parametrize(("op", "sizes", "options", "impl"), CHOICES)
def test_auto_takes_what_was_measured_faster_of_what_takes_the_call(op, sizes, options, impl):
    assert chosen(op, sizes=sizes, **options) == impl.split(" or ")[0 if READY else -1]


def test_half_precision_was_not_timed():
    half = (x.bfloat16() for x in qkv(b=4, t=128, s=128))
    assert name_of("softmax", choose(OPS["softmax"], AttentionCall(*half))) == "sdpa"


@pytest.mark.parametrize("op", OPS)
def test_all_tensors_are_of_one_dtype(arguments, op):
    tensors = arguments(op, qkv())
    *names, last = TENSORS[op]
    message = f"^{OPS[op].name}: {', '.join(names)} and {last} must have one dtype but have "
    for i in range(len(tensors)):
        mixed = [x.double() if i == j else x for j, x in enumerate(tensors)]
        dtypes = ", ".join(str(x.dtype) for x in mixed)
        with pytest.raises(ValueError, match=f"{message}{dtypes}$"):
            resolve(op)(*mixed)
    with pytest.raises(ValueError, match=message.replace("dtype", "device") + "cpu, meta"):
        resolve(op)(tensors[0], tensors[1].to("meta"), *tensors[2:])


@pytest.mark.parametrize("op", OPS)
def test_heads_have_a_width(arguments, op):
    q, k, *others = arguments(op, qkv())
    for impl in ("auto", *IMPLS[op]):
        with refusing(f"{OPS[op].name}: q must have heads, of width 1 or more, but has shape {(*q.shape[:3], 0)}"):
            resolve(op, impl)(q[..., :0], k[..., :0], *others)
    with refusing("latent_code: q must have heads, of width 1 or more, but has shape"):
        ops.latent_code(q[:, :, :0], k, normalise="softmax")


def test_a_window_is_a_count():
    for window in (True, 0, 2.0, float("nan"), "3", torch.tensor(3), np.int64(0), np.bool_(1)):
        with refusing(f"op: window must be an integer of at least 1 but is {window!r}"):
            check_window("op", window)
    assert all(type(check_window("op", kind(3))) is int for kind in (int, np.int32, np.uint8))
    assert check_window("op", None) is None
