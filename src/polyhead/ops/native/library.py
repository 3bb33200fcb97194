"""Native code: the C++ sources in ops/native, compiled at first use, cached per user, called with pointers.

A library has a plain C interface and includes no header of PyTorch, so it compiles in seconds and depends on no ABI.
Its file name in the cache is a digest of sources, flags, versions and processor.  One process builds it under a file
lock, which the system releases if the process dies; the finished file is then renamed.  Before its first use small
calls are compared with the reference.  Any failure becomes the reason, in one line, why there is no native code; then
other impls compute the op.

POLYHEAD_NATIVE=0 turns native code off; POLYHEAD_NATIVE_CACHE sets the folder; POLYHEAD_NATIVE_FLAGS sets the flags.
"""

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import of_pairs
from polyhead.ops.native.check import RIGHT, WRONG, worst_error
from polyhead.ops.native.threads import threads
from polyhead.ops.tiles import reach
from polyhead.spec.home import cache

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++")
FLAGS = "-O3 -march=native" + (" -mprefer-vector-width=512" if platform.machine() in ("x86_64", "AMD64") else "")
"""Even with AVX-512, compilers prefer vectors of 256 bits.  A whole vector that was written as two halves is slow to
read."""
ALWAYS = ("-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pipe")
LANES = 16
"""Rows (queries or keys) that native code processes at once, one per SIMD lane."""

FORWARD, BACKWARD, FEW_QUERIES = range(3)
"""The pass to compute; the same numbers as in native/pairs.h."""

FEW = 8
"""Calls with fewer queries hold keys in the SIMD lanes."""

PATIENCE = 600.0
"""Limit in seconds for a build, and for waiting until another process has built."""

NUMBERS = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float32)
"""Dtype of the tensors -> dtype of the computation.  Tests add float64, which needs a build of its own."""

SHARED = dict.fromkeys(("softmax", "relational"), "attention")
"""Op -> the C++ source that it shares with other ops.  Any other op has a source of its own name."""

SYMBOL = "polyhead_{}"
"""The name of a library's only function, from the name of its source."""

Function = Callable[..., int]
_LIBRARIES: dict[tuple[str, torch.dtype], Function | str] = {}
"""(Name of a source, dtype of the computation) -> its function, or the reason why there is none."""

_TRIAL = threading.local()
"""`.functions`: the same table in the thread that checks a library."""

_log = logging.getLogger("polyhead")


def unready(name: str, x: Tensor) -> str | None:
    """Why there is no native code of that name for these tensors, or None.  The first call builds it."""
    if x.device.type != "cpu":
        return "takes CPU tensors only"
    if x.dtype not in NUMBERS:
        return f"takes {', '.join(str(d).removeprefix('torch.') for d in NUMBERS)} only, not {x.dtype}"
    return missing(name, NUMBERS[x.dtype])


def missing(name: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no native code of that name that computes in that dtype, or None."""
    key, functions = (name, dtype), _functions()
    if key not in functions:
        try:
            _LIBRARIES[key] = _trusted(name, dtype, _library(name, dtype))
        except (OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
            _LIBRARIES[key] = _short(error)
        if isinstance(_LIBRARIES[key], str) and enabled():
            _log.warning("polyhead: no native code for %s: it %s; slower code takes its place", name, _LIBRARIES[key])
    found = functions[key]
    return found if isinstance(found, str) else None


missing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it once, untraced


def enabled() -> bool:
    """Is native code wanted?"""
    return os.environ.get("POLYHEAD_NATIVE", "1") != "0"


def call(name: str, dtype: torch.dtype, struct: ctypes.Structure, *more: int) -> None:
    """Run native code.  Raises RuntimeError if there is none, and MemoryError if it cannot allocate its memory."""
    if (reason := missing(name, dtype)) is not None:  # of an exported graph with this impl, which was made elsewhere
        raise RuntimeError(f"polyhead: native code for {name} {reason}")
    function = _functions()[name, dtype]
    assert callable(function)
    if function(ctypes.byref(struct), *more):
        raise MemoryError(f"polyhead: native code for {name} found too little memory")


def source(op: str) -> str:
    """The name of the C++ source of an op."""
    return SHARED.get(op, op)


def status(op: str) -> str:
    """The state of native code for `polyhead list impls`: whether it is built, or why not.  Builds nothing."""
    if not enabled():
        return "turned off by POLYHEAD_NATIVE=0"
    try:
        built = cached(source(op)).exists()
    except RuntimeError as error:  # no home
        return _short(error)
    if built or _compiler():
        return "built" if built else "not built yet: compiled on first use"
    return "cannot be built: neither g++ nor clang++ is there"


# ------------------------------------------------------------------------------------------------------------- building
def cached(name: str, dtype: torch.dtype = torch.float32) -> Path:
    """The path of the library, whether or not it is built."""
    parts = *flags(dtype), torch.__version__, platform.platform(terse=True), platform.machine(), _processor()
    made = hashlib.sha256("\n".join(parts).encode())
    for path in [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))]:
        made.update(path.read_bytes())
    return folder() / f"{name}-{made.hexdigest()[:20]}.so"


def flags(dtype: torch.dtype) -> list[str]:
    """The compiler's flags."""
    more = ["-DPOLYHEAD_NUMBER=double", "-O1"] if dtype == torch.float64 else []  # for tests only
    return [*os.environ.get("POLYHEAD_NATIVE_FLAGS", FLAGS).split(), *ALWAYS, *more]


def folder() -> Path:
    """The folder of the cache.  Raises RuntimeError for a user without a home folder."""
    return Path(os.environ.get("POLYHEAD_NATIVE_CACHE") or cache("native", "POLYHEAD_NATIVE_CACHE"))


def _processor() -> str:
    """The processor's name and features, on which -march=native depends."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))}))
    return platform.processor()


def _compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _library(name: str, dtype: torch.dtype) -> Function | str:
    """The function of a library, built if necessary, or the reason why there is none."""
    if not enabled():
        return "is turned off by POLYHEAD_NATIVE=0"
    path = cached(name, dtype)
    with contextlib.suppress(OSError, AttributeError, UnicodeError):
        return _load(path, name)
    if (compiler := _compiler()) is None:
        return "needs a compiler, g++ or clang++, and neither is there"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_suffix(".lock")):
        with contextlib.suppress(OSError, AttributeError, UnicodeError):
            return _load(path, name)  # another process may have built it meanwhile
        if (reason := _build([compiler, *flags(dtype)], name, path)) is not None:
            return reason
    return _load(path, name)


def _load(path: Path, name: str) -> Any:
    # Loading a truncated library could crash the process, so its digest is checked first.
    if _digest(path) != _noted(path)[0]:
        raise OSError(f"{path} is damaged")
    function = getattr(ctypes.CDLL(str(path)), SYMBOL.format(name))
    function.restype = ctypes.c_int
    return function


def _build(command: list[str], name: str, path: Path) -> str | None:
    """Compile to a temporary file and rename it; returns the reason of a failure, or None."""
    for left in path.parent.glob(f"{path.stem}.*.part"):
        left.unlink(missing_ok=True)  # left by a killed process
    part = path.with_suffix(f".{os.getpid()}.part")
    _log.warning("polyhead: compiling native code for %s, once (%s)", name, path.parent)
    try:
        done = subprocess.run(
            [*command, str(SOURCES / f"{name}.cpp"), "-o", str(part)],
            capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False, encoding="utf-8",
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            return f"cannot be compiled: {lines[0].strip() if lines else f'exit code {done.returncode}'}"
        _note(path, _digest(part), "")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _note(path: Path, digest: str, verdict: str) -> None:
    """Write a library's digest and the verdict of its check to a file beside it."""
    part = path.with_suffix(f".{os.getpid()}.note")
    part.write_text(f"{digest}\n{verdict}", encoding="utf-8")
    part.replace(path.with_suffix(".sum"))


def _noted(path: Path) -> tuple[str, str]:
    digest, _, verdict = path.with_suffix(".sum").read_text(encoding="utf-8").partition("\n")
    return digest, verdict


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A lock between processes; the system releases it if the process dies."""
    import fcntl

    with path.open("w", encoding="utf-8") as file:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(f"another process holds {path}") from None
                time.sleep(0.05)
        yield


def _short(error: Exception) -> str:
    return f"cannot be built: {' '.join(str(error).split())[:200]}"


# ------------------------------------------------------------------------------------------------------------- checking
def _trusted(name: str, dtype: torch.dtype, found: Function | str) -> Function | str:
    """The function if its numbers are right, otherwise what is wrong.  Each build is checked once."""
    if isinstance(found, str):
        return found
    path = cached(name, dtype)
    digest, verdict = _noted(path)
    if not verdict:
        verdict = _verdict(name, dtype, found)
        with contextlib.suppress(OSError):  # without a writable cache the next process checks again
            _note(path, digest, verdict)
    return found if verdict == RIGHT else verdict


def _verdict(name: str, dtype: torch.dtype, function: Function) -> str:
    """RIGHT, or what is wrong, in words.  It runs in a new thread, without the caller's modes such as autocast or
    vmap."""
    error = math.inf

    def look() -> None:
        nonlocal error
        _TRIAL.functions = {(name, dtype): function}
        with contextlib.suppress(Exception):
            error = worst_error(name, dtype)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return RIGHT if error < WRONG else f"computes wrong numbers on this processor (relative error {error:.0e})"


def _functions() -> dict[tuple[str, torch.dtype], Function | str]:
    return getattr(_TRIAL, "functions", _LIBRARIES)


# -------------------------------------------------------------------------------------------------------------- calling
class Rows(ctypes.Structure):
    """A tensor (b n h width): pointer and strides in numbers; see native/pairs.h."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("b", "n", "h"))]


class Pairs(ctypes.Structure):
    """A tensor (b h t s): pointer and strides in numbers."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("b", "h", "own", "other"))]


class BiasGrad(ctypes.Structure):
    """The gradient of a bias: pointer and strides in numbers; see native/pairs.h."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("b", "h", "query", "key", "slot", "strip")),
    ]


class Limits(ctypes.Structure):
    """Ranges of visible keys and queries, bias, dropout and mask; "own" is the side in the lanes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "end", "low", "high")),
        *((name, Pairs) for name in ("bias", "keep", "mask")),
        *((name, ctypes.c_int64) for name in ("owns", "others", "hides")),
    ]


def rows(x: Tensor | None) -> Rows:
    """The struct of a tensor (b n h width) whose width is contiguous."""
    return Rows() if x is None else Rows(x.data_ptr(), *x.stride()[:3])


def pairs(x: Tensor | None, t: int) -> Pairs:
    """The struct of a tensor of 4 dimensions that broadcasts to (b h t s), or by offset (h t+s-1)."""
    if x is None:
        return Pairs()
    if x.ndim == 2:
        head, step = x.stride()
        return Pairs(x.data_ptr() + (t - 1) * step * x.itemsize, 0, head, -step, step)
    return Pairs(x.data_ptr(), *(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)))


def sight(
    t: int, s: int, causal: bool, window: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """For each query the first visible key and one past the last; for each key the same of queries.

    None if every pair is visible.
    """
    if not (causal and t > 1) and window is None and cu_seqlens is None:
        return None  # a single causal query sees all keys
    first, end = reach(t, s, torch.device("cpu"), causal=causal, window=window, cu_seqlens=cu_seqlens)
    keys = torch.arange(s, dtype=torch.int32)
    low, high = torch.searchsorted(end, keys, right=True), torch.searchsorted(first, keys, right=True)
    return first, end, low.to(torch.int32), high.to(torch.int32)


def limits(x: AttentionCall, dtype: torch.dtype) -> tuple[Limits, list[Tensor | None]]:
    """The struct of a call's masks and biases, and the tensors that own its memory."""
    t, s = x.lengths
    bias, keep = (None if a is None else a.to(dtype) for a in (x.bias, x.keep))
    mask, keep = (a if a is None else of_pairs(a) for a in (x.mask, keep))
    look = sight(t, s, x.causal, x.window, x.cu_seqlens)
    ends = [None] * 4 if look is None else [a.data_ptr() for a in look]
    # Reading a large bias takes as long as it saves; reading an expanded one takes much longer.
    hides = bias is not None and (bias.numel() > 1 << 20 or bool((bias == -math.inf).any()))
    return Limits(*ends, pairs(bias, t), pairs(keep, t), pairs(mask, t), t, s, hides), [bias, keep, mask, *(look or ())]


def shares(b: int, s: int, bias: Tensor | None) -> tuple[int, int]:
    """Into how many parts a backward pass cuts the samples and the keys, for the threads.

    Each part of the keys needs its own dq, and each part of either needs its own gradient of a bias by offset; so the
    parts are few.  Samples that share a dense bias are not cut.
    """
    n, tiles = threads(), max(1, -(-s // LANES))
    if n == 1:
        return 1, 1
    shared = bias is not None and bias.ndim == 4 and bias.shape[0] == 1
    slots = 1 if shared else max(1, min(b, 4 * n))
    return slots, min(tiles, -(-2 * n // slots))


def forward_shares(x: AttentionCall) -> tuple[int, int, int]:
    """The same for a forward pass, and the pass: FEW_QUERIES, or FORWARD, which divides its queries itself."""
    t, s = x.lengths
    return (*shares(len(x.q), s, None), FEW_QUERIES) if t < FEW else (1, 1, FORWARD)


def added(parts: Tensor) -> Tensor:
    """The sum over the parts of the keys.  Not a view: autograd forbids writing to a view that a custom op returns."""
    return parts.sum(0) if len(parts) > 1 else parts.squeeze_(0)


def bias_grad(bias: Tensor | None, slots: int, strips: int, t: int) -> tuple[Tensor | None, BiasGrad]:
    """Zeros (slots strips ...), whose sum will be the gradient of a bias; float64, as in native/pairs.h."""
    if bias is None:
        return None, BiasGrad()
    if bias.ndim == 2:
        grad = torch.zeros(slots, strips, *bias.shape, dtype=torch.float64)
        slot, strip, head, _ = grad.stride()
        return grad, BiasGrad(grad.data_ptr() + (t - 1) * grad.itemsize, 0, head, -1, 1, slot, strip)
    grad = torch.zeros(1, 1, *bias.shape, dtype=torch.float64)
    steps = (0 if n == 1 else step for n, step in zip(bias.shape, grad.stride()[2:], strict=True))
    return grad, BiasGrad(grad.data_ptr(), *steps)


def numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype with a contiguous last dimension."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
