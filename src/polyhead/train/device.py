"""The device of a process, its threads, determinism, random state and matrix products."""

import contextlib
import datetime
import functools
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


_default_dtypes: list[torch.dtype] = []
"""One entry per open `usual_defaults`, of any thread: first the caller's default dtype, then `DTYPE` for each other."""
_dtype_lock = threading.Lock()


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """A context in which torch makes tensors of `DTYPE` on the CPU, whatever the defaults of the caller.

    Threads may be in it at once; the last to leave restores the default dtype.
    """
    with _dtype_lock:
        _default_dtypes.append(torch.get_default_dtype())
        torch.set_default_dtype(DTYPE)
    try:
        # Entering a device slows every function of torch, so it is done only for a caller with another default device.
        is_on_cpu = torch.get_default_device().type == "cpu"
        with contextlib.nullcontext() if is_on_cpu else torch.device("cpu"):
            yield
    finally:
        with _dtype_lock:
            dtype = _default_dtypes.pop()
            if not _default_dtypes:
                torch.set_default_dtype(dtype)


_training_lock = threading.RLock()


def refuse_second_thread() -> None:
    """Raise ValueError while another thread trains: the two would share random numbers."""
    if not _training_lock.acquire(blocking=False):
        raise ValueError("train: another thread of this process trains a run; give each a process (polyhead sweep)")
    _training_lock.release()


@contextlib.contextmanager
def process(config: Run, device: torch.device | None = None) -> Iterator[torch.device]:
    """Set threads, determinism, precision, default dtype, default device and random state for a run; restore them.

    The caller's autocast, `no_grad`, `inference_mode` and matmul precision do not apply: one digest has one result.

    Raises:
        ValueError: While another thread is in such a context: the two would share random numbers.
    """
    if device is None:
        device = pick_device(config.device)
    refuse_second_thread()
    _training_lock.acquire()
    # These settings are global: unless restored, they would change the caller's own work after the run.
    num_threads = torch.get_num_threads()
    is_strict = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cuda_precision = torch.backends.cuda.matmul.fp32_precision
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.deterministic:  # an op without a deterministic algorithm raises
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
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
        if config.deterministic:  # the call imports the compiler of torch, which takes seconds
            torch.use_deterministic_algorithms(is_strict, warn_only=warns_only)
        torch.set_num_threads(num_threads)
        _training_lock.release()


# ---------------------------------------------------------------------------------------------- fast matrix products
# oneDNN is up to twice as fast as MKL on processors of AMD.  Its switch also allows rounding to bfloat16, as processors
# with AMX do.  So each process first compares one product with float64.
SWITCH: Any = getattr(torch.backends.mkldnn, "matmul", None)
"""The object with `fp32_precision`; None if this torch has no such switch."""

STOCK, FAST = "ieee", "bf16"


@contextlib.contextmanager
def fast_products(enabled: bool = True) -> Iterator[bool]:
    """A context in which float32 matrix products on the CPU use oneDNN, if it is as exact as PyTorch's own choice.

    Yields whether oneDNN is used.  The setting is global to the process; the earlier one returns at the end.  Inside,
    `torch.get_float32_matmul_precision()` raises, and so do flex attention and max-autotune, which call it.
    """
    if SWITCH is None:
        yield False
        return
    is_fast = enabled and onednn_is_exact()
    before = SWITCH.fp32_precision
    SWITCH.fp32_precision = FAST if is_fast else STOCK
    try:
        yield is_fast
    finally:
        SWITCH.fp32_precision = before


@functools.cache
def onednn_is_exact() -> bool:
    """Is a product by oneDNN as exact as PyTorch's own on this processor?"""
    if getattr(torch.cpu, "_is_amx_tile_supported", bool)():  # rounds to bfloat16
        return False
    # A small product is enough: rounding to bfloat16 shows far above the effect of another order of sums.
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(512, 128, generator=generator, device="cpu", dtype=torch.float32)
    w = torch.randn(128, 384, generator=generator, device="cpu", dtype=torch.float32)
    exact = x.double() @ w.double()
    error_by_precision = {}
    before = SWITCH.fp32_precision
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for precision in (STOCK, FAST):
                SWITCH.fp32_precision = precision
                error_by_precision[precision] = float(((x @ w).double() - exact).norm())
    finally:
        SWITCH.fp32_precision = before
    return error_by_precision[FAST] <= 2 * error_by_precision[STOCK]


# ------------------------------------------------------------------------------------------------- for the result
def environment(device: torch.device) -> dict[str, Any]:
    """The environment of a run: versions, machine, threads, device, matrix products, date."""
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
