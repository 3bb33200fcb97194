"""Rotary embedding against explicit 2 x 2 rotations in NumPy float64."""

import math

import numpy as np
import pytest
import torch
from problems import draw
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from polyhead.ops.rope import rope

LAYOUTS = ("interleaved", "half")


def oracle(x, positions, theta, layout):
    """Every pair of every vector, one multiplication by a rotation matrix at a time."""
    d = x.shape[-1]
    positions = np.broadcast_to(positions, x.shape[:-1])
    out = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        for j in range(d // 2):
            a, b = (2 * j, 2 * j + 1) if layout == "interleaved" else (j, j + d // 2)
            angle = float(positions[index]) * theta ** (-2 * j / d)
            turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            out[(*index, a)], out[(*index, b)] = turn @ [x[(*index, a)], x[(*index, b)]]
    return out


BASE = draw(2, 5, 3, 11)
CASES = {
    "one": (draw(2), torch.tensor(3)),
    "rows": (draw(2, 5, 8), torch.arange(5)),
    "rows of each sample": (draw(2, 5, 3, 8), torch.tensor([[4, 3, 2, 1, 0], [0, 0, 7, 9, 2]])[..., None]),
    "rows of all samples": (draw(2, 5, 3, 8), torch.arange(5)[None, :, None]),
    "five axes": (draw(2, 3, 2, 5, 4), torch.arange(5)[None]),
    # Odd offsets and strides and expanded inputs take another path through the same numbers.
    "odd offset": (BASE[..., 1:9], torch.arange(5)[:, None]),
    "odd stride": (BASE[..., :8], torch.arange(5)[:, None]),
    "expanded": (draw(5, 3, 8).expand(2, 5, 3, 8), torch.arange(5)[:, None]),
    "every second": (draw(2, 5, 3, 16)[..., ::2], torch.arange(5)[:, None]),
    "empty": (draw(0, 4), torch.arange(0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("theta", [1e4, 100.0])
@pytest.mark.parametrize("name", CASES)
def test_float64_equals_the_rotation_matrices(layout, theta, name):
    x, positions = CASES[name]
    actual = rope(x, positions, theta=theta, layout=layout)
    expected = torch.tensor(oracle(x.numpy(), positions.numpy(), theta, layout))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_never_rounded_to_half(dtype, layout):
    """At position 2049, beyond the integers of float16 and bfloat16, and at activations of 1e3."""
    positions = torch.tensor([0, 1, 257, 2049, 100_003])
    x = 1e3 * draw(5, 64, dtype=dtype)
    actual = rope(x, positions, layout=layout)
    assert actual.dtype == dtype
    expected = torch.tensor(oracle(x.double().numpy(), positions.numpy(), 1e4, layout))
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, atol=2e-4, rtol=1.01 * ulp)


def test_mistakes_are_one_line():
    x, positions = torch.zeros(2, 5, 4), torch.arange(5)
    for call, text in (
        (lambda: rope(x[..., :3], positions), "rope: the width must be even but is 3$"),
        (lambda: rope(x, positions, layout="halve"), r"rope: unknown layout 'halve'; did you mean 'half'\?"),
        (lambda: rope(x, positions, theta=0.0), "rope: theta must be above 0 but is 0.0$"),
        (lambda: rope(x, positions - 1), "rope: positions must not be negative but hold -1$"),
        (lambda: rope(x, positions.float()), "rope: positions must be of an integer dtype but is torch.float32$"),
        (lambda: rope(x, positions[:4]), r"rope: positions of shape \(4,\) do not broadcast to \(2, 5\)$"),
        (lambda: rope(x, positions[None, None]), r"rope: positions of shape \(1, 1, 5\) do not broadcast to \(2, 5\)$"),
        (lambda: rope(x, positions[:0]), r"rope: positions of shape \(0,\) do not broadcast to \(2, 5\)$"),
    ):
        refused(call, f"^{text}")


def test_samples_of_vmap_may_lie_anywhere_and_have_their_own_positions():
    """The stride of samples is odd: no view as complex numbers; and vmap reads no data."""
    x, positions = torch.randn(3 * 41).as_strided((3, 5, 8), (41, 8, 1)), torch.arange(15).view(3, 5)
    torch.testing.assert_close(torch.func.vmap(rope)(x, positions), rope(x.clone(), positions))


def test_positions_without_data_are_not_read():
    """As where memory is estimated without computing, or a graph is traced."""
    with FakeTensorMode():
        assert rope(torch.empty(2, 5, 3, 4), torch.arange(5)[:, None]).shape == (2, 5, 3, 4)
    x, positions = torch.randn(2, 5, 3, 4), torch.arange(5)[:, None]
    traced = make_fx(lambda x, positions: rope(x, positions))(x, positions)
    torch.testing.assert_close(traced(2 * x, positions + 1), rope(2 * x, positions + 1))
