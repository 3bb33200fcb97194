"""Several workers on this machine for one run, as `torchrun --standalone --nproc-per-node N -m polyhead.train RUN`.

It uses PyTorch's elastic engine, as torchrun does, but reports errors in one line.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import uuid
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from polyhead.config import Run
from polyhead.config.extensions import handed_on
from polyhead.train.checks import check
from polyhead.train.device import pick_device
from polyhead.train.stop import DONE, INTERRUPTED, LOST, PREEMPTED, USUAL, slurm_job
from polyhead.train.store.disk import tell
from polyhead.train.store.folder import CONFIG, Result, folder_of, read_result
from polyhead.train.trainer import begin

GRACE = 600
"""Seconds between asking workers to stop and killing them, so that they can save."""


def train(config: Run, devices: int, *, progress: bool = True, resume: bool = False, again: bool = False) -> Result:
    """`run` with a worker for each of `devices` devices of this machine.

    Raises ValueError as `run` does, and for more devices than this machine has.  If workers fail, raises SystemExit
    with their exit code, after they or this function printed the reason.
    """
    _check_devices(config, devices)
    check(config, devices)
    folder = folder_of(config)
    with contextlib.ExitStack() as held:
        finished = begin(config, folder, held, resume, again)
    if not finished:
        arguments = [str(folder / CONFIG)] + ([] if progress else ["--quiet"])
        with handed_on(config, "train"):
            code = _workers(devices, arguments, f"polyhead resume {folder} --devices {devices}")
        if code:
            raise SystemExit(code)
    result = read_result(folder)
    assert result is not None
    return result


def _check_devices(config: Run, devices: int) -> None:
    if devices < 1:
        raise ValueError(f"train: devices must be at least 1 but is {devices}")
    kind = pick_device(config.device).type
    if kind == "cuda" and devices > (count := torch.cuda.device_count()):
        raise ValueError(f"train: {devices} devices were wanted but this machine has {count}")


def _workers(count: int, arguments: list[str], way_on: str) -> int:
    """Start the workers, forward signals and wait; returns the exit code of the first that ended."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    os.environ.setdefault("OMP_NUM_THREADS", threads)  # otherwise each would use all cores
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # this module reports errors in place of the engine
    before = signal.signal(signal.SIGUSR1, _ask) if hasattr(signal, "SIGUSR1") else None
    try:
        elastic_launch(_settings(count), sys.executable)("-m", "polyhead.train", *arguments)
    except SignalException as stopped:
        usual = (signal.SIGINT,) if slurm_job() else USUAL
        return INTERRUPTED if stopped.sigval in usual else PREEMPTED
    except ChildFailedError as error:
        return _told(list(error.failures.values()), count, way_on)
    finally:
        if before is not None:
            signal.signal(signal.SIGUSR1, before)
    return DONE


def _settings(count: int) -> LaunchConfig:
    """Settings for workers on this machine, without restarts: the user resumes a failed run by command."""
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    grace: dict[str, Any] = {"shutdown_timeout": GRACE} if "shutdown_timeout" in known else {}  # else 30 s
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        **grace,
    )


def _ask(number: int, frame: object) -> None:
    raise SignalException("asked to stop", signal.Signals(number))


def _told(failures: list[ProcessFailure], count: int, way_on: str) -> int:
    """The exit code of the first failure that is not a consequence of another; prints it if the worker could not."""
    first = min(failures, key=lambda failure: (failure.exitcode == LOST, failure.timestamp))
    if first.exitcode >= 0:
        return int(first.exitcode)
    name = signal.Signals(-first.exitcode).name
    tell(f"polyhead: worker {first.local_rank + 1} of {count} was killed ({name}); resume with: {way_on}")
    return 128 - int(first.exitcode)
