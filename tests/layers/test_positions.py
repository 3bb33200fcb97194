"""Positions: constants that survive moving and casting, T5 buckets against the original, ALiBi, learned, sinusoidal."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from problems import draw
from refusals import refused

from polyhead.config import Alibi, Softmax
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.positions import (
    AlibiBias,
    LearnedPositions,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositions,
    relative_buckets,
)
from polyhead.ops.rope import rope


def meta_then_cpu(make):
    return make(device="meta").to_empty(device="cpu")


def under_meta(make):
    with torch.device("meta"):
        module = make()
    return module.to_empty(device="cpu")


CONVERSIONS = {
    "plain": lambda make: make(),
    "meta": meta_then_cpu,
    "under meta": under_meta,
    "half and back": lambda make: make().half().float(),
    "deepcopy": lambda make: copy.deepcopy(make().bfloat16()),
    "pickle": lambda make: pickle.loads(pickle.dumps(make())),
    "meta, then bfloat16": lambda make: meta_then_cpu(make).to(torch.bfloat16),
}


# -------------------------------------------------------------------------------------------------------------- rotary
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_rotary_angles_survive(conversion, layout):
    """Position 1025 and its neighbours are one number in bfloat16: a rounded table or position is far off."""

    def make(**to):
        return RotaryEmbedding(8, 500.0, 1100, layout=layout, **to)

    x, positions = draw(2, 5, 3, 8), torch.tensor([0, 1, 513, 1025, 1099])[:, None]
    rotary = CONVERSIONS[conversion](make)
    assert not rotary.state_dict()
    assert not list(rotary.parameters())
    expected = rope(x, positions, theta=500.0, layout=layout)
    torch.testing.assert_close(rotary(x.float(), positions).double(), expected, atol=2e-6, rtol=0)
    for dtype in (torch.bfloat16, torch.float16):
        assert rotary(x.to(dtype), positions).dtype == dtype
        exact = rope(x.to(dtype).double(), positions, theta=500.0, layout=layout)
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(rotary(x.to(dtype), positions).double(), exact, atol=1e-5, rtol=0.51 * ulp)
    torch.testing.assert_close(rotary(x, positions), expected, atol=1e-12, rtol=0)
    rotary = rotary.double()
    assert rotary.table.value.dtype == torch.float64
    torch.testing.assert_close(rotary(x, positions), expected, atol=1e-12, rtol=0)


# --------------------------------------------------------------------------------------------------------- T5 relative
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [16, 36, 128])
def test_buckets_equal_the_original_tables(fixtures, length, bidirectional):
    expected = np.load(fixtures / "hyla_relpos_buckets.npz")[f"bucket_{'bidir_' * bidirectional}{length}"]
    positions = torch.arange(length)
    actual = relative_buckets((positions[:, None] - positions).numpy(), length, length, bidirectional)
    np.testing.assert_array_equal(actual, expected)
    bias = RelativePositionBias(2, length, length, bidirectional)
    assert torch.equal(
        to_dense(bias(length, length, offset=0), length, length), bias.table[:, torch.tensor(expected).long()]
    )
    assert torch.equal(bias.dense(positions[None], positions[None])[0], bias.table[:, torch.tensor(expected).long()])


def test_beyond_the_longest_distance_is_the_last_bucket():
    """8 exact buckets, 8 logarithmic ones up to 128, then the last: from the formula, by hand."""
    cases = {-5: 0, 0: 0, 1: 1, 7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 63: 13, 64: 14, 127: 15, 128: 15, 10**6: 15}
    actual = relative_buckets(np.array(list(cases)), 16, 128)
    assert actual.tolist() == list(cases.values())
    both = relative_buckets(np.array([0, -1, 1, -(10**6), 10**6]), 16, 128, True)
    assert both.tolist() == [0, 9, 1, 15, 7]


def to_dense(by_offset, t, s):
    """Key j for query i is column j - i + t - 1."""
    assert by_offset.shape[-1] == t + s - 1
    dense = by_offset.new_empty(len(by_offset), t, s)
    for i in range(t):
        for j in range(s):
            dense[:, i, j] = by_offset[:, j - i + t - 1]
    return dense


def biases():
    return (
        RelativePositionBias(3, 8, 20, dtype=torch.float64),
        RelativePositionBias(3, 8, 20, True, dtype=torch.float64),
        RelativePositionBias(3, 12, 5, dtype=torch.float64),
        AlibiBias(3),
    )


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(("t", "s", "offset"), [(5, 5, 0), (1, 1, 0), (3, 7, 4), (7, 3, -4), (4, 6, 0), (2, 40, 38)])
def test_by_offset_equals_dense(index, t, s, offset):
    bias = biases()[index]
    queries, keys = torch.arange(t) + offset, torch.arange(s)
    distance = queries[:, None] - keys
    if index < 3:
        bucket = relative_buckets(distance.numpy(), bias.buckets, bias.max_distance, index == 1)
        expected = bias.table[:, torch.tensor(bucket).long()]
    else:
        expected = -torch.tensor([2**-4, 2**-8, 2**-2])[:, None, None] * distance.abs()
    assert torch.equal(to_dense(bias(t, s, offset=offset), t, s), expected)
    assert torch.equal(bias.dense(queries[None], keys[None]), expected[None])
    shifted = bias.dense(torch.stack((queries, queries + 9)), torch.stack((keys, keys + 9)))
    assert torch.equal(shifted, expected.expand(2, -1, -1, -1))


def test_alibi_is_exact_in_bfloat16():
    """At the distances 300 to 400 its biases, rounded to bfloat16, would be off by up to a quarter."""
    attention = MultiHeadAttention(24, Softmax(8), positions=Alibi(), dtype=torch.bfloat16)
    x, far = torch.randn(1, 400, 24).bfloat16(), (torch.arange(400) - torch.arange(400)[:, None]) >= 300
    exact = copy.deepcopy(attention).double()(x.double(), mask=far)
    for arguments in ({}, {"positions": torch.arange(400)[None]}):
        output = attention(x, mask=far, **arguments).double()
        assert ((output - exact).norm() / exact.norm()).item() < 0.01


# -------------------------------------------------------------------------------------------------- vectors for inputs
@pytest.mark.parametrize("conversion", ["meta", "half and back", "meta, then bfloat16"])
def test_sinusoidal_positions_survive(conversion):
    sinusoidal = CONVERSIONS[conversion](lambda **to: SinusoidalPositions(1100, 6, 100.0, **to))
    positions = [0, 1, 513, 1025, 1099]
    expected = torch.empty(len(positions), 6, dtype=torch.float64)
    for row, position in zip(expected, positions, strict=True):
        for j in range(3):
            angle = position * 100.0 ** (-2 * j / 6)
            row[2 * j], row[2 * j + 1] = math.sin(angle), math.cos(angle)
    actual = sinusoidal(torch.tensor(positions))
    ulp = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, atol=max(ulp / 4, 1e-7), rtol=0)
    torch.testing.assert_close(sinusoidal.double()(torch.tensor(positions)), expected, atol=1e-12, rtol=0)


def test_mistakes_are_one_line():
    relative, learned, rotary = RelativePositionBias, LearnedPositions(8, 4), RotaryEmbedding(8)
    short, x = RotaryEmbedding(8, max_length=4), torch.zeros(2, 5, 8)
    assert torch.equal(short(x, torch.arange(5) % 4, check=False), short(x, torch.arange(5) % 4))
    for call, message in (
        (lambda: short(x, torch.arange(5)), "RotaryEmbedding: positions must be below max_length = 4 but reach 4"),
        (lambda: rotary(x, torch.arange(5) - 1), "RotaryEmbedding: positions must not be negative but hold -1"),
        (lambda: rotary(x, torch.arange(4)), r"RotaryEmbedding: .* \(4,\) do not broadcast to \(2, 5\)"),
        (lambda: rotary(x[..., :6], torch.arange(5)), r"RotaryEmbedding: d = 8 but x \(\.\.\. d\) = \(2, 5, 6\)"),
        (lambda: RotaryEmbedding(7), "RotaryEmbedding: the width must be even but is 7"),
        (lambda: RotaryEmbedding(8, theta=0.0), "RotaryEmbedding: theta must be above 0 but is 0.0"),
        (lambda: RotaryEmbedding(8, layout="interleave"), "RotaryEmbedding: .* did you mean 'interleaved'.*"),
        (lambda: relative(2, 1, 8), "RelativePositionBias: buckets must be at least 2 but is 1"),
        (lambda: relative(2, 7, 8, True), "RelativePositionBias: buckets must be even and at least 4 but is 7"),
        (lambda: AlibiBias(1.5), "AlibiBias: heads must be an integer of at least 1 but is 1.5"),
        (lambda: RotaryEmbedding(8, max_length=-1), "RotaryEmbedding: max_length must be an .* at least 1 but is -1"),
        (lambda: learned(torch.ones(9)), "LearnedPositions: positions must be integers but are torch.float32"),
        (lambda: learned(torch.arange(9)), "LearnedPositions: positions must be below max_length = 8 but reach 8"),
        (lambda: SinusoidalPositions(8, 5), "SinusoidalPositions: the width must be even but is 5"),
    ):
        refused(call, f"^{message}$")
