"""Soft cap, sinks and gate of softmax heads by every implementation; layers are in test_equation.py, models of
transformers in compat/huggingface/test_todays_models.py."""

import pytest
import torch
from torch.testing import assert_close

from polyhead import ops

F64 = torch.float64
HEADS, GROUPS, DIM, TOKENS = 4, 2, 8, 11
LIMITS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "packed": {"cu_seqlens": torch.tensor([0, 4, 11], dtype=torch.int32)},
    "mask": {"mask": torch.arange(TOKENS) % 3 > 0},
}


@pytest.mark.parametrize("limits", LIMITS)
def test_tiles_and_the_reference_agree(limits):
    """Outputs and gradients, that of the sinks too; where native code and fused kernels would be faster, as well."""
    torch.manual_seed(0)
    b = 1 if limits == "packed" else 2
    leaves = [torch.randn(b, TOKENS, h, DIM, dtype=F64) for h in (HEADS, GROUPS, GROUPS)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.randn(HEADS, dtype=F64))]
    results = []
    for impl in ("reference", "blocked", "auto"):
        q, k, v, sinks = leaves
        y = ops.softmax_attention(q, k, v, softcap=1.5, sinks=sinks, impl=impl, **LIMITS[limits])
        results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["native", "sdpa"])
@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"sinks": torch.zeros(HEADS)}])
def test_other_implementations_refuse_them(impl, extra):
    q = torch.randn(1, TOKENS, HEADS, DIM)
    with pytest.raises(ValueError, match=f"impl '{impl}' takes no {next(iter(extra))}"):
        ops.softmax_attention(q, q, q, impl=impl, **extra)


def test_a_query_without_a_key_gives_all_its_weight_to_the_sink():
    q = torch.randn(1, 3, HEADS, DIM, requires_grad=True)
    y = ops.softmax_attention(q, q, q, mask=torch.zeros(3, dtype=torch.bool), sinks=torch.zeros(HEADS))
    (gradient,) = torch.autograd.grad(y.sum(), q)
    assert not y.any()
    assert not gradient.any()
