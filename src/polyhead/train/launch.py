"""Several worker processes on this machine for one run, one for each device.

Each worker is `python -m polyhead.train RUN` with the variables that torchrun would set.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from shlex import quote

import torch

from polyhead.config import Run
from polyhead.extensions import handed_on
from polyhead.train.checks import check
from polyhead.train.device import pick_device
from polyhead.train.messages import print_notice
from polyhead.train.stop import LAUNCHER, LOST, signals_to
from polyhead.train.store.folder import CONFIG, Result, folder_of, read_result
from polyhead.train.trainer import begin

GRACE = 30.0
"""Seconds that the other workers have after one has failed, before they are killed."""


def train(config: Run, devices: int, *, progress: bool = True, resume: bool = False, again: bool = False) -> Result:
    """`run` with a worker for each of `devices` devices of this machine.

    Raises:
        ValueError: As `run` does, and for too many devices.
        SystemExit: With the exit code of workers that failed.
    """
    if devices < 1:
        raise ValueError(f"train: devices must be at least 1 but is {devices}")
    count = torch.cuda.device_count()
    if pick_device(config.device).type == "cuda" and devices > count:
        raise ValueError(f"train: devices must be at most {count} on this machine, got {devices}")
    check(config, devices)
    folder = folder_of(config)
    # The lock is released before the workers start: the first of them takes it, and would be refused otherwise.
    with contextlib.ExitStack() as claims:
        finished = begin(config, folder, claims, resume, again)
    if not finished:
        # With -P, a file in the current folder cannot take the place of a module, as a torch.py would.
        command = [sys.executable, "-P", "-m", "polyhead.train", str(folder / CONFIG)]
        if not progress:
            command.append("--quiet")
        with handed_on(config, "train"):
            code = run_workers(devices, command, f"polyhead resume {quote(str(folder))} --devices {devices}")
        if code:
            raise SystemExit(code)
    result = read_result(folder)
    assert result is not None
    return result


def run_workers(count: int, command: list[str], resume_command: str) -> int:
    """Start `command` once for each worker, hand them the signals of this process, and wait; return the exit code of
    the first that failed for a reason of its own, and print the reason of a killed one."""
    workers: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    # The address is a number, because the name of this machine may be one that no server resolves.
    common = os.environ | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common[LAUNCHER] = str(os.getpid())
    # By default each worker would start a thread for every core, and all would compete for the same cores.
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    with signals_to(hand_on):
        for rank in range(count):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of its own: Ctrl-C in a terminal reaches a worker once, by way of this process.
            workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
        failures = _wait(workers)
    if not failures:
        return 0
    # A worker that ended with LOST is a consequence of another one's failure, so it comes behind all others.
    failures.sort(key=lambda rank: workers[rank].returncode == LOST)
    rank = failures[0]
    code = workers[rank].returncode
    if code > 0:
        return code
    name = signal.Signals(-code).name
    print_notice(f"polyhead: worker {rank + 1} of {count} was killed ({name}); resume with: {resume_command}")
    return 128 - code


def _wait(workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all workers have ended; returns the ranks of those that failed, in the order of their ends."""
    failures: list[int] = []
    running = list(range(len(workers)))
    deadline = float("inf")
    while running:
        for rank in list(running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                workers[rank].wait(0.1)
                running.remove(rank)
                if workers[rank].returncode:
                    failures.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE)
        # A worker may hang in a message to the one that failed, so nobody waits for it without end.
        if time.monotonic() > deadline:
            for rank in running:
                workers[rank].kill()
    return failures


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
