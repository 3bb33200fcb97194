"""The drop-in equals nn.MultiheadAttention with the same weights, with other heads our own layer; so do their taps."""

import dataclasses
import inspect
import itertools

import pytest
import torch
from refusals import refusing
from torch import nn
from torch.testing import assert_close
from torch_attention import DIM, HEADS, KINDS, MIXED, B, S, T, inputs, masks, own_layer, pair, rebuilt, scrambled

import polyhead as ph
from polyhead.analysis import codes
from polyhead.compat.torch_mha import MultiheadAttention, capture

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}
NEAR = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    ("kind", "batch_first", "mask"),
    [
        ("self", True, "none"),
        ("self", False, "per head"),
        ("self", True, "both"),
        ("cross", True, "bool and added"),
        ("cross", False, "padding"),
        ("widths", True, "added padding"),
        ("widths", False, "pairs"),
        ("no biases", True, "added pairs"),
    ],
)
def test_output_weights_gradients_and_taps_are_those_of_pytorch(kind, batch_first, mask):
    reference, drop_in = (module.eval() for module in pair(kind, batch_first=batch_first, dropout=0.3))
    qkv = inputs(kind)
    options = masks(mask, qkv[0].shape[1])
    arguments = qkv if batch_first else [x.transpose(0, 1) for x in qkv]
    for average in (True, False):
        y, weights = drop_in(*arguments, average_attn_weights=average, **options)
        expected = reference(*arguments, average_attn_weights=average, **options)
        assert_close((y, weights), expected, **EXACT)
    y_alone, no_weights = drop_in(*arguments, need_weights=False, **options)
    assert no_weights is None
    assert_close(y_alone, y, **EXACT)
    cotangent = torch.randn_like(y)
    leaves = list(dict.fromkeys(qkv))
    grads = torch.autograd.grad(y, [*leaves, *drop_in.parameters()], cotangent)
    parameters = [reference.get_parameter(name) for name, _ in drop_in.named_parameters()]
    assert_close(grads, torch.autograd.grad(expected[0], [*leaves, *parameters], cotangent), **NEAR)
    for module in (reference, drop_in):
        (taps,) = capture(module, *arguments, need_weights=False, **options)
        assert_close(taps.groups[0].code(), weights, **EXACT)
        pairs = [0, -1, 2], [1, 3, -1]
        assert_close(codes(taps, *pairs), weights[:, :, pairs[0], pairs[1]].transpose(1, 2), **EXACT)
        assert_close(taps.output, y if batch_first else y.transpose(0, 1), **EXACT)
        rows = torch.stack([rebuilt(taps, b, 2) for b in range(B)])
        assert_close(rows, taps.output[:, 2], rtol=1e-9, atol=1e-9)
        assert torch.equal(taps.x, qkv[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_keys_and_signature(kind):
    modules = []
    for build in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(3)
        modules.append(build(DIM, HEADS, **KINDS[kind]))
    expected, state = (module.state_dict() for module in modules)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    for function in ("forward", "__init__"):
        expected = defaults_of(getattr(nn.MultiheadAttention, function))
        assert defaults_of(getattr(MultiheadAttention, function))[: len(expected)] == expected


def defaults_of(function):
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize(("b", "t", "s", "per_head"), [(0, T, S, True), (B, 0, S, False), (B, T, 0, True)])
def test_no_queries_or_no_keys_with_masks(b, t, s, per_head):
    reference, drop_in = pair("cross")
    q, k = (torch.randn(b, n, DIM, dtype=F64) for n in (t, s))
    hidden = torch.zeros((b * HEADS, t, s) if per_head else (t, s), dtype=torch.bool)
    options = {"attn_mask": hidden, "key_padding_mask": torch.zeros(b, s, dtype=torch.bool)}
    assert_close(drop_in(q, k, k, **options), reference(q, k, k, **options), **EXACT)


def test_one_sequence_without_a_batch():
    reference, drop_in = pair("cross", batch_first=False)
    query, key, value = (x[0] for x in inputs("cross"))
    padding, pairs = torch.tensor([False, False, True, False, True]), torch.rand(HEADS, T, S) > 0.5
    pairs[..., 0] = False
    options = {"key_padding_mask": padding, "attn_mask": pairs}
    for average in (True, False):
        expected = reference(query, key, value, average_attn_weights=average, **options)
        assert_close(drop_in(query, key, value, average_attn_weights=average, **options), expected, **EXACT)
    (taps,) = capture(reference, query, key, value=value, **options)
    assert_close((taps.output[0], taps.groups[0].code()[0]), expected, **EXACT)


def test_a_causal_hint():
    """PyTorch reads the mask beside it if it returns weights, or if there are fewer queries."""
    reference, drop_in = pair()
    qkv, padding = inputs("self"), torch.zeros(B, S, dtype=F64)
    padding[1, 3:] = -torch.inf
    mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=F64)
    slopes = torch.randn(S, S, dtype=F64) + mask
    limits = {"attn_mask": mask}, {"attn_mask": mask, "key_padding_mask": padding}, {"attn_mask": slopes}
    for limit, need_weights in itertools.product(limits, (True, False)):
        options = {**limit, "need_weights": need_weights, "is_causal": True}
        assert_close(drop_in(*qkv, **options), reference(*qkv, **options), **EXACT)
    fewer_queries, options = (qkv[0][:, :T], *qkv[1:]), {"attn_mask": mask[:T], "is_causal": True}
    for need_weights in (True, False):
        options["need_weights"] = need_weights
        assert_close(drop_in(*fewer_queries, **options), reference(*fewer_queries, **options), **EXACT)
    taps = capture(drop_in, *qkv, attn_mask=slopes, is_causal=True)
    assert_close(taps[0].groups[0].code(), drop_in(*qkv, attn_mask=slopes, average_attn_weights=False)[1])


def test_a_row_without_keys_is_0_and_has_no_gradient_of_nan():
    _, drop_in = pair()
    qkv, padding = inputs("self"), torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(B, S, dtype=F64).masked_fill(padding, -torch.inf)):
        y, weights = drop_in(*qkv, key_padding_mask=mask)
        assert_close(y[1], drop_in.out_proj.bias.expand(S, DIM))
        assert (weights[1] == 0).all()
        assert torch.autograd.grad(y.sum(), qkv[0])[0].isfinite().all()


def test_dropout_is_of_the_code_and_is_returned():
    _, drop_in = pair(dropout=0.25)
    qkv = inputs("self")
    _, code = drop_in.eval()(*qkv, average_attn_weights=False)
    y, dropped = drop_in.train()(*qkv, average_attn_weights=False)
    is_kept = dropped != 0
    assert 0 < (~is_kept).sum() < is_kept.numel() / 2
    assert_close(dropped[is_kept], code[is_kept] / 0.75, **EXACT)
    v = nn.functional.linear(qkv[2], *(part.chunk(3)[2] for part in (drop_in.in_proj_weight, drop_in.in_proj_bias)))
    read = torch.einsum("bhts,bshe->bthe", dropped, v.unflatten(-1, (HEADS, -1)))
    assert_close(y, drop_in.out_proj(read.flatten(2)), **EXACT)


def test_a_learned_mask_of_zeros_has_its_gradient():
    gradients = []
    for module in pair():
        bias = torch.zeros(S, S, dtype=F64, requires_grad=True)
        x = torch.linspace(-1, 1, B * S * DIM, dtype=F64).reshape(B, S, DIM)
        gradients += torch.autograd.grad(module(x, x, x, attn_mask=bias)[0].sin().sum(), bias)
    assert_close(*gradients, **NEAR)


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_nan_in_a_mask_is_not_lost(name):
    reference, drop_in = pair()
    qkv, mask = inputs("self"), torch.zeros((B, S) if name == "key_padding_mask" else (S, S), dtype=F64)
    mask[1, 2] = torch.nan
    is_nan, expected = (module(*qkv, **{name: mask})[0].isnan() for module in (drop_in, reference))
    assert expected.any()
    assert torch.equal(is_nan, expected)


def numbers_at_the_last_key():
    """A mixture with HYLA heads, its inputs, and a mask as libraries make it."""
    padding = torch.zeros(B, S, dtype=F64)
    padding[:, -1] = -1e9
    heads = [ph.Softmax(2), ph.Hyla(2)]
    return MultiheadAttention(DIM, HEADS, batch_first=True, heads=heads, dtype=F64), inputs("self"), padding


def test_a_mask_of_large_numbers_is_refused_by_heads_without_a_softmax():
    """For them -1e9 is a score like others: their code at the key to be hidden would be the largest."""
    mixed, qkv, padding = numbers_at_the_last_key()
    with refusing("-inf or a Boolean mask hides pairs from HylaHeads, got a mask with -1e+09"):
        mixed(*qkv, key_padding_mask=padding)
    relations = ph.Relational(HEADS, relation_act="softmax")  # whose softmax is another one
    for heads in (relations, ph.Pooled(HEADS, normalise="softmax", pool="mean")):
        other = MultiheadAttention(DIM, HEADS, batch_first=True, heads=heads, dtype=F64)
        with refusing("got a mask with -1e+09"):
            other(*qkv, key_padding_mask=padding)
    for heads in (ph.Softmax(HEADS), ph.Hyla(HEADS, normalise="softmax")):
        soft = MultiheadAttention(DIM, HEADS, batch_first=True, heads=heads, dtype=F64)
        assert_close(soft(*qkv, key_padding_mask=padding), soft(*qkv, key_padding_mask=padding < 0))
    half = MultiheadAttention(DIM, HEADS, batch_first=True, heads=ph.Hyla(HEADS), dtype=torch.float16)
    qkv = [part.half() for part in qkv]  # where -1e9 is -inf: "-inf hides pairs, got a mask with -inf"
    assert_close(half(*qkv, key_padding_mask=padding), half(*qkv, key_padding_mask=padding < 0))


@pytest.mark.compile
def test_in_compiled_code_large_numbers_hide():
    """There they cannot be read, and hid nothing from heads without a softmax over keys."""
    mixed, qkv, padding = numbers_at_the_last_key()
    torch._dynamo.reset()
    compiled = torch.compile(mixed, fullgraph=True, backend="eager")
    assert_close(compiled(*qkv, key_padding_mask=padding), mixed(*qkv, key_padding_mask=padding < 0))


# ---------------------------------------------------------------------------------------------------------- other heads
@pytest.mark.parametrize("name", MIXED)
def test_other_heads_are_those_of_multi_head_attention(name):
    batch_first = name != "mixture"
    drop_in = scrambled(MultiheadAttention(DIM, HEADS, heads=MIXED[name], dtype=F64, batch_first=batch_first))
    layer, taps = own_layer(drop_in, MIXED[name]), []
    x, context = torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)

    def batch_as_expected(tensor):
        return tensor if batch_first else tensor.transpose(0, 1)

    if name != "neighbours":  # our layer counts padding as neighbours, the drop-in knows where it is
        padding, bias = torch.zeros(B, T, dtype=torch.bool), torch.randn(B * HEADS, T, T, dtype=F64)
        padding[1, 3:] = True
        options = {"mask": ~padding[:, None, None], "bias": bias.unflatten(0, (B, HEADS))}
        y, code = layer(x, **options, return_code=True)
        query = batch_as_expected(x)
        output = drop_in(query, query, query, padding, True, bias, average_attn_weights=False)
        assert_close(output, (batch_as_expected(y), code), **NEAR)
    mask = torch.rand(T, S) < 0.7
    y, code = layer(x, context, mask=mask, return_code=True, taps=taps)
    qkv = (batch_as_expected(x), batch_as_expected(context), batch_as_expected(context))
    output = drop_in(*qkv, attn_mask=~mask, average_attn_weights=False)
    assert_close(output, (batch_as_expected(y), code), **NEAR)
    (captured,) = capture(drop_in, *qkv, attn_mask=~mask, need_weights=False)
    assert_same_taps(captured, taps[0])


def assert_same_taps(actual, expected):
    assert_same_fields(actual, expected)
    for group, expected_group in zip(actual.groups, expected.groups, strict=True):
        assert_same_fields(group, expected_group)
        assert_close(group.code(), expected_group.code().detach(), **NEAR)


def assert_same_fields(actual, expected):
    for name in {field.name for field in dataclasses.fields(actual)} - {"groups", "name", "coder", "bias", "mask"}:
        value, expected_value = getattr(actual, name), getattr(expected, name)
        if isinstance(expected_value, torch.Tensor):
            assert_close(value, expected_value.detach(), **NEAR)
        else:
            assert value == expected_value, name


def test_neighbours_are_no_padding():
    drop_in = MultiheadAttention(DIM, HEADS, heads=MIXED["neighbours"], dtype=F64, batch_first=True)
    nn.init.normal_(drop_in.in_proj_weight)
    x, padding = torch.randn(1, S, DIM, dtype=F64), torch.tensor([[False, False, False, True, True]])
    unpadded, _ = drop_in(x[:, :3], x[:, :3], x[:, :3])
    assert_close(drop_in(x, x, x, padding)[0][:, :3], unpadded, **NEAR)
