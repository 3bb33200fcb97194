"""Language models of the package `dual-attention` 0.0.7 as ours: outputs and all gradients, in float64.

All weights are drawn anew (norms and relation weights, too); what the package computes in float32 there (RMSNorm,
rotary) keeps the bounds at 1e-5.
"""

import json

import pytest
import torch
from dual_arguments import CONFIG, PLAIN, SYMBOLS, VOCAB, D
from refusals import refusing
from torch.testing import assert_close

from polyhead.compat import dual_attention
from polyhead.compat.dual_attention.tensors import of_model

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import language_models, model_utils, relational_attention

F64 = torch.float64
NEAR = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _import_that_the_package_forgot(monkeypatch):
    monkeypatch.setattr(relational_attention, "model_utils", model_utils, raising=False)


def package_model(arguments, cls=None):
    """The package's model with these arguments, in evaluation, every parameter drawn."""
    if cls is None:
        has_relations = "n_heads_ra" in arguments
        cls = language_models.DualAttnTransformerLM if has_relations else language_models.TransformerLM
    torch.manual_seed(0)
    model = cls(**json.loads(json.dumps(arguments))).to(F64).eval()  # the package changes its arguments
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1) / 2, std=0.35)
    return model


# ---------------------------------------------------------------------------------------------------------- the models
POSITION = {"symbol_retrieval": "positional_symbols", "symbol_retrieval_kwargs": {"symbol_dim": D, "max_length": 12}}
RELATIVE = {"symbol_retrieval": "position_relative", "symbol_retrieval_kwargs": {"symbol_dim": D, "max_rel_pos": 3}}
BY_OFFSET = {"use_relative_positional_symbols": True}
OWN = {"symbol_retriever_config": {"shared_symbol_retriever": False, "weight_tie_symbol_library": False}}
TRAINABLE = {"symbol_retrieval_kwargs": {**SYMBOLS, "trainable_symbols": True}}
KV = {"n_kv_heads": 1}


def dual(**changes):
    return {**CONFIG, "n_layers": 2, "dff": 20, "sa_kwargs": None, "ra_kwargs": None, **changes}


MODELS = {
    "published": dual(dff=None, sa_kwargs=KV, ra_kwargs={**KV, "n_relations": 8, "rel_proj_dim": 1}),
    "learned positions": dual(**POSITION, pos_enc_type="pos_emb", activation="relu"),
    "relative": dual(**RELATIVE, **OWN, ra_kwargs={**BY_OFFSET, "symmetric_rels": True, "n_relations": 1}),
    "swiglu rms": dual(**TRAINABLE, activation="swiglu", norm_type="rmsnorm", dff=None),
    "post": dual(**OWN, norm_first=False, activation="silu", ra_kwargs={"rel_activation": "gelu", "n_relations": 4}),
    "relational heads only": dual(n_heads_sa=0, n_heads_ra=4, ra_kwargs={"rel_activation": "relu"}),
    "sensory heads only": dual(n_heads_sa=4, n_heads_ra=0),
    "plain": {**PLAIN, "bias": True, "norm_first": False, "pos_enc_type": "pos_emb"},
    "plain, no bias": {**PLAIN, "activation": "swiglu", "norm_type": "rmsnorm"},
}
for number, act in enumerate(("identity", "relu", "tanh", "gelu", "sigmoid", "silu")):
    # Each activation, and every second one with keys that two heads share.
    shared_keys = {"n_kv_heads": 1} if number % 2 else {}
    relations = {"n_relations": (1, 2, 8)[number % 3], "symmetric_rels": number % 2 == 0}
    MODELS[f"relational {act}"] = dual(ra_kwargs={**shared_keys, **relations, "rel_activation": act})


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_package(name):
    arguments = MODELS[name]
    package = package_model(arguments)
    model = dual_attention.load(package.state_dict(), arguments)
    tokens = torch.randint(VOCAB, (2, 7))
    logits = model(tokens)
    expected = package(tokens)[0]
    assert expected.std() > 0.1, "constant outputs prove nothing"
    assert_close(logits, expected, **NEAR)

    cotangent = torch.randn_like(logits) / 10
    torch.autograd.backward((logits, expected), (cotangent, cotangent))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    package_parameters = dict(package.named_parameters(remove_duplicate=False))
    num_compared = 0
    for mapping in of_model(model, is_dual="n_heads_ra" in arguments):
        for key in package_parameters.keys() & set(mapping.keys):
            # What the package does not train is no parameter of ours.
            assert (mapping.names[0] in parameters) == package_parameters[key].requires_grad
            if package_parameters[key].requires_grad:
                gradient = parameters[mapping.names[0]].grad[mapping.index]
                assert_close(gradient, package_parameters[key].grad, **NEAR)
                num_compared += 1
    assert num_compared >= sum(parameter.grad is not None for parameter in package_parameters.values())


# ----------------------------------------------------------------------------------------------------- folders, dtypes
def test_a_folder_of_the_packages_hub_class_is_read(tmp_path):
    """Shared tensors are written once."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from dual_attention.hf import DualAttnTransformerLM_HFHub

    package = package_model(CONFIG, DualAttnTransformerLM_HFHub)
    package.save_pretrained(tmp_path)
    tokens = torch.randint(VOCAB, (2, 9))
    assert_close(dual_attention.from_folder(tmp_path)(tokens), package(tokens)[0], **NEAR)


def test_devices_and_dtypes_are_kept_and_prefixes_removed():
    state = package_model(PLAIN).state_dict()
    half = {f"_orig_mod.{key}": value.to(torch.bfloat16) for key, value in state.items()}
    model = dual_attention.load(half, PLAIN, dropout_rate=0.3)
    assert (model.config.dropout, model.config.residual_dropout) == (0.3, 0.3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert dual_attention.load({key: value.to("meta") for key, value in state.items()}, PLAIN).norm.weight.is_meta


# ------------------------------------------------------------------------------------------------------------ mistakes
BAD_ARGUMENTS = {
    "ra_kwargs: unknown argument 'n_relation'; did you": dual(ra_kwargs={"n_relation": 2}),
    "dff, norm_first missing": {name: CONFIG[name] for name in CONFIG if name not in ("dff", "norm_first")},
    "unknown argument 'image_shape'": {"image_shape": [3, 8, 8]},
    "symbol_retrieval_kwargs: dropout must be 0.0": dual(symbol_retrieval_kwargs={**SYMBOLS, "dropout": 0.1}),
    "ra_type must be 'relational_attention' but is 'rca'": dual(ra_type="rca"),
    "arguments: unknown symbol_retrieval 'rel_sym_attn'": dual(symbol_retrieval="rel_sym_attn"),
    "ra_kwargs: unknown rel_activation 'softmax'": dual(ra_kwargs={"rel_activation": "softmax"}),
    "sa_kwargs: key_dim must be None but is 6": dual(sa_kwargs={"key_dim": 6}),
    "sa_kwargs must be arguments by name, got [2]": dual(sa_kwargs=[2]),
    "Softmax: heads must be int but is '2'": dual(n_heads_sa="2"),
}


@pytest.mark.parametrize("line", BAD_ARGUMENTS)
def test_invalid_arguments_are_one_line(line):
    with refusing(line):
        dual_attention.load({}, BAD_ARGUMENTS[line])


GAIN = "layers.blocks.0.norm1.weight"
BAD_TENSORS = {
    f"missing {GAIN}": {GAIN: None},
    f"{GAIN} must be (16,) but is (3,)": {GAIN: torch.ones(3)},
    f"{GAIN} must be a floating tensor": {GAIN: torch.ones(D).long()},
    "are one tensor in the package but differ": {"layers.final_out.weight": torch.ones(VOCAB, D)},
}


@pytest.mark.parametrize("line", BAD_TENSORS)
def test_invalid_state_dicts_are_one_line(line):
    changed = {**package_model(PLAIN).state_dict(), **BAD_TENSORS[line]}
    state = {name: value for name, value in changed.items() if value is not None}
    with refusing(f"dual_attention.load: {line}" if "differ" not in line else line):
        dual_attention.load(state, PLAIN)
