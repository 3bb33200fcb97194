"""Many runs side by side: one worker process each, at most `workers` at a time, one bar per run.

A worker that crashes takes nobody with it.  The same call again skips what is finished and goes on with the rest.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.train.device import pick_device
from polyhead.train.folder import METRICS, Result, claim, clear, read_result
from polyhead.train.progress import QUIET_SECONDS, duration
from polyhead.train.stop import Interrupted

LOG = "worker.log"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Failure:
    """A run whose worker ended without a result: its exit code and the last line it said."""

    name: str
    folder: pathlib.Path
    code: int
    error: str


MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""glibc keeps freed memory instead of asking for it anew in every step: 12 % of a HYLA step at the paper's shape."""


class _Worker:
    """One run of a sweep: its process, and what its metrics.jsonl says so far."""

    def __init__(self, config: Run, folder: pathlib.Path) -> None:
        self.config, self.folder = config, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.outcome: Result | Failure | None = read_result(folder) if folder.exists() else None
        self.step, self.rate, self.read = 0, 0.0, 0
        self.shown: dict[str, str] = {}

    def start(self, threads: int) -> None:
        try:
            with claim(self.config, self.folder):
                pass
        except ValueError as error:
            self.outcome = Failure(self.config.name, self.folder, 2, str(error))
            return
        source = str(pathlib.Path(configs.__file__).parents[1])
        paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {**MEMORY, **os.environ, "PYTHONPATH": paths}
        settings |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        with open(self.folder / LOG, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polyhead.train", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=settings,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks each worker to save
            )

    def poll(self) -> bool:
        """Read new rows; True when the worker has just ended."""
        self._follow()
        if self.process is None or self.outcome is not None or self.process.poll() is None:
            return False
        self._follow()
        code = self.process.returncode
        self.outcome = read_result(self.folder) if code == 0 else None
        if self.outcome is None:
            self.outcome = Failure(self.config.name, self.folder, code, last_line(self.folder / LOG, code))
        return True

    def _follow(self) -> None:
        try:
            with open(self.folder / METRICS, "rb") as file:
                if file.seek(0, os.SEEK_END) < self.read:
                    self.read = 0  # a resumed run has cut the file
                file.seek(self.read)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                self._show(json.loads(line))

    def _show(self, row: dict[str, Any]) -> None:
        metric, self.step = self.config.task.metric, row["step"]
        if row["kind"] == "train":
            self.rate = row["steps_per_second"]
            self.shown["loss"] = f"{row['loss']:.4f}"
        elif row["kind"] == "eval":
            self.shown[f"{row['split']} {metric}"] = f"{row[metric]:.3f}"

    def text(self) -> str:
        shown = "  ".join(f"{name} {value}" for name, value in self.shown.items())
        if isinstance(self.outcome, Failure):
            return f"failed: {self.outcome.error}"
        if self.outcome is not None:
            return f"{shown}  done in {duration(self.outcome.seconds)}".strip()
        left = (self.config.train.steps - self.step) / self.rate if self.rate else 0.0
        return f"{shown}  {self.rate:.1f} steps/s  {duration(left)} left" if self.rate else "starting"


def sweep(
    runs: Sequence[Run],
    folder: str | pathlib.Path,
    *,
    workers: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    again: bool = False,
) -> list[Result | Failure]:
    """Train every run in `folder`/NAME-DIGEST; results or failures in the order of `runs`.

    `workers` run at once (default: one per core, one in all on an accelerator), each with `threads` threads (default:
    the cores divided among them).  `again`: forget what is there and start over.  Raises Interrupted after Ctrl-C, when
    every worker has saved.
    """
    places = prepare("sweep", runs, folder, again=again)
    jobs = [_Worker(replace(run, folder=None), place) for run, place in zip(runs, places, strict=True)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        on_cpu = all(pick_device(run.device).type == "cpu" for run in runs)
        workers = max(1, min(cores, sum(job.outcome is None for job in jobs))) if on_cpu else 1
    if workers < 1:
        raise ValueError(f"sweep: workers must be at least 1 but is {workers}")
    with _Screen(jobs, enabled=progress) as screen, _interruptible():
        try:
            _work(jobs, screen, workers, threads or max(1, cores // workers))
        except KeyboardInterrupt:
            _stop(jobs)
            done = sum(isinstance(job.outcome, Result) for job in jobs)
            raise Interrupted(
                f"stopped and saved; {done} of {len(jobs)} runs are done, the same command goes on"
            ) from None
        finally:
            _kill(jobs)
    return [job.outcome for job in jobs if job.outcome is not None]


def prepare(who: str, runs: Sequence[Run], folder: str | pathlib.Path, *, again: bool) -> list[pathlib.Path]:
    """The folder of each run, `folder`/NAME-DIGEST; with `again`, all training there is forgotten.

    Raises ValueError for a run that occurs twice and where no folder can be made.
    """
    places = [pathlib.Path(folder) / f"{run.name}-{configs.digest(run)}" for run in runs]
    if len(set(places)) < len(places):
        twice = next(run.name for run, place in zip(runs, places, strict=True) if places.count(place) > 1)
        raise ValueError(f"{who}: the run {twice!r} occurs twice")
    for run, place in zip(runs, places, strict=True):
        if again and place.exists():
            with claim(run, place):
                clear(place)
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{who}: {folder} cannot be made ({error.strerror})") from None
    return places


def _work(jobs: list[_Worker], screen: "_Screen", workers: int, threads: int) -> None:
    waiting = [job for job in jobs if job.outcome is None]
    running: list[_Worker] = []
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            job.start(threads)
            screen.began(job)
            if job.outcome is None:
                running.append(job)
        for job in [job for job in running if job.poll()]:
            running.remove(job)
            screen.ended(job)
        screen.update()
        time.sleep(POLL_SECONDS)


def _stop(jobs: list[_Worker]) -> None:
    """Ask all workers to save and wait for them."""
    processes = [job.process for job in jobs if job.process is not None and job.process.poll() is None]
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def _kill(jobs: list[_Worker]) -> None:
    for job in jobs:
        if job.process is not None and job.process.poll() is None:
            job.process.kill()
            job.process.wait()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, and SIGHUP where it exists, act like Ctrl-C, so that no worker is left behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_line(path: pathlib.Path, code: int) -> str:
    """The last thing a worker's log says, or how the worker ended."""
    lines = path.read_text(errors="replace").strip().splitlines()
    said = lines[-1].removeprefix("polyhead: ") if lines else ""
    return said if code > 0 and said else f"killed by signal {-code}" if code < 0 else f"no result (exit code {code})"


class _Screen:
    """A live bar per run on a terminal; elsewhere a line when a run starts, ends, and now and then between."""

    def __init__(self, jobs: list[_Worker], *, enabled: bool) -> None:
        self.jobs, self.enabled, self.console = jobs, enabled, Console(stderr=True)
        self.live = enabled and self.console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed}/{task.total}"))
        self.bars = Progress(*columns, TextColumn("{task.fields[text]}"), console=self.console, disable=not self.live)
        self.ids: list[TaskID] = []
        self.spoken = time.monotonic()

    def __enter__(self) -> "_Screen":
        self.bars.start()
        for job in self.jobs:
            job.poll()
            total, text = job.config.train.steps, "waiting" if job.outcome is None else job.text()
            self.ids.append(self.bars.add_task(job.config.name, total=total, completed=job.step, text=text))
            if job.outcome is not None:
                self._line(f"{job.config.name}: already done")
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        self.bars.stop()

    def update(self) -> None:
        for job, bar in zip(self.jobs, self.ids, strict=True):
            started = job.process is not None or job.outcome is not None
            self.bars.update(bar, completed=job.step, text=job.text() if started else "waiting")
        if not self.live and time.monotonic() - self.spoken > QUIET_SECONDS:
            self.spoken = time.monotonic()
            for job in self.jobs:
                if job.process is not None and job.outcome is None:
                    self._line(f"{job.config.name}: step {job.step}/{job.config.train.steps}  {job.text()}")

    def began(self, job: _Worker) -> None:
        self._line(f"{job.config.name}: started ({job.folder})")

    def ended(self, job: _Worker) -> None:
        self._line(f"{job.config.name}: {job.text()}")

    def _line(self, text: str) -> None:
        if self.enabled and not self.live:
            print(text, file=sys.stderr, flush=True)
