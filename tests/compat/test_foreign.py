"""Foreign masks as our bias and mask."""

import torch

from polyhead.compat.foreign import limits


def test_a_bias_of_zeros_and_a_mask_of_true_are_none():
    assert limits([], 2, 3, torch.float32) == (None, None)
    assert limits([torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 1, 3).bool()], 2, 3, torch.float32) == (None, None)
    learned = torch.zeros(1, 1, 2, 3, requires_grad=True)  # which may differ from 0 later
    assert limits([learned], 2, 3, torch.float32)[0].requires_grad
    bias, mask = limits([torch.tensor([[[[0.0, -torch.inf]]]])], 1, 2, torch.float32)
    assert bias is None
    assert mask.flatten().tolist() == [True, False]
    assert limits([torch.tensor([[[[-1e4]]]])], 1, 1, torch.float32) == (torch.tensor(-1e4), None)
