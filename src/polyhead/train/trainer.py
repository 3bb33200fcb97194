"""One run in its folder, from its checks to its result.  It can be killed at any moment and resumes exactly."""

import contextlib
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

import torch

from polyhead.config import Run, check_run, digest, to_dict
from polyhead.models.build import build
from polyhead.spec.values import one_line
from polyhead.train import optimiser
from polyhead.train.checks import check, check_read_back, read_all
from polyhead.train.device import environment, process, refuse_second_thread
from polyhead.train.evaluation import evaluate_network
from polyhead.train.messages import print_notice, safe_error_stream
from polyhead.train.network import Network
from polyhead.train.progress import Progress
from polyhead.train.stop import DIVERGED, Interrupted, StopSignals, code_of
from polyhead.train.store.checkpoint import restore, save_checkpoint, save_sharded
from polyhead.train.store.files import Damaged, delete
from polyhead.train.store.folder import (
    CONFIG,
    FAILURE,
    RESULT,
    Result,
    add_row,
    checkpoints,
    claim,
    clear,
    cut_metrics,
    finished,
    folder_of,
    read_result,
    sync_metrics,
    write_failure,
    write_result,
)
from polyhead.train.tracking import Trackers
from polyhead.train.world import StopBroadcast, World

Row = dict[str, Any]
# What PyTorch says of a tensor that is too large.
TOO_LARGE = ("allocate memory", "out of memory", "Storage size calculation")
Callback = Callable[[Row], object]
"""Called with every row of metrics.jsonl when it is written."""


def run(
    config: Run, *, progress: bool = True, resume: bool = False, again: bool = False, callbacks: Sequence[Callback] = ()
) -> Result:
    """Train `config` in its folder and return its result; a finished run is not trained again.

    Args:
        resume: Continue from the folder's checkpoint if there is one.
        again: Delete the earlier training and restart.
        callbacks: Called with every row of metrics.jsonl when it is written, only in the first of several processes.
            An exception in a callback ends the run; the run keeps its last checkpoint.

    Raises:
        ValueError: If the folder holds another run, or an unfinished one and neither `resume` nor `again` is given.
            Also while another thread of this process trains.
        OSError: If the disk fails.
        Interrupted: After Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, with the run saved.
    """
    check_run("train.run", config)
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ValueError(f"train.run: callbacks must be a list of functions, got {callbacks!r:.60}")
    world, folder = World.here(config.device), folder_of(config)
    with safe_error_stream(), world.joined(), contextlib.ExitStack() as stack:
        values = json.dumps(to_dict(replace(config, folder=None, device="auto", threads=None)), sort_keys=True)
        problem = f"the {world.size} processes of one run have different runs; start each run by a step of its own"
        world.agree(values, f"train: {problem}")
        check(config, world.size)
        refuse_second_thread()  # before anything is deleted
        if world.on_rank_zero(lambda: begin(config, folder, stack, resume, again)):
            result = read_result(folder)
            assert result is not None
            return result
        # A process on another machine may lack the data that process 0 has read in `begin`.
        if not world.first:
            read_all(config)
        with process(config, world.device) as device, StopSignals() as stop:
            training = Training(config, folder, device, world, stop, progress=progress, callbacks=callbacks)
            try:
                return training.fit()
            except RuntimeError as error:
                if not any(words in str(error) for words in TOO_LARGE):
                    raise
                way_out = "lower train.batch_size or raise train.accumulate"
                text = f"train: a batch does not fit into memory; {way_out} ({one_line(error)})"
                record_failure(text, folder, world)
                raise ValueError(text) from error
            except ValueError as error:
                record_failure(str(error), folder, world)
                raise
            finally:
                training.close()


def record_failure(text: str, folder: pathlib.Path, world: World) -> None:
    """Write in the folder why the run failed, once for all processes."""
    if world.first:
        write_failure(folder, text)


def begin(config: Run, folder: pathlib.Path, stack: contextlib.ExitStack, resume: bool, again: bool) -> int:
    """Lock the folder until `stack` closes; return 1 if the run is already finished, else 0."""
    check_read_back(config)
    if not again and finished(folder, digest(config)) is not None:  # perhaps in a read-only folder
        return 1
    if not folder.exists():
        build(config.model, device="meta")  # a model that cannot be built leaves no folder
    stack.enter_context(claim(config, folder))
    if (folder / RESULT).exists() and not again:
        # With the last checkpoint, a result that cannot be read costs one evaluation and no training.
        print_notice(f"{folder / RESULT} is damaged or of another run; it is computed again")
    elif checkpoints(folder) and not (resume or again):
        raise ValueError(
            f"train: {folder} holds an unfinished run; resume it with `polyhead resume {quote(str(folder))}` "
            "(resume=True), or delete its training and start over with --again (again=True)"
        )
    # What is missing must be missed before anything is deleted.
    read_all(config)
    if again:
        clear(folder)
    config.task.keep(folder)
    return 0


class Training:
    """A run after `step` updates: its network, rows and checkpoints."""

    def __init__(
        self,
        config: Run,
        folder: pathlib.Path,
        device: torch.device,
        world: World,
        stop: StopSignals,
        *,
        progress: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.folder, self.device, self.world, self.stop = config, folder, device, world, stop
        self.digest = digest(config)
        self.step = self.saved_step = 0
        self.scores: dict[str, dict[str, float]] = {}
        self.stop_broadcast = StopBroadcast(world)
        seconds = self._load()

        self.callbacks = callbacks
        # After the load, because rows past the restored step are dropped: those steps are trained again.
        if world.first:
            delete(folder / FAILURE)  # of the last process
            cut_metrics(folder, self.step, config.train.steps)
            self.trackers = Trackers(config, folder, self.step)
        steps, metric, is_shown = config.train.steps, config.task.metric, progress and world.first
        self.progress = Progress(config.name, metric, start=self.step, steps=steps, enabled=is_shown)
        if self.step < steps:
            self.progress.begin(folder, self.network.num_parameters)
        # The run has trained since `start`; its rate counts the steps since `rate_start`, without evaluations.
        self.start = time.perf_counter() - seconds
        self.rate_start, self.rate_step = time.perf_counter(), self.step

    def _load(self) -> float:
        """Make the network and load the last undamaged checkpoint; return its seconds of training."""
        paths = checkpoints(self.folder)
        names = " ".join(path.name for path in paths)
        self.world.agree(names, f"train: all processes must see the checkpoints of {self.folder}, some see others")
        for path in paths:
            # Anew for each attempt, because a part of a damaged checkpoint may have been loaded.
            self.network = Network(self.config, self.device, self.world)
            metadata, problem = None, "it is damaged for another process"
            try:
                metadata = restore(path, self.digest, self.network)
            except Damaged as error:
                problem = str(error)
            # It counts only if every process could read it: otherwise they would go on from different steps.
            num_failed = self.world.sum(torch.tensor([float(metadata is None)]))
            if metadata is not None and not num_failed:
                if metadata.get("scaler"):
                    self.network.scaler.load_state_dict(metadata["scaler"])
                self.step = self.saved_step = metadata["step"]
                return float(metadata["seconds"])
            if self.world.first:
                print_notice(f"{self.config.name}: {problem}; the one before is used")
        if paths and self.world.first:
            print_notice(f"{self.config.name}: no undamaged checkpoint is left, so the run starts at step 0")
        self.network = Network(self.config, self.device, self.world)
        return 0.0

    def fit(self) -> Result:
        """Train to the end.  Raises Interrupted after a signal, with the run saved."""
        train = self.config.train
        is_evaluated = False
        while self.step < train.steps:
            is_last = self.step + 1 == train.steps
            is_logged = is_last or self.step == 0 or (self.step + 1) % train.log_every == 0
            values = self.network.step(self.step, needs_metrics=is_logged)
            self.step += 1
            self.progress.step()
            if is_logged:
                self._log(values)
            is_evaluated = is_last or self.step % train.eval_every == 0
            if is_evaluated:
                self._evaluate()
            # All processes save at the same step, though a signal may reach only one of them.
            signal_number = self.stop_broadcast.exchange(self.stop.asked)
            if is_last or signal_number or self.step % train.save_every == 0:
                self._save()
            # A signal at the last step changes nothing: only the result is missing, and it is written next.
            if signal_number and not is_last:
                self.world.on_rank_zero(functools.partial(self._interrupt, signal_number))
        self.stop_broadcast.last()
        if not is_evaluated:  # killed between its last checkpoint and its result
            self._evaluate()
        return self._finish()

    def _log(self, values: dict[str, float]) -> None:
        """Write a training row: loss and metrics of the step's own batch.  Raises ValueError if the run diverged."""
        if not math.isfinite(values["loss"]):
            self._diverge(f"the loss of {self.config.name} is {values['loss']}")
        rate = (self.step - self.rate_step) / (time.perf_counter() - self.rate_start)
        row: Row = {"kind": "train", "step": self.step, **values}
        row["lr"] = optimiser.learning_rate(self.step - 1, self.config.train)
        row["steps_per_second"] = rate
        if self.network.tokens_per_step:
            row["tokens_per_second"] = rate * self.network.tokens_per_step
        self._add(row)
        self.progress.trained(row)
        self.rate_start, self.rate_step = time.perf_counter(), self.step

    def _add(self, row: Row) -> None:
        row["seconds"] = time.perf_counter() - self.start
        if not self.world.first:
            return
        add_row(self.folder, row)
        self.trackers.add(row)
        for callback in self.callbacks:
            callback(dict(row))

    def _evaluate(self) -> None:
        """Evaluate: write a row for each split."""
        begin_time = time.perf_counter()
        for split in self.config.train.evaluate:
            scores = evaluate_network(self.network, split)
            self.scores[split] = scores
            self._add({"kind": "eval", "step": self.step, "split": split, **scores})
            self.progress.evaluated({"split": split, **scores})
        self.rate_start += time.perf_counter() - begin_time

    def _save(self) -> None:
        """Replace the checkpoint, after all rows are on the disk.  Raises OSError."""
        begin_time = time.perf_counter()
        # NaNs must not replace the last good checkpoint.
        if not self.network.is_finite():
            self._diverge(f"parameters of {self.config.name} are not finite")
        # Rows first: a run that resumes from this step never repeats them, so a power cut must not lose them.
        if self.world.first:
            sync_metrics(self.folder)
        save = save_sharded if self.network.is_sharded else save_checkpoint
        save(self.folder, self.network, self._metadata(), self.config.train.keep)
        self.saved_step = self.step
        self.rate_start += time.perf_counter() - begin_time

    def _metadata(self) -> Row:
        seconds, scaler = time.perf_counter() - self.start, self.network.scaler.state_dict()
        return {"digest": self.digest, "step": self.step, "seconds": seconds, "scaler": scaler}

    def _interrupt(self, signal_number: int) -> int:
        devices = f" --devices {self.world.size}" if self.world.size > 1 else ""
        text = f"stopped and saved at step {self.step}; resume with: polyhead resume {quote(str(self.folder))}{devices}"
        raise Interrupted(text, code_of(signal_number))

    def _diverge(self, problem: str) -> None:
        """Raise the ValueError of a run whose numbers are not finite; all processes call it."""
        saved = "there is no checkpoint yet"
        if self.saved_step:
            saved = f"the checkpoint of step {self.saved_step} is kept"
        text = f"train: {problem} at step {self.step}; {saved}; {DIVERGED}"

        def fail() -> int:
            raise ValueError(text)

        self.world.on_rank_zero(fail)

    def _finish(self) -> Result:
        """Write the result.  A sharded run also saves one whole checkpoint, for readers of single files."""
        about = environment(self.device)
        if self.world.size > 1:
            about["devices"] = self.world.size
        result = Result(
            name=self.config.name,
            digest=self.digest,
            steps=self.step,
            seconds=time.perf_counter() - self.start,
            parameters=self.network.num_parameters,
            scores=self.scores,
            command=self.world.command(self.folder / CONFIG),
            environment=about,
            folder=self.folder,
        )
        if self.network.is_sharded:
            save_checkpoint(self.folder, self.network, self._metadata(), self.config.train.keep)
        if self.world.first:
            sync_metrics(self.folder)
            write_result(result)
        return result

    def close(self) -> None:
        if self.world.first:
            self.trackers.close()
        self.progress.close()
