"""GELU by native code: its numbers and gradients, and everything that goes to PyTorch in its place."""

import pytest
import torch
import torch.nn.functional as F
from compilers import READY
from torch.testing import assert_close

from polyhead.layers.feedforward import MlpLayer
from polyhead.ops.native import gelu, library

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
needs_compiler = pytest.mark.skipif(not READY, reason="no compiler")
ENOUGH = gelu.LEAST


def stock(x, bias=None):
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def learned(f, given, dout):
    """Output and gradients of x and, where there is one, of the bias."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.fixture
def counted(monkeypatch):
    """How often native code was called, after its own check."""
    library.missing("gelu")
    calls = []
    run = library.call
    monkeypatch.setattr(library, "call", lambda *a: (calls.append(a[0]), run(*a)))
    return calls


def values(n):
    """Where it bends, both ends, and 0."""
    return torch.cat([torch.randn(n - 1001) * 2, torch.linspace(-30, 30, 1001)])


LENGTHS = [ENOUGH, ENOUGH + 1, ENOUGH + 15, 5 * ENOUGH + 7]
SHAPES = [(64, 256), (3, 8000), (1, 2 * ENOUGH + 3), (1000, 19), (70, 16, 17)]
"""Of x, whose last dimension is that of the bias: rows of whole vectors and others, many and one, longer than a job."""
GIVEN = [(n, None) for n in LENGTHS] + [(shape, shape[-1]) for shape in SHAPES]


@needs_compiler
@pytest.mark.parametrize(("shape", "bias"), GIVEN)
def test_its_error_is_no_larger_than_that_of_pytorch(shape, bias, counted):
    """On two threads, too, where x and its gradient have the same numbers."""
    given = [values(shape)] if bias is None else [2 * torch.randn(shape), torch.randn(bias)]
    dout, times = torch.randn(shape), 1.2 if bias is None else 2
    exact = learned(stock, [x.double() for x in given], dout.double())
    mine, theirs = (learned(f, given, dout) for f in (gelu.gelu_tanh, stock))
    torch.set_num_threads(2)
    parted = learned(gelu.gelu_tanh, given, dout)
    assert_close(parted[:2], mine[:2], rtol=0, atol=0)
    for own, two, other, truth in zip(mine, parted, theirs, exact, strict=True):
        assert (own - truth).norm() <= times * (other - truth).norm()
        assert (two - truth).norm() <= times * (other - truth).norm()
        assert (own - truth).abs().max() <= 4 * (other - truth).abs().max()
    assert counted == ["gelu"] * 4


@needs_compiler
@pytest.mark.parametrize("layout", ["expanded", "transposed", "a column as bias", "a bias that learns nothing"])
def test_gradients_and_biases_may_have_any_strides(layout, counted):
    x, dout, wide = torch.randn(128, 256), torch.randn(128, 256), torch.randn(256, 3)
    dout = {"expanded": torch.randn(1, 1).expand(128, 256), "transposed": torch.randn(256, 128).T}.get(layout, dout)
    given = [x, wide] if layout == "a column as bias" else [x]
    column = {"a column as bias": lambda more: more[0][:, 1], "a bias that learns nothing": lambda _: wide[:, 1]}
    bias = column.get(layout, lambda _: None)
    mine, theirs = (learned(lambda x, *more, f=f: f(x, bias(more)), given, dout) for f in (gelu.gelu_tanh, stock))
    assert_close(mine, theirs)
    assert len(counted) == 2


@needs_compiler
def test_small_results_keep_their_digits():
    """1 + tanh has lost all of them at -6: PyTorch says 0."""
    x = torch.linspace(-9, -4, ENOUGH)
    exact = x.double() * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3))
    assert ((gelu.gelu_tanh(x) - exact) / exact).abs().max() < 2e-5


@needs_compiler
def test_what_is_not_finite_or_huge():
    for value, out, slope in ((torch.inf, torch.inf, 1.0), (3e38, 3e38, 1.0), (-3e38, 0.0, None)):
        got = learned(gelu.gelu_tanh, [torch.full((ENOUGH,), value)], torch.ones(ENOUGH))
        assert_close(got[0], torch.full((ENOUGH,), out))
        assert slope is None or (got[1] == slope).all()
    for value in (torch.nan, -torch.inf):  # as PyTorch's
        got = learned(gelu.gelu_tanh, [torch.full((ENOUGH,), value)], torch.ones(ENOUGH))
        assert all(x.isnan().all() for x in got)


OTHERS = {
    "too few": lambda: torch.randn(ENOUGH - 1),
    "strides": lambda: torch.randn(256, 256).T,
    "float64": lambda: torch.randn(ENOUGH, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(ENOUGH).bfloat16(),
    "meta": lambda: torch.empty(ENOUGH, device="meta"),
    "turned off": lambda: torch.randn(ENOUGH),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_tensors_go_to_pytorch(what, counted, monkeypatch):
    monkeypatch.delitem(library.NUMBERS, torch.float64, raising=False)
    if what == "turned off":
        monkeypatch.setattr(library, "_LIBRARIES", {})
        monkeypatch.setenv("POLYHEAD_NATIVE", "0")
    x = OTHERS[what]()
    assert_close(*(learned(f, [x], torch.ones_like(x)) for f in (gelu.gelu_tanh, stock)), rtol=0, atol=0)
    assert not counted


@needs_compiler
def test_what_it_saves_is_its_input_alone():
    x, saved = torch.randn(ENOUGH, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: saved.append(a) or a, lambda a: a):
        gelu.gelu_tanh(x)
    assert [a is x for a in saved] == [True]


# ----------------------------------------------------------------------------------------------- the feed-forward layer
def layers(bias=True):
    """Two with the same parameters; the second one's activation is PyTorch's."""
    made = [MlpLayer(32, hidden=256, act="gelu_tanh", bias=bias) for _ in "ab"]
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    made[1].load_state_dict(made[0].state_dict())
    made[1].act, made[1]._act = "other", stock
    return made


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_same_layer(counted, bias):
    """Its bias is added by native code."""
    made, x = layers(bias), torch.randn(4, 32, 32)
    found = [learned(lambda x, *_, layer=layer: layer(x), [x], torch.ones_like(x)) for layer in made]
    for layer in made:
        layer(x).square().sum().backward()
    assert_close(*found, rtol=1e-4, atol=1e-5)
    assert_close(*([p.grad for p in layer.parameters()] for layer in made), rtol=1e-4, atol=1e-4)
    assert counted == ["gelu"] * 4
    MlpLayer(32, hidden=256, act="gelu")(x)
    assert len(counted) == 4


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_of_the_first_map_are_called(hook):
    mine, _ = layers()
    called = []
    getattr(mine.up, hook)(lambda module, *_: called.append(module))
    mine(torch.randn(64, 32, requires_grad=True)).sum().backward()
    assert called == [mine.up]


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
