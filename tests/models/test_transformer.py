"""The transformer: inputs and outputs, stacks, positions, norms, devices and dtypes, causality, errors."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import polyhead as ph
from polyhead import config
from polyhead.layers.norms import LayerNorm
from polyhead.layers.positions import RotaryEmbedding
from polyhead.models.size import parameters

BASE = ph.TransformerConfig(
    ph.Tokens(11),
    ph.Logits(11),
    dim=32,
    layers=2,
    heads=[ph.Softmax(2), ph.Hyla(2)],
    max_length=24,
    feedforward=ph.Swiglu(),
)
VARIANTS = {
    "rotary": replace(BASE, positions=ph.Rotary()),
    "half": replace(BASE, positions=ph.Rotary(layout="half"), norm="rms"),
    "t5": replace(BASE, positions=ph.RelativeBias(), bias=True, init="hyla"),
    "alibi": replace(BASE, positions=ph.Alibi(), feedforward=ph.Mlp(act="relu")),
    "learned": replace(BASE, positions=ph.Learned(), qk_norm=True),
    "sinusoidal": replace(BASE, positions=ph.Sinusoidal(), norm_order="post"),
    "hybrid": replace(
        BASE, heads=[[ph.Linear(4)], [ph.Hyla(2, dim=4, value_depth=2), ph.Softmax(2, dim=6)]], positions=ph.Rotary()
    ),
    "experts": replace(BASE, feedforward=ph.Experts(3, 2, hidden=16)),
    "tied": replace(BASE, outputs=ph.Logits(11, tied=True, scaled=True), init="hyla"),
    "vectors": replace(BASE, inputs=ph.Vectors(5), outputs=ph.Values(3)),
    "scaled": replace(BASE, inputs=ph.Tokens(11, scaled=True), final_norm=False, feedforward=ph.Swiglu(24, bias=True)),
    "dual": replace(BASE, heads=[ph.Softmax(2), ph.Relational(2, relations=3)], positions=ph.Rotary(), init="hyla"),
    "relative symbols": replace(
        BASE,
        heads=[
            [ph.Relational(2, symbols=ph.RelativeSymbols(2)), ph.Softmax(2)],
            [
                ph.Disentangled(2, symbols=ph.PositionSymbols(5)),
                ph.Abstractor(2, symbols=ph.RelativeSymbols(), act="tanh"),
            ],
        ],
    ),
    "symbols of each layer": replace(
        BASE,
        heads=[
            [ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention(count=5, shared=False, trainable=False))],
            [ph.Relational(2, symbols=ph.RelationalSymbols(count=5, once=True, neighbours=1)), ph.Softmax(2)],
        ],
    ),
}


def inputs_of(settings, b=2, t=7, dtype=torch.float64):
    torch.manual_seed(1)
    if isinstance(settings.inputs, ph.Tokens):
        return torch.randint(settings.inputs.count, (b, t))
    return torch.randn(b, t, settings.inputs.size, dtype=dtype)


def build(settings, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return ph.Transformer(settings, dtype=dtype, **options).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_causal_two_ways(name):
    settings = replace(VARIANTS[name], causal=True)
    model, x = build(settings), inputs_of(settings)
    y = model(x)
    for i in range(7):
        assert_close(model(x[:, : i + 1])[:, i], y[:, i], atol=1e-9, rtol=1e-9)
    if isinstance(settings.inputs, ph.Vectors):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x)[:, 3].sum(), x)
        assert gradient[:, :4].ne(0).any(-1).all()
        assert gradient[:, 4:].eq(0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_built_on_the_meta_device_it_is_the_same_model(name):
    settings = VARIANTS[name]
    model, x = build(settings), inputs_of(settings)
    empty = ph.Transformer(settings, device="meta", dtype=torch.float64).to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert_close(empty.eval()(x), model(x), atol=0, rtol=0)
    assigned = ph.Transformer(settings, device="meta", dtype=torch.float64)
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert_close(assigned.eval()(x), model(x), atol=0, rtol=0)
    assert parameters(settings) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_eval_is_repeatable_and_copies_are_equal(name):
    settings = replace(VARIANTS[name], dropout=0.3, residual_dropout=0.2)
    model, x = build(settings), inputs_of(settings)
    assert torch.equal(model(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize("name", VARIANTS)
def test_taps_change_nothing(name):
    settings = VARIANTS[name]
    model, x, taps = build(settings), inputs_of(settings), []
    assert torch.equal(model(x, taps=taps), model(x))
    assert [len(t.groups) for t in taps] == [len(settings.layer_heads(i)) for i in range(2)]


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_is_never_read(name):
    settings = VARIANTS[name]
    model, x = build(settings), inputs_of(settings)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False
    short = model(x[:, :5])
    assert_close(model(x, mask=mask)[:, :5], short, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(model(x)[:, :5], short)


@pytest.mark.parametrize(("name", "causal"), [(name, n % 2 == 0) for n, name in enumerate(VARIANTS)])
def test_the_tail_is_the_end_of_the_whole(name, causal):
    settings = replace(VARIANTS[name], causal=causal)
    model, x = build(settings), inputs_of(settings)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 2:4] = False
    for tail in (1, 3, 7):
        whole, end = model(x, mask=mask)[:, -tail:], model(x, mask=mask, tail=tail)
        assert_close(end, whole, atol=1e-9, rtol=1e-9)
        towards = torch.randn_like(whole)
        for a, b in zip(gradients(model, end, towards), gradients(model, whole, towards), strict=True):
            assert_close(a, b, atol=1e-9, rtol=1e-9)
    where = torch.arange(7)[None] * 2
    assert_close(model(x, positions=where, tail=2), model(x, positions=where)[:, -2:])


def gradients(model, y, towards):
    grads = torch.autograd.grad((y * towards).sum(), list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in grads]


def test_one_rotary_table_for_all_layers_outside_the_state():
    model = build(replace(VARIANTS["rotary"], layers=4))
    assert len({id(m) for m in model.modules() if isinstance(m, RotaryEmbedding)}) == 1
    assert not [k for k in model.state_dict() if "rotary" in k or "table" in k.replace("inputs.table", "")]


@pytest.mark.parametrize("name", ["rotary", "half", "sinusoidal", "t5", "alibi"])
def test_positions_survive_casting(name):
    settings = replace(VARIANTS[name], max_length=2048)
    model = build(settings, dtype=torch.float32)
    there_and_back = copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)
    rounded = copy.deepcopy(model)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    x = torch.randint(11, (1, 1000))
    assert torch.equal(there_and_back(x), rounded(x))
    half = copy.deepcopy(model).to(torch.bfloat16)(x).float()
    assert (half - model(x)).abs().max() < 0.2 * model(x).abs().max()


def test_post_norm_has_no_final_norm_unless_asked_for():
    assert isinstance(build(VARIANTS["sinusoidal"]).norm, torch.nn.Identity)
    assert isinstance(build(VARIANTS["scaled"]).norm, torch.nn.Identity)
    assert isinstance(build(replace(VARIANTS["sinusoidal"], final_norm=True)).norm, LayerNorm)
    assert isinstance(build(BASE).norm, LayerNorm)
    out = build(replace(VARIANTS["sinusoidal"], outputs=ph.Values(32)))
    assert out(inputs_of(BASE)).shape == (2, 7, 32)


def test_every_layer_has_its_keep():
    model, x = build(BASE), inputs_of(BASE)
    assert torch.equal(model(x, keep=[None, None]), model(x))
    keep = torch.rand(1, 4, 7, 7, dtype=torch.float64)
    by_layer = [model(x, keep=which) for which in ([keep, None], [None, keep], [keep, keep])]
    assert not any(torch.allclose(a, b) for a, b in ((by_layer[0], by_layer[1]), (by_layer[1], by_layer[2])))
    seen = model.blocks[0](model.inputs(x))
    assert torch.equal(by_layer[1], model.outputs(model.norm(model.blocks[1](seen, keep=keep))))
    assert_close(model(x, keep=[keep, keep], tail=2), by_layer[2][:, -2:])


def test_experts_add_their_balance_to_the_loss():
    model = build(VARIANTS["experts"])
    model(inputs_of(BASE))
    assert model.auxiliary_loss().item() > 0
    assert build(BASE).auxiliary_loss() == 0.0


def test_initialisation_presets():
    wide = replace(
        BASE,
        dim=512,
        heads=[ph.Hyla(8, dim=16, value_dim=16, value_depth=2)],
        layers=1,
        inputs=ph.Tokens(600),
        bias=True,
    )
    hyla = build(replace(wide, init="hyla", positions=ph.RelativeBias(64)), torch.float32)
    block = hyla.blocks[0]
    for rows in block.attention.qkv.weight.split(block.attention.widths):
        assert rows.std().item() == pytest.approx(512**-0.5, rel=0.02)
        assert rows.abs().max().item() <= 2.0001 * 512**-0.5 / 0.8796
    assert block.attention.out.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert block.attention.relative.table.std().item() == pytest.approx(64**-0.5, rel=0.15)
    assert block.attention.groups[0].value_weight.std().item() == pytest.approx(16**-0.5, rel=0.1)
    assert hyla.inputs.table.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert block.attention.qkv.bias.eq(0).all()
    course = build(replace(wide, init="cs336"), torch.float32)
    q = course.blocks[0].attention.qkv.weight[:128]
    assert q.std().item() == pytest.approx((2 / (512 + 128)) ** 0.5 * 0.9866, rel=0.02)
    assert course.inputs.table.weight.abs().max() <= 3.0001
    assert course.inputs.table.weight.std().item() == pytest.approx(0.9866, rel=0.02)


def test_mistakes_give_one_clear_line():
    model = build(BASE)
    for call, text in (
        (lambda: model(torch.randn(2, 3)), "Transformer: inputs must be of an integer dtype but is torch.float32"),
        (lambda: build(VARIANTS["vectors"])(torch.randn(2, 3, 4)), r"inputs \(b t 5\) were wanted but \(2, 3, 4\)"),
        (
            lambda: model(inputs_of(BASE), mask=torch.ones(2, 7)),
            "Transformer: mask must be boolean, True where attention is allowed, but is torch.float32",
        ),
        (
            lambda: model(inputs_of(BASE), mask=torch.ones(2, 6).bool()),
            r"t = 7 in inputs but 6 in mask \(b t\) = \(2, 6\)",
        ),
        (lambda: model(inputs_of(BASE), tail=8), r"tail must be 1 to 7 \(the positions\) but is 8"),
        (
            lambda: model(inputs_of(BASE), keep=[None]),
            "Transformer: keep must hold one tensor, or None, a layer: 2, not 1",
        ),
        (lambda: model(torch.tensor([[3, 11]])), "Transformer: tokens must be 0 to 10 but 11 came"),
        (lambda: replace(BASE, heads=[[ph.Softmax(2)]]), "2 layers but 1 lists of heads"),
        (lambda: replace(BASE, heads=[ph.Softmax(2), [ph.Hyla(2)]]), "not a mixture of both"),
        (lambda: replace(BASE, heads=[]), "heads must be mechanisms"),
        (lambda: replace(BASE, norm="rsm"), "did you mean 'rms'"),
        (lambda: build(replace(BASE, outputs=ph.Logits(7, tied=True))), r"tied logits need Tokens\(7\)"),
        (lambda: build(VARIANTS["rotary"])(torch.zeros(1, 25, dtype=torch.long)), "24"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.compile
def test_compiles_whole_for_any_length():
    """Heads of every kind, packed and in a window, are in test_callers.py."""
    settings = replace(BASE, heads=ph.Hyla(4, value_depth=2), layers=1, causal=True, positions=ph.RelativeBias())
    model, other = build(settings), build(settings)
    model.compile(fullgraph=True, dynamic=True, backend="eager")  # graph breaks show in any backend
    for t in (7, 12):
        x = inputs_of(settings, t=t)
        assert_close(model(x), other(x), atol=1e-9, rtol=1e-9)
    assert config.digest(settings) == config.digest(replace(settings))


@pytest.mark.parametrize(
    ("sees", "blind"),
    [
        ({"positions": ph.Learned()}, False),
        ({"causal": True}, False),
        ({"window": 3}, False),
        ({"heads": [ph.Softmax(2), ph.Relational(2)]}, False),  # symbols of positions
        ({"heads": [ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols())]}, False),
        ({"inputs": config.Vectors(9)}, False),
        ({"heads": ph.Relational(4, symbols=ph.SymbolicAttention(5))}, True),
        ({}, True),
    ],
)
def test_a_model_that_is_blind_to_order_says_so(sees, blind):
    settings = ph.TransformerConfig(**{"inputs": ph.Tokens(9), "outputs": ph.Logits(9), "dim": 16} | sees)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = ph.Transformer(settings).eval()
    assert [one.category for one in said] == [config.BlindToOrder] * blind
    if isinstance(settings.inputs, ph.Tokens):  # what the warning claims
        x, order = torch.arange(1, 7)[None], torch.tensor([3, 0, 5, 1, 4, 2])
        assert torch.allclose(model(x)[:, order], model(x[:, order]), atol=1e-5) == blind
