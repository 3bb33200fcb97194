"""The snippet of the docs for timm's attention."""

import pytest
import timm_like
import torch
from torch.testing import assert_close

F64 = torch.float64
PARTS = {"qkv_bias": True, "qk_norm": True, "scale_norm": True}
MASK = torch.ones(6, 6, dtype=torch.bool).tril(2)


@pytest.mark.parametrize("options", [{}, {"attn_mask": MASK}, {"is_causal": True}], ids=["none", "pairs", "causal"])
def test_with_softmax_heads_the_snippet_computes_what_timm_computes(options):
    attention, x = timm_like.Attention(16, 4, **PARTS).to(F64), torch.randn(2, 6, 16, dtype=F64)
    expected = attention(x, **options)
    keys = list(attention.state_dict())
    timm_like.snippet("softmax_attention")["swap"](attention)
    assert_close(attention(x, **options), expected, rtol=1e-12, atol=1e-12)
    assert list(attention.state_dict()) == keys
