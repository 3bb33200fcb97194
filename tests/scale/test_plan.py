"""Estimates against measured or hand-computed values.  `benchmarks/validate_plan.py` does the same at full size."""

import dataclasses
import functools
import json
import re
import types
from dataclasses import replace

import pytest
import torch
import zoo
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from polyhead.cli import dispatch as cli, plan as cli_plan
from polyhead.config import CoRelNetConfig, Hyla, Linear, Mlp, Relational, Run, Softmax, Train, TransformerConfig
from polyhead.models.build import build
from polyhead.models.size import parameters
from polyhead.papers import demo
from polyhead.papers.recipes import RECIPES
from polyhead.scale.plan import cards, count as plan_count, estimate as module
from polyhead.scale.plan.cards import CARDS, Card
from polyhead.scale.plan.count import FORMULAS, StepCounts, on_card
from polyhead.scale.plan.estimate import RESERVED, SHARE, Plan, _PlannedRun, plan, step
from polyhead.tasks import FuzzyLogic
from polyhead.timing.measure import peak
from polyhead.train import optimiser

CPU = torch.device("cpu")
HERE = Card("here", "cpu", 1e9, 2e9, 1e12, 1e9, 1e9, 1e9)
TASK = FuzzyLogic(length=24)


def run_of(heads, **changes):
    """A small run; `changes` of the model, and of training where it has the field."""
    fields = {f.name for f in dataclasses.fields(Train)}
    train = {name: changes.pop(name) for name in list(changes) if name in fields}
    shape = {"dim": 32, "layers": 2, "feedforward": Mlp(64), "max_length": 24} | changes
    model = TransformerConfig(*TASK.ends, heads=heads, **shape)
    return Run(task=TASK, model=model, train=Train(**{"batch_size": 8, "evaluate": (), **train}))


def counted(run):
    place = _PlannedRun(run, 1, HERE)
    return place, place.counted(place.sequences)


def measured_growth(run, sequences):
    """By how much memory grows in a step, and what AdamW holds after one."""
    torch.manual_seed(0)
    model = build(run.model).train()
    batch = run.task.batch("train", sequences, seed=0, step=0)
    step(model, run, batch)
    adamw = optimiser.build(model, run.train)
    adamw.step()
    held = sum(x.numel() * x.element_size() for state in adamw.state.values() for x in state.values())
    clear = run.train.accumulate == 1
    model.zero_grad(set_to_none=clear)
    return peak(CPU, lambda: step(model, run, batch, clear=clear)), held


MECHANISMS = tuple(made(4) for made in zoo.KINDS.values())
RUNS = {
    "mechanisms": run_of([[heads] for heads in MECHANISMS], layers=len(MECHANISMS)),
    "bf16": run_of(Softmax(4), precision="bf16"),
    "checkpoint": run_of(Softmax(4), layers=3, checkpoint=True),
    "pieces": run_of(Softmax(4), accumulate=2),
    "encoder and decoder": replace(RECIPES["sorting-dual"](), train=Train(batch_size=4)),
    "baseline": replace(RECIPES["games-dual"](), train=Train(batch_size=8)),
}
RUNS["baseline"] = replace(RUNS["baseline"], model=CoRelNetConfig(*RUNS["baseline"].task.ends))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", RUNS)
def test_memory_is_what_is_measured(name):
    run = RUNS[name]
    place, have = counted(run)
    told = place.memory(have)
    grown, moments = measured_growth(run, place.sequences)
    assert told["parameters"] == told["gradients"] == 4 * parameters(run.model)
    assert told["moments"] == moments
    before = have.parameters + have.buffers + have.inputs
    before += told["gradients"] if run.train.accumulate > 1 else 0
    assert have.most - before == pytest.approx(grown, rel=0.1 if name == "bf16" else 0.02)
    assert have.kept <= have.beside <= have.most < told["total"]


def test_operations_are_those_of_flop_counter():
    run = run_of(Softmax(4))
    _, have = counted(run)
    plain = replace(run, model=replace(run.model, heads=Softmax(4, impl="reference")))
    with FlopCounterMode(display=False) as counter:
        step(build(plain.model).train(), plain, run.task.batch("train", 8, seed=0, step=0))
    assert have.operations == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert sum(kind[0] * kind[3] for kind in have.backward) > 1.7 * sum(kind[0] * kind[3] for kind in have.forward)


def test_a_mask_chooses_every_position():
    x, mask = torch.randn(3, 4, 5, requires_grad=True), torch.zeros(3, 4, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True), plan_count._Tally() as tally:
        tally.begin()
        assert x[mask].shape == (12, 5)
        assert tally.most() == 12 * 5 * 4
        x[mask].sum().backward()
    assert x.grad.shape == x.shape


Q, V, NONE = torch.empty(2, 5, 3, 4), torch.empty(2, 5, 3, 6), torch.empty(0)
HYLA = [Q, Q, V, *[NONE] * 5]
DEEP = [Q, Q, V, *[NONE] * 3, torch.empty(3, 6, 6), NONE]
RELATED = [Q, Q, V, *[torch.empty(2, 5, 7, 2)] * 2, *[NONE] * 3]
DISENTANGLED = [Q, Q, V, Q, Q, *[NONE] * 3]
PAIRS = 2 * 25 * 3
BY_HAND = [  # multiply-adds of all pairs and heads
    ("hyla_blocked", HYLA, PAIRS * (4 + 2 * 6)),
    ("hyla_blocked_backward", HYLA, PAIRS * (3 * 4 + 5 * 6)),
    ("hyla_blocked", DEEP, PAIRS * (4 + 2 * 6 + 6 * 6)),
    ("hyla_native_backward", DEEP, PAIRS * (3 * 4 + 5 * 6 + 4 * 6 * 6)),
    ("relational_blocked", RELATED, 2 * 25 * (3 * (4 + 6 + 7) + 7 * 2)),
    ("relational_native_backward", RELATED, 2 * 25 * (3 * (3 * 4 + 2 * 6 + 2 * 7) + 3 * 7 * 2)),
    ("softmax_blocked", HYLA, PAIRS * (4 + 6)),
    ("softmax_native", HYLA, PAIRS * (4 + 6)),
    ("softmax_native_backward", HYLA, PAIRS * (3 * 4 + 2 * 6)),
    ("disentangled_blocked", DISENTANGLED, PAIRS * (4 + 6 + 4)),
    ("disentangled_blocked_backward", DISENTANGLED, 3 * PAIRS * (4 + 6 + 4)),
]


@pytest.mark.parametrize(("kernel", "tensors", "wanted"), BY_HAND)
def test_operations_of_our_kernels_by_hand(kernel, tensors, wanted):
    formula = FORMULAS[getattr(torch.ops.polyhead, kernel)]
    arguments = [[V], tensors, []] if kernel.endswith("_backward") else [tensors, []]
    assert formula(arguments, {"causal": False}) == 2 * wanted
    assert formula(arguments, {"causal": True}) == 2 * wanted * 15 // 25
    assert formula(arguments, {"causal": False, "window": 2}) == 2 * wanted * 13 // 25


def test_operations_of_other_kernels_by_hand():
    sdpa, heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, [x.transpose(1, 2) for x in (Q, Q, V)]
    assert FORMULAS[sdpa](heads, {"is_causal": False}) == 2 * PAIRS * 10
    assert FORMULAS[sdpa]([*heads, 0.0, True], {}) == 2 * 2 * 3 * 15 * 10
    ours = torch.ops.polyhead
    assert FORMULAS[ours.linear_native]([HYLA, []], {}) == 2 * 2 * (3 * 5 * (24 + 16 * 10) + 3 * 5 * 24)
    rows, table = torch.empty(7, 4), torch.empty(9, 4)
    assert FORMULAS[ours.chunked_cross_entropy]([rows, table], {}) == 2 * 7 * 4 * 9
    assert FORMULAS[ours.chunked_cross_entropy_backward]([NONE, rows, table], {}) == 3 * 2 * 7 * 4 * 9


def test_on_a_card_kernels_keep_what_tiles_keep():
    def impl(heads, precision):
        return on_card(run_of(heads).model, precision).layer_heads(0)[0].impl

    assert impl(Hyla(4), "bf16") == "blocked" == impl(Hyla(4), "fp32")
    assert impl(Hyla(4, value_depth=2), "bf16") == "auto" == impl(Hyla(4, act="gelu"), "bf16")
    assert impl(Hyla(32, dim=16, value_dim=1), "fp32") == "auto"
    assert impl(Relational(4, relation_act="relu"), "fp32") == "blocked"
    assert impl(Relational(4), "fp32") == "auto" == impl(Softmax(4), "bf16")
    assert impl(Relational(4, impl="triton"), "fp32") == "blocked"
    assert impl(Linear(4, impl="triton"), "fp32") == "chunked"
    both = RUNS["encoder and decoder"].model
    encoder = on_card(replace(both, encoder=replace(both.encoder, heads=Hyla(4))), "fp32").encoder
    assert encoder.layer_heads(0)[0].impl == "blocked"


@pytest.fixture
def straight(monkeypatch):
    """A step that takes and holds so much a sequence, a third as much with checkpoints."""

    def stand_in(run, sequences, sample, *, card):
        size, twice = 4 * parameters(run.model), run.train.accumulate > 1
        kept = (10_000 if getattr(run.model, "checkpoint", False) else 30_000) * sequences
        most = size * (1 + twice) + 100 * sequences + kept
        kernels = ((10**7 * sequences, 10**6, False, 20), (0, 10**6 * sequences, True, 5))
        held = {"parameters": size, "buffers": 0, "inputs": 100 * sequences, "kept": kept, "beside": kept, "most": most}
        return StepCounts(sequences, 24 * sequences, **held, forward=kernels, backward=kernels * 2)

    monkeypatch.setattr(module, "count", stand_in)


def test_time_by_hand(straight):
    run = run_of(Softmax(4), accumulate=2, clip=1.0, steps=100, eval_every=50, eval_batches=3, evaluate=("iid",))
    place, size = _PlannedRun(run, 1, HERE), 4 * parameters(run.model)
    seconds = place.seconds(place.counted(4), 0.5)
    each = 20 * 4e7 / 1e9 + 5 * 4e6 / 1e9 + 25 * 1e-5  # operations bind some, bytes others
    assert seconds["forward"] == pytest.approx(2 * each / 0.5)
    assert seconds["backward"] == pytest.approx(2 * 2 * each / 0.5)
    assert seconds["AdamW"] == pytest.approx(10 * size / 1e9 / 0.5)
    assert seconds["exchange"] == seconds["exposed"] == 0.0
    found = plan(run, card=HERE, share=0.5, search=False)
    assert found.hours == pytest.approx((100 * found.seconds["step"] + 2 * 3 * 2 * each / 0.5) / 3600)
    assert found.tokens_per_second == pytest.approx(24 * 8 / found.seconds["step"])
    fast = plan(run, card=replace(CARDS["h100"], fp32=1e30, narrow=1e30, bandwidth=1e30), search=False)
    assert fast.seconds["forward"] == pytest.approx(2 * 25 * 1e-5)  # no faster than it is launched


@pytest.mark.parametrize("devices", [2, 8, 16])
def test_communication_by_hand(straight, devices):
    run = run_of(Softmax(4), batch_size=32, accumulate=2)
    slow = replace(CARDS["h100"], link=1e7, network=1e6)
    part = 4 * parameters(run.model) * (devices - 1) / devices / (1e7 if devices <= 8 else 1e6)
    data = plan(run, devices=devices, card=slow, search=False).seconds
    assert data["exchange"] == pytest.approx(2 * part)
    assert data["exposed"] == pytest.approx(max(0.0, 2 * part - data["backward"] / 2))
    sharded = plan(replace(run, parallel="sharded"), devices=devices, card=slow, search=False).seconds
    blocks = sum(p.numel() for p in build(run.model).blocks.parameters()) / parameters(run.model)
    wanted = 2 * (part + blocks * part) + part  # gathered for both passes of two pieces, scattered once
    assert sharded["exchange"] == pytest.approx(wanted)
    assert sharded["exposed"] == pytest.approx(wanted - sharded["forward"] - sharded["backward"])
    wide = plan(run, devices=devices, card=slow, link=1e15, search=False).seconds
    assert wide["exposed"] == 0.0
    assert wide["step"] < data["step"]


def test_sharded_memory_by_hand(straight):
    run = replace(run_of(Softmax(4), batch_size=10), parallel="sharded")
    found = plan(run, devices=5, card="h100", search=False).memory
    model = build(run.model)
    own = sum(-(-p.shape[0] // 5) * p[0].numel() * 4 for p in model.parameters())
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    root = 4 * parameters(run.model) - 2 * block
    assert found["parameters"] == found["gradients"] == found["moments"] / 2 == own
    assert found["gathered"] == 2 * (root + 2 * block)
    assert found["total"] == 4 * own + 2 * (root + 2 * block) + 2 * 30_000 + 10 * 100
    whole = plan(replace(run, parallel="data"), devices=5, card="h100", search=False).memory
    assert whole["parameters"] == 4 * parameters(run.model)


def card_of(memory):
    """A card with `memory` usable bytes."""
    return replace(CARDS["h100"], memory=RESERVED + memory / 0.95)


def test_the_largest_batch_fits_and_twice_as_many_do_not(straight):
    run = run_of(Softmax(4), batch_size=8, dim=8, feedforward=Mlp(8))  # with less to update than a sequence keeps
    fixed = 4 * parameters(run.model) + plan(run, card="h100", search=False).memory["moments"] + 8 * 100
    for most, wanted in ((32, 32), (63, 32), (64, 64), (7, 4), (1, 1), (0, None)):
        found = plan(run, card=card_of(fixed + 30_000 * most + 1))
        assert (found.largest, found.fits) == (wanted, most >= 8), most


def test_what_would_fit_is_the_smallest_change(straight):
    run = run_of(Softmax(4), batch_size=2048, dim=8, feedforward=Mlp(8))
    fixed = 4 * 4 * parameters(run.model) + 2048 * 100
    found = plan(run, card=card_of(fixed + 30_000 * 600))
    assert not found.fits
    assert found.smallest_change == "--train.accumulate 4"
    assert found.verdict.startswith("does not fit: needs")
    assert found.verdict.endswith("--train.accumulate 4")
    alone = replace(run, train=replace(run.train, batch_size=1))
    wanted = plan(alone, card=card_of(2 * 4 * parameters(run.model) + 4 * 4 * len(list(build(run.model).parameters()))))
    assert wanted.smallest_change is None
    four = replace(run, train=replace(run.train, batch_size=4))
    own = plan(four, devices=4, card="h100", search=False).memory["total"]
    assert plan(four, devices=4, card=card_of(own - 10_000)).smallest_change == "--model.checkpoint"
    wide = run_of(Softmax(4), batch_size=8, layers=8)
    all_ = 4 * 4 * parameters(wide.model)
    assert plan(wide, devices=4, card=card_of(0.8 * all_)).smallest_change == "--parallel sharded"
    pieces = replace(wide, train=replace(wide.train, accumulate=2))
    wanted = "--parallel sharded --train.accumulate 1"  # a step in pieces holds all gradients
    assert plan(pieces, devices=4, card=card_of(0.8 * all_)).smallest_change == wanted
    assert plan(wide, devices=4, card=card_of(0.8 * all_)).memory["total"] > all_


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"card": "h10"}, "plan: unknown card 'h10'; did you mean 'h100'"),
        ({"devices": 0}, "devices must be at least 1 but is 0"),
        ({"devices": 3, "card": "l4"}, "a multiple of 3 devices x accumulate 1 but is 8; the nearest is 9"),
        ({"share": 0.0}, "share must be above 0 and at most 1 but is 0.0"),
        ({"share": 5.0}, "share must be above 0 and at most 1 but is 5.0"),
        ({"link": -1e9}, "link must be above 0 but is -1e+09"),
        ({"link": float("nan")}, "link must be above 0 but is nan"),
    ],
)
def test_mistakes_are_told_in_a_line(straight, given, wanted):
    refused(lambda: plan(run_of(Softmax(4)), **given), re.escape(wanted))


def test_a_batch_that_no_machine_could_draw_is_planned(straight):
    few, many = (plan(run_of(Softmax(4), batch_size=n), card="l4", search=False) for n in (4096, 10**8))
    assert not many.fits
    assert many.seconds["draw"] > 100 * few.seconds["draw"]


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(cards, "quickest", functools.partial(cards.quickest, times=1))
    found = plan(run_of(Softmax(4)), card="this", search=False)
    assert isinstance(found, Plan)
    assert found.share > 0
    assert found.hours > 0
    said = dict(found.assumptions)
    assert "took" in said["share of the peak"]
    assert "measured here" in said["cpu"]


def test_a_step_for_which_this_machine_has_no_memory_is_not_taken(straight, monkeypatch):
    monkeypatch.setattr(module, "measured", lambda *given: pytest.fail("a step was taken"))
    found = plan(run_of(Softmax(4)), card=replace(HERE, memory=1000.0), search=False)
    assert (found.fits, found.share) == (False, SHARE)
    assert "assumed" in dict(found.assumptions)["share of the peak"]


@pytest.mark.parametrize(
    ("full", "name"),
    [
        *((one.full, one.name) for one in CARDS.values()),
        *((full, "this") for full in ("NVIDIA L40S", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU")),
    ],
)
def test_a_card_is_taken_for_no_other(monkeypatch, full, name):
    """One that is not known is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: full)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: types.SimpleNamespace(total_memory=48e9))
    monkeypatch.setattr(cards, "_measured", lambda full, memory: replace(HERE, name="this", full=full, memory=memory))
    assert (cards.this().name, cards.this().full) == (name, full)


def test_the_verb_prints_tables_or_json(straight, capsys):
    words = ["plan", "fuzzy-softmax", "--card", "a100", "--devices", "4", "--train.batch-size", "32", "--share", "0.4"]
    assert cli.main([*words, "--hours", "0.001"]) == 0
    said = capsys.readouterr().out
    for word in ("4 x a100, data", "moments", "verdict: fits", "assumed:", "0.40 (given)", "of 15,000 steps"):
        assert word in said
    assert cli.main([*words, "--json", "--link", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == 8
    assert found["fits"]
    assert "5 GB/s" in found["assumptions"]["link"]


def test_several_runs_are_planned_once_for_each_kind(straight, capsys):
    runs = [replace(run, seed=seed, name=f"{run.name}-{seed}") for run in demo.fuzzy() for seed in (0, 1)]
    assert [len(group) for group in cli_plan.alike(runs)] == [2, 2]
    deep = [replace(run, model=replace(run.model, checkpoint=True)) for run in runs]  # the same digests
    assert [len(group) for group in cli_plan.alike(runs + deep)] == [2, 2, 2, 2]
    assert cli.main(["plan", "demo", "--card", "l4"]) == 0
    said = capsys.readouterr().out
    assert "all 8 runs" in said
    assert "-1 on 1 x l4" in said
