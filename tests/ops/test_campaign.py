"""A few hundred fixed cases of benchmarks/parity_campaign.py.

A case that fails here: python benchmarks/parity_campaign.py --kind ops --small --seed 0 --case NUMBER
"""

import json
from dataclasses import replace

import agreement.cases
import agreement.measure
import agreement.models
import agreement.ops
import agreement.steps
import pytest
import torch
from compilers import READY
from rich.console import Console
from scripts import loaded
from some import some

from polyhead.ops import tiles
from polyhead.ops.dispatch import BACKENDS
from polyhead.ops.hyla import tiles as hyla_blocked_tiles
from polyhead.ops.native import library

BLOCKS, EACH = 10, 30
needs_compiler = pytest.mark.skipif(not READY, reason="no compiler")


def failures(check, numbers, **how):
    outcomes = {n: check(0, n, **how) for n in numbers}
    return [f"case {n}: {came.detail}; {came.words}" for n, came in outcomes.items() if came.failed]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_ops_agree_with_the_oracle(block):
    assert not failures(agreement.ops.check_number, range(block * EACH, (block + 1) * EACH), small=True)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("check", "cases"),
    [
        (agreement.models.check_cache, 6),
        (agreement.models.check_models, 6),
        (agreement.models.check_across, 2),
        (agreement.steps.check_number, 10),
    ],
)
def test_models_and_steps_agree_with_themselves(check, cases):
    assert not failures(check, range(cases))


def test_jax_agrees_with_the_oracle():
    pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
    import agreement.jax

    assert not failures(agreement.jax.check_number, (0,))
    assert not failures(agreement.jax.check_learned, (6,))


@needs_compiler
def test_native_code_agrees_with_the_oracle(monkeypatch):
    """All that native code computes, in float64: layouts, limits and sizes as users have them."""
    monkeypatch.setitem(library.NUMBERS, torch.float64, torch.float64)
    native = [replace(agreement.cases.draw(0, n, small=True, only="native"), dtype="float64") for n in range(150)]
    with agreement.measure.poisoned():
        found = [agreement.ops.check(case, 0) for case in some(native)]
    assert not [f"{case}: {came.detail}" for case, came in zip(native, found, strict=True) if came.failed]
    assert sum(came.what == "right" for came in found) > 40


@needs_compiler
def test_native_gradients_are_of_the_scores_that_were_computed():
    """Large scores and few keys: were they rounded in another way than before, ds would not add up to 0 over keys."""
    case = agreement.cases.Case(  # as the campaign found it; in words, as a draw changes with its tables
        1286, "hyla", "native", "float32",
        {"b": 1, "t": 64, "s": 64, "h": 1, "g": 1, "d": 2, "e": 8, "r": 1, "p": 8},
        {"causal": False, "normalise": "softmax", "act": "gelu"},
        bias=(1, 127), mask=(1, 1, 1, 64), keep=(1, 1, 64, 64), edges=(0, 26, 40, 64), tie="q is k",
        layouts={"q": ("stride", 2), "v": ("swap", 1, 2), "bias": ("plain",), "mask": ("plain",),
        "keep": ("swap", 1, 3), "dout": ("swap", 1, 2)}, learned=("q", "v", "bias"), sharp=3.0,
    )  # fmt: skip
    came = agreement.ops.check(case, 0)
    assert came.what == "right", came.detail


@needs_compiler
def test_native_gradients_of_a_bias_by_offset_do_not_lose_digits_over_thousands_of_terms():
    came = agreement.ops.check(agreement.cases.draw(0, 4437, only="native"), 0)  # 2,698 terms an offset
    assert came.what == "right", came.detail


def test_every_impl_is_drawn():
    drawn = {op: {*impls} | {"native"} & {*BACKENDS[op]} for op, impls in agreement.cases.IMPLS.items()}
    assert drawn == {op: {*impls} for op, impls in BACKENDS.items() if op != "pooled"}  # native code has its own draws


@pytest.mark.parametrize("fault", ["eps", "edge", "gradient"])
def test_a_fault_is_noticed(monkeypatch, fault):
    if fault == "eps":  # one percent more under the root
        monkeypatch.setattr(hyla_blocked_tiles, "RMS_HEADS_EPS", 1.01e-6)
    elif fault == "edge":  # the last keys are visible to all
        hidden = tiles.VisibleTiles.hidden
        monkeypatch.setattr(tiles.VisibleTiles, "hidden", lambda self, at: hidden(self, at) & (at.k1 < self.s))
    else:  # of what is scaled
        monkeypatch.setattr(tiles, "accumulate", lambda out, x, y, alpha=1.0: out.add_(torch.bmm(x, y)))
    numbers = [n for n in range(400) if agreement.cases.draw(0, n, small=True).impl == "blocked"]
    assert any(agreement.ops.check_number(0, n, small=True).failed for n in numbers)


def test_the_campaign_goes_on_where_it_stopped(tmp_path):
    campaign, silent = loaded("benchmarks", "parity_campaign.py"), Console(quiet=True)
    path = tmp_path / "parity.json"
    for cases in (2, 5):
        campaign.go("ops", cases, 0, campaign.read(str(path)), str(path), silent, how={"small": True})
    whole = campaign.go("ops", 5, 0, {"kinds": {}}, None, silent, how={"small": True})
    came = json.loads(path.read_text())["kinds"]["ops"]
    assert came["cases"] == whole["cases"] == 5
    assert {**came, "seconds": 0} == {**whole, "seconds": 0}
    assert "--kind ops --seed 3 --case 7" in campaign.repeat("ops", 3, 7)
    assert campaign.repeat("ops", 3, 7, "native", small=True).endswith("--impl native --seed 3 --case 7 --small")
    campaign.count(whole, "", 6, agreement.ops.Outcome("g", "", "right", {"dq": (2e-9, 4e-9)}, "", ("conditioned",)))
    assert whole["conditioned"] == [{"case": 6, "group": "g", "errors and bounds": {"dq": [2e-9, 4e-9]}}]
    failed = agreement.ops.Outcome("hyla blocked float64", "words", "wrong", {}, "dv: 1 > 0")
    campaign.count(whole, campaign.repeat("ops", 0, 7), 7, failed)
    line = {"case": 7, "repeat": campaign.repeat("ops", 0, 7), "words": "words", "detail": "dv: 1 > 0"}
    assert whole["failures"] == [line]


def test_a_campaign_that_is_killed_keeps_the_failures_that_it_has_not_tried_again(tmp_path, monkeypatch):
    campaign, path, tried = loaded("benchmarks", "parity_campaign.py"), tmp_path / "parity.json", []
    outcome = agreement.ops.Outcome("g", "", "wrong", {}, "")

    def check(seed, number, **how):
        if len(tried) == 3:  # the second failure, when it is tried again
            raise KeyboardInterrupt
        tried.append(number)
        return outcome if len(tried) < 3 else replace(outcome, what="right")

    monkeypatch.setattr(campaign, "SAVED", -1.0)  # saves after each case
    monkeypatch.setattr(campaign.pkgutil, "resolve_name", lambda name: check)
    go = lambda: campaign.go("ops", 2, 0, campaign.read(str(path)), str(path), Console(quiet=True), how={})  # noqa: E731
    go()
    with pytest.raises(KeyboardInterrupt):
        go()
    state = campaign.read(str(path))["kinds"]["ops"]
    assert (state["cases"], state["right"], [line["case"] for line in state["failures"]]) == (2, 1, [1])
