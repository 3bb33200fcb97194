"""The Triton kernels where they may not run, and where what they compute is wrong: failures are faked."""

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from polyhead.ops import cards, first_use, hyla, linear_attention, relational_attention
from polyhead.ops.call import AttentionCall
from polyhead.ops.dispatch import implementation

pytestmark = pytest.mark.skipif(not cards.INTERPRETED, reason="needs triton's interpreter")

KERNELS = {op: importlib.import_module(f"polyhead.ops.{op}.triton") for op in ("hyla", "linear", "relational")}


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    """As on a card: "auto" wants the kernels, and their first use is checked."""
    monkeypatch.setattr(first_use, "watched", lambda x: True)
    monkeypatch.setattr(first_use, "VERDICTS", {})
    monkeypatch.setattr(KERNELS["linear"], "CHUNK", 16)  # a card takes no smaller ones
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear.triton.kernels"), "WIDTH", {4: 16})
    for op in KERNELS:
        for impl in ("state", "triton", "native", "sdpa", "chunked"):
            if impl in importlib.import_module("polyhead.ops.dispatch").BACKENDS[op]:
                monkeypatch.setattr(implementation(op, impl), "preferred", lambda x, impl=impl: impl == "triton")


def call(op, impl="auto", t=3, s=5):
    """Output and gradients of a small call with a bias, where there is one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 3).requires_grad_() for n in (t, s, s))
    if op == "linear":
        leaves, out = (q, k, v), linear_attention(q, k, v, causal=True, impl=impl)
    elif op == "hyla":
        bias = torch.randn(2, t + s - 1).requires_grad_()
        leaves, out = (q, k, v, bias), hyla(q, k, v, bias=bias, causal=True, impl=impl)
    else:
        weight = torch.randn(2, 3, 2).requires_grad_()
        leaves, out = (q, k, v, weight), relational_attention(q, k, q, k, v, weight, relation_act="relu", impl=impl)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def planted(monkeypatch, name, change):
    """Guarded kernels have their `forward` or `backward` replaced."""

    def replaced(guard, kernel, x, *rest):
        return original(guard, dataclasses.replace(kernel, **{name: change(getattr(kernel, name))}), x, *rest)

    original = getattr(first_use.FirstUse, name)
    monkeypatch.setattr(first_use.FirstUse, name, replaced)


def wrong(function):
    def run(*given):
        out = function(*given)
        if isinstance(out, dict):
            return {name: x * 1.01 if name == "k" else x for name, x in out.items()}
        return [out[0] * 1.01, *out[1:]]

    return run


@pytest.mark.parametrize("op", KERNELS)
def test_kernels_that_are_right_are_checked_once_and_kept(monkeypatch, op):
    calls, verdict = [], first_use.FirstUse._verdict
    monkeypatch.setattr(first_use.FirstUse, "_verdict", lambda *given: calls.append(given[-1]) or verdict(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        came = [call(op) for _ in range(2)]
    assert calls == ["forward", "backward"]
    assert [*first_use.VERDICTS.values()] == [None, None]
    assert_close(came[1], call(op, "reference"), rtol=1e-4, atol=1e-5)


def raising(make):
    """A change of a kernel's function: it raises instead."""

    def change(function):
        def run(*given):
            raise make()

        return run

    return change


def no_room():
    return importlib.import_module("triton.runtime.errors").OutOfResources(180224, 166912, "shared memory")


OFF = r"is wrong on this card: {} is 1.0e-02 off, .* tiles of the reference compute it instead$"
FAULTS = [
    *((op, "forward", wrong, OFF.format("output 1")) for op in KERNELS),
    ("linear", "backward", wrong, OFF.format("the gradient of k")),
    ("hyla", "forward", raising(no_room), r"cannot be launched on this card \(OutOfResources: "),
]


@pytest.mark.parametrize(("op", "name", "change", "told"), FAULTS)
def test_what_is_wrong_is_told_once_and_computed_otherwise(monkeypatch, op, name, change, told):
    planted(monkeypatch, name, change)
    with pytest.warns(RuntimeWarning, match=f"impl 'triton' {told}") as found:
        came = call(op)
    assert len(found) == 1
    assert_close(came, call(op, "reference"), rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(call(op), came, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=rf"impl 'triton' {told.partition(' on')[0]} .*; use impl='auto' or"):
        call(op, "triton")


def test_any_other_error_is_raised(monkeypatch):
    planted(monkeypatch, "forward", raising(lambda: ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        call("hyla")


def test_lengths_are_no_configuration_and_layouts_are():
    call("hyla")
    count = len(first_use.VERDICTS)
    call("hyla", t=7, s=9)
    assert len(first_use.VERDICTS) == count
    x = torch.randn(2, 5, 2, 4)[..., :3]
    hyla(x, x, x)
    hyla(x.contiguous(), x, x)
    assert len(first_use.VERDICTS) == count + 2


def test_a_short_first_call_says_nothing_of_a_long_one(monkeypatch):
    """Nor one with few keys of one with many, as in decoding: then several programs divide the keys."""
    monkeypatch.setattr(first_use, "ROWS", 6)
    key, found, counts = inspect.unwrap(first_use._key), set(), []
    for t, s in ((3, 5), (5, 6), (4, 7), (5, 9), (6, 5), (6, 6), (9, 9), (1, 5), (1, 7)):
        q, k = torch.zeros(1, t, 2, 3), torch.zeros(1, s, 2, 3)
        found.add(key(SimpleNamespace(op="hyla"), AttentionCall(q, k, k), "forward"))
        counts.append(len(found))
    assert counts == [1, 1, 2, 2, 3, 4, 4, 5, 6]


def test_a_check_of_linear_attention_reads_a_state(monkeypatch):
    """A card has chunks of 64: in one of 64 queries the state is 0, and nobody would see that it is wrong."""
    kernels = importlib.import_module("polyhead.ops.linear.triton.kernels")
    launches = kernels.states_launch

    def broken(x, y, sequence, lengths, states, C):
        return lambda: (launches(x, y, sequence, lengths, states, C)(), states.mul_(1.5))

    monkeypatch.setattr(KERNELS["linear"], "CHUNK", 64)
    monkeypatch.setattr(kernels, "states_launch", broken)
    with pytest.warns(RuntimeWarning, match="is wrong on this card: output 1"):
        call("linear", t=128, s=128)


def test_a_part_has_the_first_rows_as_they_lie(monkeypatch):
    """More queries and keys than a check takes, heads outside of rows, a mask that is part of a wider one."""
    parts = []
    monkeypatch.setattr(first_use.FirstUse, "_verdict", lambda guard, kernel, x, which: parts.append(x))
    monkeypatch.setattr(first_use, "ROWS", 4)
    q, k = (torch.randn(3, 2, n, 3).transpose(1, 2) for n in (6, 9))
    mask, bias = (torch.rand(3, 1, 1, 12) > 0.3)[..., 2:11], torch.randn(2, 14)
    out = hyla(q, k, k, bias=bias, mask=mask, causal=True, normalise="softmax")
    (part,) = parts
    assert (part.q.stride(), part.mask.stride()) == (q.stride(), mask.stride())
    assert_close(part.bias, bias[:, 2:9])
    options = {"bias": part.bias, "causal": True, "normalise": "softmax"}
    whole = hyla(q[:2, :4], k[:2, :4], k[:2, :4], mask=mask[:2, ..., :4], **options)
    assert_close(hyla(part.q, part.k, part.v, mask=part.mask, **options), whole)
    assert out.shape == q.shape


def test_numbers_that_say_nothing_are_replaced():
    assert not any(first_use._telling(torch.tensor(x)) for x in ([0.0, 0.0], [1.0, torch.nan]))
    waves = first_use._waves(torch.zeros(2, 50, dtype=torch.float16))
    assert waves.dtype == torch.float16
    assert waves.unique().numel() > 90


# ------------------------------------------------------------------------------------------------------------ the cards
def test_the_version_of_triton_needs_no_distribution_of_that_name(tmp_path):
    """Those for ROCm, XPU and Windows have other names; and any folder "triton" is found as a package."""
    for name, text in (("triton", None), ("other", "# a name\n"), ("dev", "__version__ = '3.6.0+git1'\n")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "__init__.py").write_text(text)
    find = importlib.machinery.PathFinder.find_spec
    found = [cards.version(find(name, [str(tmp_path)])) for name in ("triton", "other", "dev", "none")]
    assert found == [(0, 0), (0, 0), (3, 6), (0, 0)]
    assert cards.version(importlib.util.find_spec("triton")) == cards.VERSION > (3, 0)


def reason(monkeypatch, *, capability=(9, 0), dtype=torch.bfloat16, hip=None, version=(3, 7), mode="check"):
    """Of a call on a card that is not here."""
    monkeypatch.setattr(cards, "INTERPRETED", False)
    monkeypatch.setattr(cards, "MODE", mode)
    monkeypatch.setattr(cards, "VERSION", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    card = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    q = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"))
    return inspect.unwrap(cards.without_triton)(SimpleNamespace(q=q))


REFUSED = {
    "takes no torch.float64 on a card": {"dtype": torch.float64},
    "knows compute capabilities 8.0, 8.6, 8.9, 9.0, not 7.5": {"capability": (7, 5)},
    "knows compute capabilities 8.0, 8.6, 8.9, 9.0, not 12.0": {"capability": (12, 0)},
    "knows cards of NVIDIA only": {"hip": "6.4"},
    "knows triton 3.6 to 3.9, not 4.0": {"version": (4, 0)},
    "is turned off by POLYHEAD_TRITON=0": {"mode": "0"},
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_card_that_was_not_tried_is_refused_by_name(monkeypatch, told):
    changes = REFUSED[told]
    assert reason(monkeypatch) is None
    found = reason(monkeypatch, **changes)
    assert found.startswith(told)
    if "mode" not in changes and "dtype" not in changes:
        assert found.endswith("; POLYHEAD_TRITON=1 takes it nevertheless")
        assert reason(monkeypatch, **changes, mode="1") is None


RECORD = {("hyla", "bf16", False): {32: 1024, 64: 512}, ("hyla", "bf16", True): {64: None}}
HERE, LONG = {"this card": RECORD}, (512, 512, 64)
CHOICES = [
    ({}, "hyla", (300, 300, 64), True),
    ({"another card": RECORD}, "hyla", (300, 300, 64), True),
    (HERE, "hyla", (511, 4096, 64), False),
    (HERE, "hyla", LONG, True),
    (HERE, "hyla", (512, 512, 24), False),
    (HERE, "hyla", (1024, 9, 24), True),
    (HERE, "hyla", (512, 512, 128), True),
    (HERE, "hyla", (1, 9999, 64), False),
    ({"this card": RECORD | {("hyla", "bf16", True): {64: 4096}}}, "hyla", (1, 4096, 64), True),
    (HERE, "linear", LONG, False),
    ({"this card": RECORD | {("linear", "bf16", False): {64: 1}}}, "linear", LONG, True),
    (HERE, "relational", LONG, False),
]


@pytest.mark.parametrize(("record", "op", "sizes", "taken"), CHOICES)
def test_auto_takes_what_was_measured_to_be_faster(monkeypatch, record, op, sizes, taken):
    """On a card with a record nothing else; on any other card the check alone decides."""
    monkeypatch.undo()  # `preferred` as it is
    monkeypatch.setattr(KERNELS[op], "faster", inspect.unwrap(cards.faster))
    monkeypatch.setattr(cards, "FASTER", record)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="this card"))
    t, s, d = sizes
    q = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cuda"), shape=(2, t, 8, d))
    assert inspect.unwrap(KERNELS[op].preferred)(SimpleNamespace(q=q, k=SimpleNamespace(shape=(2, s, 8, d)))) == taken


def test_a_record_knows_tf32_from_float32(monkeypatch):
    record = {("hyla", "tf32", False): {64: 1}, ("hyla", "fp32", False): {64: None}}
    monkeypatch.setattr(cards, "FASTER", {"this card": record})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="this card"))
    q = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda"), shape=(2, 9, 8, 64))
    found = []
    for fast in (True, False):
        monkeypatch.setattr(cards, "tf32", lambda fast=fast: fast)
        found.append(inspect.unwrap(cards.faster)("hyla", SimpleNamespace(q=q, k=q)))
    assert found == [True, False]
