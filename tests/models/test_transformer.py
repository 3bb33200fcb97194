"""The transformer: inputs and outputs, stacks, positions, norms, copies, the tail, errors."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import zoo
from gradients import same_with_gradients
from refusals import refused
from torch.testing import assert_close
from zoo import fresh as build

import polyhead as ph
from polyhead import config
from polyhead.models.size import parameters
from polyhead.models.transformer import BlindToOrder

BASE = ph.TransformerConfig(
    ph.Tokens(11), ph.Logits(11), dim=32, heads=[ph.Softmax(2), ph.Hyla(2)], max_length=24, feedforward=ph.Swiglu()
)
VECTORS = {"inputs": ph.Vectors(5), "outputs": ph.Values(3)}
LAYERS = [ph.Linear(4)], [ph.Hyla(2, dim=4, value_depth=2), ph.Softmax(2, dim=6)]
MODELS = zoo.models(zoo.MIXTURES, causal=False) | {
    "vectors": replace(BASE, **VECTORS, positions=ph.Rotary(layout="half"), norm="rms"),
    "layers": replace(BASE, heads=LAYERS, bias=True),
    "scaled": replace(BASE, inputs=ph.Tokens(11, scaled=True), final_norm=False, feedforward=ph.Swiglu(24, bias=True)),
}


def inputs_of(settings, b=2, t=7, dtype=torch.float64):
    torch.manual_seed(1)
    if isinstance(settings.inputs, ph.Tokens):
        return torch.randint(settings.inputs.count, (b, t))
    return torch.randn(b, t, settings.inputs.size, dtype=dtype)


@pytest.mark.parametrize("name", [*MODELS][::3])
def test_copies_compute_the_same(name):
    """Also those that were built on the meta device; dropout is for training."""
    settings = replace(MODELS[name], dropout=0.3, residual_dropout=0.2)
    model, x = build(settings), inputs_of(settings)
    copied = copy.deepcopy(model)
    loaded = ph.Transformer(settings, device="meta", dtype=torch.float64).to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict())
    assigned = ph.Transformer(settings, device="meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in assigned.parameters())
    assigned.load_state_dict(model.state_dict(), assign=True)
    for same in (model, copied, loaded, assigned):
        assert torch.equal(same.eval()(x), model(x))
    assert parameters(settings) == sum(p.numel() for p in model.parameters())
    assert not torch.equal(copied.train()(x), model(x))


@pytest.mark.parametrize(("name", "causal"), zoo.turns([*MODELS], (False, True))[::3])
def test_the_tail_is_the_end_of_the_whole(name, causal):
    settings = replace(MODELS[name], causal=causal)
    model, x = zoo.make_model(settings), inputs_of(settings)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 2:4] = False
    for tail in (1, 3, 7):
        same_with_gradients(model(x, mask=mask, tail=tail), model(x, mask=mask)[:, -tail:], model.parameters())
    positions = torch.arange(7)[None] * 2
    assert_close(model(x, positions=positions, tail=2), model(x, positions=positions)[:, -2:])


def test_initialisation_presets():
    heads = ph.Hyla(8, dim=16, value_dim=16, value_depth=2)
    wide = replace(BASE, dim=512, heads=heads, layers=1, inputs=ph.Tokens(600), bias=True)
    hyla = build(replace(wide, init="hyla", positions=ph.RelativeBias(64)), torch.float32)
    course = build(replace(wide, init="cs336"), torch.float32).blocks[0].attention.qkv.weight[:128]
    attention = hyla.blocks[0].attention
    parts = [(rows, 512) for rows in attention.qkv.weight.split(attention.widths)]
    parts += [(attention.out.weight, 128), (attention.groups[0].value_weight, 16)]
    for rows, fan_in in parts:
        assert rows.std().item() == pytest.approx(fan_in**-0.5, rel=0.1 if fan_in == 16 else 0.03)
        assert rows.abs().max().item() <= 2.0001 * fan_in**-0.5 / 0.8796
    assert attention.relative.table.std().item() == pytest.approx(64**-0.5, rel=0.15)
    assert hyla.inputs.table.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert attention.qkv.bias.eq(0).all()
    assert course.std().item() == pytest.approx((2 / (512 + 128)) ** 0.5 * 0.9866, rel=0.02)


def test_mistakes_are_one_line():
    model, x = build(BASE), inputs_of(BASE)
    vectors, rotary = build(MODELS["vectors"]), build(replace(BASE, positions=ph.Rotary()))
    for call, message in (
        (lambda: model(torch.randn(2, 3)), r"^Transformer: inputs \(b t\) must be of an integer dtype but is torch"),
        (lambda: vectors(torch.randn(2, 3, 4)), r"inputs must be \(b t 5\), got \(2, 3, 4\)"),
        (lambda: model(x, mask=torch.ones(2, 7)), "Transformer: mask must be boolean, True where attention is allowed"),
        (lambda: model(x, mask=torch.ones(2, 6).bool()), r"t = 7 in inputs but 6 in mask \(b t\) = \(2, 6\)"),
        (lambda: model(x, tail=8), r"tail must be 1 to 7 \(the positions\) but is 8"),
        (lambda: model(x, keep=[None]), "Transformer: keep must hold one tensor, or None, a layer: 2, not 1"),
        (lambda: model(torch.tensor([[3, 11]])), "Transformer: tokens must be 0 to 10, got 11"),
        (lambda: replace(BASE, heads=[[ph.Softmax(2)]]), "2 layers but 1 lists of heads"),
        (lambda: build(replace(BASE, outputs=ph.Logits(7, tied=True))), r"tied logits need Tokens\(7\)"),
        (lambda: build(replace(BASE, outputs=ph.Logits(11, tied=True, bias=True))), "has no bias, so tied needs bias"),
        (lambda: build(replace(BASE, outputs=ph.Logits(7, scaled=True))), "so it needs tied=True"),
        (lambda: rotary(torch.zeros(1, 25, dtype=torch.long)), "25 positions but max_length is 24"),
    ):
        refused(call, message)


@pytest.mark.parametrize(
    ("changes", "blind"),
    [
        ({"positions": ph.Learned()}, False),
        ({"causal": True}, False),
        ({"heads": [ph.Softmax(2), ph.Relational(2)]}, False),  # symbols of positions
        ({"inputs": config.Vectors(9)}, False),
        ({"heads": ph.Relational(4, symbols=ph.SymbolicAttention(5))}, True),
        ({}, True),
    ],
)
def test_a_model_that_is_blind_to_order_warns(changes, blind):
    settings = ph.TransformerConfig(**{"inputs": ph.Tokens(9), "outputs": ph.Logits(9), "dim": 16} | changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ph.Transformer(settings).eval()
    assert [warning.category for warning in caught] == [BlindToOrder] * blind
    if isinstance(settings.inputs, ph.Tokens):  # as the warning claims
        x, order = torch.arange(1, 7)[None], torch.tensor([3, 0, 5, 1, 4, 2])
        assert torch.allclose(model(x)[:, order], model(x[:, order]), atol=1e-5) == blind
