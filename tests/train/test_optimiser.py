"""Weight decay by the type of a parameter's module; the schedule."""

import dataclasses
import math

import pytest
import torch

import polyhead as ph
from polyhead.train.optimiser import build, learning_rate, parameter_kinds


def everything():
    """A model with every kind of parameter."""
    ends, heads = (ph.Tokens(11), ph.Logits(11, bias=True)), (ph.Softmax(2, sinks=True), ph.Hyla(2, value_depth=2))
    parts = {"feedforward": ph.Experts(experts=3, top_k=2, hidden=8), "positions": ph.RelativeBias(), "qk_norm": True}
    return ph.Transformer(ph.TransformerConfig(*ends, dim=16, layers=1, heads=heads, max_length=8, bias=True, **parts))


KINDS = {
    "embeddings": "inputs.table.weight",
    "relative_bias": "attention.relative.table",
    "qkv_biases": "attention.qkv.bias",
    "biases": "attention.out.bias feedforward.up_bias feedforward.down_bias outputs.linear.bias "
    "attention.groups.0.sinks",
    "norms": "norm1.weight norm1.bias norm2.weight norm2.bias norm.weight norm.bias "
    + " ".join(f"attention.qk_norms.{i}.weight" for i in range(4)),
    "weights": "attention.qkv.weight attention.groups.1.value_weight attention.out.weight feedforward.gate.weight "
    "feedforward.up feedforward.down outputs.linear.weight",
}
"""Of all parameters of `everything`; names without the block's."""


def test_every_parameter_has_the_kind_of_its_owner():
    expected = {name: kind for kind, names in KINDS.items() for name in names.split()}
    assert {name.removeprefix("blocks.0."): kind for name, kind in parameter_kinds(everything()).items()} == expected


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


def test_an_owner_without_a_rule_is_an_error():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(ValueError, match=r"optimiser: parameter '1.weight' belongs to Bilinear, which has no decay"):
        parameter_kinds(model)


@pytest.mark.parametrize(("early_floor", "end"), [(False, 63), (True, 62)])
def test_the_schedule_rises_from_zero_and_ends_at_the_floor(early_floor, end):
    """The early floor is the original code's."""
    train = ph.Train(steps=64, warmup=2, lr=1e-3, early_floor=early_floor)
    for t in range(64):
        if t < 2:
            expected = 1e-3 * t / 2
        elif t < end:
            expected = 1e-4 + 0.9e-3 * 0.5 * (1 + math.cos(math.pi * (t - 2) / (end - 2)))
        else:
            expected = 1e-4
        assert learning_rate(t, train) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 100), (5, 5), (5, 4), (2, 0)])
def test_short_schedules_divide_by_nothing(steps, warmup):
    for early_floor in (False, True):
        train = ph.Train(steps=steps, warmup=warmup, early_floor=early_floor)
        assert all(0 <= learning_rate(t, train) <= train.lr for t in range(steps))
