"""The encoder-decoder: its equation, masks, taps, dropout, compilation, errors."""

from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch.testing import assert_close
from zoo import fresh as build

import polyhead as ph

ENCODER = ph.TransformerConfig(
    ph.Tokens(7), ph.Logits(7), dim=16, layers=1, heads=[ph.Softmax(4)], max_length=12, feedforward=ph.Mlp(20)
)
ENDS = {"inputs": ph.Tokens(9, scaled=True), "outputs": ph.Logits(9, tied=True), "positions": ph.Sinusoidal()}
ENCODER_DECODER = replace(ENCODER, **ENDS, layers=2, causal=True, encoder=ENCODER)
NEIGHBOURS = ph.Relational(2, symbols=ph.RelationalSymbols(count=5, neighbours=1))


def variant(encoder=(), **changes):
    """With other fields of the encoder, and of the decoder."""
    return replace(ENCODER_DECODER, encoder=replace(ENCODER, **dict(encoder)), **changes)


VARIANTS = {
    "softmax": ENCODER_DECODER,
    "post": variant({"norm_order": "post", "norm": "rms"}, norm_order="post", final_norm=False),
    "rotary": variant({"positions": ph.Rotary(), "layers": 3}, positions=ph.Rotary()),
    "dual": variant(
        {"heads": [ph.Hyla(2), NEIGHBOURS], "layers": 2},
        heads=[ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention())],
        cross_heads=[ph.Softmax(1), ph.Relational(3, symbols=ph.SymbolicAttention(count=4))],
    ),
    "neighbours": variant(cross_heads=[NEIGHBOURS, ph.Relational(2, symbols=ph.PositionSymbols(shared=False))]),
    "vectors": variant({"inputs": ph.Vectors(3)}, outputs=ph.Logits(9, bias=True)),
}


def data(settings, b=2, t=5, s=6):
    torch.manual_seed(1)
    x = torch.randint(settings.inputs.count, (b, t))
    if isinstance(settings.encoder.inputs, ph.Vectors):
        return x, torch.randn(b, s, settings.encoder.inputs.size, dtype=torch.float64)
    return x, torch.randint(settings.encoder.inputs.count, (b, s))


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_it_is_its_equation(norm_order):
    model = build(replace(ENCODER_DECODER, norm_order=norm_order, layers=1, final_norm=True))
    x, source = data(ENCODER_DECODER)
    encoder, block = model.encoder, model.blocks[0]
    context = encoder.norm(encoder.blocks[0](encoder.inputs.table(source)))
    y = model.inputs.table(x) * 4.0 + model.positions(torch.arange(5))
    for norm, sublayer in (
        (block.norm1, block.attention),
        (block.norm_cross, lambda z: block.cross(z, context)),
        (block.norm2, block.feedforward),
    ):
        y = y + sublayer(norm(y)) if norm_order == "pre" else norm(y + sublayer(y))
    expected = model.norm(y) @ model.inputs.table.weight.T
    assert_close(model(x, source=source), expected, atol=1e-12, rtol=1e-12)
    assert_close(model(x, encoded=model.encode(source)), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_sees_the_whole_source_and_no_later_token(name):
    model, (x, source) = build(VARIANTS[name]), data(VARIANTS[name])
    y = model(x, source=source)
    for i in range(5):
        assert_close(model(x[:, : i + 1], source=source)[:, i], y[:, i], atol=1e-9, rtol=1e-9)
        assert_close(model(x[:, : i + 1], source=source, tail=1)[:, 0], y[:, i], atol=1e-9, rtol=1e-9)
    for j in range(6):
        other = source.clone()
        other[:, j] = (source[:, j] + 1) % 7
        assert (model(x, source=other) - y).abs().amax((0, 2)).gt(1e-9).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_of_the_source_changes_nothing(name):
    model, (x, source) = build(VARIANTS[name]), data(VARIANTS[name])
    for first, last in ((0, 4), (2, 6)):  # padding behind, and before
        mask = torch.zeros(2, 6, dtype=torch.bool)
        mask[:, first:last] = True
        padded = model(x, source=source, source_mask=mask)
        other = torch.where(mask if source.ndim == 2 else mask[..., None], source, source.roll(1, 0).flip(1))
        assert_close(model(x, source=other, source_mask=mask), padded, atol=0, rtol=0)
        if first == 0:
            assert_close(padded, model(x, source=source[:, :last]), atol=1e-9, rtol=1e-9)
        assert not torch.allclose(padded, model(x, source=source))


def test_taps_have_names_and_assignments_of_symbols():
    model, (x, source), taps = build(VARIANTS["dual"]), data(VARIANTS["dual"]), []
    assert torch.equal(model(x, source=source, taps=taps), model(x, source=source))
    names = ["encoder 0", "encoder 1", "decoder 0", "cross 0", "decoder 1", "cross 1"]
    assert [layer.name for layer in taps] == names
    assert [[g.assignments is not None for g in layer.groups] for layer in taps] == [[False, True]] * 6
    shapes = [tuple(layer.groups[1].assignments.shape) for layer in taps]
    assert shapes == [(2, 6, 4, 5)] * 2 + [(2, 5, 4, 64), (2, 6, 4, 4)] * 2
    encoded, embedded = model.encode(source), model.inputs(x) + model.positions(torch.arange(5))
    assert_close(taps[3].groups[1].assignments, model.cross_symbols[0].assignments(encoded))
    assert_close(taps[2].groups[1].assignments, model.symbols[0].assignments(embedded))
    assert not torch.equal(taps[4].groups[1].assignments, taps[2].groups[1].assignments)
    assert_close(taps[3].context, encoded)


def test_experts_of_both_sides_add_their_balance():
    encoder = replace(ENCODER, feedforward=ph.Experts(3, 1, hidden=8, balance=10.0))
    model = build(replace(ENCODER_DECODER, feedforward=ph.Experts(3, 1, hidden=8, balance=0.1), encoder=encoder))
    with pytest.raises(ValueError, match="auxiliary_loss is of the last forward pass, but there was none"):
        model.auxiliary_loss()
    x, source = data(ENCODER_DECODER)
    model(x, source=source)
    loads = [block.feedforward.balance_loss for block in (*model.encoder.blocks, *model.blocks)]
    assert_close(model.auxiliary_loss(), 10.0 * loads[0] + 0.1 * (loads[1] + loads[2]))
    assert build(ENCODER_DECODER).auxiliary_loss() == 0.0


NO_SOURCE = r"Transformer: source and source_mask must be None, as it has no encoder"


def test_mistakes_are_one_line():
    model, (x, source) = build(ENCODER_DECODER), data(ENCODER_DECODER)
    decoder_only, encoded = build(replace(ENCODER_DECODER, encoder=None)), model.encode(source)
    relative, short_mask = ph.Relational(4, symbols=ph.RelativeSymbols()), torch.ones(2, 1).bool()
    for call, message in (
        (lambda: model(x), "Transformer: its encoder reads a source: source or, once encoded, encoded must be given"),
        (lambda: model(x, source=source, encoded=encoded), "source or, once encoded, encoded must be"),
        (lambda: decoder_only(x, source=source), NO_SOURCE),
        (lambda: decoder_only(x, source_mask=torch.ones(2, 3, dtype=bool)), NO_SOURCE),
        (lambda: decoder_only.encode(source), "Transformer: source must be None, as it has no encoder"),
        (lambda: model(x, source=source[:1]), r"b = 2 in inputs but 1 in source \(b s\) = \(1, 6\)"),
        (lambda: model(x, encoded=encoded, source_mask=short_mask), r"source_mask .* \(2, 6\), but is \(2, 1\)"),
        (
            lambda: replace(ENCODER_DECODER, encoder=replace(ENCODER, dim=8)),
            "the encoder's dim is 8 but the decoder's 16",
        ),
        (lambda: replace(ENCODER, cross_heads=ph.Softmax(4)), "cross_heads look at an encoder, but encoder is None"),
        (lambda: replace(ENCODER_DECODER, cross_heads=relative), "another sequence, which has no RelativeSymbols"),
    ):
        refused(call, message)


@pytest.mark.compile
def test_compiles_whole_for_any_length():
    """And any feed-forward layer and norm; heads of every kind are in test_callers.py."""
    base = VARIANTS["softmax"]
    encoder = replace(base.encoder, norm="rms", feedforward=ph.Experts(3, 2, hidden=8))
    settings = replace(base, layers=1, encoder=encoder, feedforward=ph.Swiglu())
    model, eager = build(settings), build(settings)
    model.compile(fullgraph=True, dynamic=True, backend="eager")
    for t, s, stance in ((9, 10, "default"), (11, 13, "fail_on_recompile")):
        x, source = data(settings, t=t, s=s)
        mask = torch.rand(2, s) > 0.2
        with torch.compiler.set_stance(stance):
            output = model(x, source=source, source_mask=mask)
        assert_close(output, eager(x, source=source, source_mask=mask), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_without_tokens_leaves_the_cache_open_to_another_source(name):
    model, (x, source) = build(VARIANTS[name]), data(VARIANTS[name])
    cache = ph.Cache(len(model.blocks))
    model(x[:, :0], encoded=model.encode(source.flip(0)), cache=cache)
    encoded = model.encode(source)
    assert_close(model(x, encoded=encoded, cache=cache), model(x, encoded=encoded))
