"""The effect of a head: the score of a model when the code of one head, or of a whole layer, is zeroed.

A zeroed head contributes to no value network: softmax and linear heads then add nothing to the output, and a HYLA layer
composes its value network from the other heads.  The model is not retrained.  So the drop shows how much this model
uses the head, not how well a model without the head could do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead.analysis.capture import for_model
from polyhead.analysis.probe import draws
from polyhead.config import total_heads
from polyhead.layers.taps import looking
from polyhead.models.transformer import Transformer
from polyhead.spec.shapes import check_number
from polyhead.tasks.base import Batch, Task, check_split
from polyhead.tasks.scores import Score
from polyhead.train.evaluation import joined_amounts
from polyhead.train.network import predict


def zero_heads(
    model: Transformer,
    task: Task,
    split: str = "compositional",
    *,
    sequences: int = 1024,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """The task's metric without zeroing; then for every layer, with the code of each head zeroed, and of all heads.

    Means are weighted by the task's `amounts`.  All rows use the same `sequences` sequences, which neither training nor
    evaluation reads.  Of an encoder-decoder, layers are those of the decoder, and their self-attention is zeroed.

    >>> rows = zero_heads(model, task)
    >>> max((row for row in rows if row["head"] is not None), key=lambda row: row["drop"])      # matters most

    Returns:
        Rows {layer, head, score, se, drop, drop_se, n}; head None: a whole layer; layer None: nothing zeroed.
            `drop` is the loss of score, and `drop_se` the standard error of its mean over n sequences.
    """
    check_split(task, split)
    check_number("zero_heads", "sequences", sequences, 2)
    batches = []
    for batch in draws(task, split, sequences, seed=seed, purpose="zero", device=device):
        batches.append(for_model(model, batch))
    amounts = joined_amounts(map(task.amounts, batches))
    rows = []
    with looking(model):
        complete = _scores(model, task, batches)
        rows.append(_row(None, None, complete, torch.zeros_like(complete), amounts))
        for layer in range(len(model.blocks)):
            num_heads = total_heads(model.config.layer_heads(layer))
            for head in (*range(num_heads), None):
                factors = torch.ones(num_heads)
                factors[slice(None) if head is None else head] = 0.0
                scores = _scores(model, task, batches, layer, factors)
                rows.append(_row(layer, head, scores, task.gain(1.0) * (complete - scores), amounts))
    return rows


def _scores(
    model: Transformer, task: Task, batches: Sequence[Batch], layer: int = 0, factors: Float[Tensor, " h"] | None = None
) -> Tensor:
    """The metric of each sequence (b), on the CPU.  `factors`: what multiplies the code in `layer`, by head."""
    scores = []
    for batch in batches:
        keep: list[Tensor | None] = [None] * len(model.blocks)
        if factors is not None:
            t = model.length(batch.inputs)
            by_head = factors.to(next(model.parameters()))[:, None, None]
            keep[layer] = by_head.expand(1, len(factors), t, t)  # the same for all pairs of tokens
        outputs = predict(model, task, batch, keep=keep).float()
        scores.append(task.metrics(outputs, batch)[task.metric].cpu())
    return torch.cat(scores).double()


def _row(layer: int | None, head: int | None, scores: Tensor, drops: Tensor, amounts: Tensor | None) -> dict[str, Any]:
    score = Score.of(scores, amounts=amounts)
    drop = Score.of(drops, amounts=amounts)
    return {
        "layer": layer,
        "head": head,
        "score": score.mean,
        "se": score.standard_error,
        "drop": drop.mean,
        "drop_se": drop.standard_error,
        "n": len(scores),
    }
