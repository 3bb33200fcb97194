"""Scores of a model on a split of its task."""

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.config import Logits
from polyhead.layers.taps import looking
from polyhead.models.inputs_outputs import LazyLogits
from polyhead.models.transformer import Transformer
from polyhead.tasks.base import Batch, Task
from polyhead.tasks.task import Score
from polyhead.train.world import World

LAZY = 2**26
"""From this many logits on, the loss is computed tile by tile if possible.  They would take 256 MB as float32, and
three times as much in training.  On a CPU the loss then takes 20 % more time and differs only by rounding."""

OWN = (
    "loss", "sequences", "kind", "step", "split", "seconds", "lr", "grad_norm", "steps_per_second", "tokens_per_second",
)  # fmt: skip
"""What results and rows of metrics.jsonl hold beside metrics."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """A context for the forward pass in mixed precision; a no-op for fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def predict(
    model: Callable[..., Tensor],
    task: Task,
    batch: Batch,
    precision: str = "fp32",
    keep: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The model's outputs in at least float32: (b t c), or (b 1 c) for classification.

    Positions that the task never scores are not computed; they are 0.
    `keep`: multiplies the code of each layer, see `Transformer.forward`.
    """
    outputs = _outputs(model, task, batch, precision, {} if keep is None else {"keep": keep})
    before = 0 if task.tail is None else batch.inputs.shape[1] - outputs.shape[1]
    return F.pad(outputs, (0, 0, before, 0)) if before else outputs


def answers(model: Callable[..., Any], task: Task, batch: Batch, precision: str = "fp32") -> Tensor | LazyLogits:
    """The outputs for loss and metrics: those of `predict`, or lazy logits from `LAZY` logits on."""
    # A model inside DistributedDataParallel is no Transformer, so it always gives whole logits.
    end = task.ends[1]
    if (
        isinstance(model, Transformer)
        and task.lazy
        and task.tail is None
        and isinstance(end, Logits)
        and batch.targets.numel() * end.count >= LAZY
    ):
        lazy: LazyLogits = _outputs(model, task, batch, precision, {"lazy": True})
        return lazy
    return predict(model, task, batch, precision)


def _outputs(model: Callable[..., Any], task: Task, batch: Batch, precision: str, options: dict[str, Any]) -> Any:
    # Some models have no code, no encoder, or no separate output layer.
    arguments: dict[str, Any] = sources(batch) | options
    if task.tail is not None:
        arguments["tail"] = task.tail
    with autocast(batch.inputs.device, precision):
        outputs = model(batch.inputs, mask=batch.mask, **arguments)
    if isinstance(outputs, Tensor) and outputs.dtype in _DTYPES.values():  # of autocast, or of the model itself
        return outputs.float()
    return outputs


def sources(batch: Batch) -> dict[str, Tensor | None]:
    """The encoder's input in a batch, by the argument names of `Transformer.forward`."""
    if batch.source is None:
        return {}
    return {"source": batch.source, "source_mask": batch.source_mask}


def metrics(task: Task, outputs: Tensor | LazyLogits, batch: Batch) -> dict[str, Tensor]:
    """The task's metrics of a batch, each (b).

    Raises ValueError for another shape, for the name of another score, and without the main metric.
    """
    kind, shape = type(task).__name__, (len(batch.inputs),)
    scores = task.metrics(outputs, batch)
    for name, value in scores.items():
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if got != shape:
            raise ValueError(f"{kind}: metrics must be numbers {shape}, one for each sequence, but {name} is {got}")
        # Scores share one flat row: a metric of such a name would overwrite the loss or another metric's error.
        if name in OWN or name.removesuffix("_se") in scores.keys() - {name}:
            raise ValueError(f"{kind}: no metric may be called {name!r}, the name of another score")
    if task.metric not in scores:
        raise ValueError(f"{kind}: its metric is {task.metric!r}, but its metrics are {', '.join(scores)}")
    return scores


def parts(batch: Batch, count: int) -> list[Batch]:
    """A batch cut into `count` parts, or fewer if it is short."""
    if count == 1:
        return [batch]
    # Rounded up, so that a short batch gives fewer parts and never an empty one, whose mean is NaN.
    size = -(-len(batch.inputs) // count)
    cuts = [slice(start, start + size) for start in range(0, len(batch.inputs), size)]
    return [batch.map(operator.itemgetter(cut)) for cut in cuts]


def evaluate(
    model: nn.Module,
    task: Task,
    split: str,
    *,
    batches: int = 16,
    batch_size: int = 128,
    seed: int = 0,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
    accumulate: int = 1,
    world: World | None = None,
) -> dict[str, float]:
    """The loss over all scored positions; for each metric its mean over sequences, weighted by the task's `amounts`,
    and the standard error `<metric>_se` of that mean (nan for a single sequence).

    Batches 0 to `batches` - 1 of the split's own stream are scored: the same for every model with this seed.  If a
    split has fewer batches, each of its sequences is scored once.  `sequences` is the number of scored sequences.
    `accumulate`: number of parts per batch, as in training.  `world`: the processes that share the work.
    """
    device, world = torch.device(device), world or World.alone()
    losses: list[Tensor] = []
    scored: list[Tensor] = []
    amounts: list[Tensor | None] = []
    values: dict[str, list[Tensor]] = defaultdict(list)
    sequences = 0
    with looking(model):
        for i in range(enough(task, split, batches, batch_size)):
            batch = task.batch(split, batch_size, seed=seed, step=i, device=device)
            # A batch that trains only in parts might not fit into memory as a whole here.
            for part in parts(batch, accumulate):
                loss, metric_values = _score(model, task, part, precision, world)
                losses.append(loss)
                scored.append(part.scored.sum())
                amounts.append(task.amounts(part))
                sequences += len(part.inputs)
                for name, value in metric_values.items():
                    values[name].append(value)
    scores = summary(*_gathered(losses, values, world), scored, sequences, amounts)
    return scores | task.derived(scores)


def _score(model: nn.Module, task: Task, part: Batch, precision: str, world: World) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a part and its metrics per sequence; with several processes, the contribution of this one's rows."""
    if world.size == 1:
        outputs = answers(model, task, part, precision)
        return task.loss(outputs, part), metrics(task, outputs, part)
    count = len(part.inputs)
    rows = world.rows(count)
    # A process without rows computes one unscored row, because the others wait for its part of the model.
    rows_here = part.map(operator.itemgetter(rows if rows.start < rows.stop else slice(0, 1)))
    outputs = answers(model, task, rows_here, precision)
    # Rows of other processes are zeros here: the sum in `_gathered` puts the rows of all side by side.
    before, counted = rows.start, rows.stop - rows.start
    scores = {
        name: F.pad(value[:counted].double(), (before, count - before - counted))
        for name, value in metrics(task, outputs, rows_here).items()
    }
    if not counted:
        return torch.zeros((), dtype=torch.double), scores
    # Each share is weighted by its scored positions, so the sum over processes is the mean over the part.
    return task.loss(outputs, rows_here).double() * (rows_here.scored.sum() / part.scored.sum().clamp(min=1)), scores


def _gathered(
    losses: list[Tensor], values: dict[str, list[Tensor]], world: World
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """The joint results of all processes, in each of them."""
    if world.size == 1:
        return losses, values
    # One message: the losses, then one row of numbers for each metric.
    tensors = [torch.stack(losses).cpu()]
    for parts_of_metric in values.values():
        tensors.append(torch.cat(parts_of_metric).cpu())
    total = world.sum(torch.cat(tensors))
    metric_rows = total[len(losses) :].view(len(values), -1)
    return list(total[: len(losses)]), {name: [row] for name, row in zip(values, metric_rows, strict=True)}


def mean(values: Tensor) -> Tensor:
    """The mean of a metric of sequences (b), which may also be counts or truth values."""
    return values.mean(dtype=values.dtype if values.is_floating_point() else torch.float32)


def enough(task: Task, split: str, batches: int, batch_size: int) -> int:
    """The number of batches, or fewer if those cover the split once.  Raises ValueError for an empty split."""
    count = task.count(split)
    if count == 0:
        raise ValueError(f"{type(task).__name__}: split {split!r} has no {task.items}")
    return batches if count is None else min(batches, -(-count // batch_size))


def summary(
    losses: list[Tensor],
    values: Mapping[str, list[Tensor]],
    scored: list[Tensor],
    sequences: int,
    amounts: Sequence[Tensor | None] = (),
) -> dict[str, float]:
    """The mean loss over all scored positions, the mean and standard error of each metric over all sequences, and the
    number of sequences.  `scored`: the number of scored positions of each batch.  `amounts`: see `Task.amounts`."""
    # Batches may differ in scored positions; a plain mean of their losses would favour the short ones.
    counts = torch.stack(scored).cpu().double()
    means = torch.stack(losses).cpu().double().masked_fill(counts == 0, 0.0)  # the mean of no position may be NaN
    scores = {"loss": (means * (counts / counts.sum())).sum().item()}
    given_amounts = [amount for amount in amounts if amount is not None]
    all_amounts = torch.cat(given_amounts).cpu() if given_amounts else None
    for name, parts in values.items():
        score = Score.of(torch.cat(parts).cpu(), amounts=all_amounts)
        scores |= {name: score.mean, f"{name}_se": score.standard_error}
    return {**scores, "sequences": sequences}
