"""Feed-forward layers against explicit matrices; the mixture of experts against a loop over tokens."""

import functools
import math

import pytest
import torch
from gradients import same_with_gradients
from problems import draw
from refusals import refused

from polyhead.layers.feedforward import MixtureOfExperts, MlpLayer, SwigluLayer

ACTS = {
    "identity": lambda a: a,
    "relu": lambda a: a * (a > 0),
    "gelu": lambda a: a * 0.5 * (1 + torch.erf(a / math.sqrt(2))),
    "gelu_tanh": lambda a: a * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "silu": lambda a: a / (1 + torch.exp(-a)),
}


def randomise(module):
    """All parameters, so that no bias is zero."""
    for i, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(draw(*parameter.shape, seed=i) / parameter.shape[-1] ** 0.5)
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_an_mlp_is_its_equation(act, bias):
    mlp = randomise(MlpLayer(6, 10, act=act, bias=bias, dtype=torch.float64))
    x = draw(2, 3, 6, seed=9)
    up, down = (mlp.up.bias, mlp.down.bias) if bias else (0, 0)
    expected = ACTS[act](x @ mlp.up.weight.T + up) @ mlp.down.weight.T + down
    torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=0)
    mlp.up = torch.nn.Sequential(mlp.up)  # a wrapper, which has no in_features
    torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=0)
    assert len(list(mlp.parameters())) == (4 if bias else 2)
    assert MlpLayer(6).up.weight.shape == (24, 6)


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_is_its_equation_and_64_divides_its_width(bias):
    swiglu = randomise(SwigluLayer(6, 10, bias, dtype=torch.float64))
    assert [tuple(layer.weight.shape) for layer in (swiglu.w1, swiglu.w2, swiglu.w3)] == [(10, 6), (6, 10), (10, 6)]
    x = draw(2, 3, 6, seed=9)
    b1, b2, b3 = (layer.bias if bias else 0 for layer in (swiglu.w1, swiglu.w2, swiglu.w3))
    gate, value = ACTS["silu"](x @ swiglu.w1.weight.T + b1), x @ swiglu.w3.weight.T + b3
    expected = (gate * value) @ swiglu.w2.weight.T + b2
    torch.testing.assert_close(swiglu(x), expected, atol=1e-12, rtol=0)
    swiglu.w1 = torch.nn.Sequential(swiglu.w1)
    torch.testing.assert_close(swiglu(x), expected, atol=1e-12, rtol=0)
    assert len(list(swiglu.parameters())) == (6 if bias else 3)
    assert SwigluLayer(8).w1.bias is None
    assert [SwigluLayer(dim).w1.out_features for dim in (1, 64, 100, 1600)] == [64, 192, 256, 4288]


def experts_oracle(moe, x):
    """Token by token, expert by expert: the output, and the balance of the load."""
    out = torch.zeros_like(x)
    load, mean = (torch.zeros(moe.experts, dtype=x.dtype) for _ in range(2))
    for n, token in enumerate(x):
        scores = moe.gate.weight @ token
        chosen = sorted(range(moe.experts), key=lambda i: -scores[i].item())[: moe.top_k]
        total = sum(torch.exp(scores[i]) for i in chosen)
        for i in chosen:
            hidden = moe.up[i] @ token + (0 if moe.up_bias is None else moe.up_bias[i])
            y = moe.down[i] @ ACTS[moe.act](hidden) + (0 if moe.down_bias is None else moe.down_bias[i])
            out[n] += torch.exp(scores[i]) / total * y
            load[i] += 1 / moe.top_k / len(x)
        mean += torch.exp(scores) / torch.exp(scores).sum() / len(x)
    return out, moe.experts * (load * mean).sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "act"), [(4, 2, "gelu"), (5, 1, "relu"), (3, 3, "silu"), (1, 1, "gelu_tanh")]
)
def test_experts_by_the_definition(experts, top_k, act, bias):
    moe = randomise(MixtureOfExperts(6, experts, top_k, 10, act, bias, dtype=torch.float64))
    x = draw(11, 6, seed=9).requires_grad_()
    expected, balance = experts_oracle(moe, x)
    same_with_gradients(moe(x), expected, [x, *moe.parameters()])
    assert abs(moe.balance_loss.item() - balance.item()) < 1e-12
    folded = draw(2, 5, 3, 6, seed=8)
    expected, _ = experts_oracle(moe, folded.view(-1, 6))
    torch.testing.assert_close(moe(folded).view(-1, 6), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(moe(x[0]), moe(x)[0], atol=1e-12, rtol=0)
    (towards_even,) = torch.autograd.grad(moe.balance_loss, moe.gate.weight)
    assert towards_even.any() == (experts > 1)
    moe.gate = torch.nn.Sequential(moe.gate)
    torch.testing.assert_close(moe(folded).view(-1, 6), expected, atol=1e-12, rtol=0)


def test_autocast_chooses_the_same_experts():
    """Rounded to bfloat16, the scores of a hundredth of these tokens are equal or have another order."""
    moe, x = MixtureOfExperts(16, 8, 1), draw(4000, 16, dtype=torch.float32)
    with torch.no_grad():
        largest = moe(x).abs().max()
        for tokens in (x, x.bfloat16()):
            moe(tokens.float())
            balance = moe.balance_loss
            with torch.autocast("cpu", torch.bfloat16):
                output = moe(tokens)
            assert moe.balance_loss == balance
            assert ((moe(tokens.float()) - output).abs().amax(1) < 0.1 * largest).all()


def test_mistakes_are_one_line():
    refused(lambda: MlpLayer(4, act="gelus"), r"unknown act 'gelus'; did you mean 'gelu'\?")
    refused(lambda: MixtureOfExperts(4, 4, 5), r"^MixtureOfExperts: top_k must be 1 to 4 \(experts\) but is 5$")
    for kind in (MlpLayer, SwigluLayer, MixtureOfExperts):
        call = functools.partial(kind(16), torch.randn(3, 8))
        refused(call, rf"^{kind.__name__}: m = 16 but x \(\.\.\. m\) = \(3, 8\)$")
