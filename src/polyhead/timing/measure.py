"""`polyhead bench`: time and peak memory of an op's implementations by t, beside the reference and other libraries.

First every implementation must agree with the float64 reference on a small case with the same options; otherwise
nothing is timed.  Time is CPU time on one CPU thread, elapsed time on several, and CUDA events on a GPU, with the cache
flushed before each call.
Compared implementations take turns, and all ratios are within one run.  Memory is the growth of the peak that torch's
allocators hold during the call.  A reference that does not fit into memory is skipped, and the table says so.
"""

import contextlib
import dataclasses
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from polyhead.ops.dispatch import TENSORS
from polyhead.ops.latent_code import at_least_float32
from polyhead.spec.lazy import own_names
from polyhead.spec.shapes import one_of
from polyhead.timing.options import Options
from polyhead.timing.sides import PASSES, Side, compiled, operations, sides, tensors
from polyhead.train.products import fast_products
from polyhead.train.store.files import check_folder
from polyhead.train.store.folder import environment

__dir__ = own_names(__name__)

SMALL = 200
"""Tokens of the parity case: more than a tile, and not a multiple of a tile."""

PROBE = 256
"""Tokens at which the reference's memory is measured first, to extrapolate it."""

ROUNDING = 32
"""Allowed rounding errors of the statistics' dtype (order of sums), added to twice the reference's own error."""

Row = dict[str, Any]
Tell = Callable[[str, int, int], None]
"""Called with a text, the number of finished steps, and the number of all steps."""


class ParityError(Exception):
    """An implementation disagrees with the reference, so nothing is timed."""


def run(asked: Options, folder: pathlib.Path, tell: Tell = lambda text, done, total: None) -> dict[str, Any]:
    """Measure, write OP.json, OP-time and OP-memory (.png and .svg) to `folder`, and return the content of the JSON.

    Raises ParityError if an implementation disagrees with the reference, ValueError for invalid options.
    """
    options = asked.settled()
    device, threads = torch.device(options.device), torch.get_num_threads()
    torch.set_num_threads(options.threads)
    held = contextlib.ExitStack()
    try:
        held.enter_context(fast_products(options.fast_products and device.type == "cpu"))
        tell("checking parity", 0, 1)
        small = tensors(options, SMALL, min(options.batch, 2))
        found, absent = sides(options, small)
        result: dict[str, Any] = {
            "command": command(asked),
            "options": dataclasses.asdict(options),
            "environment": machine(device),
            "parity": {"tokens": SMALL, "errors": parity(options, found, small)},
            "left_out": absent,
            "matrix_tflops": matrix_rate(device),
            "rows": [],
        }
        check_folder("bench", folder)
        bench = _Bench(options, chosen(options, found, absent), tell)
        for t in options.lengths:
            result["rows"] += bench.length(t)
            (folder / f"{options.op}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(options.op, result["rows"], folder)
        return result
    finally:
        held.close()
        torch.set_num_threads(threads)


def machine(device: torch.device) -> dict[str, Any]:
    """Versions, machine, threads and date: the conditions of a measurement."""
    return environment(device) | {"platform": f"{platform.system()} {platform.machine()}"}


def chosen(options: Options, found: Sequence[Side], absent: Mapping[str, str]) -> list[Side]:
    """The sides to time.  Raises ValueError for an unknown side, or one that is not available."""
    for name in options.sides:
        if one_of("bench", "side", name, (*(side.name for side in found), *absent, "compiled")) in absent:
            raise ValueError(f"bench: {options.op} {name} {absent[name]}")
    return [side for side in found if not options.sides or side.name in options.sides]


def command(asked: Options) -> str:
    """The command that repeats this measurement.

    >>> command(Options("hyla", lengths=(256, 512), causal=False))
    'polyhead bench hyla --lengths 256 512 --no-causal'
    """
    words = ["polyhead", "bench", asked.op]
    for field in dataclasses.fields(asked)[1:]:
        value = getattr(asked, field.name)
        if value == field.default:
            continue
        if field.default is True:
            words.append(f"--no-{field.name.replace('_', '-')}")
        else:
            words += [f"--{field.name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return " ".join(words)


# --------------------------------------------------------------------------------------------------------------- parity
def parity(options: Options, found: Sequence[Side], small: Mapping[str, Tensor]) -> dict[str, float]:
    """The worst relative error of each side that computes the op, over its output and all gradients.

    The error is relative to the float64 reference.  Twice the reference's own error in this dtype is allowed.
    Raises ParityError for a larger error.
    """
    exact = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in small.items()}
    reference = next(side for side in found if side.name == "reference")
    wanted, own = reference.both(exact), reference.both(small)
    slack = ROUNDING * torch.finfo(at_least_float32(own[0].dtype)).eps
    allowed = [2 * _error(x, y) + slack for x, y in zip(own, wanted, strict=True)]
    worst = {}
    for side in (side for side in found if side.same):
        errors = [_error(x, y) for x, y in zip(side.both(small), wanted, strict=True)]
        names = ("the output", *(f"the gradient of {name}" for name in TENSORS[options.op]))
        for name, error, limit in zip(names, errors, allowed, strict=True):
            if not error <= limit:  # also rejects nan
                raise ParityError(
                    f"bench: parity of {options.op} fails, so nothing is timed: {name} of {side.name} is off by "
                    f"{error:.1e} of the reference in float64, where {limit:.1e} is allowed"
                )
        worst[side.name] = max(errors)
    return worst


def _error(came: Tensor, wanted: Tensor) -> float:
    return ((came.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


# ---------------------------------------------------------------------------------------------------------- measurement
class Clock:
    """Seconds of a call: CPU time of the process, elapsed time of several threads, or CUDA events around it."""

    def __init__(self, device: torch.device, threads: int = 1) -> None:
        self.device = device
        self.now = time.process_time if threads == 1 else time.perf_counter
        # Larger than any card's cache: cached data of the previous call would favour some sides.
        self.cache = torch.zeros(2**28, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def seconds(self, call: Callable[[], object]) -> float:
        if self.cache is None:
            start = self.now()
            call()
            return self.now() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cache.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def peak(device: torch.device, call: Callable[[], object]) -> int:
    """The peak growth in bytes of the memory in torch's allocator during a call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The public profiler also records every op, which at large lengths takes more memory than the call.
    from torch._C import _autograd
    from torch._C._profiler import ProfilerActivity, RecordScope

    private: Any = _autograd
    config = profiler.profile(use_kineto=True, profile_memory=True).config()
    private._prepare_profiler(config, {ProfilerActivity.CPU})
    private._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
    try:
        call()
    finally:
        events = private._disable_profiler().events()
    now = most = 0
    for event in events:
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most


def matrix_rate(device: torch.device, n: int = 8192) -> float | None:
    """TFLOP/s of a large matrix product in bfloat16: the achievable peak of a GPU.  None on a CPU."""
    if device.type != "cuda":
        return None
    x, clock = torch.randn(n, n, device=device, dtype=torch.bfloat16), Clock(device)
    return 2 * n**3 / min(clock.seconds(lambda: x @ x) for _ in range(20)) / 1e12


class _Bench:
    """The state of one measurement: the sides, and the memory of each so far."""

    def __init__(self, options: Options, found: list[Side], tell: Tell) -> None:
        self.options, self.found, self.tell = options, found, tell
        self.device = torch.device(options.device)
        self.clock, self.warm = Clock(self.device, options.threads), 2 if self.device.type == "cuda" else 0
        self.taken: dict[tuple[str, str], tuple[int, float]] = {}
        self.repeats = int(options.repeats or 0)
        count = len(found) + bool(options.compile)
        self.done, self.total = 0, len(options.lengths) * len(PASSES) * count * (1 + self.repeats + self.warm)
        reference = next((side for side in found if side.name == "reference"), None)
        if reference is not None and max(options.lengths) > PROBE:
            given = tensors(options, PROBE)
            for which in PASSES:
                taken = peak(self.device, lambda which=which: reference.of(which)(given))  # type: ignore[misc]
                self.taken["reference", which] = PROBE, taken

    def length(self, t: int) -> list[Row]:
        """All rows of one length."""
        given, options = tensors(self.options, t), self.options
        if options.compile:
            torch.compiler.reset()
        here = [*self.found, *([compiled(options)] if options.compile else [])]
        turns = [(side, which) for side in here for which in PASSES]
        rows: dict[tuple[str, str], Row] = {}
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for side, which in turns:
            at = side.name, which
            rows[at] = {"t": t, "side": side.name, "pass": which}
            calls[at] = lambda side=side, which=which: side.of(which)(given)  # type: ignore[misc]
            self.say(t, at)
            if (skipped := self.first(side, which, t, calls[at])) is not None:
                rows[at]["skipped"] = skipped
                self.done += self.repeats + self.warm
                del calls[at]
            else:
                rows[at]["memory"] = self.taken[at][1]
        seconds: dict[tuple[str, str], list[float]] = {at: [] for at in calls}
        for turn in range(self.warm + self.repeats):
            for at, call in calls.items():
                self.say(t, at)
                passed = self.clock.seconds(call)
                seconds[at] += [passed] if turn >= self.warm else []
        for at, all_ in seconds.items():
            rows[at]["seconds"] = {"min": min(all_), "median": statistics.median(all_)}
        return [self.compare(row, rows) for row in rows.values()]

    def say(self, t: int, at: tuple[str, str]) -> None:
        self.tell(f"t {t}: {at[0]}, {at[1]}", self.done, self.total)
        self.done += 1

    def first(self, side: Side, which: str, t: int, call: Callable[[], object]) -> str | None:
        """The first call of a length, for warm-up: records its memory, or why the call was skipped."""
        limit = float(self.options.memory or 0)
        known = self.taken.get((side.name, which)) or self.taken.get(("reference", which))
        if side.square and known is not None and (want := known[1] * (t / known[0]) ** 2 / 2**30) > limit:
            return f"would take {want:.1f} GiB of {limit:.1f}"
        try:
            if side.name == "compiled":
                call()  # memory of the compiler does not count
            self.taken[side.name, which] = t, peak(self.device, call)
            return None
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                reason = "out of memory"
            elif side.name == "compiled":
                reason = f"cannot be compiled: {str(error).strip().splitlines()[0]}"
            else:
                raise
        if self.device.type == "cuda":  # after the error's frames have released their tensors
            torch.cuda.empty_cache()
        return reason

    def compare(self, row: Row, rows: Mapping[tuple[str, str], Row]) -> Row:
        """Add the ratios to a row, and on a GPU its rate."""
        if "skipped" in row:
            return row
        for name in ("reference", "stock"):
            other = rows.get((name, row["pass"]))
            if other is not None and "skipped" not in other:
                times, memory = other["seconds"]["min"] / row["seconds"]["min"], other["memory"] / max(row["memory"], 1)
                row[f"{name}_over"] = {"time": times, "memory": memory}
        if self.device.type == "cuda" and row["side"] != "stock":
            row["tflops"] = operations(self.options, row["t"], row["pass"]) / row["seconds"]["min"] / 1e12
        return row


def draw(op: str, rows: Sequence[Row], folder: pathlib.Path) -> None:
    """Draw time and memory by t on logarithmic axes."""
    from polyhead.analysis import figures

    measures: dict[str, tuple[str, Callable[[Row], float]]] = {
        "time": ("ms", lambda row: row["seconds"]["min"] * 1e3),
        "memory": ("MiB", lambda row: row["memory"] / 2**20),
    }
    for name, (unit, value) in measures.items():
        panels: list[Any] = []
        for which in PASSES:
            series: dict[str, dict[float, list[float]]] = {}
            for row in rows:
                if row["pass"] == which and "skipped" not in row:
                    series.setdefault(row["side"], {})[row["t"]] = [value(row)]
            panels.append((f"{op}, {which}", series, {}))
        panels = [panel for panel in panels if panel[1]]
        for kind in ("png", "svg") if panels else ():
            path = folder / f"{op}-{name}.{kind}"
            figures.lines(panels, path, x_label="tokens", y_label=unit, log_x=True, log_y=True, columns=2)
