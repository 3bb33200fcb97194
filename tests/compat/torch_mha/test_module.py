"""PyTorch's layers with the drop-in in place of nn.MultiheadAttention: outputs, taps, parameters, mistakes."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from refusals import refusing
from torch import nn
from torch.testing import assert_close
from torch_attention import DIM, F64, B, S, T, pair

import polyhead as ph
from polyhead.analysis import codes
from polyhead.compat.torch_mha import MultiheadAttention, capture, drop_in, replace

HYLA = [ph.Softmax(2), ph.Hyla(2)]
RELATIONAL = [ph.Softmax(2), ph.Relational(2)]
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
LIMITS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "pairs": {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "both": {
        "src_mask": torch.ones(5, 5, dtype=torch.bool).triu(2),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False] + [True] * 2 + [False] * 2]),
    },
}


@pytest.fixture
def forward_calls():
    """Calls of our modules: a hook would switch PyTorch's fast path off by itself."""
    forward = MultiheadAttention.forward
    with mock.patch.object(MultiheadAttention, "forward", autospec=True, side_effect=forward) as called:
        yield called


def layer(**options):
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)


def encoder(**options):
    return nn.TransformerEncoder(layer(dtype=F64, **options), 2)


def replaced(model, heads=None, *, count):
    """A copy with other heads."""
    copied = copy.deepcopy(model)
    assert replace(copied, heads) == count
    return copied


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("mask", LIMITS)
def test_an_encoder_layer_runs_our_forward(forward_calls, mask, training):
    """For inference PyTorch calls no attention module of its own: its fast path computes the layer as one."""
    reference = layer(dropout=0.0).train(training)
    model = replaced(reference, count=1)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = reference(x, **LIMITS[mask])
        assert not forward_calls.called
        assert_close(model(x, **LIMITS[mask]), expected, rtol=1e-6, atol=1e-6)
        assert forward_calls.call_count == 1
    gradients = []
    for module in (model, reference):
        loss = module(x, **LIMITS[mask]).sin().sum()
        gradients.append(torch.autograd.grad(loss, list(module.parameters())))
    assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_an_encoder_with_padding_runs_our_forward_in_all_layers(forward_calls):
    """There PyTorch nests the sequences, without their padding, for its fused layers."""
    reference = nn.TransformerEncoder(layer(), 2).eval()
    model, x = replaced(reference, count=2), torch.randn(2, 5, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*nested tensors")  # said once in a process, here or before
        expected = reference(x, src_key_padding_mask=PADDING)
        y = model(x, src_key_padding_mask=PADDING)
        assert forward_calls.call_count == 2
        assert_close(y[~PADDING], expected[~PADDING], rtol=1e-5, atol=1e-6)
        model.use_nested_tensor = True  # as where layers are put in by hand
        with refusing("not nested: set enable_nested_tensor=False"):
            model(x, src_key_padding_mask=PADDING)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # PyTorch's own, of its own module
def test_encoder_and_decoder(forward_calls):
    reference = nn.Transformer(12, 4, 1, 1, 16, dropout=0.0, dtype=F64)
    model = replaced(reference, count=3)
    sequences = torch.randn(S, B, 12, dtype=F64), torch.randn(T, B, 12, dtype=F64)
    hidden = torch.zeros(B, S, dtype=F64)
    hidden[0, 2:] = -torch.inf
    options = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(T, dtype=F64), "tgt_is_causal": True}
    options |= {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    assert_close(model(*sequences, **options), reference(*sequences, **options), rtol=1e-10, atol=1e-10)
    assert forward_calls.call_count == 3
    reference_taps, model_taps = capture(reference, *sequences, **options), capture(model, *sequences, **options)
    names = [taps.name.rpartition("layers.0.")[2] for taps in reference_taps]
    assert names == ["self_attn", "self_attn", "multihead_attn"]
    assert [taps.name for taps in model_taps] == [taps.name for taps in reference_taps]
    for expected, actual in zip(reference_taps, model_taps, strict=True):
        assert_close(expected.groups[0].code(), actual.groups[0].code(), rtol=1e-10, atol=1e-10)


# ----------------------------------------------------------------------------------------------------------------- taps
def test_the_fused_encoder_is_walked_layer_by_layer():
    """In eval mode PyTorch runs a whole encoder layer as one kernel that calls no attention module."""
    taps = capture(encoder(dropout=0.2).eval(), torch.randn(B, 5, 16, dtype=F64), src_key_padding_mask=PADDING)
    assert [layer_taps.name for layer_taps in taps] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert (codes(taps[1], 0, 4)[1] == 0).all()


def hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_capture_changes_nothing_even_after_an_error():
    model, x = encoder(dropout=0.2), torch.randn(B, 6, 16, dtype=F64)
    model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    assert torch.equal(capture(model, x)[1].output, capture(model, x)[1].output)  # no dropout
    with pytest.raises((AssertionError, RuntimeError)):
        capture(model, x[..., :5])
    assert [m.training for m in model.modules()] == modes
    assert not any(hooks(model))
    assert torch.backends.mha.get_fastpath_enabled()


# ----------------------------------------------------------------------------------------------------------- parameters
def test_replace_keeps_the_parameters_themselves():
    model = nn.TransformerEncoder(layer(bias=False), 2, enable_nested_tensor=False)
    model.layers[1].self_attn = model.layers[0].self_attn  # one module, in two places
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    before = {name: id(p) for name, p in model.named_parameters()}
    model.layers[0].eval()
    assert replace(model, HYLA) == 1
    assert model.layers[0].self_attn is model.layers[1].self_attn
    assert not model.layers[0].self_attn.training
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_replace_under_a_default_device_of_meta():
    with torch.device("meta"):
        model = nn.TransformerEncoder(layer(), 1)
        replace(model, RELATIONAL)
    reference = replaced(nn.TransformerEncoder(layer(), 1), RELATIONAL, count=1)
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    assert shapes == {name: x.shape for name, x in reference.state_dict().items()}
    assert all(x.is_meta for x in model.state_dict().values())
    x, hidden = torch.empty(2, 5, 16, device="meta"), PADDING.to("meta")
    for mask in (hidden, torch.empty(2, 5, device="meta")):
        assert model(x, src_key_padding_mask=mask).shape == x.shape


def test_relational_heads_take_the_rows_of_values_for_their_symbols():
    reference, _ = pair()
    module = drop_in(reference, RELATIONAL)
    assert torch.equal(module.in_proj_weight, reference.in_proj_weight[: 2 * DIM + 6])
    assert torch.equal(module.groups[1].value.weight, reference.in_proj_weight[2 * DIM + 6 :])
    assert torch.equal(module.groups[1].value.bias, reference.in_proj_bias[2 * DIM + 6 :])
    assert module.out_proj.weight is reference.out_proj.weight


# ------------------------------------------------------------------------------------------------------------- mistakes
class OwnAttention(nn.MultiheadAttention):
    """Computes something of its own."""

    def forward(self, query, key, value):
        return query, None


def polyhead_attention(**options):
    return MultiheadAttention(12, 4, **options)


def torch_attention(**options):
    return nn.MultiheadAttention(12, 4, **options)


def call(**options):
    qkv = {"query": torch.zeros(2, 5, 12), "key": torch.zeros(2, 5, 12), "value": torch.zeros(2, 5, 12)}
    polyhead_attention(batch_first=True)(**{**qkv, **options})


class Itself(nn.Module):
    """Self-attention as a model of one input."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0]


def capture_once(model):
    try:
        capture(model, torch.zeros(2, 3, 12))
    finally:
        assert not any(hooks(model))


MISTAKES = {
    "keys must be made of the inputs but add_bias_kv or add_zero_attn": lambda: polyhead_attention(add_bias_kv=True),
    "heads with symbols take no kdim and vdim": lambda: polyhead_attention(heads=ph.Relational(4), kdim=8),
    "network='sequence' reads all queries, so attn_mask would hide none": lambda: polyhead_attention(
        heads=ph.Pooled(4, network="sequence")
    )(*[torch.zeros(2, 5, 12)] * 3, attn_mask=torch.zeros(5, 5).bool()),
    "heads must add up to num_heads = 4, got 2": lambda: polyhead_attention(heads=ph.Hyla(2)),
    "inputs must be (b t m) or (t m), not nested": lambda: call(query=torch.zeros(12)),
    "key must have a last axis of 12 but is (2, 5, 11)": lambda: call(key=torch.zeros(2, 5, 11)),
    "is_causal says what attn_mask is, but attn_mask is None": lambda: call(is_causal=True),
    "attn_mask must be Boolean or floating of shape (5, 5) or (8, 5, 5) but is torch.int64 (5, 5)": lambda: call(
        attn_mask=torch.ones(5, 5).long()
    ),
    "but is torch.float32 (2, 5, 5)": lambda: call(attn_mask=torch.zeros(2, 5, 5)),
    "key_padding_mask must be Boolean or floating of shape (2, 5) but is torch.bool (1, 5)": lambda: call(
        key_padding_mask=torch.zeros(1, 5, dtype=torch.bool)
    ),
    "Sequential holds no nn.MultiheadAttention": lambda: replace(nn.Sequential(polyhead_attention()), ph.Hyla(4)),
    "drop_in takes one itself": lambda: replace(torch_attention()),
    "must have no hooks and no wrappers but is a OwnAttention": lambda: replace(nn.Sequential(OwnAttention(12, 4))),
    ", got 3, 3 and kv_heads 2": lambda: drop_in(torch_attention(), ph.Hyla(4, kv_heads=2)),
    "keys must be made of the inputs": lambda: capture_once(Itself(torch_attention(add_bias_kv=True))),
    "a OwnAttention must have the forward of nn.MultiheadAttention": lambda: capture_once(Itself(OwnAttention(12, 4))),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_clear_line(line):
    with refusing(line):
        MISTAKES[line]()
