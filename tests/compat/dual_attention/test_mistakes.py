"""Invalid models of the package `dual-attention`: one line says what was wanted and what came."""

from dataclasses import replace

import pytest
import torch
from dual_arguments import CONFIG, PLAIN, SYMBOLS, VOCAB, D
from refusals import refusing

import polyhead as ph
from polyhead.compat import dual_attention

WITHOUT = "without relational heads the package's decoders and vision models"
LANGUAGE = ph.TransformerConfig(
    *(ph.Tokens(VOCAB), ph.Logits(VOCAB, tied=True)),
    dim=D,
    feedforward=ph.Mlp(20, act="relu", bias=False),
    positions=ph.Rotary(),
    max_length=12,
    causal=True,
    heads=ph.Softmax(4),
)


def changed(**changes):
    return {**CONFIG, **changes}


def symbolic(**changes):
    return changed(symbol_retrieval_kwargs={**SYMBOLS, **changes})


OFFSETS = {"symbol_retrieval": "position_relative", "symbol_retrieval_kwargs": {"symbol_dim": D, "max_rel_pos": 2}}
BAD_CONFIG = {
    "ra_kwargs: arguments: unknown name 'n_relation'; did you": changed(ra_kwargs={"n_relation": 2}),
    "dff, norm_first missing": {name: CONFIG[name] for name in CONFIG.keys() - {"dff", "norm_first"}},
    "vocab_size, image_shape or input_spec missing: no model of the package": {},
    "symbol_retrieval_kwargs: dropout must be 0 (the package applies it in": symbolic(dropout=0.1),
    "symbol_retrieval_kwargs: d_model must be 16, the model's width": symbolic(d_model=8),
    "symbol_retrieval_kwargs: its heads must divide 16 but are 5": symbolic(n_heads=5),
    "arguments: unknown symbol_retrieval 'rel_sym_attn'": changed(symbol_retrieval="rel_sym_attn"),
    "feed-forward layers: unknown activation 'tanh'": changed(activation="tanh"),
    "arguments: unknown norm_type 'none'": changed(norm_type="none"),
    "arguments: unknown pos_enc_type 'rope' (choose from pos_emb, RoPE)": changed(pos_enc_type="rope"),
    "arguments: unknown ra_type 'ra'": changed(ra_type="ra"),
    "d_model must be a multiple of the heads, 5, but is 16": changed(n_heads_ra=3),
    "d_model must be a multiple of the heads, 0, but is 16": changed(n_heads_sa=0, n_heads_ra=0),
    "ra_kwargs: n_relations x rel_proj_dim must be 8, the heads' width": changed(ra_kwargs={"n_relations": 3}),
    "ra_kwargs: the package's softmax of relations sees later": changed(ra_kwargs={"rel_activation": "softmax"}),
    "ra_kwargs: use_relative_positional_symbols belongs": changed(ra_kwargs={"use_relative_positional_symbols": True}),
    "ra_kwargs: use_relative_positional_symbols must be true with position-relative symbols": changed(**OFFSETS),
    "with RoPE the package has no key_dim other than d_model / heads": changed(sa_kwargs={"key_dim": 6}),
    "Softmax: kv_heads must divide 2 heads but is 3": changed(sa_kwargs={"n_kv_heads": 3}),
    "share_attn_params needs n_heads_sa = n_heads_ra but": changed(share_attn_params=True, n_heads_sa=3, n_heads_ra=1),
    "share_attn_params: the package has it for relation": changed(share_attn_params=True, ra_type="rca", ra_kwargs={}),
    "ra_kwargs: add_bias_kv of disrca gives": changed(ra_type="disrca", ra_kwargs={"add_bias_kv": True}),
    "n_layers must be an integer of at least 1 but is True": changed(n_layers=True),
    "n_heads_ra must be an integer of at least 0 but is -1": changed(n_heads_ra=-1),
    "norm_first must be true or false but is 1": changed(norm_first=1),
    "dropout_rate must be a number but is '0'": changed(dropout_rate="0"),
    "sa_kwargs must hold arguments by name but is [2]": changed(sa_kwargs=[2]),
    "config holds no arguments, as the package writes it when": {"args": [], "kwargs": {}},
}


@pytest.mark.parametrize("line", BAD_CONFIG)
def test_invalid_arguments(line):
    with refusing(f"dual_attention.load: {line}"):
        dual_attention.load({}, BAD_CONFIG[line])


def state_with(changes):
    """A state dict with some tensors changed, or dropped (None)."""
    state, _ = dual_attention.save(ph.Transformer(LANGUAGE))
    return {name: value for name, value in {**state, **changes}.items() if value is not None}


GAIN = "layers.blocks.0.norm1.weight"
BAD_STATE = {
    f"missing {GAIN}": lambda: state_with({GAIN: None}),
    "unknown extra": lambda: state_with({"extra": torch.ones(1)}),
    f"{GAIN} must be (16,) but is (3,)": lambda: state_with({GAIN: torch.ones(3)}),
    f"{GAIN} must be a floating tensor but is a list": lambda: state_with({GAIN: [1.0]}),
    f"{GAIN} must be a floating tensor but is of torch.int64": lambda: state_with({GAIN: torch.ones(D).long()}),
    "are one tensor in the package but differ": lambda: state_with({"layers.final_out.weight": torch.ones(VOCAB, D)}),
    " and 19 more": lambda: {GAIN: torch.ones(D)},
    "the state dict is empty": dict,
}


@pytest.mark.parametrize("line", BAD_STATE)
def test_invalid_state_dicts(line):
    with refusing(line):
        dual_attention.load(BAD_STATE[line](), PLAIN)


# --------------------------------------------------------------------------------------------------------------- saving
def language(*heads, **fields):
    return replace(LANGUAGE, heads=list(heads) or LANGUAGE.heads, **fields)


def with_relations(**fields):
    return language(ph.Softmax(2), ph.Relational(2, **fields))


def pair(**fields):
    """An encoder and a decoder as the package has them, but for `fields` of the decoder."""
    both = {"inputs": ph.Tokens(7, scaled=True), "positions": ph.Sinusoidal(), "final_norm": False}
    own = {"encoder": replace(LANGUAGE, **both, causal=False), "outputs": ph.Logits(VOCAB, bias=True)}
    return replace(LANGUAGE, **{**both, **own, **fields})


OFFSET = [ph.Softmax(2), ph.Relational(2, symbols=ph.RelativeSymbols(distance=2))]
PATCHES = ph.Patches((1, 8, 8), (4, 4), norm=True, class_token=True)
IMAGES = ph.TransformerConfig(PATCHES, ph.Classes(5), dim=D, positions=ph.Learned(), max_length=5)
IMAGES = replace(IMAGES, final_norm=False, feedforward=ph.Mlp(act="relu"), heads=ph.Softmax(4))
BAD_MODEL = {
    "heads must be Softmax, then heads with symbols, each at most once, but are Hyla": language(ph.Hyla(4)),
    "each at most once, but are Relational, Softmax": language(ph.Relational(2), ph.Softmax(2)),
    "heads[1] must be": language([ph.Softmax(4)], [ph.Softmax(2), ph.Relational(2)]),
    "the package has no activation 'gelu' there (it has relu": with_relations(relation_act="gelu"),
    "heads[0][1].symbols.once must be False": with_relations(symbols=ph.SymbolicAttention(once=True)),
    "heads[0][1].symbols.dim must be 16 but is 8": with_relations(symbols=ph.PositionSymbols(dim=8)),
    "feedforward must be Mlp or Swiglu but is Experts": language(feedforward=ph.Experts()),
    "'gelu' there (it has relu, gelu_tanh, silu, identity)": language(feedforward=ph.Mlp()),
    "positions must be Rotary(theta=10000.0, layout='interleaved') but is Alibi()": language(positions=ph.Alibi()),
    "qk_norm must be False but is True": language(qk_norm=True),
    "final_norm must be True but is False": language(norm_order="post"),
    "outputs.tied must be True but is False": language(outputs=ph.Logits(VOCAB)),
    "the package has no model from Vectors to ": language(inputs=ph.Vectors(3), outputs=ph.Values(2)),
    "final_norm must be False but is True": replace(IMAGES, final_norm=None),
    "max_length must be 5 but is 9": replace(IMAGES, max_length=9),
    f"{WITHOUT} have no n_kv_heads, but it is 2": replace(IMAGES, heads=ph.Softmax(4, kv_heads=2)),
    "inputs.scaled must be True but is False": pair(inputs=ph.Tokens(7)),
    f"{WITHOUT} have no n_kv_heads, but it is 1": pair(heads=ph.Softmax(4, kv_heads=1)),
    "cross_heads[0].heads must be 4 but is 2": pair(cross_heads=ph.Softmax(2)),
    "cross_heads must be one group, Softmax": pair(cross_heads=[ph.Softmax(2), ph.Softmax(2)]),
    "encoder_symbols must be": pair(heads=OFFSET, encoder=replace(pair().encoder, heads=OFFSET)),
}


@pytest.mark.parametrize("line", BAD_MODEL)
def test_models_without_an_equivalent_in_the_package(line):
    model = ph.Transformer(BAD_MODEL[line])
    with refusing(line):
        dual_attention.save(model)


def test_a_users_function_is_refused():
    model = ph.Transformer(LANGUAGE)
    model.blocks[1].attention.groups[0].use(ph.ops.linear_attention)
    with refusing("dual_attention.save: SoftmaxHeads must compute the op of their kind but compute a user's function"):
        dual_attention.save(model)


def test_a_bias_that_ours_lacks_is_0():
    state, _ = dual_attention.save(ph.Transformer(pair(outputs=ph.Logits(VOCAB))))
    assert not state["layers.final_out.bias"].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sequence_models_in_half_precision(dtype):
    """Their tables of sines are rounded, too."""
    state, arguments = dual_attention.save(ph.Transformer(pair()).to(dtype))
    again = dual_attention.load(state, arguments)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}


@pytest.mark.compile
def test_compiled_models_are_saved():
    model = ph.Transformer(LANGUAGE)
    state, arguments = dual_attention.save(model)
    model.blocks[0] = torch.compile(model.blocks[0])
    again, same = dual_attention.save(torch.compile(model))
    assert same == arguments
    assert all(torch.equal(again[key], value) for key, value in state.items())


def test_values_without_a_place_in_the_package():
    for settings, name, line in (
        (language(bias=True), "blocks.1.attention.qkv.bias", "that the package has no place for: it has no bias there"),
        (with_relations(), "blocks.0.attention.out.weight", "between heads of two kinds, which the package projects"),
    ):
        model = ph.Transformer(settings)
        model.get_parameter(name).data[0] = 0.25
        with pytest.raises(ValueError, match=rf"^dual_attention\.save: {name} has entries, up to 0\.\d+, {line}"):
            dual_attention.save(model)


PARTS = {
    "load_attention: d_model must be an integer": lambda: dual_attention.load_attention({}, {"n_heads": 2}),
    "unknown cls 'Attn'": lambda: dual_attention.load_attention({}, {"d_model": 4}, cls="Attn"),
    "load_block: n_heads, dff, activation": lambda: dual_attention.load_block({}, {"d_model": 4}),
    "missing wq.weight, wk.weight, wv": lambda: dual_attention.load_attention(
        {"wo": torch.ones(1)}, {"d_model": 4, "n_heads": 2}, cls="Attention"
    ),
}


@pytest.mark.parametrize("line", PARTS)
def test_single_parts(line):
    with refusing(line):
        PARTS[line]()
