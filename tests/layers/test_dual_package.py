"""Single modules of the package `dual-attention` 0.0.7 with options that its models in tests/compat do not have."""

import pytest
import torch

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import model_utils, relational_attention
from dual_attention.dual_attention import DualAttention
from torch.testing import assert_close

from polyhead.compat.dual_attention.load import load_attention

F64 = torch.float64
ACTS = ("identity", "relu", "tanh", "gelu", "sigmoid", "silu", "softmax")
ONE = {"d_model": 16, "n_heads": 4, "n_kv_heads": 1, "dropout": 0.0}
SHARED = {"d_model": 16, "n_heads_sa": 2, "n_heads_ra": 2, "dropout": 0.0, "share_attn_params": True}
CASES = [
    *(("RelationalAttention", {**ONE, "rel_activation": act}) for act in ACTS),
    *(("RelationalCrossAttention", {**ONE, "activation": act}) for act in ACTS),
    *(("DisentangledRelationalCrossAttention", {**ONE, "rel_activation": act}) for act in ACTS),
    *(("DualAttention", {**SHARED, "ra_type": kind}) for kind in ("relational_attention", "disrca")),
]


@pytest.mark.parametrize(("cls", "cfg"), CASES)
def test_outputs_are_those_of_the_package(monkeypatch, cls, cfg):
    monkeypatch.setattr(relational_attention, "model_utils", model_utils, raising=False)  # an import that it lacks
    theirs = (DualAttention if cls == "DualAttention" else getattr(relational_attention, cls))(**cfg).to(F64).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours = load_attention(theirs.state_dict(), cfg, cls=cls)
    assert any(ours.shared) == ("share_attn_params" in cfg)
    x, symbols = torch.randn(2, 2, 6, 16, dtype=F64)
    assert_close(ours(x, symbols=symbols), theirs(x, symbols)[0], atol=1e-5, rtol=1e-5)
