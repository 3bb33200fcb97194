"""The code of nn.MultiheadAttention equals its attention weights, and value networks give its output."""

import dataclasses
import itertools

import pytest
import torch
import torch_masks
from torch import nn
from torch.testing import assert_close
from torch_mixed import MIXED, own_layer

import polyhead as ph
from polyhead.analysis import codes, embed, value_network
from polyhead.compat.torch_mha import MultiheadAttention, capture, replace

F64 = torch.float64
B, T, S, DIM, HEADS = 2, 4, 5, 12, 3
KINDS = {
    "self": {},
    "cross": {},
    "widths": {"kdim": 7, "vdim": 10},
    "no biases": {"bias": False},
}


def make(kind, batch_first=True):
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first, dropout=0.3, dtype=F64, **KINDS[kind])
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def inputs(kind):
    """query, key, value, batch first; in `cross` keys and values are different tensors."""
    torch.manual_seed(2)
    if kind in ("self", "no biases"):
        return (torch.randn(B, S, DIM, dtype=F64),) * 3
    k, v = KINDS[kind].get("kdim", DIM), KINDS[kind].get("vdim", DIM)
    return tuple(torch.randn(B, n, m, dtype=F64) for n, m in ((T, DIM), (S, k), (S, v)))


def masks(name, t):
    torch.manual_seed(3)
    return torch_masks.masks(name, B, t, S, HEADS)


def rebuilt(taps, sample, query):
    """A row of the layer's output: the sum of its value networks over keys."""
    total = 0 if taps.b_out is None else taps.b_out
    for j in range(taps.context.shape[1]):
        total = total + value_network(taps, query, j, sample=sample)(taps.context[sample, j])
    return total


@pytest.mark.parametrize("mask", torch_masks.MASKS)
@pytest.mark.parametrize(("kind", "batch_first"), list(itertools.product(KINDS, (True, False))))
def test_codes_and_value_networks_are_the_modules_own(kind, batch_first, mask):
    attention = make(kind, batch_first).eval()
    qkv = inputs(kind)
    options = masks(mask, qkv[0].shape[1])
    given = qkv if batch_first else [x.transpose(0, 1) for x in qkv]
    (taps,) = capture(attention, *given, need_weights=False, **options)
    with torch.no_grad():
        output, weights = attention(*given, need_weights=True, average_attn_weights=False, **options)
    output = output if batch_first else output.transpose(0, 1)
    assert_close(taps.groups[0].code(), weights, rtol=1e-12, atol=1e-12)
    pairs = [0, -1, 2], [1, 3, -1]
    assert_close(codes(taps, *pairs), weights[:, :, pairs[0], pairs[1]].transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert_close(taps.output, output, rtol=1e-12, atol=1e-12)
    assert_close(torch.stack([rebuilt(taps, b, 2) for b in range(B)]), output[:, 2], rtol=1e-9, atol=1e-9)
    assert torch.equal(taps.x, qkv[0])
    assert not any(x.requires_grad for x in (taps.q, taps.groups[0].w_out, taps.output))


def test_one_sequence_without_a_batch():
    attention = make("cross").eval()
    query, key, value = (x[0] for x in inputs("cross"))
    (taps,) = capture(attention, query, key, value=value)
    with torch.no_grad():
        output, weights = attention(query, key, value, average_attn_weights=False)
    assert_close(taps.groups[0].code()[0], weights, rtol=1e-12, atol=1e-12)
    assert_close(taps.output[0], output, rtol=1e-12, atol=1e-12)


def encoder(**options):
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.2, dtype=F64, **options)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # PyTorch's own, in the model's plain runs
def test_the_fused_encoder_is_walked_layer_by_layer():
    """In eval mode PyTorch runs a whole encoder layer as one kernel that calls no attention module."""
    model, x = encoder().eval(), torch.randn(B, 6, 16, dtype=F64)
    padding = torch.zeros(B, 6, dtype=torch.bool)
    padding[0, 4:] = True
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
    taps = capture(model, x, src_key_padding_mask=padding)
    assert [layer.name for layer in taps] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert (codes(taps[1], 0, 4)[0] == 0).all()
    first = model.layers[0]
    with torch.no_grad():
        y = first.norm1(x + taps[0].output)
        assert_close(taps[1].x, first.norm2(y + first.linear2(torch.relu(first.linear1(y)))), rtol=1e-9, atol=1e-9)
        assert torch.equal(model(x, src_key_padding_mask=padding), before)
    assert embed(codes(capture(model, torch.randn(9, 6, 16, dtype=F64))[1], -1, -1), "pca").shape == (9, 2)


def test_encoder_and_decoder_with_a_causal_hint():
    torch.manual_seed(5)
    model = nn.Transformer(12, 4, 1, 1, 16, batch_first=True, dtype=F64)
    source, target = torch.randn(B, S, 12, dtype=F64), torch.randn(B, T, 12, dtype=F64)
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=F64)
    taps = capture(model, source, target, tgt_mask=causal, tgt_is_causal=True)
    assert [layer.name.rpartition("layers.0.")[2] for layer in taps] == ["self_attn", "self_attn", "multihead_attn"]
    code = taps[1].groups[0].code()
    assert (code.triu(1) == 0).all()
    assert_close(code.sum(-1), torch.ones(B, 4, T, dtype=F64))
    with torch.no_grad():
        assert_close(taps[2].context, model.eval().encoder(source), rtol=1e-9, atol=1e-9)


def hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_nothing_is_changed_also_after_an_error():
    model, x = encoder(), torch.randn(B, 6, 16, dtype=F64)
    model.layers[1].eval()
    modes, state = [m.training for m in model.modules()], {n: p.clone() for n, p in model.state_dict().items()}

    def restored():
        assert [m.training for m in model.modules()] == modes
        assert not any(hooks(model))
        assert torch.backends.mha.get_fastpath_enabled()
        assert all(torch.equal(p, state[n]) for n, p in model.state_dict().items())

    first, again = capture(model, x), capture(model, x)
    assert torch.equal(first[1].output, again[1].output)  # no dropout
    restored()
    with pytest.raises((AssertionError, RuntimeError)):
        capture(model, x[..., :5])
    restored()


class OwnForward(nn.MultiheadAttention):
    def forward(self, query, key, value):
        return query, None


@pytest.mark.parametrize(
    ("make_model", "line"),
    [
        (lambda: nn.Linear(12, 12), "capture: Linear called none of 0 nn.MultiheadAttention"),
        (
            lambda: nn.Sequential(nn.MultiheadAttention(12, 3, add_bias_kv=True)),
            "capture: 0 must have keys that its inputs make but has add_bias_kv=True",
        ),
        (
            lambda: nn.MultiheadAttention(12, 3, add_zero_attn=True),
            "capture: MultiheadAttention must have keys that its inputs make but has add_zero_attn=True",
        ),
        (
            lambda: OwnForward(12, 3),
            "capture: OwnForward must run nn.MultiheadAttention.forward but OwnForward has its own",
        ),
    ],
)
def test_mistakes_are_one_clear_line(make_model, line):
    model = make_model()
    with pytest.raises(ValueError, match=r"^capture: ") as caught:
        capture(model, torch.zeros(2, 3, 12))
    assert str(caught.value) == line
    assert not any(hooks(model))


# ------------------------------------------------------------------------------------------------------ after `replace`
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MIXED)
def test_what_capture_sees_of_them_is_what_our_layer_taps(name, batch_first):
    torch.manual_seed(7)
    heads = MIXED[name]
    ours = MultiheadAttention(DIM, 4, heads=heads, dtype=F64, batch_first=batch_first)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer, wanted = own_layer(ours, heads), []
    x, context = torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)
    mask = torch.rand(T, S) < 0.7
    layer(x, context, mask=mask, taps=wanted)
    given = [a if batch_first else a.transpose(0, 1) for a in (x, context, context)]
    found = capture(nn.ModuleDict({"a": ours}).eval()["a"], *given, attn_mask=~mask, need_weights=False)
    assert len(found) == 1
    assert_same_taps(found[0], wanted[0])


def assert_same_taps(found, wanted):
    for field in ("x", "context", "output", "b_out"):
        assert_close(getattr(found, field), getattr(wanted, field).detach(), rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(found.groups, wanted.groups, strict=True):
        assert_close(mine.code(), theirs.code().detach(), rtol=1e-10, atol=1e-10)
        for field in dataclasses.fields(mine):
            one, other = getattr(mine, field.name), getattr(theirs, field.name)
            if field.name == "coder":
                one, other = (one.func, one.keywords), (other.func, other.keywords)  # partial functions have no ==
            assert type(one) is type(other) or isinstance(one, torch.Tensor), field.name
            if field.name not in ("bias", "mask") and isinstance(one, torch.Tensor):
                assert not one.requires_grad
                assert_close(one, other.detach(), rtol=1e-10, atol=1e-10)
            elif field.name not in ("bias", "mask"):
                assert one == other


def test_a_model_is_read_after_replace_as_before():
    torch.manual_seed(6)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dtype=F64), 2).eval()
    x, padding = torch.randn(B, S, 16, dtype=F64), torch.zeros(B, S, dtype=torch.bool)
    padding[0, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=F64)
    options = {"mask": causal, "is_causal": True, "src_key_padding_mask": padding.double().masked_fill(padding, -1e400)}
    before = capture(model, x, **options)
    replace(model)
    after = capture(model, x, **options)
    assert [taps.name for taps in after] == [taps.name for taps in before]
    for one, other in zip(before, after, strict=True):
        assert_close(one.groups[0].code(), other.groups[0].code(), rtol=1e-10, atol=1e-10)
        assert_close(codes(one, -1, 1), codes(other, -1, 1), rtol=1e-10, atol=1e-10)
    replaced = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dtype=F64), 2)
    replace(replaced, [ph.Softmax(1), ph.Hyla(3)])
    taps = capture(replaced, x)[1]
    rows = range(S)
    networks = [value_network(taps, 2, j, sample=1, group=g) for g in (0, 1) for j in rows]
    total = sum(network(taps.context[1, j]) for network, j in zip(networks, (*rows, *rows), strict=True))
    assert_close(total + taps.b_out, taps.output[1, 2], rtol=1e-9, atol=1e-9)


def test_arguments_that_would_be_ignored():
    """PyTorch's module has no twelfth argument, and takes none twice."""
    front = 16, 4, 0.0, True, False, False
    with pytest.raises(TypeError, match=r"^MultiheadAttention: only 11 arguments may come without their names"):
        MultiheadAttention(*front, None, None, True, None, torch.float64, ph.Hyla(4))
    with pytest.raises(TypeError, match=r"^MultiheadAttention: kdim came twice, by its place and by its name$"):
        MultiheadAttention(*front, 7, kdim=16)
