"""A plain training loop that can be killed at any moment and goes on as if nothing had happened.

Everything random is a pure function of (seed, name, step): the initial parameters of stream(seed, "init"), batch i of
the task's own stream, dropout in step i of stream(seed, "dropout", i).  So a checkpoint holds no generator state.

Several processes draw the same batch and each takes its rows of it; dropout draws from a stream of each.
"""

import math
import operator
import pathlib
import time
from typing import Any

import torch
from torch import Tensor

from polyhead import config as configs
from polyhead.config import Run, stream
from polyhead.models.build import build
from polyhead.models.transformer import Transformer
from polyhead.train import optimiser, parallel, products
from polyhead.train.evaluation import answers, evaluate, parts
from polyhead.train.progress import Progress
from polyhead.train.stop import Stop
from polyhead.train.store.disk import Patience
from polyhead.train.store.folder import CONFIG, Metrics, Result, environment, is_past, write_result
from polyhead.train.store.saving import Saver
from polyhead.train.throughput import Throughput
from polyhead.train.tracking import Rows
from polyhead.train.world import Ear, World


class Loop:
    """The state of one run: model, optimiser, `step` updates done."""

    def __init__(
        self,
        config: Run,
        folder: pathlib.Path,
        device: torch.device,
        progress: bool,
        stop: Stop | None = None,
        world: World | None = None,
    ) -> None:
        self.config, self.folder, self.device, self.train = config, folder, device, config.train
        self.world = world or World.alone(device)
        self.ear, rank = Ear(self.world), self.world.rank
        self.dropout = f"dropout/{rank}" if rank else "dropout"  # the name of its stream
        torch.manual_seed(stream(config.seed, "init"))
        self.model = parallel.placed(build(config.model), self.world, config.parallel)
        self.optimiser = optimiser.build(self.model, self.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.train.precision == "fp16")
        self.norm: Tensor | None = None  # of the gradient before clipping
        self.patience = Patience(stop or Stop(), speaks=self.world.first)
        how: dict[str, Any] = {"world": self.world}
        self.saver = Saver(config, folder, self.model, self.optimiser, self.scaler, self.patience, **how)
        self.step, self.seconds = self.saver.load()
        own = products.of_run(config, device, self.saver.fast, speaks=self.world.first)
        self.products = products.agreed(own, self.world)
        self.saver.fast = self.products.fast
        if config.compile:
            self.model.compile()
        self.call = parallel.called(self.model, self.world, config.parallel)
        first, metric = self.world.first, config.task.metric
        self.metrics = Rows(config, Metrics(folder, self._is_past, self.patience, self.saver.rows)) if first else None
        shown = progress and first
        self.progress = Progress(config.name, metric, start=self.step, steps=self.train.steps, enabled=shown)
        self.throughput = Throughput(config, self.model, device, self.world.size)
        self.started = self.ticked = time.perf_counter()
        self.counted = 0  # steps since `ticked`

    def fit(self, stop: Stop) -> Result:
        with products.using(self.products):
            return self._fit(stop)

    def _fit(self, stop: Stop) -> Result:
        train, scores = self.train, {}
        self.model.train()
        while self.step < train.steps:
            last = self.step + 1 == train.steps
            told = last or self.step == 0 or (self.step + 1) % train.log_every == 0
            loss, scores_of_batch = self._update(score=told)
            self.saver.losses.append(loss)
            self.progress.step()
            if told:
                self._log(loss, scores_of_batch)
            if last or self.step % train.eval_every == 0:
                scores = self._evaluate()
                self.saver.rating.evaluated(self.step, scores)
            asked = self.ear.hears(stop.asked)
            if last or asked or self.step % train.save_every == 0:
                self._save()
            if asked and not last:
                stop.asked = asked
                self.world.lead(lambda: self._stop(stop))
        self.ear.last()
        return self._finish(scores or self._evaluate())

    def _stop(self, stop: Stop) -> int:
        way_on = f"polyhead resume {self.folder}" + (f" --devices {self.world.size}" if self.world.size > 1 else "")
        raise stop.interrupted(f"stopped and saved at step {self.step}; go on with: {way_on}")

    def _update(self, *, score: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of AdamW: the loss of its batch and, if `score`, the metrics.  Nothing here waits for the device."""
        train, config = self.train, self.config
        rate = optimiser.learning_rate(self.step, train)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = config.task.batch("train", train.batch_size, seed=config.seed, step=self.step, device=self.device)
        torch.manual_seed(stream(config.seed, self.dropout, self.step))
        self.optimiser.zero_grad(set_to_none=True)
        own = batch if self.world.size == 1 else batch.map(operator.itemgetter(self.world.rows(train.batch_size)))
        pieces = parts(own, train.accumulate)
        done = []
        for piece in pieces:
            with parallel.exchanging(self.call, piece is pieces[-1]):
                done.append(self._backward(piece, batch, score))
        loss = torch.stack([loss for loss, _ in done]).sum() if len(done) > 1 else done[0][0]
        self.scaler.unscale_(self.optimiser)
        if train.clip is not None:
            self.norm = parallel.norm_of_gradients(self.model, train.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.step += 1
        self.counted += 1
        return loss, {name: torch.cat([seen[name] for _, seen in done]).mean() for name in done[0][1]}

    def _backward(self, piece: configs.Batch, batch: configs.Batch, score: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a piece of the batch: what it adds to the loss and, if `score`, metrics by sequence."""
        task = self.config.task
        outputs = answers(self.call, task, piece, self.train.precision)
        loss = task.loss(outputs, piece)
        if isinstance(self.model, Transformer):
            loss = loss + self.model.auxiliary_loss()
        if piece is not batch:  # the mean over what the whole batch scores; gradients of processes are averaged
            loss = loss * (piece.scored.sum() * self.world.size / batch.scored.sum())
        early = score and self.saver.sharded  # afterwards parameters are parts again; else later, as it takes memory
        scores = self._metrics(outputs, piece) if early else {}
        self.scaler.scale(loss).backward()
        return loss.detach(), self._metrics(outputs, piece) if score and not early else scores

    @torch.no_grad()
    def _metrics(self, outputs: Any, piece: configs.Batch) -> dict[str, Tensor]:
        """Of the parameters that gave the loss: lazy outputs read them again."""
        return self.config.task.metrics(outputs, piece)

    def _log(self, loss: Tensor, scores: dict[str, Tensor]) -> None:
        """A row of training: the loss and metrics of this step's batch."""
        norm = (parallel.norm_of_gradients(self.model, None) if self.norm is None else self.norm).item()
        value, *found = self.world.mean([loss, *scores.values()])
        self.saver.demand(math.isfinite(value), f"the loss of {self.config.name} is {value}", self.step)
        row: dict[str, Any] = {"kind": "train", "step": self.step, "loss": value}
        row |= dict(zip(scores, found, strict=True))
        row |= {
            "lr": optimiser.learning_rate(self.step - 1, self.train),
            "grad_norm": norm if math.isfinite(norm) else None,
        }
        rate = self.counted / (time.perf_counter() - self.ticked)
        row |= {"steps_per_second": rate, **self.throughput.row(rate), "seconds": self._elapsed()}
        self._tell(row)
        self.progress.trained(row)
        self._tick()

    def _evaluate(self) -> dict[str, dict[str, float]]:
        """A row for each split."""
        scores, train, began = {}, self.train, time.perf_counter()
        for split in train.evaluate:
            scores[split] = evaluate(
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
            row = {"kind": "eval", "step": self.step, "split": split, **scores[split], "seconds": self._elapsed()}
            self._tell(row)
            self.progress.evaluated(row)
        parallel.let_go(self.model)
        self.ticked += time.perf_counter() - began
        return scores

    def _tell(self, row: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.add(row)

    def _save(self) -> None:
        began = time.perf_counter()
        if self.metrics is not None:
            self.saver.rows = self.metrics.sync()  # rows before the checkpoint that vouches for them
        self.saver.save(self.step, self._elapsed())
        self.ticked += time.perf_counter() - began

    def _is_past(self, row: dict[str, Any]) -> bool:
        return is_past(row, self.step, self.train.steps)

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.started

    def _tick(self) -> None:
        self.ticked, self.counted = time.perf_counter(), 0

    def _finish(self, scores: dict[str, dict[str, float]]) -> Result:
        result = Result(
            name=self.config.name,
            digest=configs.digest(self.config),
            steps=self.step,
            seconds=self._elapsed(),
            parameters=sum(p.numel() for p in self.model.parameters()),
            scores=scores,
            command=self.world.command(self.folder / CONFIG),
            environment=environment(self.device) | ({} if self.world.size == 1 else {"devices": self.world.size}),
            folder=self.folder,
        )
        self.saver.finish(self.step, self._elapsed())
        if self.metrics is not None:
            self.metrics.finish(result)
            self.patience(lambda: write_result(result))
        return result

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.progress.close()
