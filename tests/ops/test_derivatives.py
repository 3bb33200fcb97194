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
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
OWN = ("blocked", "triton", "native")
"""Impls of custom ops."""
LATE = ("rows at once", "gradients by vmap")
"""Ways of which a call knows nothing, but its backward pass does."""


def build(op, arguments, problem, t, s=None, p=1, **sizes):
    """The op as a function of its tensors by autograd's own names, and the tensors."""
    sizes = {"b": 1, "h": 2, "g": 1, "d": 2, "e": 2, **sizes}
    return [x.detach() for x in arguments(op, problem(t, s or t, **sizes)[0], r=2, p=p)]


def ways(run, x):
    """All ways to derivatives of a function of one tensor, each as a value."""
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
        many = torch.stack([cotangent, -2 * cotangent])
        return vmap(lambda one: torch.autograd.grad(out, leaf, one, retain_graph=True))(many)

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


def same_in_all_ways(mine, theirs, x):
    """A kernel that "auto" chose learns of many gradients only in its backward pass, and refuses them there."""
    for (name, came), (_, wanted) in zip(ways(mine, x), ways(theirs, x), strict=True):
        try:
            result = came()
        except RuntimeError as error:
            assert name in LATE
            assert "takes no batched gradients; use impl='reference' or torch.func" in str(error)  # noqa: PT017
            continue
        assert_close(result, wanted(), msg=lambda text, name=name: f"{name}: {text}")


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
    q, *rest = build(op, arguments, problem, 3)
    run, plain = (lambda q, impl=impl: resolve(op, impl)(q, *rest, causal=True) for impl in ("auto", "reference"))
    same_in_all_ways(run, plain, q)


@pytest.mark.parametrize(("op", "impl"), [(op, impl) for op, impls in IMPLS.items() for impl in impls if impl in OWN])
def test_custom_ops_refuse_in_one_line(problem, arguments, op, impl):
    if impl == "triton" and not (KERNELS_RUN):
        pytest.skip("needs triton's interpreter")
    q, *rest = build(op, arguments, problem, 2)
    told = f"impl '{impl}' takes no vmap, derivatives of torch.func or forward mode; use impl='auto' or 'reference'$"
    late = f"impl '{impl}' takes no batched gradients; use impl='reference' or torch.func$"
    for name, way in some(ways(lambda q: resolve(op, impl)(q, *rest, causal=True), q)):
        kind, text = (RuntimeError, late) if name in LATE else (ValueError, told)
        with pytest.raises(kind, match=text):
            way()
    # What shows in the backward pass: forward mode around it, and a second one.
    out = resolve(op, impl)(q.requires_grad_(), *rest, causal=True)
    told = f"impl '{impl}' has no derivative of its gradient; use impl='reference' or torch.func$"
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match=told):
            torch.autograd.grad(out, q, cotangent, retain_graph=True)
    slope = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(
        RuntimeError, match=f"impl '{impl}' has no second derivative; use impl='reference' or torch.func$"
    ):
        torch.autograd.grad(slope.sum(), q)


def test_fused_kernels_know_one_derivative(problem):
    """One in reverse mode, that of the reference; anything else is refused."""
    (q, k, v), _ = problem(3, 3)
    q, k, v = (x.detach() for x in (q, k, v))
    mine, plain = (lambda q, impl=impl: ops.softmax_attention(q, k, v, impl=impl) for impl in ("sdpa", "reference"))
    told = "impl 'sdpa' takes no derivatives in forward mode, of derivatives or under vmap; use impl='auto' or 'refe"
    refused = []
    for (name, way), (_, wanted) in zip(ways(mine, q), ways(plain, q), strict=True):
        try:
            assert_close(way(), wanted())
        except ValueError as error:
            assert told in str(error)  # noqa: PT017
            refused.append(name)
    assert refused == ["jvp", "forward_ad", "jacfwd", "hessian", "vmap of grad", "grad of vmap", "jvp of grad"]


@pytest.mark.parametrize("block", [14, 1000])
def test_entropies_have_all_derivatives(monkeypatch, block):
    monkeypatch.setattr(cross_entropy, "BLOCK", block)
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 3])
    same_in_all_ways(
        lambda x: ops.chunked_cross_entropy(x, weight, None, targets, factor=0.5),
        lambda x: F.cross_entropy(0.5 * x @ weight.T, targets, reduction="none"),
        x,
    )
    with pytest.raises(ValueError, match="targets must be 0 to 6 but 9 came"):
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
    wanted = jvp(lambda q: ops.hyla(q, k, v, impl="reference"), (q,), (tangent,))
    compiled(q)
    with forward_ad.dual_level(), contextlib.suppress(torch._dynamo.exc.Unsupported):  # torch 2.14 refuses it itself
        assert_close(forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, tangent))).tangent, wanted[1])
    assert_close(compiled(q), wanted[0])
    whole = torch.compile(lambda q: jvp(run, (q,), (tangent,)), fullgraph=True, backend="eager")
    assert_close(whole(q), wanted)
