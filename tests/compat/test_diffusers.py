"""The example of an attention processor for diffusers: on a stand-in of its layer, and on its own network."""

import pathlib
import runpy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "diffusers_processor.py"
F64 = torch.float64


def layer(**changed):
    """The attributes of diffusers' attention that the processor reads; 2 heads of width 3."""
    torch.manual_seed(0)
    absent = dict.fromkeys(("spatial_norm", "norm_cross", "norm_q", "added_kv_proj_dim", "group_norm"))
    attention = types.SimpleNamespace(**absent, heads=2, residual_connection=True, rescale_output_factor=2.0)
    attention.scale = 3**-0.5
    attention.to_q, attention.to_k, attention.to_v = (nn.Linear(6, 6, dtype=F64) for _ in "qkv")
    attention.to_out = [nn.Linear(6, 6, dtype=F64), nn.Identity()]
    attention.group_norm = nn.GroupNorm(2, 6, dtype=F64)
    attention.prepare_attention_mask = lambda mask, s, b: mask.repeat_interleave(2, 0)
    vars(attention).update(changed)
    return attention


@pytest.mark.parametrize("scale", [3**-0.5, 1.0])
def test_softmax_attention_is_that_of_the_layer(scale):
    attn, x = layer(scale=scale), torch.randn(2, 6, 2, 2, dtype=F64)
    mask = torch.tensor([0.0, 0.0, -1e4, 0.5], dtype=F64).expand(2, 1, 4)
    y = runpy.run_path(str(EXAMPLE))["Processor"](ph.ops.softmax_attention)(attn, x, attention_mask=mask)
    flat = attn.group_norm(x.flatten(2)).transpose(1, 2)
    q, k, v = (m(flat).unflatten(-1, (2, 3)).transpose(1, 2) for m in (attn.to_q, attn.to_k, attn.to_v))
    read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale).transpose(1, 2).flatten(2)
    assert_close(y, (attn.to_out[0](read).transpose(1, 2).unflatten(2, (2, 2)) + x) / 2, rtol=1e-10, atol=1e-10)


def test_a_masked_key_is_masked_for_every_op():
    """diffusers adds -1e4, which HYLA alone would take for a large score."""
    attn, x, context = layer(group_norm=None), torch.randn(2, 5, 6, dtype=F64), torch.randn(2, 4, 6, dtype=F64)
    mask = torch.tensor([0.0, 0.5, 0.0, -1e4]).to(torch.bfloat16).to(F64).expand(2, 1, 4)
    process = runpy.run_path(str(EXAMPLE))["Processor"](ph.ops.hyla)
    expected = process(attn, x, context[:, :3], mask[..., :3])
    assert_close(process(attn, x, context, mask), expected)


def test_other_options_are_refused():
    processor = runpy.run_path(str(EXAMPLE))["Processor"](ph.ops.hyla)
    with pytest.raises(ValueError, match=r"^Processor: attention without norm_q was wanted but this has it$"):
        processor(layer(norm_q=nn.Identity()), torch.zeros(1, 4, 6, dtype=F64))
