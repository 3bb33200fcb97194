"""A plain training loop that can be killed at any moment and goes on as if nothing had happened.

Everything random is a pure function of (seed, name, step): the initial parameters of stream(seed, "init"), batch i of
the task's own stream, dropout in step i of stream(seed, "dropout", i).  So a checkpoint holds no generator state.
"""

import contextlib
import math
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from polyhead import config as configs
from polyhead.config import Run, stream
from polyhead.models.build import build
from polyhead.models.generate import reach
from polyhead.models.transformer import Transformer
from polyhead.shapes import one_of
from polyhead.train import optimiser
from polyhead.train.checkpoint import load_optimiser, load_weights, read_checkpoint, save_checkpoint
from polyhead.train.evaluation import answers, evaluate, parts
from polyhead.train.folder import (
    CHECKPOINT,
    CONFIG,
    Metrics,
    Result,
    claim,
    clear,
    environment,
    folder_of,
    read_result,
    write_result,
)
from polyhead.train.progress import Progress
from polyhead.train.throughput import Throughput


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run has saved itself.  The text says how to go on."""


def run(config: Run, *, progress: bool = True, resume: bool = False, again: bool = False) -> Result:
    """Train `config` in its folder and return what it reached; a finished run is returned as it is.

    `resume`: go on from the folder's checkpoint if there is one.  `again`: forget what is there and start over.
    Raises ValueError when the folder holds another run, or an unfinished one and neither is asked for; OSError when the
    disk is full (the last good checkpoint survives); Interrupted after Ctrl-C or SIGTERM, when everything is saved.
    """
    check(config)
    folder = folder_of(config)
    with claim(config, folder):
        if again:
            clear(folder)
        if (done := read_result(folder)) is not None:
            return done
        if (folder / CHECKPOINT).exists() and not resume:
            raise ValueError(
                f"train: {folder} holds an unfinished run; go on with `polyhead resume {folder}`, or train again"
            )
        read_all(config)
        config.task.keep(folder)
        with process(config) as device, Stop() as stop:
            loop = _Loop(config, folder, device, progress)
            try:
                return loop.fit(stop)
            finally:
                loop.close()


def check(config: Run) -> None:
    """Everything that would otherwise fail after the first hour."""
    pick_device(config.device)
    for split in config.train.evaluate:
        one_of(type(config.task).__name__, "split", split, config.task.splits)
    encoder = config.model.encoder if isinstance(config.model, configs.TransformerConfig) else None
    gives = dict(zip(("inputs", "outputs"), config.task.ends, strict=True)) | {"source": config.task.source}
    takes = {"inputs": config.model.inputs, "outputs": config.model.outputs}
    takes |= {"source": None if encoder is None else encoder.inputs}
    for what, given in gives.items():
        taken = takes[what]
        if type(given) is not type(taken) or _size(given) != _size(taken):
            verb = "is" if what == "source" else "are"
            raise ValueError(f"train: the task's {what} {verb} {given} but the model's {verb} {taken}")
    _check_lengths("model", config.model, config.task.length)
    _check_lengths("model.encoder", encoder, config.task.source_length)


def _check_lengths(name: str, settings: configs.Model | None, length: int) -> None:
    """Raise a ValueError unless a transformer has a place for every token of the task."""
    if not isinstance(settings, configs.TransformerConfig):
        return
    length = settings.inputs.count if isinstance(settings.inputs, configs.Patches) else length
    if (most := reach(settings)) is not None and length > most:
        raise ValueError(f"train: {name}.max_length must be at least {length}, the task's tokens, but is {most}")


def read_all(config: Run) -> None:
    """Draw a sequence of every split, so that data that are missing are missed now and not at the first evaluation."""
    for split in config.train.evaluate:
        config.task.batch(split, 1, seed=config.seed, step=0)


def _size(end: configs.Input | configs.Output | None) -> int | tuple[int, ...] | None:
    """What a task and a model must agree on; how an image is cut into patches is the model's choice."""
    if end is None or isinstance(end, configs.Patches):
        return None if end is None else end.image
    return end.size if isinstance(end, (configs.Vectors, configs.Values)) else end.count


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, else mps, else cpu.  Raises ValueError for a device this machine lacks."""
    present = ["cpu"]
    if torch.backends.mps.is_available():
        present.insert(0, "mps")
    if torch.cuda.is_available():
        present[:0] = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in ("auto", *present):
        one_of("device", "device", name.partition(":")[0], ("auto", "cpu", "cuda", "mps"))
        raise ValueError(f"device: this machine has no {name} (choose from auto, {', '.join(present)})")
    return torch.device(present[0] if name == "auto" else name)


def be_deterministic() -> None:
    """Deterministic algorithms only, from here on in this process; an op that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def process(config: Run) -> Iterator[torch.device]:
    """The process as the run wants it, and afterwards as the caller had it: threads, determinism, random state."""
    device = pick_device(config.device)
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        be_deterministic()
    try:
        with torch.random.fork_rng(devices=[device] if device.type != "cpu" else [], device_type=device.type):
            yield device
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(threads)


def diverged(what: str, step: int, saved: int) -> str:
    """The advice of a run whose loss or parameters (`what`) are not finite."""
    kept = f"the checkpoint of step {saved} is kept" if saved else "there is no checkpoint yet"
    return f"train: {what} at step {step}; {kept}; lower train.lr or set train.clip"


class Stop:
    """SIGINT and SIGTERM ask the loop to save and stop; a second one stops at once."""

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in self.signals}
        return self

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class _Loop:
    """The state of one run: model, optimiser, `step` updates done."""

    def __init__(self, config: Run, folder: pathlib.Path, device: torch.device, progress: bool) -> None:
        self.config, self.folder, self.device, self.train = config, folder, device, config.train
        torch.manual_seed(stream(config.seed, "init"))
        self.model = build(config.model).to(device)
        self.optimiser = optimiser.build(self.model, self.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.train.precision == "fp16")
        self.step, self.seconds, self.saved = 0, 0.0, 0
        self.norm: Tensor | None = None  # of the gradient before clipping
        if (folder / CHECKPOINT).exists():
            self._load()
        if config.compile:
            self.model.compile()
        self.metrics = Metrics(folder, self._is_past)
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
            self.progress.step()
            if told:
                self._log(loss, scores_of_batch)
            if last or self.step % train.eval_every == 0:
                scores = self._evaluate()
            if last or stop.asked or self.step % train.save_every == 0:
                self._save()
            if stop.asked and not last:
                raise Interrupted(f"stopped and saved at step {self.step}; go on with: polyhead resume {self.folder}")
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
        self._demand(math.isfinite(value), f"the loss of {self.config.name} is {value}")
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
        whole = torch.stack([p.detach().isfinite().all() for p in self.model.parameters()]).all().item()
        self._demand(whole, f"parameters of {self.config.name} are not finite")
        self.metrics.sync()  # rows before the checkpoint that vouches for them
        metadata = {"digest": configs.digest(self.config), "step": self.step, "seconds": self._elapsed()}
        save_checkpoint(self.folder, self.model, self.optimiser, {**metadata, "scaler": self.scaler.state_dict()})
        self.saved = self.step
        self.ticked += time.perf_counter() - began

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        tensors, metadata = read_checkpoint(self.folder, configs.digest(self.config))
        load_weights(self.model, tensors, path)
        load_optimiser(self.model, self.optimiser, tensors, path)
        if metadata["scaler"]:
            self.scaler.load_state_dict(metadata["scaler"])
        self.step = self.saved = metadata["step"]
        self.seconds = metadata["seconds"]

    def _is_past(self, row: dict[str, Any]) -> bool:
        """Rows that stay when the run goes on: up to the checkpoint, except a final evaluation, which is done again."""
        return row["step"] <= self.step and not (row["kind"] == "eval" and row["step"] == self.train.steps)

    def _demand(self, fine: object, what: str) -> None:
        """Stop training, with advice, unless `fine`."""
        if not fine:
            raise ValueError(diverged(what, self.step, self.saved))

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
        write_result(result)
        return result

    def close(self) -> None:
        self.metrics.close()
        self.progress.close()
