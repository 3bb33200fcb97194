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
def test_output_weights_gradients_and_taps_are_theirs(kind, batch_first, mask):
    theirs, ours = (module.eval() for module in pair(kind, batch_first=batch_first, dropout=0.3))
    qkv = inputs(kind)
    options = masks(mask, qkv[0].shape[1])
    given = qkv if batch_first else [x.transpose(0, 1) for x in qkv]
    for average in (True, False):
        y, weights = ours(*given, average_attn_weights=average, **options)
        wanted = theirs(*given, average_attn_weights=average, **options)
        assert_close((y, weights), wanted, **EXACT)
    without, none = ours(*given, need_weights=False, **options)
    assert none is None
    assert_close(without, y, **EXACT)
    cotangent = torch.randn_like(y)
    leaves = list(dict.fromkeys(qkv))
    grads = torch.autograd.grad(y, [*leaves, *ours.parameters()], cotangent)
    own = [theirs.get_parameter(name) for name, _ in ours.named_parameters()]
    assert_close(grads, torch.autograd.grad(wanted[0], [*leaves, *own], cotangent), **NEAR)
    for module in (theirs, ours):
        (taps,) = capture(module, *given, need_weights=False, **options)
        assert_close(taps.groups[0].code(), weights, **EXACT)
        pairs = [0, -1, 2], [1, 3, -1]
        assert_close(codes(taps, *pairs), weights[:, :, pairs[0], pairs[1]].transpose(1, 2), **EXACT)
        assert_close(taps.output, y if batch_first else y.transpose(0, 1), **EXACT)
        rows = torch.stack([rebuilt(taps, b, 2) for b in range(B)])
        assert_close(rows, taps.output[:, 2], rtol=1e-9, atol=1e-9)
        assert torch.equal(taps.x, qkv[0])
        assert not any(x.requires_grad for x in (taps.groups[0].w_out, taps.output))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_keys_and_signature(kind):
    made = []
    for build in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(3)
        made.append(build(DIM, HEADS, **KINDS[kind]))
    theirs, ours = (module.state_dict() for module in made)
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    for function in ("forward", "__init__"):
        ours, theirs = (
            inspect.signature(getattr(cls, function)) for cls in (MultiheadAttention, nn.MultiheadAttention)
        )
        names = {name: parameter.default for name, parameter in ours.parameters.items()}
        expected = {name: parameter.default for name, parameter in theirs.parameters.items()}
        assert list(names.items())[: len(expected)] == list(expected.items())


@pytest.mark.parametrize(("b", "t", "s", "each"), [(0, T, S, True), (B, 0, S, False), (B, T, 0, True)])
def test_no_queries_or_no_keys_with_masks(b, t, s, each):
    theirs, ours = pair("cross")
    q, k = (torch.randn(b, n, DIM, dtype=F64) for n in (t, s))
    hidden = torch.zeros((b * HEADS, t, s) if each else (t, s), dtype=torch.bool)
    given = {"attn_mask": hidden, "key_padding_mask": torch.zeros(b, s, dtype=torch.bool)}
    assert_close(ours(q, k, k, **given), theirs(q, k, k, **given), **EXACT)


def test_one_sequence_without_a_batch():
    theirs, ours = pair("cross", batch_first=False)
    query, key, value = (x[0] for x in inputs("cross"))
    padding, pairs = torch.tensor([False, False, True, False, True]), torch.rand(HEADS, T, S) > 0.5
    pairs[..., 0] = False
    options = {"key_padding_mask": padding, "attn_mask": pairs}
    for average in (True, False):
        wanted = theirs(query, key, value, average_attn_weights=average, **options)
        assert_close(ours(query, key, value, average_attn_weights=average, **options), wanted, **EXACT)
    (taps,) = capture(theirs, query, key, value=value, **options)
    assert_close((taps.output[0], taps.groups[0].code()[0]), wanted, **EXACT)


def test_a_causal_hint():
    """PyTorch reads the mask beside it if it returns weights, or if there are fewer queries."""
    theirs, ours = pair()
    qkv, padding = inputs("self"), torch.zeros(B, S, dtype=F64)
    padding[1, 3:] = -torch.inf
    mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=F64)
    slopes = torch.randn(S, S, dtype=F64) + mask
    hint = {"is_causal": True}
    for given, more in itertools.product(
        ({"attn_mask": mask}, {"attn_mask": mask, "key_padding_mask": padding}, {"attn_mask": slopes}),
        ({"need_weights": True}, {"need_weights": False}),
    ):
        assert_close(ours(*qkv, **given, **more, **hint), theirs(*qkv, **given, **more, **hint), **EXACT)
    narrow, given = (qkv[0][:, :T], *qkv[1:]), {"attn_mask": mask[:T], **hint}
    assert_close(ours(*narrow, **given), theirs(*narrow, **given), **EXACT)
    taps = capture(ours, *qkv, attn_mask=slopes, **hint)
    assert_close(taps[0].groups[0].code(), ours(*qkv, attn_mask=slopes, average_attn_weights=False)[1])


def test_a_row_without_keys_is_0_and_has_no_gradient_of_nan():
    _, ours = pair()
    qkv, padding = inputs("self"), torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(B, S, dtype=F64).masked_fill(padding, -torch.inf)):
        y, weights = ours(*qkv, key_padding_mask=mask)
        assert_close(y[1], ours.out_proj.bias.expand(S, DIM))
        assert (weights[1] == 0).all()
        assert torch.autograd.grad(y.sum(), qkv[0])[0].isfinite().all()


def test_dropout_is_of_the_code_and_is_returned():
    _, ours = pair(dropout=0.25)
    x = inputs("self")
    _, code = ours.eval()(*x, average_attn_weights=False)
    y, dropped = ours.train()(*x, average_attn_weights=False)
    kept = dropped != 0
    assert 0 < (~kept).sum() < kept.numel() / 2
    assert_close(dropped[kept], code[kept] / 0.75, **EXACT)
    v = nn.functional.linear(x[2], *(part.chunk(3)[2] for part in (ours.in_proj_weight, ours.in_proj_bias)))
    read = torch.einsum("bhts,bshe->bthe", dropped, v.unflatten(-1, (HEADS, -1)))
    assert_close(y, ours.out_proj(read.flatten(2)), **EXACT)


def test_a_learned_mask_of_zeros_has_its_gradient():
    slopes = []
    for module in pair():
        bias = torch.zeros(S, S, dtype=F64, requires_grad=True)
        x = torch.linspace(-1, 1, B * S * DIM, dtype=F64).reshape(B, S, DIM)
        slopes += torch.autograd.grad(module(x, x, x, attn_mask=bias)[0].sin().sum(), bias)
    assert_close(*slopes, **NEAR)


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_nan_in_a_mask_is_not_lost(name):
    theirs, ours = pair()
    x, mask = inputs("self"), torch.zeros((B, S) if name == "key_padding_mask" else (S, S), dtype=F64)
    mask[1, 2] = torch.nan
    y, wanted = (module(*x, **{name: mask})[0].isnan() for module in (ours, theirs))
    assert wanted.any()
    assert torch.equal(y, wanted)


def numbers_at_the_last_key():
    """A mixture with HYLA heads, its inputs, and a mask as libraries make it."""
    padding = torch.zeros(B, S, dtype=F64)
    padding[:, -1] = -1e9
    heads = [ph.Softmax(2), ph.Hyla(2)]
    return MultiheadAttention(DIM, HEADS, batch_first=True, heads=heads, dtype=F64), inputs("self"), padding


def test_a_mask_of_large_numbers_is_refused_by_heads_without_a_softmax():
    """For them -1e9 is a score like others: their code at the key to be hidden would be the largest."""
    mixed, x, padding = numbers_at_the_last_key()
    with refusing("-inf or a Boolean mask hides pairs from HylaHeads but a mask with -1e+09 came"):
        mixed(*x, key_padding_mask=padding)
    for heads in (ph.Softmax(HEADS), ph.Hyla(HEADS, normalise="softmax")):
        soft = MultiheadAttention(DIM, HEADS, batch_first=True, heads=heads, dtype=F64)
        assert_close(soft(*x, key_padding_mask=padding), soft(*x, key_padding_mask=padding < 0))
    half = MultiheadAttention(DIM, HEADS, batch_first=True, heads=ph.Hyla(HEADS), dtype=torch.float16)
    x = [part.half() for part in x]  # where -1e9 is -inf: "-inf hides pairs but a mask with -inf came"
    assert_close(half(*x, key_padding_mask=padding), half(*x, key_padding_mask=padding < 0))


@pytest.mark.compile
def test_in_compiled_code_large_numbers_hide():
    """There they cannot be read, and hid nothing from heads without a softmax over keys."""
    mixed, x, padding = numbers_at_the_last_key()
    torch._dynamo.reset()
    compiled = torch.compile(mixed, fullgraph=True, backend="eager")
    assert_close(compiled(*x, key_padding_mask=padding), mixed(*x, key_padding_mask=padding < 0))


# ---------------------------------------------------------------------------------------------------------- other heads
@pytest.mark.parametrize("name", MIXED)
def test_other_heads_are_those_of_our_layer(name):
    batch_first = name != "mixture"
    ours = scrambled(MultiheadAttention(DIM, HEADS, heads=MIXED[name], dtype=F64, batch_first=batch_first))
    layer, taps = own_layer(ours, MIXED[name]), []
    x, context = torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)

    def turned(tensor):
        return tensor if batch_first else tensor.transpose(0, 1)

    if name != "neighbours":  # our layer counts padding as neighbours, the drop-in knows where it is
        padding, bias = torch.zeros(B, T, dtype=torch.bool), torch.randn(B * HEADS, T, T, dtype=F64)
        padding[1, 3:] = True
        own = {"mask": ~padding[:, None, None], "bias": bias.unflatten(0, (B, HEADS))}
        y, code = layer(x, **own, return_code=True)
        got = ours(*(turned(x),) * 3, padding, True, bias, average_attn_weights=False)
        assert_close(got, (turned(y), code), **NEAR)
    mask = torch.rand(T, S) < 0.7
    y, code = layer(x, context, mask=mask, return_code=True, taps=taps)
    given = (turned(x), turned(context), turned(context))
    assert_close(ours(*given, attn_mask=~mask, average_attn_weights=False), (turned(y), code), **NEAR)
    (found,) = capture(ours, *given, attn_mask=~mask, need_weights=False)
    assert_same_taps(found, taps[0])


def assert_same_taps(found, wanted):
    for mine, theirs in ((found, wanted), *zip(found.groups, wanted.groups, strict=True)):
        for name in {field.name for field in dataclasses.fields(mine)} - {"groups", "name", "coder", "bias", "mask"}:
            one, other = getattr(mine, name), getattr(theirs, name)
            if isinstance(other, torch.Tensor):
                assert not one.requires_grad
                assert_close(one, other.detach(), **NEAR)
            else:
                assert one == other, name
    for mine, theirs in zip(found.groups, wanted.groups, strict=True):
        assert_close(mine.code(), theirs.code().detach(), **NEAR)


def test_neighbours_are_no_padding():
    ours = MultiheadAttention(DIM, HEADS, heads=MIXED["neighbours"], dtype=F64, batch_first=True)
    nn.init.normal_(ours.in_proj_weight)
    x, padding = torch.randn(1, S, DIM, dtype=F64), torch.tensor([[False, False, False, True, True]])
    alone, _ = ours(*(x[:, :3],) * 3)
    assert_close(ours(x, x, x, padding)[0][:, :3], alone, **NEAR)
