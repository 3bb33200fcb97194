"""The network of a run: model, optimiser and loss scale; the outputs, metrics and gradients of a batch.

All randomness is a pure function of (seed, name, step): initial parameters use stream(seed, "init"), batch i the task's
own stream, and dropout in step i stream(seed, "dropout", i).  So a checkpoint needs no generator state.

With several processes, each draws the same batch and takes its own rows.  Each has its own dropout stream.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from polyhead.config import Logits, Run, Tokens
from polyhead.models.build import build
from polyhead.models.inputs_outputs import LazyLogits
from polyhead.models.transformer import Transformer
from polyhead.spec.values import one_line
from polyhead.tasks.base import Batch, Task, stream
from polyhead.train import optimiser, parallel
from polyhead.train.device import seed
from polyhead.train.world import World

LAZY = 2**26
"""From this many logits on, the loss is computed tile by tile if possible.  They would take 256 MB as float32, and
three times as much in training.  On a CPU the loss then takes 20 % more time and differs only by rounding."""

RESERVED = (
    "loss", "sequences", "kind", "step", "split", "seconds", "lr", "grad_norm", "steps_per_second", "tokens_per_second",
)  # fmt: skip
"""What results and rows of metrics.jsonl hold beside metrics."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def initial(config: Run) -> nn.Module:
    """The network of a run before its first step, on the CPU."""
    torch.manual_seed(stream(config.seed, "init"))
    return build(config.model)


class Network:
    """The network of a run: `model`, with a data-parallel or sharded wrapper if several processes train it."""

    def __init__(self, config: Run, device: torch.device, world: World) -> None:
        self.config, self.device, self.world = config, device, world
        # Ranks drop different units for their rows; rank 0 keeps the name that a single process uses.
        self.dropout_stream = "dropout"
        if world.rank:
            self.dropout_stream = f"dropout/{world.rank}"
        model = initial(config)
        self.is_sharded = world.size > 1 and config.parallel == "sharded"
        if self.is_sharded:
            parallel.shard(model, world)
        self.model = model.to(world.device)
        self.optimiser = optimiser.build(self.model, config.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.tokens_per_step = 0
        if isinstance(config.model.inputs, Tokens):
            self.tokens_per_step = config.train.batch_size * config.task.length
        if config.compile:
            self.model.compile()
        self.wrapped = self.model
        if world.size > 1 and not self.is_sharded:
            self.wrapped = parallel.replicated(self.model, world)
        self.model.train()

    def step(self, number: int, *, needs_metrics: bool) -> dict[str, float]:
        """Make update number `number`, from 0; return loss, metrics and gradient norm of its batch if asked for.

        Without `needs_metrics` it never waits for the device.
        """
        config, train = self.config, self.config.train
        for group in self.optimiser.param_groups:
            group["lr"] = optimiser.learning_rate(number, train)
        batch = config.task.batch("train", train.batch_size, seed=config.seed, step=number, device=self.device)
        seed(self.device, stream(config.seed, self.dropout_stream, number))
        self.optimiser.zero_grad(set_to_none=True)

        # Each process computes its rows of the batch, in `accumulate` pieces whose gradients are added up.
        rows = batch
        if self.world.size > 1:
            rows = batch.map(operator.itemgetter(self.world.rows(train.batch_size)))
        pieces = parts(rows, train.accumulate)
        losses: list[Tensor] = []
        scores: dict[str, list[Tensor]] = {}
        for piece in pieces:
            exchange: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            if self.world.size > 1:
                exchange = parallel.gradient_sync(self.wrapped, piece is pieces[-1])
            with exchange:
                loss, piece_scores = self._backward(piece, batch, needs_metrics)
            losses.append(loss)
            for name, values in piece_scores.items():
                scores.setdefault(name, []).append(values)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()

        # Clipping compares true gradients with its limit, so the loss scale is taken out before.
        self.scaler.unscale_(self.optimiser)
        norm = None
        if train.clip is not None:
            norm = self._gradient_norm(train.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        torch.clear_autocast_cache()  # within another autocast, that of a step keeps the casts of weights
        if not needs_metrics:
            return {}
        if norm is None:
            norm = self._gradient_norm(None)
        means = {"loss": loss}
        for name, of_pieces in scores.items():
            means[name] = mean(torch.cat(of_pieces))
        totals = self.world.totals(list(means.values()))
        row = {name: float(total) / self.world.size for name, total in zip(means, totals, strict=True)}
        return row | {"grad_norm": float(norm)}

    def _backward(self, piece: Batch, batch: Batch, needs_metrics: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a piece of a batch; return its share of the loss, and its metrics by sequence."""
        task = self.config.task
        outputs = answers(self.wrapped, task, piece, self.config.train.precision)
        loss = loss_of(task, outputs, piece)
        if not loss.requires_grad:
            raise ValueError(f"{type(task).__name__}: loss must be one number with a gradient but has none")
        if isinstance(self.model, Transformer):
            loss = loss + self.model.auxiliary_loss()
        if piece is not batch:  # the mean over all scored positions of the batch; gradients of processes are averaged
            loss = loss * (piece.scored.sum() * self.world.size / batch.scored.sum().clamp(min=1))
        # Lazy outputs read the parameters again, so metrics come before the update.  A sharded model has its
        # parameters together only before the backward pass; any other model saves memory by waiting for it.
        scores = {}
        if needs_metrics and self.is_sharded:
            scores = self._metrics(outputs, piece)
        self.scaler.scale(loss).backward()
        if needs_metrics and not self.is_sharded:
            scores = self._metrics(outputs, piece)
        return loss.detach(), scores

    def _gradient_norm(self, clip: float | None) -> Tensor:
        """The gradient norm over all processes; gradients of a larger norm than `clip` are scaled down to it."""
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.is_sharded:
            norm = parallel.full_tensor(norm)
        if clip is not None:
            clip_grads_with_norm_(self.model.parameters(), clip, norm)
        return norm

    @torch.no_grad()
    def _metrics(self, outputs: Any, piece: Batch) -> dict[str, Tensor]:
        return metrics(self.config.task, outputs, piece)

    def is_finite(self) -> bool:
        """Are all parameters finite, in all processes?"""
        finite = [parallel.local_part(p).detach().isfinite().all() for p in self.model.parameters()]
        num_bad = (~torch.stack(finite)).sum().cpu()
        return not self.world.sum(num_bad)


# ------------------------------------------------------------------------------------- outputs and metrics of a batch
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

    Positions that the task never scores are not computed; their outputs are 0.

    Args:
        keep: Multiplies the code of each layer, see `Transformer.forward`.
    """
    options = {}
    if keep is not None:
        options["keep"] = keep
    outputs = _outputs(model, task, batch, precision, options)
    num_missing = batch.inputs.shape[1] - outputs.shape[1]
    if task.tail is None or num_missing == 0:
        return outputs
    return F.pad(outputs, (0, 0, num_missing, 0))


def answers(model: Callable[..., Any], task: Task, batch: Batch, precision: str = "fp32") -> Tensor | LazyLogits:
    """The outputs for loss and metrics: those of `predict`, or lazy logits from `LAZY` logits on."""
    # A model inside DistributedDataParallel is no Transformer, so it always gives whole logits.
    if isinstance(model, Transformer) and task.lazy and task.tail is None:
        end = model.config.outputs
        if isinstance(end, Logits) and batch.targets.numel() * end.count >= LAZY:
            lazy: LazyLogits = _outputs(model, task, batch, precision, {"lazy": True})
            return lazy
    return predict(model, task, batch, precision)


def _outputs(model: Callable[..., Any], task: Task, batch: Batch, precision: str, options: dict[str, Any]) -> Any:
    # Only models that have them take these arguments, so they are passed only where they are needed.
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


def loss_of(task: Task, outputs: Tensor | LazyLogits, batch: Batch) -> Tensor:
    """The task's loss of a batch.  Raises ValueError unless it is one number (): others would be broadcast."""
    loss = task.loss(outputs, batch)
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise ValueError(f"{type(task).__name__}: loss must be one number () but is {one_line(repr(loss)):.60}")
    return loss


def metrics(task: Task, outputs: Tensor | LazyLogits, batch: Batch) -> dict[str, Tensor]:
    """The task's metrics of a batch, each (b).

    Raises:
        ValueError: For another shape, for the name of another score, and without the main metric.
    """
    kind, shape = type(task).__name__, (len(batch.inputs),)
    scores = task.metrics(outputs, batch)
    if not isinstance(scores, dict):
        raise ValueError(f"{kind}: metrics must be numbers {shape} by name but are a {type(scores).__name__}")
    for name, value in scores.items():
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if got != shape:
            raise ValueError(f"{kind}: metrics must be numbers {shape}, one for each sequence, but {name} is {got}")
        # Scores share one flat row: a metric of such a name would overwrite the loss or another metric's error.
        if name in RESERVED or name.removesuffix("_se") in scores.keys() - {name}:
            raise ValueError(f"{kind}: no metric may be called {name!r}, the name of another score")
    if task.metric not in scores:
        raise ValueError(f"{kind}: its metric is {task.metric!r}, but its metrics are {', '.join(scores)}")
    return scores


def parts(batch: Batch, count: int) -> list[Batch]:
    """A batch cut into `count` parts, or fewer if it is short."""
    if count == 1:
        return [batch]
    # Rounded up, so that a short batch gives fewer parts and never an empty one, whose mean is NaN.
    size = math.ceil(len(batch.inputs) / count)
    batches = []
    for start in range(0, len(batch.inputs), size):
        batches.append(batch.map(operator.itemgetter(slice(start, start + size))))
    return batches


def mean(values: Tensor) -> Tensor:
    """The mean of a metric of sequences (b), which may also be counts or truth values."""
    if not values.is_floating_point():
        values = values.float()
    return values.mean()
