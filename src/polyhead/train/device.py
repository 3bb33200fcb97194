"""The device of a process, its threads, determinism and random state."""

import contextlib
import datetime
import os
import pathlib
import platform
import threading
from collections.abc import Iterator
from typing import Any

import torch

from polyhead import __version__
from polyhead.config import Run
from polyhead.spec.shapes import one_of
from polyhead.train.products import FAST, SWITCH, fast_products


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

    That function takes up to a millisecond for the kinds of devices that the machine lacks.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


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


_busy = threading.RLock()


@contextlib.contextmanager
def process(config: Run, device: torch.device | None = None) -> Iterator[torch.device]:
    """Set threads, determinism, precision, default dtype, default device and random state for a run; restore them.

    Autocast, `no_grad`, `inference_mode` and the matmul precision of the caller do not apply, or one digest would have
    two results.  Raises ValueError while another thread is in such a context: they would share random numbers.
    """
    if device is None:
        device = pick_device(config.device)
    if not _busy.acquire(blocking=False):
        raise ValueError("train: another thread of this process trains a run; give each a process (polyhead sweep)")
    # These settings are global: unless restored, they would change the caller's own work after the run.
    num_threads = torch.get_num_threads()
    is_strict = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cuda_precision = torch.backends.cuda.matmul.fp32_precision
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            be_deterministic()
        # TF32 rounds the inputs of products, on some GPUs only: results would depend on the machine.
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        # The compiler may ask for the precision, which raises under the switch of fast products.
        is_fast = config.fast_products and device.type == "cpu" and not config.compile
        devices = [] if device.type == "cpu" else [device]
        with (
            usual_defaults(),
            fast_products(is_fast),
            torch.random.fork_rng(devices=devices, device_type=device.type),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
        ):
            yield device
    finally:
        torch.backends.cuda.matmul.fp32_precision = cuda_precision
        torch.use_deterministic_algorithms(is_strict, warn_only=warns_only)
        torch.set_num_threads(num_threads)
        _busy.release()


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of a run: versions, machine, threads, device, matrix products (products.py), date."""
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "polyhead": __version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):  # Linux
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                about["cpu"] = line.partition(":")[2].strip()
    if device.type == "cuda":
        about["device"] = f"cuda ({torch.cuda.get_device_name(device)})"
    elif device.type == "cpu":
        about["products"] = "oneDNN" if SWITCH is not None and SWITCH.fp32_precision == FAST else "stock"
    return about
