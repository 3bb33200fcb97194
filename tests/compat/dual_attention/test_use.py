"""Models of the package `dual-attention` from published folders, in other dtypes, and its attention modules."""

import json

import pytest
import torch
from dual_arguments import CONFIG, PLAIN as RELU, VOCAB, D
from refusals import refusing
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from polyhead.compat import dual_attention

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import model_utils, relational_attention
from dual_attention.attention import Attention
from dual_attention.language_models import DualAttnTransformerLM, TransformerLM
from dual_attention.relational_attention import RelationalAttention

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
def test_a_folder_of_the_packages_hub_class_is_read(tmp_path):
    """Shared tensors are written once: 73 keys are 61 in the file."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from dual_attention.hf import DualAttnTransformerLM_HFHub

    theirs = package(CONFIG, DualAttnTransformerLM_HFHub)
    theirs.save_pretrained(tmp_path)
    assert (len(theirs.state_dict()), len(load_file(tmp_path / "model.safetensors"))) == (73, 61)
    assert_close(dual_attention.from_folder(tmp_path)(tokens()), theirs(tokens())[0], **NEAR)


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


def test_devices_dtypes_and_prefixes():
    state = package(PLAIN, TransformerLM).state_dict()
    half = {f"_orig_mod.{key}": value.to(torch.bfloat16) for key, value in state.items()}
    ours = dual_attention.load(half, PLAIN, dropout_rate=0.3)
    assert (ours.config.dropout, ours.config.residual_dropout) == (0.3, 0.3)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert dual_attention.load({key: value.to("meta") for key, value in state.items()}, PLAIN).norm.weight.is_meta


# ---------------------------------------------------------------------------------------------------- attention modules
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
