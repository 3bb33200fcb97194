"""RMSNorm and LayerNorm against their definitions in float64, and in half precision at activations of 1e3."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from polyhead.ops.norms import layer_norm, rms_norm


def rms_oracle(x, weight, eps):
    x = x.double().numpy()
    return torch.tensor(x / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) * weight.double().numpy())


def layer_oracle(x, weight, bias, eps):
    x = x.double().numpy()
    off = x - x.sum(-1, keepdims=True) / x.shape[-1]
    var = (off**2).sum(-1, keepdims=True) / x.shape[-1]
    return torch.tensor(off / np.sqrt(var + eps) * weight.double().numpy() + bias.double().numpy())


def draw(*shape, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", ["of the input's dtype", "wider"])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_every_dtype_is_rounded_once(dtype, gain, scale):
    """At 1e3 a square overflows float16; the error must stay that of rounding the exact result."""
    x = draw(64, 96, scale=scale, dtype=dtype)
    weight = draw(96, dtype=torch.promote_types(dtype, torch.float32) if gain == "wider" else dtype) + 1
    bias, ulp = draw(96, dtype=dtype), torch.finfo(dtype).eps
    slack = 1.01 * ulp / 2 if dtype in (torch.float16, torch.bfloat16) else 8 * ulp
    for actual, expected in (
        (rms_norm(x, weight), rms_oracle(x, weight, 1e-5)),
        (layer_norm(x, weight, bias), layer_oracle(x, weight, bias, 1e-5)),
    ):
        assert actual.dtype == dtype
        assert_close(actual.double(), expected, atol=slack, rtol=slack)
