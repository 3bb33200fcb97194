"""Uses of models of the package `dual-attention`: published folders, models of ours, single modules."""

import json

import pytest
import torch
from dual_arguments import CONFIG, PLAIN as RELU, VOCAB, D
from refusals import refusing
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import dual_attention

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import model_utils, relational_attention
from dual_attention.attention import Attention
from dual_attention.attention_utils import precompute_freqs_cis
from dual_attention.dual_attn_blocks import DualAttnDecoderBlock, DualAttnEncoderBlock
from dual_attention.language_models import DualAttnTransformerLM, TransformerLM
from dual_attention.relational_attention import RelationalAttention
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


def tokens():
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


# -------------------------------------------------------------------------------------------------------------- folders
def test_the_hub_classes_of_the_package_read_and_write_the_same(tmp_path):
    """Shared tensors are written once: 73 keys are 61 in the file."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from dual_attention.hf import DualAttnTransformerLM_HFHub

    theirs = package(CONFIG, DualAttnTransformerLM_HFHub)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = dual_attention.from_folder(tmp_path / "theirs")
    assert_close(ours(tokens()), theirs(tokens())[0], **NEAR)
    dual_attention.to_folder(ours, tmp_path / "ours")
    assert len(theirs.state_dict()) == 73
    assert [len(load_file(tmp_path / name / "model.safetensors")) for name in ("theirs", "ours")] == [61, 61]
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


@pytest.mark.parametrize(
    "related",
    [
        ph.Relational(2, relations=8, symbols=ph.SymbolicAttention(count=5)),
        ph.Relational(2, relations=8, symbols=ph.RelativeSymbols()),
        ph.Disentangled(2, relation_dim=D // 4, symbols=ph.SymbolicAttention(count=5)),
    ],
    ids=repr,
)
def test_a_model_of_ours_can_be_saved(related):
    """With our defaults as far as the package has them; the output projection is made block-diagonal here."""
    heads = [ph.Softmax(2), related]
    how = {"feedforward": ph.Mlp(act="relu", bias=False), "positions": ph.Learned(), "max_length": 12, "causal": True}
    ends = ph.Tokens(VOCAB), ph.Logits(VOCAB, tied=True)
    torch.manual_seed(0)
    ours = ph.Transformer(ph.TransformerConfig(*ends, dim=D, heads=heads, **how))
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


# --------------------------------------------------------------------------------------------------------- single parts
BLOCK = {"dff": 20, "dropout_rate": 0.0, "activation": "gelu", "norm_first": True}
DUAL = {**BLOCK, "d_model": D, "n_heads_sa": 2, "n_heads_ra": 2}
BY_OFFSET = {"use_relative_positional_symbols": True}
BLOCKS = {
    "encoder": (DualAttnEncoderBlock, {**DUAL, "causal": True, "ra_kwargs": {"n_relations": 8}}),
    "encoder, relative": (DualAttnEncoderBlock, {**DUAL, "causal": True, "ra_kwargs": BY_OFFSET}),
    "decoder": (DualAttnDecoderBlock, {**DUAL, "n_heads_cross": 4, "cross_kwargs": {"key_dim": 3}}),
    "plain encoder": (EncoderBlock, {**BLOCK, "d_model": D, "n_heads": 4, "attn_kwargs": {"n_kv_heads": 2}}),
    "plain decoder": (DecoderBlock, {**BLOCK, "d_model": D, "n_heads": 4, "n_heads_cross": 2, "causal": True}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    cls, config = BLOCKS[name]
    theirs, rotary = package(config, cls), name == "encoder"
    ours = dual_attention.load_block(theirs.state_dict(), config, rotary=rotary)
    x, symbols, context, table = (torch.randn(*shape, D) for shape in ((2, 6), (2, 6), (2, 4), (5,)))
    offset = (torch.arange(6) - torch.arange(6)[:, None]).clamp(-2, 2) + 2
    mine, its = (table, table[offset]) if "relative" in name else (symbols, symbols)
    angles = dict(zip(("freqs_cos", "freqs_sin"), precompute_freqs_cis(D // 4, 6), strict=True)) if rotary else {}
    given = (context,) if "decoder" in name else ()
    if "plain" in name:
        assert_close(ours(x, *given), theirs(x, *given), **NEAR)
    else:
        assert_close(ours(x, *given, symbols=mine), theirs(x, *given, its, **angles), **NEAR)


ATTENTION = {
    RelationalAttention: {"n_heads": 2, "total_n_heads": 8, "key_dim": 4, "n_relations": 4},
    Attention: {"n_heads": 4, "dropout": 0.0, "key_dim": 7, "n_kv_heads": 2, "add_bias_kv": True},
}


@pytest.mark.parametrize("cls", ATTENTION)
def test_attention_modules(cls):
    """Those that tests/layers/test_dual_package.py leaves out: a part of a wider layer, and sensory heads."""
    config = {"d_model": D, **ATTENTION[cls]}
    theirs = package(config, cls)
    ours = dual_attention.load_attention(theirs.state_dict(), config, cls=cls.__name__, causal=True)
    x, symbols = torch.randn(2, 6, D), torch.randn(2, 6, D)
    given = (x, x, x) if cls is Attention else (x, symbols)
    wanted = theirs(*given, is_causal=True)[0]
    y = ours(x, symbols=None if cls is Attention else symbols)
    assert_close(y[..., : wanted.shape[-1]], wanted, **NEAR)
