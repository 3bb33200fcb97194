"""The effect of a head: the score of a model when the code of one head, or of a whole layer, is zeroed.

A zeroed head contributes to no value network: softmax and linear heads then add nothing to the output, and a HYLA layer
composes its value network from the other heads.  The model is not retrained.  So the drop shows how much this model
uses the head, not how well a model without the head could do.
"""

from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.probe import draws
from polyhead.config import Batch, Task
from polyhead.layers.taps import looking
from polyhead.models.transformer import Transformer
from polyhead.spec.shapes import check_number
from polyhead.tasks.task import Score, check_split
from polyhead.train.evaluation import predict


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

    Rows are {layer, head, score, se, drop, drop_se, n}; head None: a whole layer; layer None: nothing zeroed.

    `drop` is the loss of score, and `drop_se` the standard error of its mean over n sequences; means are weighted by
    the task's `amounts`.  All rows use the same `sequences` sequences, from a stream that neither training nor
    evaluation reads.  Of an encoder-decoder, layers are those of the decoder, and their self-attention is zeroed.

    >>> rows = zero_heads(model, task)
    >>> max((row for row in rows if row["head"] is not None), key=lambda row: row["drop"])      # matters most
    """
    check_split(task, split)
    check_number("zero_heads", "sequences", sequences, 2)
    batches = list(draws(task, split, sequences, seed=seed, purpose="zero", device=device))
    amounts = [found for batch in batches if (found := task.amounts(batch)) is not None]
    counted = torch.cat(amounts).cpu() if amounts else None
    with looking(model):
        whole = _scores(model, task, batches, None, None)
        rows = [_row(None, None, whole, 0 * whole, counted)]
        for layer in range(len(model.blocks)):
            for head in (*range(_heads(model, layer)), None):
                scores = _scores(model, task, batches, layer, head)
                rows.append(_row(layer, head, scores, task.gain(1.0) * (whole - scores), counted))
    return rows


def _scores(model: Transformer, task: Task, batches: list[Batch], layer: int | None, head: int | None) -> Tensor:
    """The metric of each sequence (b), on the CPU."""
    found = []
    for batch in batches:
        keep = None if layer is None else _keep(model, layer, head, batch.inputs)
        outputs = predict(model, task, batch, keep=keep).float()
        found.append(task.metrics(outputs, batch)[task.metric].cpu())
    return torch.cat(found).double()


def _heads(model: Transformer, layer: int) -> int:
    return sum(group.heads for group in model.config.layer_heads(layer))


def _keep(model: Transformer, layer: int, head: int | None, inputs: Tensor) -> list[Tensor | None]:
    """0 for `head` of `layer` and 1 for its other heads.  `head` None: 0 for all heads."""
    heads, t = _heads(model, layer), model.length(inputs)
    kept = torch.ones(1, heads, 1, 1, device=inputs.device, dtype=next(model.parameters()).dtype)
    kept[:, slice(None) if head is None else head] = 0.0
    return [kept.expand(1, heads, t, t) if i == layer else None for i in range(len(model.blocks))]


def _row(layer: int | None, head: int | None, scores: Tensor, drops: Tensor, amounts: Tensor | None) -> dict[str, Any]:
    score, drop = Score.of(scores, amounts=amounts), Score.of(drops, amounts=amounts)
    errors = {"score": score.mean, "se": score.standard_error, "drop": drop.mean, "drop_se": drop.standard_error}
    return {"layer": layer, "head": head, **errors, "n": len(scores)}
