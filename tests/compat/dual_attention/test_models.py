"""Models of the package `dual-attention` 0.0.7 as ours: outputs and all gradients.

All weights are drawn anew (norms and relation weights, too), in float64; what the package computes in float32 there
(RMSNorm, rotary) keeps the bounds at 1e-5.
"""

import json

import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

from polyhead.compat import dual_attention
from polyhead.compat.dual_attention.models import plan
from polyhead.compat.dual_attention.tensors import of_model

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import language_models, model_utils, relational_attention, seq2seq_models, vision_models

F64 = torch.float64
NEAR = {"atol": 1e-5, "rtol": 1e-5}
D, VOCAB, T = 16, 11, 7
BLOCK = {"dff": 20, "activation": "gelu", "dropout_rate": 0.0, "norm_first": True}
SYMBOLIC = {"symbol_retrieval": "symbolic_attention"}
SYMBOLIC["symbol_retrieval_kwargs"] = {"d_model": D, "n_heads": 4, "n_symbols": 6}
POSITION = {"symbol_retrieval": "positional_symbols", "symbol_retrieval_kwargs": {"symbol_dim": D, "max_length": 10}}
RELATIVE = {"symbol_retrieval": "position_relative", "symbol_retrieval_kwargs": {"symbol_dim": D, "max_rel_pos": 3}}
NEIGHBOURS = {"d_model": D, "rel_n_heads": 4, "symbolic_attn_n_heads": 2, "n_symbols": 6, "nbhd_delta": 2}
NEIGHBOURS = {"symbol_retrieval": "rel_sym_attn", "symbol_retrieval_kwargs": NEIGHBOURS}
BY_OFFSET = {"use_relative_positional_symbols": True}
OWN = {"symbol_retriever_config": {"shared_symbol_retriever": False, "weight_tie_symbol_library": False}}
TIED = {"symbol_retriever_config": {"shared_symbol_retriever": False, "weight_tie_symbol_library": True}}


@pytest.fixture(autouse=True)
def _import_that_the_package_forgot(monkeypatch):
    monkeypatch.setattr(relational_attention, "model_utils", model_utils, raising=False)


def model_of(config):
    """The package's model with these arguments, in evaluation, every parameter drawn."""
    dual = "n_heads_sa" in config or "symbol_retrieval" in config
    if "vocab_size" in config:
        cls = language_models.DualAttnTransformerLM if dual else language_models.TransformerLM
    elif "image_shape" in config:
        cls = vision_models.VisionDualAttnTransformer if dual else vision_models.VisionTransformer
    else:
        cls = seq2seq_models.Seq2SeqDualAttnTransformer if dual else seq2seq_models.Seq2SeqTransformer
    torch.manual_seed(0)
    model = cls(**json.loads(json.dumps(config))).to(F64).eval()  # it changes what it is given
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1) / 2, std=0.35)
    return model


def inputs_of(config):
    torch.manual_seed(1)
    if "vocab_size" in config:
        length = config.get("symbol_retrieval_kwargs", {}).get("max_length", T)
        return (torch.randint(VOCAB, (2, min(T, length))),)
    if "image_shape" in config:
        c, width, height = config["image_shape"]
        return (torch.randn(2, c, height, width, dtype=F64),)
    ends = [(config["input_spec"], T), (config["output_spec"], 5)]
    token = [(torch.randint(spec["vocab_size"], (2, t)) if "vocab_size" in spec else None) for spec, t in ends]
    return tuple(
        torch.randn(2, t, spec["dim"], dtype=F64) if x is None else x for x, (spec, t) in zip(token, ends, strict=True)
    )


def outputs(model, inputs):
    """Ours and theirs, of one shape."""
    if hasattr(model, "config"):
        return model(inputs[0]) if len(inputs) == 1 else model(inputs[1], source=inputs[0])
    if isinstance(model, (seq2seq_models.Seq2SeqTransformer, seq2seq_models.Seq2SeqDualAttnTransformer)):
        return model(*inputs, targets=torch.zeros(2, 5, dtype=torch.long))[0]
    y = model(*inputs)
    return y[0] if isinstance(y, tuple) else y[:, None]


def compare(config):
    """Ours computes the same, with the same gradients."""
    theirs, inputs = model_of(config), inputs_of(config)
    state, draws = theirs.state_dict(), torch.get_rng_state()
    ours = dual_attention.load(state, config)
    assert torch.equal(torch.get_rng_state(), draws)
    y, wanted = outputs(ours, inputs), outputs(theirs, inputs)
    assert_close(y, wanted, **NEAR)
    assert wanted.std() > 0.1, "constant outputs prove nothing"
    cotangent = torch.randn_like(y) / 10
    for each in (y, wanted):
        (each * cotangent).sum().backward()
    compare_gradients(ours, theirs, config)
    return ours


def compare_gradients(ours, theirs, config):
    """Of every parameter that the package trains; what it does not train is none of ours."""
    mine, its = (dict(model.named_parameters(remove_duplicate=False)) for model in (ours, theirs))
    waiting = {key for key, parameter in its.items() if parameter.grad is not None}
    assert waiting
    for place in of_model(ours, plan(config)):
        for key in its.keys() & set(place.keys):
            wanted = its[key].grad
            if its[key].requires_grad:
                gradient = mine[place.names[0]].grad[place.where] * place.factor
                rows = wanted[: len(gradient)] if wanted.ndim == gradient.ndim else wanted.reshape(gradient.shape)
                assert_close(gradient, rows, **NEAR, msg=lambda text, key=key: f"{key}: {text}")
            else:
                assert place.names[0] not in mine
            waiting.discard(key)
    assert not waiting


# ------------------------------------------------------------------------------------------------------------- language
def language(**changes):
    config = {"vocab_size": VOCAB, "d_model": D, "n_layers": 2, "n_heads_sa": 2, "n_heads_ra": 2, "max_block_size": 10}
    return {**config, **BLOCK, **SYMBOLIC, "pos_enc_type": "RoPE", **changes}


def plain_language(**changes):
    config = {"vocab_size": VOCAB, "d_model": D, "n_layers": 2, "n_heads": 4, "max_block_size": 10}
    return {**config, **BLOCK, "pos_enc_type": "RoPE", **changes}


FROZEN = {**SYMBOLIC, "symbol_retrieval_kwargs": {**SYMBOLIC["symbol_retrieval_kwargs"], "trainable_symbols": False}}
SCALED = {**SYMBOLIC, "symbol_retrieval_kwargs": {**SYMBOLIC["symbol_retrieval_kwargs"], "scale": 0.3}}
KV, SHARED_KEYS = {"n_kv_heads": 1}, {"share_attn_params": True, "sa_kwargs": {"key_dim": 6}}
SHORT = {**POSITION, "symbol_retrieval_kwargs": {"symbol_dim": D, "max_length": 6}}
LANGUAGE = {
    "published": language(**FROZEN, dff=None, sa_kwargs=KV, ra_kwargs={**KV, "n_relations": 8, "rel_proj_dim": 1}),
    "learned positions": language(**POSITION, pos_enc_type="pos_emb", activation="relu"),
    "relative": language(**RELATIVE, ra_kwargs={**BY_OFFSET, "symmetric_rels": True, "n_relations": 1}),
    "swiglu rms": language(activation="swiglu", norm_type="rmsnorm", dff=None, ra_kwargs={"symmetric_rels": True}),
    "post": language(norm_first=False, activation="silu", ra_kwargs={"rel_activation": "gelu", "n_relations": 4}),
    "post rms": language(norm_first=False, norm_type="rmsnorm", activation="identity", **RELATIVE, ra_kwargs=BY_OFFSET),
    "wide keys": language(pos_enc_type="pos_emb", sa_kwargs={"key_dim": 6}, ra_kwargs={"key_dim": 3}),
    "shared": language(share_attn_params=True, sa_kwargs=KV, ra_kwargs=KV),
    "shared keys": language(**SHARED_KEYS, pos_enc_type="pos_emb", ra_kwargs={"key_dim": 6, "add_bias_kv": True}),
    "own": language(**OWN),
    "own positions": language(**POSITION, **OWN),
    "own offsets": language(**RELATIVE, **OWN, ra_kwargs=BY_OFFSET),
    "tied": language(**TIED, n_layers=3),
    "tied, frozen": language(**TIED, **FROZEN),
    "biases": language(sa_kwargs={"add_bias_kv": True}, ra_kwargs={"add_bias_out": True}),
    "biases of relational heads": language(ra_kwargs={"add_bias_kv": True}, pos_enc_type="pos_emb"),
    "three to one": language(n_heads_sa=3, n_heads_ra=1, ra_kwargs={"rel_activation": "tanh", "n_relations": 4}),
    "relational heads only": language(n_heads_sa=0, n_heads_ra=4, ra_kwargs={"rel_activation": "relu"}),
    "scaled": language(**SCALED),
    "rca": language(ra_type="rca", ra_kwargs={"activation": "tanh"}),
    "rca softmax": language(ra_type="rca", n_heads_sa=0, n_heads_ra=4, ra_kwargs={"add_bias_kv": True}),
    "disrca": language(ra_type="disrca", ra_kwargs={"add_bias_out": True}),
    "plain": plain_language(),
    "plain, no bias": plain_language(bias=False, activation="swiglu", norm_type="rmsnorm"),
    "plain, post": plain_language(norm_first=False, pos_enc_type="pos_emb", activation="relu"),
    "plain, kwargs": plain_language(block_kwargs={"attn_kwargs": {"n_kv_heads": 2, "add_bias_kv": True}}),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name):
    compare(LANGUAGE[name])


@pytest.mark.parametrize(
    ("changes", "length"), [(SHORT, 6), ({**POSITION, "max_block_size": 8, "pos_enc_type": "pos_emb"}, 8)]
)
def test_tables_of_two_lengths(changes, length):
    """Ours has one: rows that no sequence can reach are left out."""
    assert compare(language(**changes)).config.max_length == length


def test_without_relational_heads_it_is_a_plain_model():
    ours = compare(language(n_heads_sa=4, n_heads_ra=0))
    assert [type(group).__name__ for group in ours.config.layer_heads(0)] == ["Softmax"]


# --------------------------------------------------------------------------------------------------------------- vision
def vision(**changes):
    config = {"image_shape": [3, 12, 8], "patch_size": [4, 2], "num_classes": 5, "d_model": D, "n_layers": 2}
    return {**config, "n_heads_sa": 2, "n_heads_ra": 2, **BLOCK, **RELATIVE, "ra_kwargs": BY_OFFSET, **changes}


def plain_vision(**changes):
    config = {"image_shape": [1, 8, 8], "patch_size": [4, 4], "num_classes": 5, "d_model": D, "n_layers": 2}
    return {**config, "n_heads": 4, **BLOCK, **changes}


def neighbours(**changes):
    return {**NEIGHBOURS, "symbol_retrieval_kwargs": {**NEIGHBOURS["symbol_retrieval_kwargs"], **changes}}


ENOUGH = {**POSITION, "symbol_retrieval_kwargs": {"symbol_dim": D, "max_length": 13}}
VISION = {
    "cls": vision(),
    "mean, no bias": vision(pool="mean", bias=False, activation="swiglu", norm_type="rmsnorm"),
    "post": vision(norm_first=False, ra_kwargs={**BY_OFFSET, "symmetric_rels": True, "n_kv_heads": 1}),
    "positions": vision(**ENOUGH, ra_kwargs=None),
    "symbolic": vision(**SYMBOLIC, ra_kwargs={"rel_activation": "softmax"}),
    "neighbours before": vision(**NEIGHBOURS, ra_kwargs={"n_relations": 8}),
    "neighbours": vision(**neighbours(causal_nbhd=False, include_self=True), ra_kwargs={"n_relations": 8}),
    "neighbours, plain": vision(**neighbours(normalize_rels=False, rel_scale=3.0), ra_kwargs={}),
    "neighbours, scaled": vision(**neighbours(rel_scale=0.9, symbolic_attn_scale=0.2), ra_kwargs={}),
    "plain": plain_vision(),
    "plain, mean": plain_vision(pool="mean", bias=False, norm_first=False),
}


@pytest.mark.parametrize("name", VISION)
def test_vision_models(name):
    compare(VISION[name])


# ------------------------------------------------------------------------------------------------- sequence to sequence
WORDS = {"input_spec": {"type": "token", "vocab_size": 9}, "output_spec": {"type": "token", "vocab_size": VOCAB}}
SIZES = {"d_model": D, "out_dim": VOCAB, "n_layers_enc": 2, "n_layers_dec": 2, "in_block_size": 10, "out_block_size": 8}


def sequence(encoder=(2, 2), decoder=(2, 2), kwargs=None, **changes):
    kwargs = {**BLOCK, "activation": "relu", "norm_first": False, "ra_kwargs": BY_OFFSET, **(kwargs or {})}
    sides = [{"n_heads_sa": sa, "n_heads_ra": ra, **kwargs} for sa, ra in (encoder, decoder)]
    sides[1] |= {"n_heads_cross": 2, "cross_kwargs": {"add_bias_kv": True, "add_bias_out": True}}
    return {**WORDS, **SIZES, **RELATIVE, "encoder_kwargs": sides[0], "decoder_kwargs": sides[1], **changes}


def plain_sequence(**changes):
    side = {"n_heads": 4, **BLOCK}
    sides = {"encoder_kwargs": side, "decoder_kwargs": {**side, "n_heads_cross": 2, "causal": True}}
    return {**WORDS, **SIZES, **sides, "n_layers_dec": 1, **changes}


BY_KEY = {"ra_kwargs": {"rel_activation": "tanh"}}
PRE = {"norm_first": True, "activation": "swiglu", "norm_type": "rmsnorm", "ra_kwargs": {}}
SEQUENCE = {
    "offsets": sequence(),
    "symbolic": sequence(**SYMBOLIC, kwargs=PRE),
    "positions": sequence(**POSITION, kwargs=BY_KEY),
    "neighbours": sequence(**NEIGHBOURS, kwargs=BY_KEY),
    "sensory decoder": sequence(decoder=(4, 0)),
    "sensory encoder": sequence(encoder=(4, 0)),
    "vectors": sequence(input_spec={"type": "vector", "dim": 3}, output_spec={"type": "vector", "dim": 2}),
    "plain": plain_sequence(),
    "plain, untied, post": plain_sequence(
        tie_weights=False, encoder_kwargs={"n_heads": 4, **BLOCK, "norm_first": False, "attn_kwargs": {"n_kv_heads": 2}}
    ),
    "plain, not causal": plain_sequence(decoder_kwargs={"n_heads": 4, "n_heads_cross": 4, **BLOCK, "bias": False}),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_models(name):
    ours = compare(SEQUENCE[name])
    if "symbol_retrieval" in SEQUENCE[name] and "sensory" not in name:
        assert ours.symbols[0] is ours.encoder.symbols[0]


def test_the_dual_decoder_is_as_deep_as_its_encoder():
    assert compare(sequence(n_layers_enc=1, n_layers_dec=4)).config.layers == 1


def test_other_positions_than_sines_are_refused():
    state, key = model_of(plain_sequence()).state_dict(), "layers.source_pos_embedder.pe"
    with refusing(f"dual_attention.load: {key} is not what the package computes, which is all"):
        dual_attention.load({**state, key: state[key] + 0.01}, plain_sequence())
    with refusing(f"dual_attention.load: {key} must be (10, 16) but is (9, 16)"):
        dual_attention.load({**state, key: state[key][:9]}, plain_sequence())
