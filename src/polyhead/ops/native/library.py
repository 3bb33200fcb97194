"""Native code: the C++ sources in ops/native, from the wheel or compiled at first use, called with pointers.

A library has a plain C interface and includes no header of PyTorch, so it compiles in half a minute and depends on no
ABI.  A wheel has builds for several levels of processors (prebuilt.py).  Where none fits, one process compiles under a
file lock, which the system releases if the process dies; the finished file is then renamed.  Its name in the cache is a
digest of sources, flags, versions and processor.  Before its first use on a processor small calls are compared with
the reference (check.py).  Any failure becomes the reason, in one line, why there is no native code; then other
implementations compute the op.

    load_error(source, dtype)           memory: _LIBRARIES
      _load_and_check                   small calls in a thread; the verdict is kept in the cache
        _load_or_build                  the wheel, else cache folder, lock, compiler
          _build, _open

POLYHEAD_NATIVE=0 turns native code off; POLYHEAD_NATIVE_CACHE sets the folder, POLYHEAD_NATIVE_FLAGS the flags.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.native.check import TOLERANCE, worst_error
from polyhead.ops.native.prebuilt import prebuilt_library
from polyhead.spec.home import cache
from polyhead.spec.values import one_line

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++")

OPTIMISATION_FLAGS = "-O3"
"""Replaced by POLYHEAD_NATIVE_FLAGS.  Apple's clang knows no -march=native."""
if sys.platform != "darwin":
    OPTIMISATION_FLAGS += " -march=native"
    if platform.machine() in ("x86_64", "AMD64"):
        # Even with AVX-512 compilers prefer 256 bits, but a vector that was written in two halves is slow to read.
        OPTIMISATION_FLAGS += " -mprefer-vector-width=512"
REQUIRED_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pipe")

TIMEOUT = 600.0
"""Limit in seconds for a build, and for waiting until another process has built."""

COMPUTE_DTYPES = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float32)
"""Dtype of the tensors -> dtype of the computation.  Tests add float64, which needs a build of its own."""

SHARED_SOURCES = {"softmax": "attention", "relational": "attention"}
"""Op -> the C++ source that it shares with other ops.  Any other op has a source of its own name."""

NO_COMPILER = "needs a compiler, g++ or clang++, and neither is there"
NO_WINDOWS = "is for Linux and macOS"

NativeFunction = Callable[..., int]
LoadedLibraries = dict[tuple[str, torch.dtype], NativeFunction | str]
"""(Name of a source, dtype of the computation) -> the library's function, or the reason why there is none."""

_LIBRARIES: LoadedLibraries = {}
_THREAD = threading.local()
"""`.libraries` takes the place of _LIBRARIES in the thread that checks a library."""

_log = logging.getLogger("polyhead")


# ------------------------------------------------------------------------------------------------- asking for a library
def unsupported_tensor(source: str, x: Tensor) -> str | None:
    """Why there is no native code of that name for these tensors, or None.  The first call builds it."""
    if x.device.type != "cpu":
        return "takes CPU tensors only"
    if x.dtype not in COMPUTE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in COMPUTE_DTYPES)
        return f"takes {names} only, not {x.dtype}"
    return load_error(source, COMPUTE_DTYPES[x.dtype])


def load_error(source: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no native code of that name that computes in that dtype, or None.  The first call builds it."""
    libraries = _current_libraries()
    if (source, dtype) not in libraries:
        try:
            library = _load_and_check(source, dtype)
        except (OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
            library = _build_failure(error)
        # Success and failure are both kept: a machine without a compiler is asked once.
        _LIBRARIES[source, dtype] = library
        if library == NO_COMPILER:
            warn_without_compiler()
        elif isinstance(library, str) and library != NO_WINDOWS and enabled():
            _log.warning("polyhead: no native code for %s: it %s; slower code takes its place", source, library)
    library = libraries[source, dtype]
    return library if isinstance(library, str) else None


load_error._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it once, untraced


def call(source: str, dtype: torch.dtype, struct: ctypes.Structure, *options: int) -> None:
    """Run native code.  Raises RuntimeError if there is none, and MemoryError if it cannot allocate its memory."""
    reason = load_error(source, dtype)
    if reason is not None:  # in an exported graph, which was made where there was native code
        raise RuntimeError(f"polyhead: native code for {source} {reason}")
    function = _current_libraries()[source, dtype]
    assert callable(function)
    out_of_memory = function(ctypes.byref(struct), *options)
    if out_of_memory:
        raise MemoryError(f"polyhead: native code for {source} found too little memory")


@functools.cache
def warn_without_compiler() -> None:
    """Say, once a process, what a missing compiler costs."""
    _log.warning(
        "polyhead: no native code: it %s; HYLA takes 8 to 19 times as long; "
        "install g++ (apt install g++) or, on macOS, clang++ (xcode-select --install)",
        NO_COMPILER,
    )


def lacks_compiler() -> bool:
    """Whether native code is wanted, did not come with the package and cannot be built."""
    return status("hyla").endswith(NO_COMPILER)


def enabled() -> bool:
    """Whether the user wants native code."""
    return os.environ.get("POLYHEAD_NATIVE", "1") != "0"


def source_of(op: str) -> str:
    """The name of the C++ source of an op."""
    return SHARED_SOURCES.get(op, op)


def status(op: str) -> str:
    """The state of native code for `polyhead list implementations`: is it built, or why not?  Builds nothing."""
    if not enabled():
        return "turned off by POLYHEAD_NATIVE=0"
    try:
        is_built = library_path(source_of(op)).exists()
    except RuntimeError as error:  # no home
        return _build_failure(error)
    if _prebuilt(source_of(op), torch.float32) is not None:
        return "came with the package"
    if is_built:
        return "built"
    if _find_compiler():
        return "not built yet: compiled on first use"
    return f"cannot be built: it {NO_COMPILER}"


def _current_libraries() -> LoadedLibraries:
    return getattr(_THREAD, "libraries", _LIBRARIES)


def _build_failure(error: Exception) -> str:
    return f"cannot be built: {one_line(error)[:200]}"


# ------------------------------------------------------------------------------------------------------------- building
def library_path(source: str, dtype: torch.dtype = torch.float32) -> Path:
    """The path of the library, whether or not it is built."""
    machine = platform.platform(terse=True), platform.machine(), _processor()
    digest = hashlib.sha256("\n".join((*compiler_flags(dtype), torch.__version__, *machine)).encode())
    # A change of a source, of the compiler flags or of the processor gives another file name. A new compiler does not.
    for path in (SOURCES / f"{source}.cpp", *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return cache_folder() / f"{source}-{digest.hexdigest()[:20]}.so"


def compiler_flags(dtype: torch.dtype) -> list[str]:
    flags = os.environ.get("POLYHEAD_NATIVE_FLAGS", OPTIMISATION_FLAGS).split()
    flags.extend(REQUIRED_FLAGS)
    if dtype == torch.float64:  # for tests only
        flags.extend(["-DPOLYHEAD_NUMBER=double", "-O1"])
    return flags


def cache_folder() -> Path:
    """The folder of the libraries.  Raises RuntimeError for a user without a home folder."""
    return Path(os.environ.get("POLYHEAD_NATIVE_CACHE") or cache("native", "POLYHEAD_NATIVE_CACHE"))


def _processor() -> str:
    """The processor's name and features, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    features = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join(sorted(features))


def _find_compiler() -> str | None:
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def _load_or_build(source: str, dtype: torch.dtype) -> NativeFunction | str:
    """The function of a library, built if necessary, or the reason why there is none."""
    if not enabled():
        return "is turned off by POLYHEAD_NATIVE=0"
    # A build of the wheel needs no compiler.
    prebuilt = _prebuilt(source, dtype)
    if prebuilt is not None:
        return _function(prebuilt, source)
    if sys.platform == "win32":
        return NO_WINDOWS
    path = library_path(source, dtype)
    function = _open_if_intact(path, source)
    if function is not None:
        return function
    compiler = _find_compiler()
    if compiler is None:
        return NO_COMPILER
    from filelock import FileLock, Timeout  # here, as it takes time and only a build needs it

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    try:
        acquired = FileLock(lock, timeout=TIMEOUT).acquire()  # the system releases it if the process dies
    except Timeout:
        raise OSError(f"another process holds {lock}") from None
    with acquired:
        function = _open_if_intact(path, source)  # another process may have built it meanwhile
        if function is not None:
            return function
        reason = _build([compiler, *compiler_flags(dtype)], source, path)
        if reason is not None:
            return reason
    return _open(path, source)


def _open_if_intact(path: Path, source: str) -> NativeFunction | None:
    try:
        return _open(path, source)
    except (OSError, AttributeError, UnicodeError):
        return None


def _open(path: Path, source: str) -> NativeFunction:
    """Load a library.  Raises OSError if its file is missing or damaged."""
    # Loading a truncated library could crash the process, so its digest is compared with that beside it first.
    if not path.with_suffix(".sum").read_text(encoding="utf-8").startswith(_file_digest(path)):
        raise OSError(f"{path} is damaged")
    return _function(path, source)


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _function(path: Path, source: str) -> NativeFunction:
    function: Any = getattr(ctypes.CDLL(str(path)), f"polyhead_{source}")
    function.restype = ctypes.c_int
    return function


def _prebuilt(source: str, dtype: torch.dtype) -> Path | None:
    """The library of the wheel for this processor; None if there is none, or the user's own flags ask for a build."""
    if dtype != torch.float32 or "POLYHEAD_NATIVE_FLAGS" in os.environ:
        return None
    return prebuilt_library(source)


def _build(command: list[str], source: str, path: Path) -> str | None:
    """Compile to a temporary file and rename it; returns the reason of a failure, or None."""
    for partial in path.parent.glob(f"{path.stem}.*.part"):
        partial.unlink(missing_ok=True)  # of a killed process
    partial = path.with_suffix(f".{os.getpid()}.part")
    _log.warning("polyhead: compiling native code for %s, once (%s)", source, path.parent)
    try:
        compilation = subprocess.run(
            [*command, str(SOURCES / f"{source}.cpp"), "-o", str(partial)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
        if compilation.returncode:
            return f"cannot be compiled: {_first_error(compilation)}"
        # The digest comes first: a library without one counts as damaged and is built again.
        path.with_suffix(".sum").write_text(_file_digest(partial), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return None


def _first_error(compilation: subprocess.CompletedProcess[str]) -> str:
    lines = compilation.stderr.splitlines()
    for line in lines:
        if "error" in line:
            return line.strip()
    if lines:
        return lines[0].strip()
    return f"exit code {compilation.returncode}"


# ------------------------------------------------------------------------------------------------------------- checking
def _load_and_check(source: str, dtype: torch.dtype) -> NativeFunction | str:
    """The function if its numbers are right on this processor, otherwise why there is none."""
    function = _load_or_build(source, dtype)
    if isinstance(function, str) or _is_known_right(source, dtype):
        return function

    def check() -> float:
        # Only this thread sees the library: others wait for the verdict.
        _THREAD.libraries = {(source, dtype): function}
        return worst_error(source, dtype)

    # A new thread has none of the caller's modes, such as autocast or vmap.
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            error = thread.submit(check).result()
        except Exception as exception:  # for example for lack of memory
            return f"cannot be checked: {one_line(exception)[:200]}"
    if error < TOLERANCE:  # NaN is not
        _remember_right(source, dtype)
        return function
    return f"computes wrong numbers on this processor (relative error {error:.0e})"


def _verdict_file(source: str, dtype: torch.dtype) -> tuple[Path, str]:
    """The file in the cache that names the library that was right on this processor, and the digest of this one."""
    path = library_path(source, dtype)
    return path.with_suffix(".right"), _file_digest(_prebuilt(source, dtype) or path)


def _is_known_right(source: str, dtype: torch.dtype) -> bool:
    try:
        path, digest = _verdict_file(source, dtype)
        return path.read_text(encoding="utf-8") == digest
    except (OSError, RuntimeError, UnicodeError):  # RuntimeError: no home
        return False


def _remember_right(source: str, dtype: torch.dtype) -> None:
    # Without a cache that can be written, each process checks.
    with contextlib.suppress(OSError, RuntimeError):
        path, digest = _verdict_file(source, dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(digest, encoding="utf-8")
