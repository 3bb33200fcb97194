"""Choosing a token: by hand, at ties, at the limits of random draws, and by frequencies over many draws."""

import math

import pytest
import torch
from refusals import refused
from torch.testing import assert_close

from polyhead.models.generate.sampling import SamplingOptions, row_draws

F64 = torch.float64
P = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=F64)


def chosen(choice, draws, logits=None):
    logits = P.log() if logits is None else logits
    return choice(logits.expand(len(draws), -1), torch.tensor(draws, dtype=F64)).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),  # 4/7 of what the top two have
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.6}, [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_probabilities_by_hand(options, expected):
    actual = SamplingOptions(**options).probabilities(P.log()[None] + 3.0)[0]
    assert_close(actual, torch.tensor(expected, dtype=F64))


def test_a_draw_takes_the_token_whose_share_it_falls_into():
    assert chosen(SamplingOptions(), [0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 1 - 2**-53]) == [0, 0, 1, 1, 2, 2, 3, 3]
    barred = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf], dtype=F64)
    assert chosen(SamplingOptions(), [0.0, 0.49, 0.5, 1 - 2**-53], barred) == [1, 1, 3, 3]
    assert chosen(SamplingOptions(), [1.0], barred) == [3]  # 1 - 2^-53, rounded to float32
    assert chosen(SamplingOptions(temperature=1e-300), [0.0, 1 - 2**-53]) == [1, 1]


def test_a_row_has_a_stream_of_its_own():
    """A row has its own, however many rows and steps there are; the generator moves on from call to call."""
    draws = row_draws(3, 40, torch.Generator().manual_seed(0))
    assert torch.equal(draws[:1, :7], row_draws(1, 7, torch.Generator().manual_seed(0)))
    assert len(draws.unique()) == 120
    assert ((draws >= 0) & (draws < 1)).all()
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(row_draws(1, 7, generator), row_draws(1, 7, generator))
    torch.manual_seed(5)
    first = row_draws(1, 7)
    torch.manual_seed(5)
    assert torch.equal(first, row_draws(1, 7))


def test_mistakes_are_one_line():
    for options, message in (
        ({"temperature": math.nan}, "temperature must be at least 0 but is nan"),
        ({"top_k": 0}, "top_k must be an integer of at least 1 but is 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, or None, but is 1.5"),
    ):
        refused(lambda options=options: SamplingOptions(**options), f"generate: {message}")
    for temperature, bad in ((0.0, math.nan), (1.0, math.inf)):
        call = SamplingOptions(temperature=temperature)
        with pytest.raises(ValueError, match="generate: the model's logits are not finite numbers"):
            chosen(call, [0.5], torch.tensor([0.0, bad]))
