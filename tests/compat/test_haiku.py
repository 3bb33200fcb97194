"""The tutorial's module against ours with its parameters; biases are random: at init they are 0."""

import copy
import math

import numpy as np
import pytest
import torch
from refusals import refusing
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat.haiku import from_haiku, from_haiku_mask, to_haiku

B, S, D, H = 2, 12, 64, 8
F64 = torch.float64


def tree(dtype=np.float64, dim=D, name="mha"):
    generator = np.random.default_rng(0)
    return {
        f"{name}/~/linear{suffix}": {
            "w": (generator.standard_normal((dim, dim)) / math.sqrt(dim)).astype(dtype),
            "b": generator.standard_normal(dim).astype(dtype),
        }
        for suffix in ("", "_1", "_2", "_3")
    }


def tutorial(params, x, source, mask):
    """`MultiheadAttention.__call__` of the tutorial: of its four linears the last one is the output."""
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = ([torch.tensor(p[part]) for part in "wb"] for p in params.values())
    rows = (x @ wq + bq, source @ wk + bk, source @ wv + bv)
    q, k, v = (row.unflatten(-1, (H, -1)).transpose(1, 2) for row in rows)
    visible = None if mask is None else torch.tensor(mask != 0)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2) @ wo + bo


def masks(length):
    generator = np.random.default_rng(2)
    for shape in ((B, 1, length), (B, S, length), (1, S, length)):
        mask = generator.integers(0, 2, shape)
        mask[..., 0] = 1
        yield mask
        yield mask * 7
        yield mask.astype(bool)


@pytest.mark.parametrize("cross", [False, True])
def test_ours_equals_the_tutorial(cross):
    x, context = torch.randn(B, S, D, dtype=F64), torch.randn(B, S + 3, D, dtype=F64)
    source = context if cross else x
    attention = from_haiku(tree(), heads=H)
    for mask in (None, *masks(source.shape[1])):
        allowed = None if mask is None else from_haiku_mask(mask)
        y = attention(x, context if cross else None, mask=allowed)
        assert_close(y, tutorial(tree(), x, source, mask), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_there_and_back_are_the_same_bits(dtype):
    """Also of copies: what becomes of the module later changes nothing."""
    params, expected = (tree(dtype, name="encoder/~/mha") for _ in range(2))
    params["encoder/~/mha/~/linear_3"]["b"].flags.writeable = False  # as jax arrays are
    attention = from_haiku(params, heads=H)
    saved = to_haiku(attention, name="encoder/~/mha")
    compiled = copy.deepcopy(attention)
    compiled.out = torch.compile(compiled.out)
    assert to_haiku(compiled).keys() == tree().keys()
    for parameter in attention.parameters():
        parameter.data.zero_()
    assert list(saved) == list(expected)
    for key, entry in expected.items():
        for part in ("w", "b"):
            assert saved[key][part].dtype == dtype
            np.testing.assert_array_equal(saved[key][part], entry[part])


def test_a_mask_of_the_tutorial_becomes_boolean_or_is_refused():
    assert from_haiku_mask(np.array([[[2, 0, -1]]])).tolist() == [[[[True, False, True]]]]
    with refusing("from_haiku_mask: mask must be (b t s) or (b 1 s) but has shape (12, 12)"):
        from_haiku_mask(np.ones((S, S), dtype=int))


def test_several_modules_need_a_name():
    params = tree(name="encoder/~/mha") | tree(name="decoder/~/mha", dim=32)
    assert from_haiku(params, heads=H, name="encoder/~/mha").dim == D
    assert from_haiku(params, heads=H, name="decoder/~/mha").dim == 32
    with refusing("from_haiku: params hold several modules; give name= one of decoder/~/mha, encoder/~/mha"):
        from_haiku(params, heads=H)
    with refusing("from_haiku: params hold no module 'mha'; give name= one of "):
        from_haiku(params, heads=H, name="mha")


NARROW = {"mha/~/linear_2": {"w": np.zeros((32, 64)), "b": np.zeros(64)}}


@pytest.mark.parametrize(
    ("params", "heads", "line"),
    [
        (tree(), 7, "the number of heads must divide the width 64 but is 7"),
        ({"mha/~/linear_3": {}}, H, "mha/~/linear must hold w and b but holds nothing"),
        (tree() | NARROW, H, "mha/~/linear_2 must be w (64, 64) and b (64,) but is w (32"),
        ({"mlp": {}}, H, "params must hold a linear_3 but hold mlp"),
    ],
)
def test_mistakes_are_one_line(params, heads, line):
    with refusing(f"from_haiku: {line}"):
        from_haiku(params, heads=heads)


WITHOUT = "no positions, q/k norms, window or causal mask, as the tutorial's module has"
OTHERS = [{"causal": True}, {"positions": ph.Alibi()}, {"positions": ph.Rotary()}, {"qk_norm": True}, {"window": 3}]


def test_layers_without_an_equivalent_in_the_tutorial():
    for settings in OTHERS:
        with refusing(f"to_haiku: attention must have {WITHOUT}"):
            to_haiku(ph.MultiHeadAttention(16, ph.Softmax(4), bias=True, **settings))
    for heads in ([ph.Softmax(2), ph.Hyla(2)], ph.Hyla(4), ph.Softmax(4, kv_heads=2)):
        with refusing("one group of softmax heads that share the width 16, as the tutorial"):
            to_haiku(ph.MultiHeadAttention(16, heads, bias=True))
    with pytest.raises(ValueError, match="to_haiku: softmax heads must have no softcap, sinks or gate"):
        to_haiku(ph.MultiHeadAttention(16, ph.Softmax(4, gate=True), bias=True))
    with refusing("biases, as the tutorial"):
        to_haiku(ph.MultiHeadAttention(16, ph.Softmax(4)))
    attention = ph.MultiHeadAttention(16, ph.Softmax(4), bias=True)
    attention.groups[0].use(ph.ops.linear_attention)
    with refusing("to_haiku: SoftmaxHeads must compute the op of their kind but compute a user's function"):
        to_haiku(attention)
