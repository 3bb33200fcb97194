"""The masks that `nn.MultiheadAttention` takes."""

import torch

F64 = torch.float64
MASKS = ("none", "padding", "added padding", "pairs", "added pairs", "per head", "both", "bool and added")


def masks(name, b, t, s, heads):
    """PyTorch's masks: True is hidden; key 0 is always visible, so that no row is NaN."""
    padding, pairs, each = torch.rand(b, s) > 0.6, torch.rand(t, s) > 0.6, torch.rand(b * heads, t, s) > 0.6
    padding[:, 0], pairs[:, 0], each[..., 0] = False, False, False
    added = torch.randn(t, s, dtype=F64).masked_fill(pairs, -torch.inf)
    options = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "added padding": {"key_padding_mask": torch.zeros(b, s, dtype=F64).masked_fill(padding, -torch.inf)},
        "pairs": {"attn_mask": pairs},
        "added pairs": {"attn_mask": added},
        "per head": {"attn_mask": torch.randn(b * heads, t, s, dtype=F64).masked_fill(each, -torch.inf)},
        "both": {"key_padding_mask": padding, "attn_mask": pairs},
        "bool and added": {"key_padding_mask": torch.randn(b, s, dtype=F64), "attn_mask": added},
    }
    return options[name]
