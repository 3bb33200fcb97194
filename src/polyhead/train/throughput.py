"""Tokens per second of a token model, and its share of a GPU's peak (MFU).

    operations of a step per token = 6 (N + A)

N counts the weights that each token uses: matrices, the active share of a mixture's experts, and the embedding table if
it also gives the logits.  A counts the multiply-adds of attention (`spec`: the work of a head without its projections)
over the visible keys; causal attention sees half of them on average.  A multiply-add is two operations forward and four
backward (Chowdhery et al. 2022, appendix B, who count all keys).  Recomputation (checkpointing, lazy logits) does not
count.
"""

import re
from typing import Any

import torch
from torch import nn

from polyhead.config import Logits, Run, Tokens
from polyhead.layers.feedforward import MixtureOfExperts
from polyhead.models.transformer import Transformer
from polyhead.spec import MECHANISMS, amount
from polyhead.train.optimiser import parameter_kinds

PEAK = {
    r"\bH200 NVL\b": 835e12,
    r"\bH200\b": 989e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 NVL\b": 835e12,
    r"\bH100\b": 989e12,
    r"\bA100\b": 312e12,
    r"\bL4\b": 121e12,
    r"\bRTX 4090$": 165.2e12,
}
"""Dense bfloat16 operations per second with float32 sums, by the name of the card: NVIDIA's data sheets
(H200, H100, A100, L4) and its white paper on the Ada architecture (RTX 4090)."""


def peak(card: str) -> float | None:
    """The peak of a card by its name; None for an unknown card, and for a slice of one (MIG).

    >>> peak("NVIDIA A100-SXM4-80GB"), peak("NVIDIA L40S")
    (312000000000000.0, None)
    """
    return next((value for name, value in PEAK.items() if re.search(name, card) and " MIG " not in card), None)


def operations(model: Transformer, length: int) -> int:
    """Operations of a training step per token, in sequences of `length`.

    >>> model = Transformer(TransformerConfig(Tokens(100), Logits(100), dim=64, layers=2, heads=Softmax(4)))
    >>> weights = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 100
    >>> operations(model, 32) == 6 * (weights + 2 * 2 * 64 * 32)
    True
    """
    settings = model.config
    keys = max(1, length // 2) if settings.causal else length
    if settings.window is not None:
        seen = visible(length, length, causal=settings.causal, window=settings.window)
        keys = min(keys, max(1, round(seen / length)))
    return 6 * (_weights(model) + sum(_attention(model, i, keys) for i in range(settings.layers)))


def visible(t: int, s: int, *, causal: bool, window: int | None = None) -> int:
    """The visible pairs of t queries and s keys, of which the last are aligned.

    >>> visible(3, 4, causal=True), visible(4, 4, causal=False, window=2)
    (9, 10)
    """
    if window is None and not causal:
        return t * s
    reach = max(t, s) if window is None else window
    places = range(s - t, s)
    return sum(max(0, min(s, at + (1 if causal else reach)) - max(0, at - reach + 1)) for at in places)


def _weights(model: Transformer) -> int:
    kinds = parameter_kinds(model)
    shares = {
        id(parameter): module.top_k / module.experts
        for module in model.modules()
        if isinstance(module, MixtureOfExperts)
        for parameter in module.parameters(recurse=False)
    }
    named = [p for name, p in model.named_parameters() if kinds[name] == "weights"]
    end = model.config.outputs
    table = end.count * model.config.dim if isinstance(end, Logits) and end.tied else 0
    return table + round(sum(p.numel() * shares.get(id(p), 1.0) for p in named))


def _attention(model: Transformer, layer: int, keys: int) -> int:
    rows, total = {row.config: row for row in MECHANISMS}, 0
    attention: Any = model.blocks[layer].attention
    for group, heads in zip(model.config.layer_heads(layer), attention.groups, strict=True):
        row, sizes = rows.get(type(group).__name__, rows["Softmax"]), heads.sizes  # a user's: like softmax
        known = {"m": model.config.dim, "h": sizes.heads, "d": sizes.dim, "e": sizes.value_dim, "s": keys}
        known |= {"r": getattr(heads, "relations", sizes.heads), "p": getattr(heads, "relation_dim", 0)}
        total += sizes.heads * (amount(row.work, known) - amount(row.size, known))
    return total


class Throughput:
    """Rates for the rows of a run on tokens, in addition to steps per second; none for other runs."""

    def __init__(self, config: Run, model: nn.Module, device: torch.device, devices: int = 1) -> None:
        length = config.task.length
        self.tokens = config.train.batch_size * length if isinstance(config.task.ends[0], Tokens) else None
        most = peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.share: float | None = None
        if most is not None and self.tokens and isinstance(model, Transformer) and model.encoder is None:
            self.share = operations(model, length) / (most * devices)

    def row(self, steps_per_second: float) -> dict[str, float]:
        """`tokens_per_second` and, on a card with a known peak, `share_of_peak`."""
        if self.tokens is None:
            return {}
        rate = steps_per_second * self.tokens
        return {"tokens_per_second": rate} | ({} if self.share is None else {"share_of_peak": rate * self.share})
