"""Native code: the C++ sources in ops/native, compiled at first use, cached per user, called with pointers.

A library has a plain C interface and includes no header of PyTorch, so it compiles in half a minute and depends on no
ABI. Its file name in the cache is a digest of sources, flags, versions and processor. One process builds it under a
file lock, which the system releases if the process dies; the finished file is then renamed. Before its first use small
calls are compared with the reference. Any failure becomes the reason, in one line, why there is no native code; then
other impls compute the op.

POLYHEAD_NATIVE=0 turns native code off; POLYHEAD_NATIVE_CACHE sets the folder; POLYHEAD_NATIVE_FLAGS sets the flags.
"""

import contextlib
import ctypes
import hashlib
import logging
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

from polyhead.ops.native.check import RIGHT, WRONG, worst_error
from polyhead.spec.home import cache

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++")
FLAGS = "-O3 -march=native" + (" -mprefer-vector-width=512" if platform.machine() in ("x86_64", "AMD64") else "")
"""Even with AVX-512, compilers prefer vectors of 256 bits.  A whole vector that was written as two halves is slow to
read."""
ALWAYS = ("-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pipe")
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
        try:
            verdict = _verdict(name, dtype, found)
        except Exception as error:  # for example for lack of memory; the next process checks again
            return f"cannot be checked: {' '.join(str(error).split())[:200]}"
        with contextlib.suppress(OSError):  # without a writable cache the next process checks again
            _note(path, digest, verdict)
    return found if verdict == RIGHT else verdict


def _verdict(name: str, dtype: torch.dtype, function: Function) -> str:
    """RIGHT, or what is wrong, in words.  It runs in a new thread, without the caller's modes such as autocast or
    vmap.  Raises the error that ended the check."""
    found: list[float | Exception] = []

    def look() -> None:
        _TRIAL.functions = {(name, dtype): function}
        try:
            found.append(worst_error(name, dtype))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if isinstance(error := found[0], Exception):
        raise error
    return RIGHT if error < WRONG else f"computes wrong numbers on this processor (relative error {error:.0e})"


def _functions() -> dict[tuple[str, torch.dtype], Function | str]:
    return getattr(_TRIAL, "functions", _LIBRARIES)
