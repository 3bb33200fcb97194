"""How large a model is, counted on the meta device: nothing is allocated."""

import torch

from polyhead.config import TransformerConfig
from polyhead.models.transformer import Transformer


def parameters(settings: TransformerConfig) -> int:
    """The number of parameters of a transformer; tied tables count once."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(settings, device="meta").parameters())
