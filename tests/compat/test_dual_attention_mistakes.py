"""Invalid models of the package `dual-attention`: one line says what was wanted and what came."""

import re
from dataclasses import replace

import pytest
import torch
from dual_arguments import CONFIG, PLAIN, SYMBOLS, VOCAB, D

import polyhead as ph
from polyhead.compat import dual_attention
from polyhead.config import (
    Abstractor,
    Alibi,
    Classes,
    Disentangled,
    Experts,
    Hyla,
    Learned,
    Logits,
    Mlp,
    Patches,
    PositionSymbols,
    Relational,
    RelativeSymbols,
    Rotary,
    Sinusoidal,
    Softmax,
    SymbolicAttention,
    Tokens,
    TransformerConfig,
    Values,
    Vectors,
)

WITHOUT = "without relational heads the package's decoders and vision models"
LANGUAGE = TransformerConfig(
    *(Tokens(VOCAB), Logits(VOCAB, tied=True)),
    dim=D,
    feedforward=Mlp(20, act="relu", bias=False),
    positions=Rotary(),
    max_length=12,
    causal=True,
    heads=Softmax(4),
)


def changed(**changes):
    return {**CONFIG, **changes}


def without(*names):
    return {name: value for name, value in CONFIG.items() if name not in names}


OFFSETS = {"symbol_retrieval": "position_relative", "symbol_retrieval_kwargs": {"symbol_dim": D, "max_rel_pos": 2}}
BAD_CONFIG = [
    (changed(n_head_sa=2), "arguments: unknown name 'n_head_sa'; did you mean 'n_heads_sa'? (choose from"),
    (
        changed(ra_kwargs={"n_relation": 2}),
        "ra_kwargs: arguments: unknown name 'n_relation'; did you mean 'n_relations'?",
    ),
    (without("dff", "norm_first"), "dff, norm_first missing"),
    (without("vocab_size"), "vocab_size, image_shape or input_spec missing: no model of the package"),
    (changed(symbol_retrieval_kwargs={"n_heads": 2}), "symbol_retrieval_kwargs: d_model, n_symbols missing"),
    (changed(symbol_retrieval_kwargs={**SYMBOLS, "dropout": 0.1}), "symbol_retrieval_kwargs: dropout must be 0 (the"),
    (changed(symbol_retrieval_kwargs={**SYMBOLS, "d_model": 8}), "symbol_retrieval_kwargs: d_model must be 16, the mo"),
    (
        changed(symbol_retrieval_kwargs={**SYMBOLS, "n_heads": 5}),
        "symbol_retrieval_kwargs: its heads must divide 16 but",
    ),
    (changed(symbol_retrieval="rel_sym_attn"), "arguments: unknown symbol_retrieval 'rel_sym_attn'"),
    (changed(activation="tanh"), "feed-forward layers: unknown activation 'tanh'"),
    (changed(norm_type="none"), "arguments: unknown norm_type 'none'"),
    (changed(pos_enc_type="rope"), "arguments: unknown pos_enc_type 'rope' (choose from pos_emb, RoPE)"),
    (changed(ra_type="ra"), "arguments: unknown ra_type 'ra'"),
    (changed(n_heads_ra=3), "d_model must be a multiple of the heads, 5, but is 16"),
    (changed(n_heads_sa=0, n_heads_ra=0), "d_model must be a multiple of the heads, 0, but is 16"),
    (
        changed(ra_kwargs={"n_relations": 3}),
        "ra_kwargs: n_relations x rel_proj_dim must be 8, the heads' width, not 3 x 2",
    ),
    (
        changed(ra_kwargs={"rel_activation": "softmax"}),
        "ra_kwargs: the package's softmax of relations sees later tokens",
    ),
    (
        changed(ra_kwargs={"use_relative_positional_symbols": True}),
        "ra_kwargs: use_relative_positional_symbols belongs",
    ),
    (changed(**OFFSETS), "ra_kwargs: use_relative_positional_symbols must be true with position-relative symbols"),
    (changed(sa_kwargs={"key_dim": 6}), "with RoPE the package has no key_dim other than d_model / heads"),
    (changed(sa_kwargs={"n_kv_heads": 3}), "Softmax: kv_heads must divide 2 heads but is 3"),
    (
        changed(share_attn_params=True, n_heads_sa=3, n_heads_ra=1),
        "share_attn_params needs n_heads_sa = n_heads_ra but",
    ),
    (
        changed(share_attn_params=True, ra_type="rca", ra_kwargs={}),
        "share_attn_params: the package has it for relation",
    ),
    (
        changed(ra_type="disrca", ra_kwargs={"add_bias_kv": True}),
        "ra_kwargs: add_bias_kv of disrca gives relation keys",
    ),
    (changed(n_layers="2"), "n_layers must be an integer of at least 1 but is '2'"),
    (changed(n_heads_ra=-1), "n_heads_ra must be an integer of at least 0 but is -1"),
    (changed(norm_first=1), "norm_first must be true or false but is 1"),
    (changed(dropout_rate="0"), "dropout_rate must be a number but is '0'"),
    (changed(sa_kwargs=[2]), "sa_kwargs must hold arguments by name but is [2]"),
    ({"args": [], "kwargs": {}}, "config holds no arguments, as the package writes it when they are not given by name"),
]


@pytest.mark.parametrize(("config", "line"), BAD_CONFIG, ids=[line[:40] for _, line in BAD_CONFIG])
def test_arguments_that_cannot_be(config, line):
    with pytest.raises(ValueError, match=rf"^dual_attention\.load: {re.escape(line)}") as caught:
        dual_attention.load({}, config)
    assert "\n" not in str(caught.value)


def state_without(key, **more):
    state, _ = dual_attention.save(ph.Transformer(LANGUAGE))
    return {name: value for name, value in {**state, **more}.items() if name != key}


GAIN = "layers.blocks.0.norm1.weight"
BAD_STATE = [
    (lambda: state_without(GAIN), f"missing {GAIN}"),
    (lambda: state_without("", extra=torch.ones(1)), "unknown extra"),
    (lambda: {GAIN: torch.ones(D)}, r"missing layers\.\S+, \S+, \S+ and 19 more"),
    (lambda: state_without("", **{GAIN: torch.ones(3)}), rf"{GAIN} must be \(16,\) but is \(3,\)"),
    (lambda: state_without("", **{GAIN: [1.0]}), f"{GAIN} must be a floating tensor but is a list"),
    (lambda: state_without("", **{GAIN: torch.ones(D, dtype=torch.long)}), f"{GAIN} must be a floating .+ torch.int64"),
    (
        lambda: state_without("", **{"layers.final_out.weight": torch.ones(VOCAB, D)}),
        r"layers\.token_embedder\.weight and layers\.final_out\.weight are one tensor in the package but differ",
    ),
    (dict, "the state dict is empty"),
]


@pytest.mark.parametrize(("state", "line"), BAD_STATE, ids=range(len(BAD_STATE)))
def test_state_dicts_that_do_not_fit(state, line):
    with pytest.raises(ValueError, match=rf"^dual_attention\.load: {line}$") as caught:
        dual_attention.load(state(), PLAIN)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- saving
def language(*heads, **fields):
    return replace(LANGUAGE, heads=list(heads) or LANGUAGE.heads, **fields)


def pair(**fields):
    """An encoder and a decoder as the package has them, but for `fields` of the decoder."""
    encoder = replace(LANGUAGE, positions=Sinusoidal(), inputs=Tokens(7, scaled=True), causal=False, final_norm=False)
    mine = {"encoder": encoder, "inputs": Tokens(7, scaled=True), "positions": Sinusoidal(), "final_norm": False}
    return replace(LANGUAGE, **{**mine, "outputs": Logits(VOCAB, bias=True), **fields})


OFFSET = Relational(2, symbols=RelativeSymbols(distance=2))
IMAGES = TransformerConfig(
    Patches((1, 8, 8), (4, 4), norm=True, class_token=True), Classes(5), dim=D, positions=Learned(), max_length=5
)
IMAGES = replace(IMAGES, final_norm=False, feedforward=Mlp(act="relu"), heads=Softmax(4))
BAD_MODEL = [
    (language(Hyla(4)), "heads must be Softmax, then heads with symbols, each at most once, but are Hyla"),
    (
        language(Relational(2), Softmax(2)),
        "heads must be Softmax, then heads with symbols, each at most once, but are Rel",
    ),
    (language([Softmax(4)], [Softmax(2), Relational(2)]), "heads[1] must be"),
    (
        language(Softmax(2), Relational(2, relation_act="gelu")),
        "the package has no activation 'gelu' there (it has relu",
    ),
    (
        language(Softmax(2), Relational(2, relations=3)),
        "ra_kwargs: n_relations x rel_proj_dim must be 8, the heads' width",
    ),
    (language(Softmax(2), Relational(2, hidden=8)), "heads[0][1].hidden must be None but is 8"),
    (
        language(Softmax(2), Relational(2, symbols=SymbolicAttention(once=True))),
        "heads[0][1].symbols.once must be False",
    ),
    (
        language(Softmax(2), Relational(2, symbols=PositionSymbols(dim=8))),
        "heads[0][1].symbols.dim must be 16 but is 8",
    ),
    (language(Softmax(2, value_dim=3), Relational(2)), "heads[0][0].value_dim must be 4 but is 3"),
    (language(Softmax(2), Disentangled(2, symmetric=True)), "heads[0][1].symmetric must be False but is True"),
    (language(Abstractor(4, act="gelu")), "the package has no activation 'gelu' there"),
    (
        language(Softmax(2), Relational(2, relation_act="softmax")),
        "ra_kwargs: the package's softmax of relations sees la",
    ),
    (language(feedforward=Experts()), "feedforward must be Mlp or Swiglu but is Experts"),
    (
        language(feedforward=Mlp()),
        "the package has no activation 'gelu' there (it has relu, gelu_tanh, silu, identity)",
    ),
    (language(positions=Alibi()), "positions must be Rotary(theta=10000.0, layout='interleaved') but is Alibi()"),
    (language(positions=Rotary(theta=5e5)), "positions.theta must be 10000.0 but is 500000.0"),
    (language(qk_norm=True), "qk_norm must be False but is True"),
    (language(norm_eps=1e-6), "norm_eps must be 1e-05 but is 1e-06"),
    (language(causal=False), "causal must be True but is False"),
    (language(norm_order="post"), "final_norm must be True but is False"),
    (language(outputs=Logits(VOCAB)), "outputs.tied must be True but is False"),
    (language(inputs=Vectors(3), outputs=Values(2)), "the package has no model from Vectors to "),
    (replace(IMAGES, final_norm=None), "final_norm must be False but is True"),
    (replace(IMAGES, max_length=9), "max_length must be 5 but is 9"),
    (replace(IMAGES, inputs=Patches((1, 8, 8), (4, 4))), "inputs.norm must be True but is False"),
    (replace(IMAGES, heads=Softmax(4, kv_heads=2)), f"{WITHOUT} have no n_kv_heads, but it is 2"),
    (pair(outputs=Logits(VOCAB)), None),
    (pair(inputs=Tokens(7)), "inputs.scaled must be True but is False"),
    (pair(heads=Softmax(4, kv_heads=1)), f"{WITHOUT} have no n_kv_heads, but it is 1"),
    (pair(cross_heads=Softmax(2)), "cross_heads[0].heads must be 4 but is 2"),
    (pair(cross_heads=[Softmax(2), Softmax(2)]), "cross_heads must be one group, Softmax"),
    (
        pair(heads=[Softmax(2), OFFSET], encoder=replace(pair().encoder, heads=[Softmax(2), OFFSET])),
        "encoder_symbols mus",
    ),
    (pair(heads=[Softmax(2), OFFSET], layers=3), "layers must be 2 but is 3"),
]


@pytest.mark.parametrize(("settings", "line"), BAD_MODEL, ids=range(len(BAD_MODEL)))
def test_models_that_the_package_has_not(settings, line):
    torch.manual_seed(0)
    model = ph.Transformer(settings)
    if line is None:  # a bias that only the package has is 0
        state, _ = dual_attention.save(model)
        assert not state["layers.final_out.bias"].any()
        return
    with pytest.raises(ValueError, match=rf"^dual_attention\.save: {re.escape(line)}") as caught:
        dual_attention.save(model)
    assert "\n" not in str(caught.value)


def fill(model, name, value):
    with torch.no_grad():
        model.get_parameter(name)[0] = value
    return model


BAD_VALUES = [
    (language(bias=True), "blocks.1.attention.qkv.bias", "that the package has no place for: it has no bias"),
    (
        language(Softmax(2), Relational(2)),
        "blocks.0.attention.out.weight",
        "between heads of two kinds, which the p",
    ),
]


@pytest.mark.parametrize(("settings", "name", "line"), BAD_VALUES)
def test_values_that_the_package_has_not(settings, name, line):
    model = fill(ph.Transformer(settings), name, 0.25)
    with pytest.raises(ValueError, match=rf"^dual_attention\.save: {name} has entries, up to 0\.\d+, {line}[^\n]+$"):
        dual_attention.save(model)


def test_single_parts():
    for load in (dual_attention.load_block, dual_attention.load_attention):
        with pytest.raises(ValueError, match=rf"^dual_attention\.{load.__name__}: d_model must be an integer"):
            load({}, {"n_heads": 2})
    with pytest.raises(
        ValueError, match=r"^dual_attention\.load_attention: arguments: unknown cls 'Dualattention'; did"
    ):
        dual_attention.load_attention({}, {"d_model": 4}, cls="Dualattention")
    with pytest.raises(ValueError, match=r"^dual_attention\.load_block: n_heads, dff, activation, .+ missing$"):
        dual_attention.load_block({}, {"d_model": 4})
    config = {"d_model": 4, "n_heads": 2}
    with pytest.raises(ValueError, match=r"^dual_attention\.load_attention: missing wq\.weight, wk\.weight, wv"):
        dual_attention.load_attention({"wo": torch.ones(1)}, config, cls="Attention")
