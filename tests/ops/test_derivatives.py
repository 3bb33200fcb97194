"""Derivatives in other ways than a backward pass: torch.func, forward mode, compiled or not, at every size.

A custom op has no tangent, and PyTorch then takes it for 0; so whatever is asked must be right, or refused.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from compilers import IMPLS
from rules import KERNELS_RUN
from some import some
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops import cross_entropy
from polyhead.ops.registry import OPS, resolve

pytestmark = [  # torch's own: it scripts rules of forward mode, a Jacobian of a fused kernel takes row after row
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
OWN = ("blocked", "triton", "native")
"""Impls of custom ops."""
LATE = ("rows at once", "gradients by vmap")
"""Ways of which a call knows nothing, but its backward pass does."""


def tensors_of(op, arguments, problem, t):
    """The tensors of a small call, which require no gradient."""
    qkv, _ = problem(t, t, b=1, h=2, g=1, d=2, e=2)
    return [x.detach() for x in arguments(op, qkv, r=2, p=1)]


def derivatives(run, x):
    """All ways to derivatives of a function of one tensor: name, and a call that computes it."""
    torch.manual_seed(1)
    tangent = torch.randn_like(x)
    cotangent = torch.randn(run(x).shape, dtype=x.dtype)

    def loss(x):
        return (run(x) * cotangent).sum()

    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent))).tangent

    def gradients_by_vmap():
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        cotangents = torch.stack([cotangent, -2 * cotangent])
        return vmap(lambda row: torch.autograd.grad(out, leaf, row, retain_graph=True))(cotangents)

    yield "jvp", lambda: jvp(run, (x,), (tangent,))
    yield "forward_ad", lambda: dual(x)
    yield "grad", lambda: grad(loss)(x)
    yield "vjp", lambda: vjp(run, x)[1](cotangent)
    yield "jacrev", lambda: jacrev(run)(x)
    yield "jacfwd", lambda: jacfwd(run)(x)
    yield "hessian", lambda: hessian(loss)(x)
    yield "vmap of grad", lambda: vmap(grad(loss))(torch.stack([x, tangent]))
    yield "grad of vmap", lambda: grad(lambda xs: vmap(loss)(xs).sum())(torch.stack([x, tangent]))
    yield "vmap", lambda: vmap(run)(torch.stack([x, tangent]))
    yield "rows at once", lambda: torch.autograd.functional.jacobian(run, x, vectorize=True)
    yield "gradients by vmap", lambda: gradients_by_vmap()
    yield "jvp of grad", lambda: jvp(grad(loss), (x,), (tangent,))


def assert_same_derivatives(run, reference, x):
    """A kernel that "auto" chose learns of many gradients only in its backward pass, and refuses them there."""
    for (name, compute), (_, compute_expected) in zip(derivatives(run, x), derivatives(reference, x), strict=True):
        try:
            result = compute()
        except RuntimeError as error:
            assert name in LATE
            assert "takes no batched gradients; use impl='reference' or torch.func" in str(error)  # noqa: PT017
            continue
        assert_close(result, compute_expected(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def _worth_it(monkeypatch):
    """ "auto" treats small calls as it treats large ones."""
    for op, impls in IMPLS.items():
        for impl in impls:
            if impl != "reference":
                monkeypatch.setattr(OPS[op].backends[impl], "preferred", lambda call: True)


@pytest.mark.usefixtures("_worth_it")
@pytest.mark.parametrize("op", IMPLS)
def test_every_way_to_a_derivative_is_that_of_the_reference(problem, arguments, op):
    q, *others = tensors_of(op, arguments, problem, 3)

    def attention(impl):
        return lambda q: resolve(op, impl)(q, *others, causal=True)

    assert_same_derivatives(attention("auto"), attention("reference"), q)


@pytest.mark.parametrize(("op", "impl"), [(op, impl) for op, impls in IMPLS.items() for impl in impls if impl in OWN])
def test_custom_ops_refuse_in_one_line(problem, arguments, op, impl):
    if impl == "triton" and not KERNELS_RUN:
        pytest.skip("needs triton's interpreter")
    q, *others = tensors_of(op, arguments, problem, 2)
    message = f"impl '{impl}' takes no vmap, derivatives of torch.func or forward mode; use impl='auto' or 'reference'$"
    late_message = f"impl '{impl}' takes no batched gradients; use impl='reference' or torch"
    for name, derivative in some(derivatives(lambda q: resolve(op, impl)(q, *others, causal=True), q)):
        kind, text = (RuntimeError, late_message) if name in LATE else (ValueError, message)
        with pytest.raises(kind, match=text):
            derivative()
    # What shows in the backward pass: forward mode around it, and a second one.
    out = resolve(op, impl)(q.requires_grad_(), *others, causal=True)
    message = f"impl '{impl}' has no derivative of its gradient; use impl='reference' or torch"
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(out, q, cotangent, retain_graph=True)
    slope = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"impl '{impl}' has no second derivative; use impl='reference' or torch"):
        torch.autograd.grad(slope.sum(), q)


def test_fused_kernels_know_one_derivative(problem):
    """One in reverse mode, that of the reference; anything else is refused."""
    (q, k, v), _ = problem(3, 3)
    q, k, v = (x.detach() for x in (q, k, v))

    def fused(q):
        return ops.softmax_attention(q, k, v, impl="sdpa")

    def reference(q):
        return ops.softmax_attention(q, k, v, impl="reference")

    message = "impl 'sdpa' takes no derivatives in forward mode, of derivatives or under vmap; use impl='auto' or 'refe"
    refused = []
    for (name, derivative), (_, compute_expected) in zip(derivatives(fused, q), derivatives(reference, q), strict=True):
        try:
            assert_close(derivative(), compute_expected())
        except ValueError as error:
            assert message in str(error)  # noqa: PT017
            refused.append(name)
    assert refused == ["jvp", "forward_ad", "jacfwd", "hessian", "vmap of grad", "grad of vmap", "jvp of grad"]


@pytest.mark.parametrize("block", [14, 1000])
def test_entropies_have_all_derivatives(monkeypatch, block):
    monkeypatch.setattr(cross_entropy, "BLOCK", block)
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 3])
    assert_same_derivatives(
        lambda x: ops.chunked_cross_entropy(x, weight, None, targets, factor=0.5),
        lambda x: F.cross_entropy(0.5 * x @ weight.T, targets, reduction="none"),
        x,
    )
    with pytest.raises(ValueError, match="targets must be 0 to 6, got 9"):
        grad(lambda x: ops.chunked_cross_entropy(x, weight, None, targets + 3).sum())(x)


@pytest.mark.compile
def test_compiled_functions_know_too(problem):
    """Whether the transform is within the graph or around it."""
    torch._dynamo.reset()
    (q, k, v), _ = problem(4, 4, b=1 << 14, h=2, g=1, d=1, e=1)
    q, k, v = (x.detach() for x in (q, k, v))  # as large as tiles want

    def run(q):
        return ops.hyla(q, k, v)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    tangent = torch.randn_like(q)
    expected = jvp(lambda q: ops.hyla(q, k, v, impl="reference"), (q,), (tangent,))
    compiled(q)
    with forward_ad.dual_level(), contextlib.suppress(torch._dynamo.exc.Unsupported):  # torch 2.14 refuses it itself
        assert_close(forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, tangent))).tangent, expected[1])
    assert_close(compiled(q), expected[0])
    compiled_jvp = torch.compile(lambda q: jvp(run, (q,), (tangent,)), fullgraph=True, backend="eager")
    assert_close(compiled_jvp(q), expected)
