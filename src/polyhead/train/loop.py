"""A plain training loop that can be killed at any moment and goes on as if nothing had happened.

Everything random is a pure function of (seed, name, step): the initial parameters of stream(seed, "init"), batch i of
the task's own stream, dropout in step i of stream(seed, "dropout", i).  So a checkpoint holds no generator state.
"""

import math
import pathlib
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from polyhead import config as configs
from polyhead.config import Run, stream
from polyhead.models.build import build
from polyhead.models.transformer import Transformer
from polyhead.train import optimiser
from polyhead.train.disk import Patience
from polyhead.train.evaluation import answers, evaluate, parts
from polyhead.train.folder import CONFIG, Metrics, Result, environment, write_result
from polyhead.train.progress import Progress
from polyhead.train.saving import Saver
from polyhead.train.stop import Stop
from polyhead.train.throughput import Throughput
from polyhead.train.tracking import Rows


class Loop:
    """The state of one run: model, optimiser, `step` updates done."""

    def __init__(self, config: Run, folder: pathlib.Path, device: torch.device, progress: bool, stop: Stop) -> None:
        self.config, self.folder, self.device, self.train = config, folder, device, config.train
        torch.manual_seed(stream(config.seed, "init"))
        self.model = build(config.model).to(device)
        self.optimiser = optimiser.build(self.model, self.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.train.precision == "fp16")
        self.norm: Tensor | None = None  # of the gradient before clipping
        self.patience = Patience(stop)
        self.saver = Saver(config, folder, self.model, self.optimiser, self.scaler, self.patience)
        self.step, self.seconds = self.saver.load()
        if config.compile:
            self.model.compile()
        self.metrics = Rows(config, Metrics(folder, self._is_past, self.patience))
        metric = config.task.metric
        self.progress = Progress(config.name, metric, start=self.step, steps=self.train.steps, enabled=progress)
        self.throughput = Throughput(config, self.model, device)
        self.started = self.ticked = time.perf_counter()
        self.counted = 0  # steps since `ticked`

    def fit(self, stop: Stop) -> Result:
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
            if last or stop.asked or self.step % train.save_every == 0:
                self._save()
            if stop.asked and not last:
                way_on = f"go on with: polyhead resume {self.folder}"
                raise stop.interrupted(f"stopped and saved at step {self.step}; {way_on}")
        return self._finish(scores or self._evaluate())

    def _update(self, *, score: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of AdamW: the loss of its batch and, if `score`, the metrics.  Nothing here waits for the device."""
        train, config = self.train, self.config
        rate = optimiser.learning_rate(self.step, train)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = config.task.batch("train", train.batch_size, seed=config.seed, step=self.step, device=self.device)
        torch.manual_seed(stream(config.seed, "dropout", self.step))
        self.optimiser.zero_grad(set_to_none=True)
        pieces = parts(batch, train.accumulate)
        done = [self._backward(piece, batch, score) for piece in pieces]
        loss = torch.stack([loss for loss, _ in done]).sum() if len(done) > 1 else done[0][0]
        self.scaler.unscale_(self.optimiser)
        if train.clip is not None:
            self.norm = clip_grad_norm_(self.model.parameters(), train.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.step += 1
        self.counted += 1
        return loss, {name: torch.cat([seen[name] for _, seen in done]).mean() for name in done[0][1]}

    def _backward(self, piece: configs.Batch, batch: configs.Batch, score: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a piece of the batch: what it adds to the loss and, if `score`, metrics by sequence."""
        task = self.config.task
        outputs = answers(self.model, task, piece, self.train.precision)
        loss = task.loss(outputs, piece)
        if isinstance(self.model, Transformer):
            loss = loss + self.model.auxiliary_loss()
        if piece is not batch:  # the mean over what the whole batch scores
            loss = loss * (piece.scored.sum() / batch.scored.sum())
        self.scaler.scale(loss).backward()
        with torch.no_grad():  # of the parameters that gave the loss: lazy outputs read them again
            return loss.detach(), task.metrics(outputs, piece) if score else {}

    def _log(self, loss: Tensor, scores: dict[str, Tensor]) -> None:
        """A row of training: the loss and metrics of this step's batch."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = (get_total_norm(gradients) if self.norm is None else self.norm).item()
        value = loss.item()
        self.saver.demand(math.isfinite(value), f"the loss of {self.config.name} is {value}", self.step)
        row: dict[str, Any] = {"kind": "train", "step": self.step, "loss": value}
        row |= {name: score.item() for name, score in scores.items()}
        row |= {
            "lr": optimiser.learning_rate(self.step - 1, self.train),
            "grad_norm": norm if math.isfinite(norm) else None,
        }
        rate = self.counted / (time.perf_counter() - self.ticked)
        row |= {"steps_per_second": rate, **self.throughput.row(rate), "seconds": self._elapsed()}
        self.metrics.add(row)
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
            )
            row = {"kind": "eval", "step": self.step, "split": split, **scores[split], "seconds": self._elapsed()}
            self.metrics.add(row)
            self.progress.evaluated(row)
        self.ticked += time.perf_counter() - began
        return scores

    def _save(self) -> None:
        began = time.perf_counter()
        self.metrics.sync()  # rows before the checkpoint that vouches for them
        self.saver.save(self.step, self._elapsed())
        self.ticked += time.perf_counter() - began

    def _is_past(self, row: dict[str, Any]) -> bool:
        """Rows that stay when the run goes on: up to the checkpoint, except a final evaluation, which is done again."""
        return row["step"] <= self.step and not (row["kind"] == "eval" and row["step"] == self.train.steps)

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
            command=f"python -m polyhead.train {self.folder / CONFIG}",
            environment=environment(self.device),
            folder=self.folder,
        )
        self.metrics.finish(result)
        self.patience(lambda: write_result(result))
        return result

    def close(self) -> None:
        self.metrics.close()
        self.progress.close()
