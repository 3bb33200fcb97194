"""The network of a run: model, optimiser and loss scale, on one or several devices.

All randomness is a pure function of (seed, name, step): initial parameters use stream(seed, "init"), batch i the task's
own stream, and dropout in step i stream(seed, "dropout", i).  So a checkpoint needs no generator state.

With several processes, each draws the same batch and takes its own rows.  Each has its own dropout stream.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.config import Run, Tokens
from polyhead.models.build import build
from polyhead.models.transformer import Transformer
from polyhead.tasks.base import Batch, stream
from polyhead.train import optimiser, parallel
from polyhead.train.device import seed
from polyhead.train.evaluation import answers, evaluate, mean, metrics, parts
from polyhead.train.world import World


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
        self.model = parallel.placed(initial(config), world, config.parallel)
        self.optimiser = optimiser.build(self.model, config.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.is_sharded = parallel.is_sharded(world, config.parallel)
        self.tokens_per_step = 0
        if isinstance(config.task.ends[0], Tokens):
            self.tokens_per_step = config.train.batch_size * config.task.length
        if config.compile:
            self.model.compile()
        self.call = parallel.called(self.model, world, config.parallel)
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
            with parallel.exchanging(self.call, piece is pieces[-1]):
                loss, piece_scores = self._backward(piece, batch, needs_metrics)
            losses.append(loss)
            for name, values in piece_scores.items():
                scores.setdefault(name, []).append(values)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()

        # Clipping compares true gradients with its limit, so the loss scale is taken out before.
        self.scaler.unscale_(self.optimiser)
        norm = None
        if train.clip is not None:
            norm = parallel.norm_of_gradients(self.model, train.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        torch.clear_autocast_cache()  # within another autocast, that of a step keeps the casts of weights
        if not needs_metrics:
            return {}
        if norm is None:
            norm = parallel.norm_of_gradients(self.model, None)
        names = ["loss", *scores]
        totals = self.world.totals([loss, *(mean(torch.cat(values)) for values in scores.values())])
        row = {name: float(total) / self.world.size for name, total in zip(names, totals, strict=True)}
        return row | {"grad_norm": float(norm)}

    def _backward(self, piece: Batch, batch: Batch, needs_metrics: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a piece of a batch; return its share of the loss, and its metrics by sequence."""
        task = self.config.task
        outputs = answers(self.call, task, piece, self.config.train.precision)
        loss = task.loss(outputs, piece)
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

    @torch.no_grad()
    def _metrics(self, outputs: Any, piece: Batch) -> dict[str, Tensor]:
        return metrics(self.config.task, outputs, piece)

    def evaluate(self, split: str) -> dict[str, float]:
        """The scores on `split`, equal in all processes."""
        train = self.config.train
        scores = evaluate(
            self.model,
            self.config.task,
            split,
            batches=train.eval_batches,
            batch_size=train.batch_size,
            seed=self.config.seed,
            device=self.device,
            precision=train.precision,
            accumulate=train.accumulate,
            world=self.world,
        )
        parallel.let_go(self.model)
        return scores

    def is_finite(self) -> bool:
        """Are all parameters finite, in all processes?"""
        finite = [parallel.own_part(p).detach().isfinite().all() for p in self.model.parameters()]
        num_bad = (~torch.stack(finite)).sum().cpu()
        return not self.world.sum(num_bad)
