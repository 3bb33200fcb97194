"""RMSNorm and LayerNorm against NumPy in float64, and in half precision at activations of 1e3."""

import numpy as np
import pytest
import torch

from polyhead.ops.latent_code import at_least_float32
from polyhead.ops.norms import layer_norm, rms_norm

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def rms_oracle(x, weight, eps):
    """One vector at a time, by the definition."""
    out = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        root = np.sqrt(sum(float(a) ** 2 for a in x[index]) / x.shape[-1] + eps)
        out[index] = [float(a) / root * float(g) for a, g in zip(x[index], weight, strict=True)]
    return out


def layer_oracle(x, weight, bias, eps):
    out = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        mean = sum(float(a) for a in x[index]) / x.shape[-1]
        var = sum((float(a) - mean) ** 2 for a in x[index]) / x.shape[-1]
        out[index] = (x[index] - mean) / np.sqrt(var + eps) * weight + bias
    return out


def draw(*shape, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 3, 8), (2, 1, 3, 17)])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_float64_equals_the_definition(shape, eps):
    x, weight, bias = draw(*shape), draw(shape[-1]) + 1.5, draw(shape[-1]) * 0.3
    expected = rms_oracle(x.numpy(), weight.numpy(), eps)
    torch.testing.assert_close(rms_norm(x, weight, eps), torch.tensor(expected), atol=1e-12, rtol=0)
    expected = layer_oracle(x.numpy(), weight.numpy(), bias.numpy(), eps)
    torch.testing.assert_close(layer_norm(x, weight, bias, eps), torch.tensor(expected), atol=1e-12, rtol=0)


def test_without_gain_and_by_default_eps_is_1e_5():
    x = draw(4, 6, scale=1e-3)  # small, so that eps matters
    ones, zeros = np.ones(6), np.zeros(6)
    torch.testing.assert_close(rms_norm(x, None), torch.tensor(rms_oracle(x.numpy(), ones, 1e-5)), atol=1e-12, rtol=0)
    expected = torch.tensor(layer_oracle(x.numpy(), ones, zeros, 1e-5))
    torch.testing.assert_close(layer_norm(x, None), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_every_dtype_is_rounded_once(dtype, scale):
    """At 1e3 a square overflows float16; the error must stay that of rounding the exact result."""
    x = draw(64, 96, scale=scale, dtype=dtype)
    weight = draw(96, dtype=dtype) + 1
    bias = draw(96, dtype=dtype)
    eps = 1e-5
    pairs = (
        (rms_norm(x, weight, eps), rms_oracle(x.double().numpy(), weight.double().numpy(), eps)),
        (
            layer_norm(x, weight, bias, eps),
            layer_oracle(x.double().numpy(), weight.double().numpy(), bias.double().numpy(), eps),
        ),
    )
    for actual, expected in pairs:
        assert actual.dtype == dtype
        ulp = torch.finfo(dtype).eps
        slack = 1.01 * ulp / 2 if dtype in (torch.float16, torch.bfloat16) else 8 * ulp
        torch.testing.assert_close(actual.double(), torch.tensor(expected), atol=slack, rtol=slack)


def test_a_float32_gain_is_not_rounded_to_half():
    x, weight = draw(8, 32, dtype=torch.float16), (draw(32) + 1).float()
    expected = torch.tensor(rms_oracle(x.double().numpy(), weight.double().numpy(), 1e-5))
    actual = rms_norm(x, weight)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.double(), expected, atol=6e-4, rtol=5.1e-4)


def test_gradients():
    x, weight, bias = (a.requires_grad_() for a in (draw(3, 5), draw(5) + 1.0, draw(5) + 0.5))
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(layer_norm, (x, weight, bias))


def test_zero_vectors_have_finite_gradients():
    x = torch.zeros(2, 4, requires_grad=True)
    rms_norm(x, torch.ones(4)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1e-5**-0.5))


def test_wide_dtype():
    assert [at_least_float32(d) for d in DTYPES] == [torch.float64, torch.float32, torch.float32, torch.float32]


def test_mistakes_are_one_line():
    with pytest.raises(ValueError, match=r"^rms_norm: d = 4 in x but 3 in weight \( ?d\) = \(3,\)$"):
        rms_norm(torch.zeros(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"^layer_norm: d = 4 in x but 5 in bias \( ?d\) = \(5,\)$"):
        layer_norm(torch.zeros(2, 4), torch.ones(4), torch.ones(5))
    with pytest.raises(ValueError, match=r"^rms_norm: x must be of a floating dtype but is torch.int64$"):
        rms_norm(torch.zeros(2, 4, dtype=torch.long), torch.ones(4))


@pytest.mark.compile
def test_compiles_whole():
    compiled = torch.compile(
        lambda x, w: rms_norm(x, w) + layer_norm(x, w), fullgraph=True, dynamic=True, backend="eager"
    )
    for n in (3, 5):
        x, weight = draw(n, 8, dtype=torch.float32), torch.ones(8)
        torch.testing.assert_close(compiled(x, weight), rms_norm(x, weight) + layer_norm(x, weight))
