"""GELU by native code: its numbers and gradients, and everything that goes to PyTorch in its place."""

import gc

import pytest
import torch
import torch.nn.functional as F
from compilers import READY
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from polyhead.layers.feedforward import MlpLayer
from polyhead.ops.native import gelu, library

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
needs_compiler = pytest.mark.skipif(not READY, reason="no compiler")
ENOUGH = gelu.LEAST


def stock(x):
    return F.gelu(x, approximate="tanh")


def both(f, x, dout):
    """Output and gradient."""
    leaf = x.detach().requires_grad_()
    out = f(leaf)
    return [out.detach(), *torch.autograd.grad(out, leaf, dout)]


@pytest.fixture
def counted(monkeypatch):
    """How often native code was called, after its own check."""
    library.missing("gelu")
    calls = []
    run = library.call
    monkeypatch.setattr(library, "call", lambda *a: (calls.append(a[0]), run(*a)))
    return calls


def values(n, dtype=torch.float32):
    """Where it bends, both ends, and 0."""
    return torch.cat([torch.randn(n - 1001, dtype=dtype) * 2, torch.linspace(-30, 30, 1001, dtype=dtype)])


@needs_compiler
@pytest.mark.parametrize("n", [ENOUGH, ENOUGH + 1, ENOUGH + 15, 2 * ENOUGH + 7])
def test_its_error_is_no_larger_than_that_of_pytorch(n, counted):
    x, dout = values(n), torch.randn(n)
    exact = both(stock, x.double(), dout.double())
    for mine, theirs, truth in zip(both(gelu.gelu_tanh, x, dout), both(stock, x, dout), exact, strict=True):
        own, other = ((a - truth).abs() for a in (mine, theirs))
        assert own.norm() <= 1.2 * other.norm()
        assert own.max() <= 2 * other.max()
    assert counted == ["gelu", "gelu"]


@needs_compiler
def test_in_float64_it_is_the_equation(monkeypatch):
    """The tests' own build has exp of the C library, so only the equation is left to be wrong."""
    monkeypatch.setitem(library.NUMBERS, torch.float64, torch.float64)
    x, dout = values(ENOUGH + 5, torch.float64), torch.randn(ENOUGH + 5, dtype=torch.float64)
    for mine, truth in zip(both(gelu.gelu_tanh, x, dout), both(stock, x, dout), strict=True):
        assert_close(mine, truth, rtol=1e-12, atol=1e-13)
    assert gelu.takes(x, x.numel())


SHAPES = [(64, 256), (3, 8000), (1, 2 * ENOUGH + 3), (1000, 19), (70, 16, 17)]
"""Of x, whose last dimension is that of the bias: rows of whole vectors and others, many and one, longer than a job."""


def learned(f, x, bias, dout):
    """Output and both gradients."""
    leaves = [x.detach().requires_grad_(), bias.detach().requires_grad_()]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bias_is_added_and_learns(shape, threads, counted):
    x, dout, bias = 2 * torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        mine = learned(gelu.gelu_tanh, x, bias, dout)
    finally:
        torch.set_num_threads(before)
    theirs = learned(lambda x, bias: stock(x + bias), x, bias, dout)
    exact = learned(lambda x, bias: stock(x + bias), x.double(), bias.double(), dout.double())
    for own, other, truth in zip(mine, theirs, exact, strict=True):
        assert (own - truth).norm() <= 2 * (other - truth).norm()
    assert counted == ["gelu", "gelu"]


@needs_compiler
def test_the_equation_with_a_bias_in_float64(monkeypatch):
    monkeypatch.setitem(library.NUMBERS, torch.float64, torch.float64)
    for shape in SHAPES:
        x, dout, bias = (torch.randn(size, dtype=torch.float64) for size in (shape, shape, shape[-1:]))
        mine, truth = (learned(f, x, bias, dout) for f in (gelu.gelu_tanh, lambda x, bias: stock(x + bias)))
        assert_close(mine, truth, rtol=1e-11, atol=1e-12)


@needs_compiler
def test_a_bias_that_learns_nothing_or_has_strides(counted):
    x, dout, wide = torch.randn(64, 256), torch.randn(64, 256), torch.randn(256, 3)
    assert_close(both(lambda x: gelu.gelu_tanh(x, wide[:, 1]), x, dout), both(lambda x: stock(x + wide[:, 1]), x, dout))
    column = wide.detach().requires_grad_()
    (gelu.gelu_tanh(x, column[:, 1]) * dout).sum().backward()
    assert_close(column.grad[:, 1], learned(lambda x, bias: stock(x + bias), x, wide[:, 1], dout)[2])
    assert len(counted) == 4


@needs_compiler
def test_small_results_keep_their_digits():
    """1 + tanh has lost all of them at -6: PyTorch says 0."""
    x = torch.linspace(-9, -4, ENOUGH)
    exact = x.double() * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3))
    assert ((gelu.gelu_tanh(x) - exact) / exact).abs().max() < 2e-5


@needs_compiler
def test_what_is_not_finite_or_huge():
    for value, out, slope in ((torch.inf, torch.inf, 1.0), (3e38, 3e38, 1.0), (-3e38, 0.0, None)):
        got = both(gelu.gelu_tanh, torch.full((ENOUGH,), value), torch.ones(ENOUGH))
        assert_close(got[0], torch.full((ENOUGH,), out))
        assert slope is None or (got[1] == slope).all()
    for value in (torch.nan, -torch.inf):  # as PyTorch's
        assert all(x.isnan().all() for x in both(gelu.gelu_tanh, torch.full((ENOUGH,), value), torch.ones(ENOUGH)))


@needs_compiler
def test_two_threads_compute_the_same_numbers():
    x, dout = values(5 * ENOUGH + 3), torch.randn(5 * ENOUGH + 3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(both(gelu.gelu_tanh, x, dout))
    finally:
        torch.set_num_threads(before)
    assert_close(*found, rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("dout", ["expanded", "transposed"])
def test_a_gradient_may_have_any_strides(dout, counted):
    x = torch.randn(128, 256)
    given = torch.randn(1, 1).expand(128, 256) if dout == "expanded" else torch.randn(256, 128).T
    assert_close(both(gelu.gelu_tanh, x, given), both(stock, x, given))
    assert len(counted) == 2


OTHERS = {
    "too few": lambda: torch.randn(ENOUGH - 1),
    "strides": lambda: torch.randn(256, 256).T,
    "float64": lambda: torch.randn(ENOUGH, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(ENOUGH).bfloat16(),
    "meta": lambda: torch.empty(ENOUGH, device="meta"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_tensors_go_to_pytorch(what, counted, monkeypatch):
    monkeypatch.delitem(library.NUMBERS, torch.float64, raising=False)
    x = OTHERS[what]()
    assert_close(both(gelu.gelu_tanh, x, torch.ones_like(x)), both(stock, x, torch.ones_like(x)), rtol=0, atol=0)
    assert not counted


def test_without_native_code_it_is_that_of_pytorch(monkeypatch):
    monkeypatch.setattr(library, "_LIBRARIES", {})
    monkeypatch.setenv("POLYHEAD_NATIVE", "0")
    x = torch.randn(ENOUGH)
    assert_close(both(gelu.gelu_tanh, x, x), both(stock, x, x), rtol=0, atol=0)


def squared(f):
    return lambda x: f(x).square().sum()


def bent(f):
    """With a bias that is made of the input, too: its derivatives count."""
    return lambda x: f(x, 2 * x.flatten()[:16]) if f is gelu.gelu_tanh else f(x + 2 * x.flatten()[:16])


def second(f, x):
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(squared(f)(x), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


def many(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, torch.stack([x, 2 * x]).detach(), is_grads_batched=True)[0]


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, 3 * x))).tangent


def again(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(checkpoint(squared(f), x, use_reentrant=False), x)[0]


MODES = {
    "second derivative": second,
    "many gradients at once": many,
    "forward mode": dual,
    "func.grad": lambda f, x: torch.func.grad(squared(f))(x),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(squared(f)))(x),
    "hessian": lambda f, x: torch.func.jvp(torch.func.grad(squared(f)), (x,), (x,))[1],
    "checkpoint": again,
}


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_derivative_is_right(mode):
    x = torch.randn(2, ENOUGH)
    assert_close(MODES[mode](gelu.gelu_tanh, x), MODES[mode](stock, x), rtol=1e-5, atol=1e-5)
    x = torch.randn(2, ENOUGH // 16, 16)
    assert_close(MODES[mode](bent(gelu.gelu_tanh), x), MODES[mode](bent(stock), x), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_what_it_saves_is_its_input_alone():
    """As PyTorch's: one tensor, which goes with the graph."""
    x = torch.randn(ENOUGH, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: saved.append(a) or a, lambda a: a):
        out = gelu.gelu_tanh(x)
    assert [a is x for a in saved] == [True]
    out.sum().backward()
    saved.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@needs_compiler
def test_the_feed_forward_layer_uses_it(counted):
    x = torch.randn(64, 32)
    MlpLayer(32, hidden=256, act="gelu_tanh")(x).sum().backward()
    assert counted == ["gelu", "gelu"]
    MlpLayer(32, hidden=256, act="gelu")(x).sum().backward()
    assert len(counted) == 2


def layers():
    """Two with the same parameters; the second one's activation is PyTorch's."""
    made = [MlpLayer(32, hidden=256, act="gelu_tanh") for _ in "ab"]
    made[1].load_state_dict(made[0].state_dict())
    made[1].act, made[1]._act = "other", stock
    torch.nn.init.normal_(made[0].up.bias)
    made[1].up.bias.data.copy_(made[0].up.bias)
    return made


def gradients(layer, x):
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@needs_compiler
def test_the_layer_with_the_bias_apart_is_the_same_layer(counted):
    mine, plain = layers()
    x = torch.randn(4, 32, 32)
    assert_close(gradients(mine, x), gradients(plain, x), rtol=1e-4, atol=1e-5)
    assert counted == ["gelu", "gelu"]


HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_first_map_are_called(hook):
    mine, _ = layers()
    called = []
    getattr(mine.up, hook)(lambda module, *_: called.append(module))
    mine(torch.randn(64, 32, requires_grad=True)).sum().backward()
    assert called == [mine.up]


def test_a_map_of_another_kind_is_called():
    mine, plain = layers()
    x = torch.randn(64, 32)
    mine.up = torch.nn.Sequential(mine.up, torch.nn.Identity())
    mine.up.in_features = 32
    assert_close(mine(x), plain(x))


@needs_compiler
def test_a_layer_without_bias():
    mine = MlpLayer(32, hidden=256, act="gelu_tanh", bias=False)
    x = torch.randn(64, 32)
    assert_close(mine(x), mine.down(stock(mine.up(x))))


@needs_compiler
def test_under_autocast_it_computes_what_arrives(counted):
    (mine, plain), x = layers(), torch.randn(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(mine(x), plain(x), rtol=0, atol=0)
        assert mine._hidden(x).dtype == torch.bfloat16
        assert not counted
        assert gelu.gelu_tanh(torch.randn(ENOUGH)).dtype == torch.float32
    assert counted


@pytest.mark.compile
def test_a_compiled_or_exported_layer_has_pytorchs_own():
    made, x = MlpLayer(32, hidden=256, act="gelu_tanh"), torch.randn(64, 32)
    assert_close(torch.compile(made, fullgraph=True, backend="aot_eager")(x), made(x), rtol=1e-5, atol=1e-6)
    exported = torch.export.export(made, (x,))
    assert "aten.gelu.default" in str(exported.graph)
    assert_close(exported.module()(x), made(x), rtol=1e-5, atol=1e-6)
