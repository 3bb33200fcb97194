"""The device of a process, its threads, determinism and random state."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from polyhead.config import Run
from polyhead.spec.shapes import one_of


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
    """Use only deterministic algorithms in this process from now on; an op without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def seed(device: torch.device, number: int) -> None:
    """Seed the generator of `device` as `torch.manual_seed(number)` does.

    That function records a stack trace for every kind of device that the machine lacks: up to a millisecond a step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


MALLOPT = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 1 << 25),
    "MALLOC_TRIM_THRESHOLD_": (-1, (1 << 31) - 1),
    "MALLOC_TOP_PAD_": (-2, 1 << 26),
}
"""By environment variable: an option of glibc's `mallopt`, and its number of bytes."""


def keep_memory() -> None:
    """From now on this process keeps the memory that it frees, as the next step needs as much again.

    glibc returns it to the system otherwise: up to 1,000 page faults a step, 4 % of the time of a small model's.  For
    processes of our own.  Other libraries are left as they are, and so is glibc if one of its variables is set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not MALLOPT.keys() & os.environ.keys():
        for option in MALLOPT.values():
            mallopt(*option)


DTYPE = torch.float32
"""The dtype of a run's parameters, independent of the caller's default: otherwise one digest would have two results."""


_callers: list[torch.dtype] = []
"""The caller's default dtype, once for each context of `usual_defaults` that is open: it is one for all threads."""
_changing = threading.Lock()


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """A context in which torch makes tensors of `DTYPE` on the CPU, whatever the defaults of the caller.

    Threads may be in it at once; the last to leave restores the default dtype.
    """
    with _changing:
        _callers.append(torch.get_default_dtype())
        torch.set_default_dtype(DTYPE)
    try:
        usual = torch.get_default_device().type == "cpu"
        with contextlib.nullcontext() if usual else torch.device("cpu"):  # which slows every function of torch
            yield
    finally:
        with _changing:
            dtype = _callers.pop()
            if not _callers:
                torch.set_default_dtype(dtype)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """A context in which float32 products are computed in float32, whatever precision the caller has set.

    The precision of a run is in its configuration; another one would give one digest two results.
    """
    backends: list[Any] = [torch.backends.cuda.matmul]
    if hasattr(torch.backends.mkldnn, "matmul"):
        backends.append(torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


_busy = threading.RLock()


@contextlib.contextmanager
def process(config: Run, device: torch.device | None = None) -> Iterator[torch.device]:
    """Set threads, determinism, default dtype, default device and random state for a run, and restore them afterwards.

    Autocast, `no_grad` and `inference_mode` of the caller do not apply.
    `device`: the device of the run, if already known.  Raises ValueError while another thread is in such a context: the
    threads of a process share its random numbers, so both runs would differ from what their digests say.
    """
    device = pick_device(config.device) if device is None else device
    if not _busy.acquire(blocking=False):
        raise ValueError("train: another thread of this process trains a run; give each a process (polyhead sweep)")
    threads = torch.get_num_threads()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            be_deterministic()
        forked = torch.random.fork_rng(devices=[device] if device.type != "cpu" else [], device_type=device.type)
        with (
            usual_defaults(),
            full_precision(),
            forked,
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
        ):
            yield device
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.set_num_threads(threads)
        _busy.release()
