"""Foreign masks as our bias and mask."""

import torch

from polyhead.compat.foreign import limits


def test_numbers_of_a_floating_mask_that_mask_a_pair():
    low = torch.finfo(torch.float32).min
    added = torch.tensor([[[[0.5, low, -torch.inf, -1e4]]]])
    bias, mask = limits([added, torch.tensor([[[[True]], [[False]]]])], 2, 4, torch.float64)
    assert mask.shape == (1, 2, 1, 4)
    assert mask[0, :, 0].tolist() == [[True, False, False, True], [False] * 4]
    assert (bias.shape, bias.dtype) == ((1, 1, 2, 4), torch.float64)
    assert bias[0, 0, 1].tolist() == [0.5, 0, 0, -1e4]


def test_nan_masks_nothing_and_is_kept():
    bias, mask = limits([torch.tensor([[[[0.0, torch.nan, -torch.inf]]]])], 1, 3, torch.float32)
    assert bias.isnan().flatten().tolist() == [False, True, False]
    assert mask.flatten().tolist() == [True, True, False]


def test_a_bias_of_zeros_and_a_mask_of_true_are_none():
    assert limits([], 2, 3, torch.float32) == (None, None)
    assert limits([torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 1, 3).bool()], 2, 3, torch.float32) == (None, None)
    learned = torch.zeros(1, 1, 2, 3, requires_grad=True)  # which may differ from 0 later
    assert limits([learned], 2, 3, torch.float32)[0].requires_grad
    bias, mask = limits([torch.tensor([[[[0.0, -torch.inf]]]])], 1, 2, torch.float32)
    assert bias is None
    assert mask.flatten().tolist() == [True, False]
