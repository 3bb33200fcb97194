"""Scores of a model on a split of its task."""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.layers.taps import looking
from polyhead.spec.shapes import check_count, one_of
from polyhead.tasks.base import Batch, Task, check_not_empty
from polyhead.tasks.scores import Score
from polyhead.train import parallel
from polyhead.train.network import RESERVED, Network, answers, loss_of, metrics, parts
from polyhead.train.world import World


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
    """The loss, each metric and its standard error `<metric>_se`, and the number of scored `sequences`.

    The loss is a mean over all scored positions.  A metric is a mean over sequences, weighted by the task's `amounts`;
    its error is nan for a single sequence.  Batches 0 to `batches` - 1 of the split's own stream are scored: the same
    for every model with this seed.  If a split has fewer batches, each of its sequences is scored once.

    Args:
        accumulate: The number of parts per batch, as in training.
        world: The processes that share the work.

    Raises:
        ValueError: For a split that is unknown or empty, an unknown precision, and numbers that are not integers of at
            least 1.
    """
    for name, number in (("batches", batches), ("batch_size", batch_size), ("accumulate", accumulate)):
        check_count("train.evaluate", name, number)
    one_of("train.evaluate", "precision", precision, ("fp32", "bf16", "fp16"))
    device, world = torch.device(device), world or World.alone()
    losses: list[Tensor] = []
    scored: list[Tensor] = []
    amounts: list[Tensor | None] = []
    values: dict[str, list[Tensor]] = defaultdict(list)
    sequences = 0
    with looking(model):
        for i in range(batch_count(task, split, batches, batch_size)):
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
    derived = task.derived(scores)
    if not isinstance(derived, dict) or not all(isinstance(value, int | float) for value in derived.values()):
        raise ValueError(f"{type(task).__name__}: derived must be numbers by name but is {derived!r:.60}")
    for name in derived:
        if name in RESERVED or name in scores:
            raise ValueError(f"{type(task).__name__}: derived must not be called {name!r}, as another score is")
    return scores | derived


def evaluate_network(network: Network, split: str) -> dict[str, float]:
    """The scores of a run's network on `split`, equal in all processes."""
    config, train = network.config, network.config.train
    scores = evaluate(
        network.model, config.task, split, batches=train.eval_batches, batch_size=train.batch_size, seed=config.seed,
        device=network.device, precision=train.precision, accumulate=train.accumulate, world=network.world,
    )  # fmt: skip
    if network.is_sharded:
        parallel.reshard(network.model)
    return scores


def _score(model: nn.Module, task: Task, part: Batch, precision: str, world: World) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a part and its metrics per sequence; with several processes, the contribution of this one's rows."""
    if world.size == 1:
        outputs = answers(model, task, part, precision)
        return loss_of(task, outputs, part), metrics(task, outputs, part)
    count = len(part.inputs)
    rows = world.rows(count)
    # A process without rows computes one unscored row, because the others wait for its part of the model.
    num_rows = rows.stop - rows.start
    rows_here = part.map(operator.itemgetter(rows if num_rows else slice(0, 1)))
    outputs = answers(model, task, rows_here, precision)
    # Each metric (count) is 0 at rows of other processes: the sum in `_gathered` puts the rows of all side by side.
    padding = (rows.start, count - rows.stop)
    scores = {}
    for name, value in metrics(task, outputs, rows_here).items():
        scores[name] = F.pad(value[:num_rows].double(), padding)
    if not num_rows:
        return torch.zeros((), dtype=torch.double, device=rows_here.inputs.device), scores
    # Each share is weighted by its scored positions, so the sum over processes is the mean over the part.
    share = rows_here.scored.sum() / part.scored.sum().clamp(min=1)
    return loss_of(task, outputs, rows_here).double() * share, scores


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


def batch_count(task: Task, split: str, batches: int, batch_size: int) -> int:
    """The number of batches to score, fewer than `batches` for a small split.  Raises ValueError for an empty split."""
    check_not_empty(task, split)
    count = task.count(split)
    return batches if count is None else min(batches, math.ceil(count / batch_size))


def joined_amounts(amounts: Iterable[Tensor | None]) -> Tensor | None:
    """The amounts of the sequences of all batches (n), on the CPU; None for a task without any."""
    by_batch = [amount for amount in amounts if amount is not None]
    if not by_batch:
        return None
    return torch.cat(by_batch).cpu()


def summary(
    losses: list[Tensor],
    values: Mapping[str, list[Tensor]],
    scored: list[Tensor],
    sequences: int,
    amounts: Sequence[Tensor | None] = (),
) -> dict[str, float]:
    """The scores of `evaluate` from those of batches, with their numbers of `scored` positions and `Task.amounts`."""
    # Batches may differ in scored positions; a plain mean of their losses would favour the short ones.
    counts = torch.stack(scored).cpu().double()
    means = torch.stack(losses).cpu().double().masked_fill(counts == 0, 0.0)  # the mean of no position may be NaN
    scores = {"loss": (means * (counts / counts.sum())).sum().item()}
    all_amounts = joined_amounts(amounts)
    for name, numbers in values.items():
        score = Score.of(torch.cat(numbers).cpu(), amounts=all_amounts)
        scores |= {name: score.mean, f"{name}_se": score.standard_error}
    return {**scores, "sequences": sequences}
