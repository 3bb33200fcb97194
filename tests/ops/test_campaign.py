"""A few hundred fixed cases of benchmarks/parity_campaign.py; the oracle it asks beside explicit loops.

A case that fails here: python benchmarks/parity_campaign.py --kind ops --small --seed 0 --case NUMBER
"""

import importlib.util
import json
import pathlib
from dataclasses import replace

import oracle as answers
import parity_across
import parity_arrays
import parity_cache
import parity_cases
import parity_measure
import parity_models
import parity_ops
import parity_rounding
import parity_steps
import pytest
import torch
from rich.console import Console
from some import some
from torch.testing import assert_close

from polyhead import spec
from polyhead.ops import tiles
from polyhead.ops.dispatch import BACKENDS, TENSORS
from polyhead.ops.hyla import tiles as hyla_blocked_tiles
from polyhead.ops.native import library

BLOCKS, EACH = 10, 30
DRAWN = {op: impls for op, impls in BACKENDS.items() if op != "pooled"}
"""Not pooled heads: recorded cases would get other numbers, and where two keys give nearly the maximum its gradient
jumps, so that no bound holds in half precision.  test_pooled.py has their loops."""


def load_campaign():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "parity_campaign.py"
    found = importlib.util.spec_from_file_location("parity_campaign", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def failures(check, numbers, **how):
    outcomes = {n: check(0, n, **how) for n in numbers}
    return [f"case {n}: {came.detail}; {came.words}" for n, came in outcomes.items() if came.failed]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_ops_agree_with_the_oracle(block):
    assert not failures(parity_ops.check_number, range(block * EACH, (block + 1) * EACH), small=True)


@pytest.mark.parametrize("kind", [parity_cache, parity_models])
def test_models_agree_with_themselves(kind):
    assert not failures(kind.check_number, range(6))


@pytest.mark.parametrize(("kind", "cases"), [(parity_steps, 10), (parity_across, 2)])
def test_steps_and_encoders_agree_with_the_whole(kind, cases):
    assert not failures(kind.check_number, range(cases))


def test_jax_agrees_with_the_oracle():
    pytest.importorskip("jax", reason="jax is not installed (extra `jax`)")
    import parity_jax
    import parity_learned

    assert not failures(parity_jax.check_number, (0,))
    assert not failures(parity_learned.check_number, (6,))


@pytest.mark.skipif(not library.status("hyla").startswith(("built", "not built")), reason="no compiler")
def test_native_code_agrees_with_the_oracle(monkeypatch):
    """All that native code computes, in float64: layouts, limits and sizes as users have them."""
    monkeypatch.setitem(library.NUMBERS, torch.float64, torch.float64)
    native = [replace(parity_cases.draw(0, n, small=True, only="native"), dtype="float64") for n in range(150)]
    with parity_measure.poisoned():
        found = [parity_ops.check(case, 0) for case in some(native)]
    assert not [f"{case}: {came.detail}" for case, came in zip(native, found, strict=True) if came.failed]
    assert sum(came.what == "right" for came in found) > 40


SIZES = {"b": 1, "t": 64, "s": 64, "h": 1, "g": 1, "d": 2, "e": 8, "r": 1, "p": 8}
ROUNDED_TWICE = (  # as the campaign found them; in words, as a draw changes with its tables
    parity_cases.Case(
        1286, "hyla", "native", "float32", SIZES, {"causal": False, "normalise": "softmax", "act": "gelu"},
        bias=(1, 127), mask=(1, 1, 1, 64), keep=(1, 1, 64, 64), edges=(0, 26, 40, 64), tie="q is k",
        layouts={"q": ("stride", 2), "v": ("swap", 1, 2), "bias": ("plain",), "mask": ("plain",),
        "keep": ("swap", 1, 3), "dout": ("swap", 1, 2)}, learned=("q", "v", "bias"), sharp=3.0,
    ),
    parity_cases.Case(
        3, "relational", "native", "float32", SIZES | {"b": 4, "t": 2, "s": 7, "h": 2, "d": 64, "r": 4, "p": 2},
        {"causal": True, "window": 3, "scale": 0.6285811657937007, "relation_act": "tanh"}, by_offset=True,
        layouts={"q": ("expand", 1), "dout": ("swap", 3, 3)} | dict.fromkeys(
        ("k", "q_rel", "k_rel", "symbols", "relation_weight"), ("plain",)),
        learned=("q", "k", "q_rel", "k_rel", "symbols", "relation_weight"), sharp=8.0,
    ),
)  # fmt: skip


@pytest.mark.skipif(not library.status("hyla").startswith(("built", "not built")), reason="no compiler")
@pytest.mark.parametrize("case", ROUNDED_TWICE, ids=lambda case: case.op)
def test_native_gradients_are_of_the_scores_that_were_computed(case):
    """Large scores and few keys: were they rounded in another way than before, ds would not add up to 0 over keys."""
    came = parity_ops.check(case, 0)
    assert came.what == "right", came.detail


@pytest.mark.skipif(not library.status("hyla").startswith(("built", "not built")), reason="no compiler")
def test_native_gradients_of_a_bias_by_offset_do_not_lose_digits_over_thousands_of_terms():
    came = parity_ops.check(parity_cases.draw(0, 4437, only="native"), 0)  # 2,698 terms an offset
    assert came.what == "right", came.detail


def test_the_tables_of_the_draw_are_those_of_the_package():
    drawn = {op: set(impls) for op, impls in parity_cases.IMPLS.items()}
    assert drawn == {op: {*impls} - {"native"} for op, impls in DRAWN.items()}  # that has draws of its own, above
    assert {op: TENSORS[op] for op in DRAWN} == parity_cases.TENSORS
    assert parity_cases.NORMALISE == spec.NORMALISE
    assert parity_cases.ACTS == spec.ACTS
    assert parity_cases.RELATION_ACTS == spec.RELATION_ACTS


def test_the_draw_takes_everything_and_is_the_same_every_time():
    drawn = [parity_cases.draw(0, n) for n in range(3000)]
    assert drawn[:50] == [parity_cases.draw(0, n) for n in range(50)]
    assert drawn[:50] != [parity_cases.draw(1, n) for n in range(50)]
    pairs = {(case.op, case.impl) for case in drawn}
    assert pairs == {(op, impl) for op in DRAWN for impl in ("auto", *DRAWN[op]) if impl != "native"}
    assert {case.odd for case in drawn} == {"", "empty", "-inf", "nan", "keep", "jvp"}
    assert {case.tie for case in drawn} == {"", "joint", "q_rel is k_rel", "q is k", "k is v"}
    assert {how[0] for case in drawn for how in case.layouts.values()} == {"plain", "swap", "slice", "stride", "expand"}
    assert {len(case.mask) for case in drawn if case.mask} == {1, 2, 3, 4}
    assert {len(case.bias) for case in drawn if case.bias} == {2, 4}
    assert max(case.sizes["b"] for case in drawn) > 100
    assert max(case.sizes["t"] for case in drawn) == max(case.sizes["s"] for case in drawn) == 512
    for case in drawn:
        b, h, t, s = case.shape
        assert h % case.sizes["g"] == 0
        assert case.edges is None or (b == 1 and t == s and case.edges[-1] <= t)


def test_the_oracle_agrees_with_the_loops(oracle):
    """Every op with everything that limits it, on the smallest of cases."""
    seen = set()
    for n in range(600):
        case = parity_cases.draw(2, n, small=True)
        b, h, t, s = case.shape
        if b * h * t * s > 60 or case.odd or (case.edges is not None and case.edges[-1] < t):
            continue
        case = replace(case, dtype="float64", learned=())
        bases = parity_arrays.arrays(case, 2)
        x, options, _ = parity_arrays.arguments(case, bases)
        limits = {
            name: y for name, y in options.items() if name not in ("normalise", "act", "relation_act", "value_weight")
        }
        loops = oracle(x["q"], x["k"], x["symbols"] if "symbols" in x else x["v"], **limits)
        own = {name: y for name, y in options.items() if name not in limits}
        act = [own["relation_act"]] if "relation_act" in own else []
        wanted = {
            "softmax": lambda loops=loops: loops.values(),
            "linear": lambda loops=loops, own=own: loops.values(**{"normalise": "identity", **own}),
            "hyla": lambda loops=loops, own=own: loops.networks(**own),
            "relational": lambda loops=loops, x=x, act=act: loops.relational(
                x["q_rel"], x["k_rel"], x["relation_weight"], *act
            ),
            "disentangled": lambda loops=loops, x=x, act=act: loops.disentangled(x["q_rel"], x["k_rel"], *act),
            "abstractor": lambda loops=loops, own=own: loops.abstractor(**own),
        }[case.op]()
        assert_close(answers.answer(case.op, x, options), torch.tensor(wanted), rtol=1e-10, atol=1e-10, msg=str(case))
        seen |= {case.op, *options, *own.values(), ("by offset", case.by_offset), ("bias", len(case.bias or ()))}
    assert seen >= {*DRAWN, "bias", "mask", "keep", "window", "cu_seqlens", "scale", "value_weight"}
    assert seen >= {*spec.NORMALISE, *spec.ACTS, *spec.RELATION_ACTS, ("by offset", True), ("bias", 2), ("bias", 4)} - {
        torch.Tensor
    }


def test_what_hides_a_pair_hides_it_from_the_oracle():
    """A bias of -inf hides a code as a mask does, NaN behind a mask is 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 2, 3, dtype=torch.float64)
    mask = torch.rand(2, 2, 4, 4) > 0.4
    mask[1, :, :, 2] = False
    bias = torch.where(mask, 0.0, -torch.inf).double()
    spoilt = [
        torch.where((torch.arange(4) == 2)[:, None, None] & (torch.arange(2) == 1)[:, None, None, None], torch.nan, x)
        for x in (k, v)
    ]
    for op in ("softmax", "linear", "hyla"):
        given = {"q": q, "k": k, "v": v}
        wanted = answers.answer(op, given, {"mask": mask})
        assert_close(answers.answer(op, given, {"bias": bias}), wanted)
        assert_close(answers.answer(op, {"q": q, "k": spoilt[0], "v": spoilt[1]}, {"mask": mask}), wanted)


@pytest.mark.parametrize("fault", ["eps", "edge", "gradient"])
def test_a_fault_is_noticed(monkeypatch, fault):
    if fault == "eps":  # one percent more under the root
        monkeypatch.setattr(hyla_blocked_tiles, "RMS_HEADS_EPS", 1.01e-6)
    elif fault == "edge":  # the last keys are visible to all
        hidden = tiles.Reach.hidden
        monkeypatch.setattr(tiles.Reach, "hidden", lambda self, at: hidden(self, at) & (at.k1 < self.s))
    else:  # of what is scaled
        monkeypatch.setattr(tiles, "accumulate", lambda out, x, y, alpha=1.0: out.add_(torch.bmm(x, y)))
    numbers = [n for n in range(400) if parity_cases.draw(0, n, small=True).impl == "blocked"]
    assert any(parity_ops.check_number(0, n, small=True).failed for n in numbers)


# The bounds of ill-conditioned equations, on the smallest such cases of the campaign.
ILL = {6188: "dq", 10458: "dq", 13936: "dk"}


def off(part):
    """Gradients of queries and keys that are wrong by a small part of what cancels in them."""
    run = parity_ops.run

    def changed(case, bases, impl):
        found = run(case, bases, impl)
        if impl == "reference":
            return found
        sizes = parity_ops.scales(case, bases, parity_ops.truth(case, bases))
        for name, x, size in zip(parity_ops.names_of(case), found, sizes, strict=True):
            if name in ("dq", "dk"):
                x += part * size / x.numel() ** 0.5
        return found

    return changed


@pytest.mark.parametrize(("number", "quantity"), ILL.items())
def test_an_ill_conditioned_case_has_a_bound_of_its_own(monkeypatch, number, quantity):
    case = parity_cases.draw(0, number)
    came = parity_ops.check_number(0, number)
    assert (came.what, came.notes) == ("right", ("conditioned",))
    monkeypatch.setattr(parity_ops, "run", off(1e-11 if case.dtype == "float64" else 1e-4))
    came = parity_ops.check_number(0, number)
    assert came.what == "wrong"
    assert quantity in came.detail


def test_a_well_conditioned_case_keeps_its_bound():
    """What rounds the equation by 1e-16 does not make room for an error of 1e-9."""
    found = parity_ops.check_number(0, 1, small=True)
    assert found.notes == ()
    case = replace(parity_cases.draw(0, 6188), dtype="float64")
    bases = parity_arrays.arrays(case, 0)
    wanted = parity_ops.truth(case, bases)
    sizes, names = parity_ops.scales(case, bases, wanted), parity_ops.names_of(case)
    bounds = parity_ops.conditioned(case, bases, wanted, sizes, dict.fromkeys(names, (0.0, 1e-9)))
    assert set(bounds.values()) == {(0.0, 1e-9)}


def test_partial_sums_are_rounded_where_a_state_adds_up_thousands():
    """The sum of n terms of random sign, one by one, is off by about sqrt(n / 2) times as much as one rounding."""
    x, y = torch.randn(2, 50, 9, 4000, dtype=torch.float64)
    for add in (lambda x, y: x @ y.mT, lambda x, y: x.reshape(450, 40, 100).sum((1, 2))):
        exact, off = add(x, y), {}
        for partial in (False, True):
            with parity_rounding.Rounded(1e-6, 0, partial=partial):
                off[partial] = ((add(x, y) - exact).norm() / exact.norm()).item() / 1e-6
        assert 0.3 < off[False] < 1.5
        assert 10 < off[True] < 45


def test_other_spellings_are_the_same_equations():
    """In float64, of whole cases, by states and by logarithms; rounding is what differs."""
    seen = set()
    for n in some(n for n in range(400) if parity_cases.draw(0, n, small=True).op in ("hyla", "softmax")):
        case = replace(parity_cases.draw(0, n, small=True), dtype="float64", learned=("v",))
        if case.odd or case.tie or seen >= {case.op, parity_rounding.has_state(case)}:
            continue
        bases = parity_arrays.arrays(case, 0)
        plain = parity_ops.truth(case, bases)
        with parity_rounding.spelled(case, 1):
            for x, y in some(zip(parity_ops.truth(case, bases), plain, strict=True)):
                assert_close(x, y, rtol=1e-9, atol=1e-9)
        with parity_rounding.spelled(case, 0), parity_rounding.Rounded(1e-6, 0):
            rounded = parity_ops.truth(case, bases)
        for x, y in some(zip(rounded, plain, strict=True)):
            assert 0 < (x - y).norm() / y.norm() < 1e-3
        seen |= {case.op, parity_rounding.has_state(case)}
    assert seen == {"hyla", "softmax", True, False}
    x, weight = torch.randn(5, 3).double().requires_grad_(), torch.randn(7, 3).double()
    entropies = (answers.cross_entropy, parity_rounding.entropy_by_logarithm)
    losses = [entropy(x, weight, weight[:, 0], torch.arange(5), 0.5) for entropy in entropies]
    assert_close(*losses)
    assert_close(*(torch.autograd.grad(loss.sum(), x) for loss in losses))


def test_what_does_not_fit_must_be_infinite():
    truth = torch.tensor([1.0, -7e4, 65400.0, 65400.0], dtype=torch.float64)
    for entries, wanted in [
        ((1.0, -torch.inf, 65408.0, torch.inf), [False, True, False, True]),
        ((torch.inf, torch.inf, -torch.inf, torch.nan), [False] * 4),
    ]:
        came = torch.tensor(entries).half()
        assert parity_measure.beyond(came, truth).tolist() == wanted
        assert (parity_measure.error(came, truth) < 20) == any(wanted)


def test_a_sum_that_torch_makes_is_judged_where_its_terms_fit():
    case = replace(parity_cases.draw(0, 3045, only="native"), impl="reference")  # float16, qkv expanded, numbers of 1e8
    bases = parity_arrays.arrays(case, 0)
    wanted, came = (found[-1] for found in (parity_ops.truth(case, bases), parity_ops.run(case, bases, "reference")))
    beyond = parity_ops.overflown("qkv", case, bases)
    assert (~came.isfinite())[beyond].all()
    assert not beyond.all()
    judged = parity_ops.summed("dqkv", came, wanted, case, bases)
    assert torch.equal(judged[came.isfinite()], came[came.isfinite()])
    broken = torch.where(beyond, came, torch.inf)
    assert parity_ops.summed("dqkv", broken, wanted, case, bases)[~beyond].isinf().all()
    assert parity_ops.summed("output", broken, wanted, case, bases) is broken


def test_the_campaign_goes_on_where_it_stopped(tmp_path):
    campaign, silent = load_campaign(), Console(quiet=True)
    path = tmp_path / "parity.json"
    for cases in (2, 5):
        campaign.go("ops", cases, 0, campaign.read(str(path)), str(path), silent, how={"small": True})
    whole = campaign.go("ops", 5, 0, {"kinds": {}}, None, silent, how={"small": True})
    came = json.loads(path.read_text())["kinds"]["ops"]
    assert came["cases"] == whole["cases"] == 5
    assert {**came, "seconds": 0} == {**whole, "seconds": 0}
    assert "--kind ops --seed 3 --case 7" in campaign.repeat("ops", 3, 7)
    campaign.count(whole, "", 6, parity_ops.Outcome("g", "", "right", {"dq": (2e-9, 4e-9)}, "", ("conditioned",)))
    assert whole["conditioned"] == [{"case": 6, "group": "g", "errors and bounds": {"dq": [2e-9, 4e-9]}}]
    failed = parity_ops.Outcome("hyla blocked float64", "words", "wrong", {}, "dv: 1 > 0")
    campaign.count(whole, campaign.repeat("ops", 0, 7), 7, failed)
    assert whole["failures"] == [
        {"case": 7, "repeat": campaign.repeat("ops", 0, 7), "words": "words", "detail": "dv: 1 > 0"}
    ]
