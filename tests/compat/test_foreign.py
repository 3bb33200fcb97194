"""Foreign masks as our bias and mask."""

import torch

from polyhead.compat.foreign import limits


def test_what_hides_in_a_floating_mask_and_what_adds():
    low = torch.finfo(torch.float32).min
    added = torch.tensor([[[[0.5, low, -torch.inf, -1e4]]]])
    bias, mask = limits([added, torch.tensor([[[[True]], [[False]]]])], 2, 4, torch.float64)
    assert mask.shape == (1, 2, 1, 4)
    assert mask[0, :, 0].tolist() == [[True, False, False, True], [False] * 4]
    assert (bias.shape, bias.dtype) == ((1, 1, 2, 4), torch.float64)
    assert bias[0, 0, 1].tolist() == [0.5, 0, 0, -1e4]


def test_nan_hides_nothing_and_is_kept():
    bias, mask = limits([torch.tensor([[[[0.0, torch.nan, -torch.inf]]]])], 1, 3, torch.float32)
    assert bias.isnan().flatten().tolist() == [False, True, False]
    assert mask.flatten().tolist() == [True, True, False]


def test_what_says_nothing_is_none():
    assert limits([], 2, 3, torch.float32) == (None, None)
    assert limits([torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 1, 3).bool()], 2, 3, torch.float32) == (None, None)
    bias, mask = limits([torch.tensor([[[[0.0, -torch.inf]]]])], 1, 2, torch.float32)
    assert bias is None
    assert mask.flatten().tolist() == [True, False]
