"""A causal byte model and a text, for explore pages."""

from typing import Any

import torch

import polyhead as ph
from polyhead.tasks.base import Batch
from polyhead.tasks.text.tokens import Bytes

TEXT = 'if a < b:\n\tprint("<script>window.hacked = 1</script><img src=x onerror=hacked()>")  # é &amp; a < b'
DUAL = (ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention(count=5), relations=3))


def model_of(*heads: Any, **changes: Any) -> ph.Transformer:
    """A causal model of bytes, its attention far from uniform."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dim": 16, "layers": len(heads), "max_length": 128, "causal": True, **changes}
    model = ph.Transformer(ph.TransformerConfig(ph.Tokens(256), ph.Logits(256), heads=heads, **settings))
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.qkv.weight, std=0.6)
    return model.eval()


def batch_of(text: str) -> Batch:
    ids = torch.tensor([Bytes().encode(text)])
    return Batch(ids, ids, None, torch.ones_like(ids), {})
