"""Weight decay by the type of a parameter's module; the schedule."""

import dataclasses
import math

import pytest
import torch
from some import some

import polyhead as ph
from polyhead.train.optimiser import build, learning_rate, parameter_kinds


def everything():
    """A model with every kind of parameter."""
    config = ph.TransformerConfig(
        ph.Tokens(11),
        ph.Logits(11, bias=True),
        dim=16,
        layers=1,
        heads=(ph.Softmax(2), ph.Hyla(2, value_depth=2)),
        feedforward=ph.Experts(experts=3, top_k=2, hidden=8),
        positions=ph.RelativeBias(),
        max_length=8,
        bias=True,
        qk_norm=True,
    )
    return ph.Transformer(config)


def test_every_parameter_has_the_kind_of_its_owner():
    kinds = parameter_kinds(everything())
    by_kind = {kind: {n for n, k in kinds.items() if k == kind} for kind in set(kinds.values())}
    block = "blocks.0"
    assert by_kind["qkv_biases"] == {f"{block}.attention.qkv.bias"}
    assert by_kind["embeddings"] == {"inputs.table.weight"}
    assert len(by_kind["relative_bias"]) == 1
    assert all("norm" in name for name in by_kind["norms"])
    assert {f"{block}.attention.out.bias", "outputs.linear.bias"} <= by_kind["biases"]
    assert {f"{block}.attention.qkv.weight", f"{block}.attention.out.weight", "outputs.linear.weight"} < by_kind[
        "weights"
    ]
    assert f"{block}.attention.groups.1.value_weight" in by_kind["weights"]
    experts = {n for n in kinds if n.startswith(f"{block}.feedforward")}
    shapes = dict(everything().named_parameters())
    stacked = {n for n in experts if shapes[n].ndim == 3}
    assert len(stacked) == 2
    assert stacked <= by_kind["weights"]
    assert {n for n in experts if shapes[n].shape[0] == 3 and n not in stacked and "bias" in n} <= by_kind["biases"]
    assert set(kinds) == set(shapes)


def test_learned_positions_and_rms_norms():
    config = ph.TransformerConfig(
        ph.Vectors(3), ph.Values(1), dim=8, positions=ph.Learned(), norm="rms", heads=(ph.Softmax(2),)
    )
    kinds = parameter_kinds(ph.Transformer(config))
    assert [name for name, kind in kinds.items() if kind == "embeddings"] == ["positions.table"]
    assert {name for name, kind in kinds.items() if kind == "norms"} >= {"norm.weight", "blocks.1.norm2.weight"}


def test_a_tied_table_is_one_embedding():
    config = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5, tied=True), dim=8, heads=(ph.Softmax(2),))
    model = ph.Transformer(config)
    assert parameter_kinds(model)["inputs.table.weight"] == "embeddings"
    names = [p for group in build(model, ph.Train()).param_groups for p in group["params"]]
    assert len(names) == len({id(p) for p in names}) == len(list(model.parameters()))


def decayed(decay):
    model = everything()
    groups = build(model, ph.Train(weight_decay=0.3, decay=decay)).param_groups
    strength = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert set(strength.values()) <= {0.0, 0.3}
    return {name for name, p in model.named_parameters() if strength[id(p)] == 0.3}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ph.Decay)])
def test_each_field_adds_exactly_its_kind(field):
    kinds = parameter_kinds(everything())
    plain = {name for name, kind in kinds.items() if kind == "weights"}
    assert decayed(ph.Decay()) == plain
    assert decayed(ph.Decay(**{field: True})) == plain | {name for name, kind in kinds.items() if kind == field}
    assert field in kinds.values()


def test_decay_shrinks_matrices_and_nothing_else():
    model = everything()
    optimiser = build(model, ph.Train(weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    for group in optimiser.param_groups:
        group["lr"] = 0.1
    optimiser.step()
    kinds = parameter_kinds(model)
    for name, p in some(model.named_parameters()):
        wanted = 1.0 - 0.1 * 0.5 if kinds[name] == "weights" else 1.0
        torch.testing.assert_close(p.detach(), torch.full_like(before[name], wanted))


def test_an_owner_without_a_rule_is_an_error():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(
        ValueError, match=r"optimiser: parameter '1.weight' belongs to Bilinear, of which no decay rule"
    ):
        parameter_kinds(model)


def test_the_schedule_rises_from_zero_and_ends_at_the_floor():
    train = ph.Train(steps=101, warmup=20, lr=2.0, final=0.1)
    rates = [learning_rate(t, train) for t in range(101)]
    assert rates[0] == 0.0
    assert rates[5] == pytest.approx(0.5)
    assert rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(1.1)  # halfway down
    assert rates[100] == pytest.approx(0.2)
    assert rates[99] > rates[100]
    assert max(rates) == rates[20]


def test_the_early_floor_is_the_original_codes():
    train = ph.Train(steps=64, warmup=2, lr=1e-3, early_floor=True)
    for t in range(64):
        end = 62
        if t < 2:
            wanted = 1e-3 * t / 2
        elif t < end:
            wanted = 1e-4 + 0.9e-3 * 0.5 * (1 + math.cos(math.pi * (t - 2) / (end - 2)))
        else:
            wanted = 1e-4
        assert learning_rate(t, train) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 100), (5, 5), (5, 4), (2, 0)])
def test_short_schedules_divide_by_nothing(steps, warmup):
    for early in (False, True):
        train = ph.Train(steps=steps, warmup=warmup, early_floor=early)
        assert all(0 <= learning_rate(t, train) <= train.lr for t in range(steps))
