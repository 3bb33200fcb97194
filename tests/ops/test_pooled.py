"""Pooled heads against loops over explicit indices, and against HYLA, of which the sum over pairs is a case."""

import itertools

import pytest
import torch
from some import some
from torch.testing import assert_close

import polyhead as ph
from polyhead import ops
from polyhead.ops import tiling
from polyhead.spec import ACTS, NETWORKS, NORMALISE, POOLS

CASES = list(
    itertools.product((None, "offset", "dense"), (None, "rows", "keys", "plane"), (False, True), (False, True))
)
WAYS = list(itertools.product(POOLS, NETWORKS))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    for constant, value in {"QUERIES": 3, "KEYS": 2, "NUMBERS": 200}.items():
        monkeypatch.setattr(tiling, constant, value)


@pytest.mark.parametrize(("pool", "network"), WAYS)
def test_equals_the_loops(problem, oracle, pool, network):
    start = WAYS.index((pool, network))
    for n, ((t, s), case) in some(
        enumerate(zip(itertools.cycle([(1, 4), (4, 4), (4, 3), (3, 5)]), CASES[start::5], strict=False))
    ):
        torch.manual_seed(n)
        bias, mask, causal, keep = case
        how = {"normalise": NORMALISE[n % 5], "act": ACTS[(n + start) % 4], "pool": pool, "network": network}
        qkv, options = problem(t, s, bias=bias, mask=mask, causal=causal, keep=keep, g=(1, 2, 4)[n % 3])
        wanted = torch.tensor(oracle(*qkv, **options).pooled(**how))
        for impl in ("auto", "blocked"):
            out = ops.pooled_attention(*qkv, **options, **how, impl=impl)
            assert_close(out.detach(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("pool", "network"), WAYS)
def test_windows_and_packed_sequences_equal_the_loops(problem, oracle, pool, network):
    torch.manual_seed(1)
    for limits in ({"window": 2}, {"edges": (0, 2, 2, 5)}, {"window": 2, "edges": (0, 4, 5), "causal": True}):
        qkv, options = problem(5, 5, **limits)
        wanted = torch.tensor(oracle(*qkv, **options).pooled(pool=pool, network=network))
        out = ops.pooled_attention(*qkv, **options, pool=pool, network=network)
        assert_close(out.detach(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("pool", "network"), WAYS)
def test_gradients_equal_finite_differences(problem, pool, network):
    torch.manual_seed(0)
    qkv, options = problem(3, 4, bias="offset", mask="rows", causal=True)

    def run(bias, *tensors):
        how = {"normalise": "softmax_rms_heads", "act": "silu", "pool": pool, "network": network}
        return ops.pooled_attention(*tensors, **{**options, "bias": bias}, **how, impl="reference")

    leaves = (options["bias"], *qkv)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_the_sum_over_pairs_is_hyla_and_the_mean_a_share_of_it(problem):
    torch.manual_seed(0)
    qkv, options = problem(5, 5, bias="dense", causal=True, keep=True, b=64)
    hyla = ops.hyla(*qkv, **options, normalise="softmax")
    assert_close(ops.pooled_attention(*qkv, **options, normalise="softmax", pool="sum"), hyla)
    keys = torch.arange(1, 6)[:, None, None]  # that a causal query may attend to
    assert_close(ops.pooled_attention(*qkv, **options, normalise="softmax", pool="mean") * keys, hyla)


def test_the_maximum_is_that_of_visible_keys():
    """Key 0 gives -1 and key 1 gives 2; what a hidden key gives is neither 2 nor 0."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([-1.0, 2.0], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([-1.0, 0.5], dtype=torch.float64).view(1, 2, 1, 1)
    for mask, wanted in ((None, 2.0), (torch.tensor([True, False]), -1.0)):
        out = ops.pooled_attention(one, k, v, mask=mask, normalise="identity")
        assert out.item() == wanted
    dropped = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    assert ops.pooled_attention(one, k, v, keep=dropped, normalise="identity").item() == 0  # visible, with the code 0


def test_a_query_has_one_network():
    """What the heads of a query give are multiples of one hidden layer."""
    q, k, v = torch.randn(3, 2, 6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    second = {n: torch.linalg.svdvals(ops.pooled_attention(q, k, v, network=n))[..., 1].amax() for n in NETWORKS}
    assert second["query"] < 1e-14 < 0.1 < second["pair"]


def test_what_needs_a_sum_of_codes_refuses_in_one_line():
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.Transformer(ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=ph.Pooled(2)))
    taps = ph.analysis.capture(model, task.batch("train", 2, seed=0, step=0))[0]
    assert ph.analysis.codes(taps, -1, -1).shape == (2, 2)
    with pytest.raises(ValueError, match=r"^value_network: the output of these heads must be the sum of code times"):
        ph.analysis.value_network(taps, -1, -1)
    with pytest.raises(ValueError, match=r"^swap_codes: unknown kind of heads 'pooled'"):
        ph.analysis.swap_codes(model, task)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_query_that_may_look_nowhere_gets_zero_and_no_nan(problem, network):
    torch.manual_seed(0)
    qkv, options = problem(4, 6, mask="rows", bias="offset")
    for pool, normalise in some(itertools.product(POOLS, NORMALISE)):
        out = ops.pooled_attention(*qkv, **options, normalise=normalise, pool=pool, network=network)
        grads = torch.autograd.grad(out.square().sum() + out.sum(), (*qkv, options["bias"]))
        assert (out[0, 2] == 0).all()
        assert (grads[0][0, 2] == 0).all()
        assert all(g.isfinite().all() for g in grads)


def test_mistakes_are_one_clear_line(problem):
    qkv = problem(3, 4)[0]
    for name, wrong, right in (("pool", "maxx", "max"), ("network", "qury", "query")):
        with pytest.raises(ValueError, match=f"^pooled_attention: unknown {name} '{wrong}'; did you mean '{right}'"):
            ops.pooled_attention(*qkv, **{name: wrong})
        with pytest.raises(ValueError, match=f"^Pooled: unknown {name} '{wrong}'; did you mean '{right}'"):
            ph.Pooled(2, **{name: wrong})
