"""Every implementation of every op, under every transform of PyTorch, with masks that change between calls.

A transform sees a call that hides nothing, then gets one that hides keys: by a mask, by -inf in a bias, by the edges of
packed sequences.  It gives the reference's output, or is refused in one line.  None keeps what its example hid.
"""

import pytest
import torch
from problems import make_arguments, make_problem
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from polyhead.ops.registry import IMPLS, resolve

T = 6
PAIRS = [(op, impl) for op, impls in IMPLS.items() for impl in ("auto", *impls) if impl not in ("triton", "native")]
"""Kernels run in their interpreter elsewhere; native code takes no float64, and shares its rules with "blocked"."""

OPTIONS = {"state": {"normalise": "identity", "act": "identity"}}
LIMITS = {
    "mask": (torch.ones(2, 1, 1, T, dtype=torch.bool), torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]])),
    "bias": (torch.zeros(4, 2 * T - 1, dtype=torch.float64), torch.arange(2 * T - 1) % 3),
    "cu_seqlens": (torch.tensor([0, T, T], dtype=torch.int32), torch.tensor([0, 2, T], dtype=torch.int32)),
}
"""What hides keys -> a value that hides nothing, and what the other value is made of."""


def values_of(name):
    """A value that hides nothing, and one that hides some keys."""
    nothing, other = LIMITS[name]
    if name == "mask":
        other = other.bool()[:, None, None]
    elif name == "bias":
        other = torch.zeros(4, 2 * T - 1, dtype=torch.float64).masked_fill(other == 1, -torch.inf)
    return nothing, other


class Attention(torch.nn.Module):
    """An op as a module of its first tensor and of what hides keys."""

    def __init__(self, op, impl, name):
        super().__init__()
        self.function, self.name, self.options = resolve(op, impl), name, OPTIONS.get(impl, {})
        torch.manual_seed(0)
        qkv, _ = make_problem(T, T, b=1 if name == "cu_seqlens" else 2)
        self.q, *self.others = (x.detach() for x in make_arguments(op, qkv))

    def forward(self, q, limit):
        return self.function(q, *self.others, **{self.name: limit}, **self.options)


def by_compile(module, q, limit):
    torch._dynamo.reset()
    return torch.compile(module, backend="eager", fullgraph=True)


def by_make_fx(module, q, limit):
    return make_fx(module)(q, limit)


def by_make_fx_on_fake_tensors(module, q, limit):
    return make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(q, limit)


def by_export(module, q, limit):
    return torch.export.export(module, (q, limit)).module()


def by_trace(module, q, limit):
    return torch.jit.trace(module, (q, limit), check_trace=False)


def by_vmap(module, q, limit):
    return lambda q, limit: torch.vmap(module, in_dims=(None, 0))(q, torch.stack([limit, limit]))[1]


def by_vmap_over_queries(module, q, limit):
    return lambda q, limit: torch.vmap(module, in_dims=(0, None))(torch.stack([q, q]), limit)[1]


def by_jvp(module, q, limit):
    return lambda q, limit: torch.func.jvp(lambda q: module(q, limit), (q,), (q,))[0]


def by_gradient(module, q, limit):
    """The output as the derivative of its sum with a factor."""

    def scaled(factor, q, limit):
        return (factor * module(q, limit)).sum()

    def run(q, limit):
        factor = torch.ones_like(module(q, limit))
        return torch.func.grad(scaled)(factor, q, limit)

    return run


EAGER = [by_make_fx, by_make_fx_on_fake_tensors, by_vmap, by_vmap_over_queries, by_jvp, by_gradient]
COMPILED = [by_compile, by_export, by_trace]


def check(transform, op, impl, name):
    """The output for both values, or a refusal in one line."""
    module, plain = Attention(op, impl, name), Attention(op, "reference", name)
    plain.options = module.options
    nothing, other = values_of(name)
    expected = [plain(module.q, limit) for limit in (nothing, other)]
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    try:
        transformed = transform(module, module.q, nothing)
        outputs = [transformed(module.q, limit) for limit in (nothing, other)]
    except (ValueError, torch._dynamo.exc.Unsupported) as error:  # Dynamo wraps the refusal in its own words
        assert f"impl '{impl}' takes" in str(error)  # noqa: PT017
        assert isinstance(error, torch._dynamo.exc.Unsupported) or "\n" not in str(error)  # noqa: PT017
        return
    assert_close(outputs, expected, rtol=1e-6, atol=1e-6)  # a trace rounds scales to float32


pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:torch.searchsorted"),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize(("op", "impl"), PAIRS)
@pytest.mark.parametrize("transform", EAGER)
def test_a_transform_reads_what_hides_keys(transform, op, impl, name):
    check(transform, op, impl, name)


@pytest.mark.thinned(3)
@pytest.mark.compile  # where annotations are not checked: traced sizes are tensors
@pytest.mark.parametrize(("op", "impl"), PAIRS)
@pytest.mark.parametrize("transform", COMPILED)
def test_recorded_code_reads_what_hides_keys(transform, op, impl):
    for name in LIMITS:
        check(transform, op, impl, name)
