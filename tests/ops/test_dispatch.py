"""The table of backends: names, errors, and the choice that "auto" makes."""

import numpy as np
import pytest
import torch
from compilers import IMPLS, READY
from refusals import refusing

from polyhead import ops
from polyhead.ops.call import AttentionCall
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
    return name_of(op, choose(OPS[op], AttentionCall(q, k, v, **options)))


def test_unknown_names_are_one_line():
    assert resolve("hyla") is ops.hyla
    with refusing("hyla: unknown impl 'bloked'; did you mean 'blocked'? (choose from auto,"):
        resolve("hyla", "bloked")
    with refusing("polyhead.ops: unknown op 'hylla'; did you mean 'hyla'?"):
        resolve("hylla")


def test_auto_takes_what_a_backend_refuses():
    keep = torch.ones(1, 1, 5, 5)
    assert chosen("softmax", keep=keep) == "reference"
    assert chosen("linear", keep=keep, normalise="identity") == "reference"
    assert chosen("linear", normalise="softmax") == "reference"
    long = {"t": 512, "s": 512}
    assert chosen("relational", sizes=long, act="softmax") == "reference"
    assert chosen("relational", sizes=long, act="relu", relations=(3, 1)) == ("native" if READY else "blocked")
    assert chosen("abstractor", act="relu") == "reference"


@pytest.mark.parametrize("op", ["softmax", "linear", "disentangled", "abstractor"])
def test_tiles_made_of_the_reference_are_taken_where_they_were_measured_faster(op):
    one = torch.zeros(1, 1, 1, 65, dtype=torch.float64)  # native code takes smaller heads
    options = {"keep": one, "act": "tanh" if op == "abstractor" else "identity"}
    options |= {"normalise": "rms_heads"} if op == "linear" else {}
    for t, causal, wanted in [(1023, True, "reference"), (1024, True, "blocked"), (1024, False, "reference")]:
        long = one.expand(1, t, 1, 65)
        relations = {"q_rel": long, "k_rel": long} if op == "disentangled" else {}
        call = AttentionCall(long, long, long, causal=causal, **options, **relations)
        assert name_of(op, choose(OPS[op], call)) == wanted


def test_auto_is_fast_on_long_sequences():
    long = {"t": 512, "s": 512}
    assert chosen("softmax", sizes=long, causal=True) == ("native" if READY else "sdpa")
    assert chosen("softmax", sizes={"b": 128, "t": 4, "s": 512}) == "sdpa"
    assert chosen("linear", sizes=long, causal=True, normalise="identity") == "chunked"
    assert chosen("hyla", sizes=long, causal=True, normalise="rms_heads") == ("native" if READY else "blocked")
    one = {"t": 1, "s": 2048}
    assert chosen("hyla", sizes=one, normalise="rms_heads") == ("native" if READY else "reference")
    assert chosen("hyla", sizes=one, normalise="softmax") == "reference"
    assert chosen("relational", sizes=long, causal=True, relations=(8, 4)) == ("native" if READY else "blocked")
    assert chosen("relational", sizes=long, causal=True, relations=(8, 1)) == ("native" if READY else "sdpa")
    assert chosen("abstractor", sizes=long, causal=True, act="softmax") == "sdpa"


def test_native_softmax_attention_is_taken_where_it_was_measured_faster():
    faster = "native" if READY else "sdpa"
    for d, t, causal, wanted in (
        (8, 128, False, faster), (8, 127, False, "sdpa"), (9, 128, False, "sdpa"),
        (64, 128, True, faster), (64, 127, True, "sdpa"), (65, 128, True, "sdpa"),
    ):  # fmt: skip
        assert chosen("softmax", sizes={"b": 4, "t": t, "s": 128, "d": d}, causal=causal) == wanted
    sizes = {"b": 128, "t": 32, "s": 32, "d": 64}
    assert chosen("softmax", sizes=sizes) == "sdpa"
    assert chosen("softmax", sizes=sizes, bias=torch.zeros(2, 63)) == ("native" if READY else "reference")
    half = (x.bfloat16() for x in qkv(b=4, t=128, s=128))
    assert name_of("softmax", choose(OPS["softmax"], AttentionCall(*half))) == "sdpa"


@pytest.mark.parametrize("op", OPS)
def test_all_tensors_are_of_one_dtype(arguments, op):
    tensors = arguments(op, qkv())
    *names, last = TENSORS[op]
    told = f"^{OPS[op].name}: {', '.join(names)} and {last} must have one dtype but have "
    for i in range(len(tensors)):
        mixed = [x.double() if i == j else x for j, x in enumerate(tensors)]
        came = ", ".join(str(x.dtype) for x in mixed)
        with pytest.raises(ValueError, match=f"{told}{came}$"):
            resolve(op)(*mixed)
    with pytest.raises(ValueError, match=told.replace("dtype", "device") + "cpu, meta"):
        resolve(op)(tensors[0], tensors[1].to("meta"), *tensors[2:])


@pytest.mark.parametrize("op", OPS)
def test_heads_have_a_width(arguments, op):
    q, k, *rest = arguments(op, qkv())
    for impl in ("auto", *IMPLS[op]):
        with refusing(f"{OPS[op].name}: q must have heads, of width 1 or more, but has shape {(*q.shape[:3], 0)}"):
            resolve(op, impl)(q[..., :0], k[..., :0], *rest)
    with refusing("latent_code: q must have heads, of width 1 or more, but has shape"):
        ops.latent_code(q[:, :, :0], k, normalise="softmax")


@pytest.mark.parametrize(
    "window", [True, 0, 2.0, float("nan"), "3", torch.tensor(3), np.int64(0), np.bool_(1)], ids=repr
)
def test_a_window_that_is_no_count_is_refused(window):
    with refusing(f"op: window must be an integer of at least 1 but is {window!r}"):
        check_window("op", window)


def test_an_integer_of_numpy_is_a_window():
    assert all(type(check_window("op", kind(3))) is int for kind in (int, np.int32, np.uint8))
    assert check_window("op", None) is None
