"""Uses of models of the package `dual-attention`: published folders, further training, single modules."""

import json

import pytest
import torch
from dual_arguments import CONFIG, PLAIN as RELU, VOCAB, D
from refusals import refusing
from safetensors.torch import load_file, save_file, save_model
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import dual_attention

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import model_utils, relational_attention
from dual_attention.attention import Attention
from dual_attention.attention_utils import precompute_freqs_cis
from dual_attention.dual_attention import DualAttention
from dual_attention.dual_attn_blocks import DualAttnDecoderBlock, DualAttnEncoderBlock
from dual_attention.language_models import DualAttnTransformerLM, TransformerLM
from dual_attention.relational_attention import (
    DisentangledRelationalCrossAttention,
    RelationalAttention,
    RelationalCrossAttention,
)
from dual_attention.transformer_blocks import DecoderBlock, EncoderBlock

NEAR = {"atol": 1e-5, "rtol": 1e-5}
PLAIN = RELU | {"activation": "swiglu"}


@pytest.fixture(autouse=True)
def _import_that_the_package_forgot(monkeypatch):
    monkeypatch.setattr(relational_attention, "model_utils", model_utils, raising=False)


def package(config, cls=DualAttnTransformerLM):
    torch.manual_seed(0)
    model = cls(**json.loads(json.dumps(config))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1) / 2, std=0.3)
    return model


def tokens(seed=1, count=2):
    return torch.randint(VOCAB, (count, 9), generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------------------------------- folders
def test_a_published_folder(tmp_path):
    """Shared tensors are written once: 73 keys are 61 in the file."""
    theirs = package(CONFIG)
    save_model(theirs, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert (len(theirs.state_dict()), len(load_file(tmp_path / "model.safetensors"))) == (73, 61)
    ours = dual_attention.from_folder(tmp_path)
    assert isinstance(ours, ph.Transformer)
    assert_close(ours(tokens()), theirs(tokens())[0], **NEAR)
    assert not [name for name, _ in ours.named_parameters() if "library" in name], "frozen is frozen here, too"
    dual_attention.to_folder(ours, tmp_path / "again")
    assert len(load_file(tmp_path / "again" / "model.safetensors")) == 61
    again = dual_attention.from_folder(tmp_path / "again")
    assert torch.equal(again(tokens()), ours(tokens()))


def test_the_hub_classes_of_the_package_read_and_write_the_same(tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from dual_attention.hf import DualAttnTransformerLM_HFHub

    theirs = package(CONFIG, DualAttnTransformerLM_HFHub)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = dual_attention.from_folder(tmp_path / "theirs")
    assert_close(ours(tokens()), theirs(tokens())[0], **NEAR)
    dual_attention.to_folder(ours, tmp_path / "ours")
    again = DualAttnTransformerLM_HFHub.from_pretrained(tmp_path / "ours").eval()
    assert_close(again(tokens())[0], theirs(tokens())[0], **NEAR)


def test_incomplete_folders(tmp_path):
    config, weights, who = tmp_path / "config.json", tmp_path / "model.safetensors", "dual_attention.from_folder: "
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    save_file({"a": torch.ones(1)}, tmp_path / "whole")
    for path, content, line in (
        (None, b"", f"{who}{tmp_path} has no config.json"),
        (config, b"{", f"{who}{tmp_path} has no model.safetensors"),
        (weights, (tmp_path / "whole").read_bytes(), f"{who}{config} is not valid JSON ("),
        (config, b"[1]", f"{who}{config} holds no arguments by name"),
        (config, b"{}", "dual_attention.load: vocab_size, image_shape or input_spec missing"),
        (weights, b"\x80\x04junk", f"{who}{weights} is damaged ("),
    ):
        if path is not None:
            path.write_bytes(content)
        with refusing(line):
            dual_attention.from_folder(tmp_path)


# ------------------------------------------------------------------------------------------------------------- training
def train(model, steps=14):
    """Train on one batch; the first and the last loss."""
    batch = tokens(3, 4)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def test_a_loaded_model_can_be_trained_further():
    theirs = package(CONFIG)
    ours = dual_attention.load(theirs.state_dict(), CONFIG)
    library = ours.symbols[0].library.clone()
    before, after = train(ours)
    assert before == pytest.approx(theirs(tokens(3, 4)[:, :-1], tokens(3, 4)[:, 1:])[1].item(), abs=1e-4)
    assert after < 0.6 * before
    assert torch.equal(ours.symbols[0].library, library)
    with refusing(", between heads of two kinds, which the package projects apart"):
        dual_attention.save(ours)


@pytest.mark.parametrize("which", ["plain", "relational heads only"])
def test_trained_models_with_heads_of_one_kind_can_be_saved(which):
    only = {"n_heads_sa": 0, "n_heads_ra": 4, "sa_kwargs": None}
    config, cls = (PLAIN, TransformerLM) if which == "plain" else ({**CONFIG, **only}, DualAttnTransformerLM)
    ours = dual_attention.load(package(config, cls).state_dict(), **config)
    before, after = train(ours)
    assert after < 0.7 * before
    state, arguments = dual_attention.save(ours)
    theirs = cls(**arguments).eval()
    theirs.load_state_dict(state)
    assert_close(theirs(tokens())[0], ours.eval()(tokens()), **NEAR)


def test_a_model_of_ours_can_be_saved():
    """With our defaults as far as the package has them; the output projection is made block-diagonal here."""
    settings = ph.TransformerConfig(
        *(ph.Tokens(VOCAB), ph.Logits(VOCAB, tied=True)),
        dim=D,
        heads=[ph.Softmax(2), ph.Relational(2, relations=8, symbols=ph.SymbolicAttention(count=5))],
        feedforward=ph.Mlp(act="relu", bias=False),
        positions=ph.Learned(),
        max_length=12,
        causal=True,
    )
    torch.manual_seed(0)
    ours = ph.Transformer(settings)
    with torch.no_grad():
        for block in ours.blocks:
            block.attention.out.weight[: D // 2, D // 2 :] = block.attention.out.weight[D // 2 :, : D // 2] = 0.0
    state, arguments = dual_attention.save(ours)
    theirs = DualAttnTransformerLM(**arguments).eval()
    theirs.load_state_dict(state)
    assert_close(theirs(tokens())[0], ours(tokens()), **NEAR)


def test_devices_dtypes_and_prefixes():
    state = package(PLAIN, TransformerLM).state_dict()
    half = {f"_orig_mod.{key}": value.to(torch.bfloat16) for key, value in state.items()}
    ours = dual_attention.load(half, PLAIN, dropout_rate=0.3)
    assert (ours.config.dropout, ours.config.residual_dropout) == (0.3, 0.3)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert dual_attention.load({key: value.to("meta") for key, value in state.items()}, PLAIN).norm.weight.is_meta


@pytest.mark.parametrize("tied", [False, True])
def test_loading_draws_nothing(tied):
    config = {
        **CONFIG,
        "symbol_retriever_config": {"shared_symbol_retriever": not tied, "weight_tie_symbol_library": tied},
    }
    state = package(config).state_dict()
    draws = torch.get_rng_state()
    dual_attention.load(state, config)
    assert torch.equal(torch.get_rng_state(), draws)


# --------------------------------------------------------------------------------------------------------- single parts
BLOCK = {"dff": 20, "dropout_rate": 0.0, "activation": "gelu", "norm_first": True}
DUAL = {**BLOCK, "d_model": D, "n_heads_sa": 2, "n_heads_ra": 2}
BLOCKS = {
    "encoder": (DualAttnEncoderBlock, {**DUAL, "causal": True, "ra_kwargs": {"n_relations": 8}}),
    "encoder, post": (DualAttnEncoderBlock, {**DUAL, "norm_first": False, "activation": "swiglu", "bias": False}),
    "encoder, rms": (DualAttnEncoderBlock, {**DUAL, "norm_type": "rmsnorm", "share_attn_params": True}),
    "decoder": (DualAttnDecoderBlock, {**DUAL, "n_heads_cross": 4, "cross_kwargs": {"key_dim": 3}}),
    "decoder, post": (DualAttnDecoderBlock, {**DUAL, "n_heads_cross": 2, "norm_first": False, "causal": False}),
    "plain encoder": (EncoderBlock, {**BLOCK, "d_model": D, "n_heads": 4, "attn_kwargs": {"n_kv_heads": 2}}),
    "plain decoder": (DecoderBlock, {**BLOCK, "d_model": D, "n_heads": 4, "n_heads_cross": 2, "causal": True}),
}


def turns(t):
    """The package's rotary angles of `t` positions."""
    return dict(zip(("freqs_cos", "freqs_sin"), precompute_freqs_cis(D // 4, t), strict=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    cls, config = BLOCKS[name]
    theirs = package(config, cls)
    rotary = name == "encoder"
    ours = dual_attention.load_block(theirs.state_dict(), config, rotary=rotary)
    x, symbols, context = torch.randn(2, 6, D), torch.randn(2, 6, D), torch.randn(2, 4, D)
    extra = turns(6) if rotary else {}
    given = ((context,) if "decoder" in name else ()) + (() if "plain" in name else (symbols,))
    y = ours(x, *given[: "decoder" in name], symbols=None if "plain" in name else symbols)
    assert_close(y, theirs(x, *given, **extra), **NEAR)


def test_a_block_with_relative_symbols():
    config = {**DUAL, "ra_kwargs": {"use_relative_positional_symbols": True}, "causal": True}
    theirs, table = package(config, DualAttnEncoderBlock), torch.randn(5, D)
    ours = dual_attention.load_block(theirs.state_dict(), config)
    offset = (torch.arange(6) - torch.arange(6)[:, None]).clamp(-2, 2) + 2
    x = torch.randn(2, 6, D)
    assert_close(ours(x, symbols=table), theirs(x, table[offset]), **NEAR)


WIDE = {"sa_kwargs": {"key_dim": 6, "n_kv_heads": 1}, "ra_kwargs": {"key_dim": 5, "n_relations": 2}}
ATTENTION = {
    "wide keys": (DualAttention, {"n_heads_sa": 2, "n_heads_ra": 2, "dropout": 0.0, **WIDE}),
    "biases": (DualAttention, {"n_heads_sa": 3, "n_heads_ra": 1, "dropout": 0.0, "ra_kwargs": {"add_bias_out": True}}),
    "part": (RelationalAttention, {"n_heads": 2, "total_n_heads": 8, "key_dim": 4, "n_relations": 4}),
    "rotary": (RelationalAttention, {"n_heads": 4, "symmetric_rels": True, "rel_activation": "tanh"}),
    "cross": (RelationalCrossAttention, {"n_heads": 4, "dropout": 0.0, "n_kv_heads": 2, "activation": "tanh"}),
    "disentangled": (DisentangledRelationalCrossAttention, {"n_heads": 4, "dropout": 0.0, "rel_activation": "relu"}),
    "sensory": (Attention, {"n_heads": 4, "dropout": 0.0, "key_dim": 7, "n_kv_heads": 2, "add_bias_kv": True}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_modules(name):
    cls, config = ATTENTION[name]
    config = {"d_model": D, **config}
    theirs = package(config, cls)
    how = {"cls": cls.__name__, "causal": True, "rotary": name == "rotary"}
    ours = dual_attention.load_attention(theirs.state_dict(), config, **how)
    x, symbols = torch.randn(2, 6, D), torch.randn(2, 6, D)
    angles = turns(6) if name == "rotary" else {}
    given = (x, x, x) if cls is Attention else (x, symbols)
    wanted = theirs(*given, **angles, is_causal=True)[0]
    y = ours(x, symbols=None if cls is Attention else symbols)
    assert_close(y[..., : wanted.shape[-1]], wanted, **NEAR)
