"""Masks that change between calls, under every transform of PyTorch: none keeps the mask of its example."""

import pytest
import timm_like
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat.torch_mha import drop_in

F64 = torch.float64
MIXED = [ph.Softmax(2), ph.Hyla(2)]
X = torch.randn(2, 4, 12, dtype=F64, generator=torch.Generator().manual_seed(0))
NOTHING_HIDDEN = torch.zeros(2, 4, dtype=torch.bool)
HIDDEN = torch.tensor([[False, False, True, False], [False, True, False, True]])


class Layer(nn.Module):
    """Our own layer, with a mask that is True at hidden keys."""

    def __init__(self):
        super().__init__()
        self.attention = ph.MultiHeadAttention(12, MIXED, dtype=F64)

    def forward(self, x, hidden):
        return self.attention(x, mask=~hidden[:, None, None])


class DropIn(nn.Module):
    """Our drop-in, with PyTorch's key_padding_mask, Boolean or added to the scores."""

    def __init__(self, is_added=False):
        super().__init__()
        self.is_added = is_added
        self.attention = drop_in(nn.MultiheadAttention(12, 4, batch_first=True, dtype=F64), MIXED)

    def forward(self, x, hidden):
        mask = torch.zeros_like(hidden, dtype=F64).masked_fill(hidden, -torch.inf) if self.is_added else hidden
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


class Timm(nn.Module):
    """The docs' subclass of timm's attention."""

    def __init__(self):
        super().__init__()
        self.attention = timm_like.Attention(12, 4).to(F64)
        timm_like.snippet()["swap"](self)

    def forward(self, x, hidden):
        return self.attention(x, attn_mask=~hidden[:, None, None])


DOORS = {"layer": Layer, "drop-in": DropIn, "drop-in, added": lambda: DropIn(is_added=True), "timm": Timm}


@pytest.fixture(params=DOORS)
def model(request):
    torch.manual_seed(0)
    return DOORS[request.param]().eval()


def assert_masks_are_read(model, transformed, tolerance=1e-9):
    """The transform, which saw a mask that hides nothing, gives the model's outputs for other masks, too."""
    expected = [model(X, hidden) for hidden in (NOTHING_HIDDEN, HIDDEN)]
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    for hidden, output in zip((NOTHING_HIDDEN, HIDDEN), expected, strict=True):
        assert_close(transformed(X, hidden), output, rtol=tolerance, atol=tolerance)


@pytest.mark.compile  # where annotations are not checked: traced sizes are tensors
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_jit_trace(model):
    traced = torch.jit.trace(model, (X, NOTHING_HIDDEN), check_trace=False)
    assert_masks_are_read(model, traced, tolerance=1e-6)  # scales are rounded to float32


def test_make_fx(model):
    assert_masks_are_read(model, make_fx(model)(X, NOTHING_HIDDEN))


def test_make_fx_with_fake_tensors(model):
    assert_masks_are_read(model, make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(X, NOTHING_HIDDEN))


def test_export(model):
    assert_masks_are_read(model, torch.export.export(model, (X, NOTHING_HIDDEN)).module())


@pytest.mark.compile
def test_compile(model):
    torch._dynamo.reset()
    assert_masks_are_read(model, torch.compile(model, fullgraph=True, backend="eager"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_masks(model):
    masks = torch.stack([NOTHING_HIDDEN, HIDDEN])
    with torch.no_grad():
        outputs = torch.vmap(model, in_dims=(None, 0))(X, masks)
    for hidden, output in zip(masks, outputs, strict=True):
        assert_close(output, model(X, hidden), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_jvp(model):
    tangent = torch.ones_like(X)
    for hidden in (NOTHING_HIDDEN, HIDDEN):
        output, slope = torch.func.jvp(lambda x, hidden=hidden: model(x, hidden), (X,), (tangent,))
        assert_close(output, model(X, hidden), rtol=1e-9, atol=1e-9)
        shifted = [model(X + step * tangent, hidden) for step in (1e-6, -1e-6)]
        assert_close(slope, (shifted[0] - shifted[1]) / 2e-6, rtol=1e-4, atol=1e-6)
