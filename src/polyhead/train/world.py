"""The processes that train one run together: the rank of this one, and how they communicate.

`torchrun` and Slurm's `srun` start them and set the environment.  Control messages use gloo in main memory; gradients
and parameters use NCCL between GPUs.  A single process has no process group, and all of this is free.
"""

import contextlib
import datetime
import hashlib
import os
import pathlib
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed as dist

from polyhead.train.device import pick_device
from polyhead.train.messages import print_notice
from polyhead.train.stop import DISK, LOST, MISTAKE, is_local_first

PATIENCE = datetime.timedelta(minutes=30)
"""How long a process waits for another live one, which may be drawing data or waiting for its disk."""

SILENCE, TURN = 5.0, 0.1
"""Seconds after which a process says for whom it waits, and seconds between two attempts to find the others."""

_stores: list[dist.Store] = []
"""The store where the processes meet, and one prefix for each group."""


class PeerProcessEnded(RuntimeError):
    """Another process of this run ended and reported why, so this one cannot continue.  `code`: its exit code."""

    def __init__(self, text: str, code: int = LOST) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`, the `local`-th on its machine, on `device`."""

    rank: int
    size: int
    local: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> "World":
        return cls(0, 1, 0, torch.device(device))

    @classmethod
    def here(cls, device: str = "auto") -> "World":
        """The world of this process, by its environment, with one of the machine's devices.

        Raises:
            ValueError: For an inconsistent environment, and for fewer devices than processes on this machine.
        """
        rank, size, local = ranks_from(os.environ)
        if size == 1:
            return cls.alone(pick_device(device))
        return cls(rank, size, local, _device_of_process(device, local))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """The rows of this process out of `count`: consecutive blocks of nearly equal size."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """A context with a process group.  Raises PeerProcessEnded if another process ends too early."""
        if self.size == 1 or dist.is_initialized():  # the caller's own group remains
            yield
            return
        if not _stores:
            _stores.append(meet_processes(self.rank, self.size))
        # Groups may follow one another: each has its own prefix in the one store.
        _stores.append(dist.PrefixStore(f"polyhead/{len(_stores)}", _stores[0]))
        members: dict[str, Any] = {"store": _stores[-1], "rank": self.rank, "world_size": self.size}
        if self.device.type == "cpu":
            dist.init_process_group("gloo", timeout=PATIENCE, **members)
        else:
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE, device_id=self.device, **members)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise PeerProcessEnded("another process of this run ended before its time") from error
            raise
        # Not after an error: all processes must end the group together, and the others may be elsewhere.
        self.meet()
        dist.destroy_process_group()

    def meet(self) -> None:
        """A barrier.  Without it, one process in five aborted when a gloo group ended."""
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes of `values` in main memory."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, value: str, problem: str) -> None:
        """Raise ValueError, in all processes, unless `value` is the same in all of them."""
        if self.size == 1:
            return
        number = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=6).digest(), "big")
        # The sum broadcasts the number of process 0: all others add 0.
        number_of_first = int(self.sum(torch.tensor([number * self.first], device="cpu")))
        if self.sum(torch.tensor([int(number != number_of_first)], device="cpu")):
            raise ValueError(problem)

    def totals(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Each number summed over all processes."""
        if self.size == 1 or not values:
            return list(values)
        return list(self.sum(torch.stack([value.detach().double().cpu() for value in values])))

    def on_rank_zero(self, action: Callable[[], int | None]) -> int:
        """Run `action` on rank 0 and broadcast its non-negative result; None is 0.

        Raises:
            PeerProcessEnded: On the other ranks if `action` raises; rank 0 raises the error of `action`.
        """
        if self.size == 1:
            return action() or 0
        result = torch.zeros(1, dtype=torch.int64)  # below 0: minus the exit code of the error
        # An error is broadcast, too: otherwise the other processes would wait as long as `PATIENCE` allows.
        try:
            if self.first:
                result[0] = action() or 0
        except BaseException as error:
            result[0] = -_exit_code(error)
            raise
        finally:
            dist.broadcast(result, 0)
        if result[0] < 0:
            with contextlib.suppress(RuntimeError):
                self.meet()
            raise PeerProcessEnded("the first process of this run ended", -int(result[0]))
        return int(result[0])

    def command(self, path: pathlib.Path) -> str:
        """The command that restarts this run on one machine."""
        start = "python" if self.size == 1 else f"torchrun --standalone --nproc-per-node {self.size}"
        return f"{start} -m polyhead.train {path}"


class StopBroadcast:
    """Tells all processes of a stop signal.  The answer is one step old, so that no process waits for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.flag = torch.zeros(1, dtype=torch.int64)
        self.work: dist.Work | None = None

    def exchange(self, signal_number: int) -> int:
        """Send the signal to the others; returns the result of the previous step, equal in every process."""
        if self.world.size == 1:
            return signal_number
        before = self.last()
        # The exchange runs during the next step; waiting for it here would cost every step a round trip.
        self.flag = torch.tensor([signal_number])
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)
        return before

    def last(self) -> int:
        """The result of the last exchange."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return int(self.flag.item())


def speaks() -> bool:
    """Whether this process should report why a run ended, so that a failure of all processes is reported once.

    The first process of the group to fail reports.  Before there is a group, the first process of each machine does.
    """
    if not _stores:
        return is_local_first()
    try:
        return _stores[-1].add("polyhead/told", 1) == 1
    except RuntimeError:  # the process with the counter is gone: it has reported
        return False


def leave(code: int) -> int:
    """Exit at once after an error in a group: the usual exit would end the group alone and may abort."""
    if _stores and code:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _exit_code(error: BaseException) -> int:
    """The exit code of a process after this error (see stop.py)."""
    if isinstance(error, ValueError):
        code = MISTAKE
    elif isinstance(error, OSError):
        code = DISK
    else:
        code = LOST
    return getattr(error, "code", code)


def ranks_from(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, size and local rank from torchrun or srun; 0, 1, 0 for a process that was started alone.

    A Slurm batch script also has a rank, but it is not a job step: it runs alone, even if its job has several tasks.
    """
    # torchrun may itself run in a step of Slurm, whose variables then describe torchrun, not this process.
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not environment.get("WORLD_SIZE") and integer(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank = integer(environment, names[0], 0)
    size = integer(environment, names[1], 1)
    local = integer(environment, names[2], 0)
    if not 0 <= rank < size or local < 0:
        raise ValueError(f"world: {names[0]} must be a rank from 0 to {size - 1}, got {rank}")
    return rank, size, local


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """The number in an environment variable; an empty variable is an absent one."""
    text = environment.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"world: the environment variable {name} must be an integer but is {text!r}") from None


def address_of_first(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of process 0: MASTER_ADDR and MASTER_PORT, which torchrun sets.

    srun sets neither.  Then the host is the first of its step, and the port is computed from the job's number.
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    host = environment.get("MASTER_ADDR")
    if not hosts and not (host and environment.get("MASTER_PORT")):
        raise ValueError("world: several processes need MASTER_ADDR and MASTER_PORT; start them with torchrun or srun")
    job = integer(environment, "SLURM_JOB_ID", 0) * 31 + integer(environment, "SLURM_STEP_ID", 0)
    port = integer(environment, "MASTER_PORT", 10000 + job % 20000)  # below the range of ephemeral ports
    if not 0 < port < 1 << 16:
        raise ValueError(f"world: MASTER_PORT must be a port from 1 to 65535 but is {port}")
    return host or first_host(hosts or ""), port


def meet_processes(rank: int, size: int) -> dist.Store:
    """The store that all processes share once all have come: the processes wait in short turns and say who is missing.

    Raises:
        ValueError: If the port is taken, and if a process does not come within `PATIENCE`.
    """
    host, port = address_of_first(os.environ)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _open_store(host, port, size)
    else:
        wait_for(lambda: _unreachable(host, port), f"polyhead: process {rank} of {size} at {host}:{port}")
        store = dist.TCPStore(host, port, size, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    # torchrun may keep the store when it restarts: dead processes of the last attempt would count as present.
    store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"here/{rank}", "1")

    def missing() -> str:
        numbers = [str(other) for other in range(size) if not store.check([f"here/{other}"])]
        return f"process {', '.join(numbers)}" if numbers else ""

    wait_for(missing, f"polyhead: process {rank} of {size} at {host}:{port}")
    return store


def wait_for(missing: Callable[[], str], waiting: str) -> None:
    """Return once `missing` gives no name; soon prints that `waiting` waits.  Raises ValueError after `PATIENCE`."""
    # Short turns in Python, because Ctrl-C does not end a call of torch that waits.
    begin = time.monotonic()
    has_spoken = False
    name = missing()
    while name:
        seconds = time.monotonic() - begin
        if seconds > PATIENCE.total_seconds():
            raise ValueError(f"world: {name} did not come within {PATIENCE}; start all processes of the run")
        if seconds > SILENCE and not has_spoken:
            print_notice(f"{waiting} waits for {name}")
            has_spoken = True
        time.sleep(TURN)
        name = missing()


def _unreachable(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return ""
    except OSError:
        return "process 0, which nobody reaches there"


def _open_store(host: str, port: int, size: int) -> dist.Store:
    try:
        return dist.TCPStore(host, port, size, is_master=True, timeout=PATIENCE, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise ValueError(f"world: port {port} of {host} is in use; set MASTER_PORT to another one") from None
        raise ValueError(f"world: process 0 cannot listen at {host}:{port}; set MASTER_ADDR to its host") from None


def first_host(hosts: str) -> str:
    """The first host in Slurm's list of hosts: gpu07-ib in gpu[07-09,12]-ib,login1."""
    # A comma inside brackets separates numbers of one group of hosts, so it does not end the first name.
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _device_of_process(name: str, local: int) -> torch.device:
    device = pick_device(name)
    if device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise ValueError(f"world: several processes train on cpu or cuda but the device is {device}")
    count = torch.cuda.device_count()
    index = 0
    if count > 1:  # with one visible device, the launcher may have given each process its own
        index = local
        if local >= count:
            raise ValueError(f"world: process {local + 1} of this machine needs a GPU of its own but it has {count}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
