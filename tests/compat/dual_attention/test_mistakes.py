"""Invalid models of the package `dual-attention`: one line says what was wanted and what came."""

import pytest
import torch
from dual_arguments import CONFIG, PLAIN, SYMBOLS, VOCAB, D
from refusals import refusing

from polyhead.compat import dual_attention

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention.language_models import TransformerLM


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
    state = TransformerLM(**PLAIN).state_dict()
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


PARTS = {
    "load_attention: d_model must be an integer": lambda: dual_attention.load_attention({}, {"n_heads": 2}),
    "unknown cls 'Attn'": lambda: dual_attention.load_attention({}, {"d_model": 4}, cls="Attn"),
    "missing wq.weight, wk.weight, wv": lambda: dual_attention.load_attention(
        {"wo": torch.ones(1)}, {"d_model": 4, "n_heads": 2}, cls="Attention"
    ),
}


@pytest.mark.parametrize("line", PARTS)
def test_single_parts(line):
    with refusing(line):
        PARTS[line]()
