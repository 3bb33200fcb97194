"""Processes of runs that are killed at any moment, damaged, restarted and compared.

A zygote imports torch and polyhead once and forks a child for each life (process of a run), which takes milliseconds
instead of seconds.  `Zygote.live(order, fault)` is one life.  A fault is one of

    {}                                 none: the life ends by itself
    {"after": 0.2, "who": "life"}      SIGKILL after 0.2 seconds; in a sweep also of a `worker`, or of `all` processes
    {"point": 7, "tear": 0.5}          SIGKILL from inside, at the seventh operation that changes a file: before opening
                                       it for writing, before and after syncing, before a rename, a link or a removal.
                                       `tear`: only this share of the data that were not synced is on the disk

All randomness comes from a seeded generator of the caller.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import forked
import torch
from run_folders import rows
from safetensors import safe_open
from tiny_runs import tiny

import polyhead as ph
from polyhead.cli.train import write_failures
from polyhead.scale.sweep import jobs as sweep
from polyhead.scale.sweep.engines.local import Local
from polyhead.tasks.text.tokens import codec_of
from polyhead.train.__main__ import main

HANGS = 240.0  # seconds after which a life counts as hung
DAMAGES = ("truncated", "flipped", "emptied", "zeroed", "missing")
Order = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- the caller's side
class Zygote(contextlib.AbstractContextManager):
    """The process that lives are forked from.  A context: leaving it ends them all."""

    def __init__(self) -> None:
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], env=settings, **pipes)

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # it ends when its input ends

    def live(self, order: Order, fault: Order | None = None) -> Order:
        """One life: its exit `code` (below 0: the signal), all it `said`, `moment` (where it was killed), `seconds`."""
        print(json.dumps({**order, "fault": fault or {}}), file=self.process.stdin, flush=True)
        return dict(json.loads(self.process.stdout.readline()))


def damage(path: pathlib.Path, kind: str, dice: Any) -> None:
    """Damage a file in one of the ways of DAMAGES."""
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "truncated":
        del data[dice.randrange(len(data)) :]
    elif kind == "flipped":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "zeroed":
        begin = dice.randrange(len(data))
        data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    else:
        assert kind == "emptied", kind
        data.clear()
    path.write_bytes(data)  # in place, so that its hard links are damaged, too


def facts(folder: pathlib.Path) -> Order:
    """All that a finished run may be compared by, bit for bit: rows, scores, parameters, the optimiser's state."""
    with safe_open(folder / "checkpoint.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name).tobytes().hex() for name in file.keys()}  # noqa: SIM118 (not a dict)
    result = vars(ph.train.read_result(folder))
    own = {name: result[name] for name in ("scores", "steps", "digest", "parameters")}
    return {"rows": rows(folder), **own, "tensors": tensors}


def difference(came: Order, wanted: Order) -> str | None:
    """The first fact that differs, in words, or None."""
    for name, value in wanted.items():
        if came.get(name) != value:
            return _rows(came["rows"], value) if name == "rows" else f"{name} differ"
    return None


def _rows(came: list[Order], wanted: list[Order]) -> str:
    keys = [(row["kind"], row["step"], row.get("split")) for row in came]
    expected = [(row["kind"], row["step"], row.get("split")) for row in wanted]
    if twice := len(keys) - len(set(keys)):
        return f"{twice} rows of metrics occur twice"
    if missing := len(set(expected) - set(keys)):
        return f"{missing} rows of metrics are missing"
    return "rows of metrics differ in order" if keys != expected else "numbers in metrics differ"


# ---------------------------------------------------------------------------------------------------- the zygote's side
def serve() -> None:
    """Read orders, a line each; answer each when its life has ended."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of the zygote
    _warm()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread only"
    for line in sys.stdin:
        print(json.dumps(_life(json.loads(line))), flush=True)
    _end(_children(os.getpid()))


def _warm() -> None:
    """Compute once, so that no life has to."""
    with contextlib.suppress(ImportError):
        import tokenizers  # noqa: F401
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ph.train.run(tiny(folder, steps=1), progress=False)
        _use(folder)


def _life(order: Order) -> Order:
    fault, began = order["fault"], time.monotonic()
    with tempfile.TemporaryDirectory() as notes:
        log, note = pathlib.Path(notes, "log"), pathlib.Path(notes, "note")
        if not (pid := os.fork()):
            _child(order, log, note)
        killed = _wait(pid, fault)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not order.get("leave"):  # the workers of a killed sweep would otherwise continue
            _end(_children(os.getpid()))
        said = log.read_text(errors="replace") if log.exists() else ""
        moment = note.read_text() if note.exists() else killed
        points = max([int(path.read_text()) for path in pathlib.Path(notes).glob("points-*")], default=0)
    return {"code": code, "said": said, "moment": moment, "points": points, "seconds": time.monotonic() - began}


def _wait(pid: int, fault: Order) -> str:
    """Until the life has ended, by itself or by the fault's delay; whom the delay killed."""
    handle = os.pidfd_open(pid)
    try:
        if select.select([handle], [], [], fault.get("after", HANGS))[0]:
            return ""
        workers, who = _children(pid), fault.get("who", "life") if "after" in fault else "hung"
        victims = {"life": [pid], "hung": [pid], "worker": workers[:1], "all": [pid, *workers]}[who]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if who == "worker":
            select.select([handle], [], [], HANGS)
        return who if victims else ""
    finally:
        os.close(handle)


def _children(pid: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return sorted(found)


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ----------------------------------------------------------------------------------------------------- the child's side
def _child(order: Order, log: pathlib.Path, note: pathlib.Path) -> None:
    """One life, in a process of its own.  Does not return."""
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if "point" in order["fault"] and (order["do"] != "sweep" or order["fault"].get("who") == "life"):
            arm(order["root"], order["fault"], note)
        runs = [ph.train.read_config(path) for path in order.get("runs", ())]
        code = {
            "train": lambda: main([order["folder"], "--quiet"]),
            "use": lambda: _told(_use, order["folder"]),
            "sweep": lambda: _sweep(order, runs, note),
        }[order["do"]]()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        note_points(note)
        os._exit(code)


def note_points(note: pathlib.Path) -> None:
    note.with_name(f"points-{os.getpid()}").write_text(str(passed[0]))


def _use(folder: str) -> None:
    """Read the files that `polyhead eval` and `generate` read, without computing floors."""
    run, model = ph.train.load_model(folder)
    for split in run.train.evaluate:
        ph.train.evaluate(model, run.task, split, batches=1, batch_size=2, seed=0)
    if hasattr(run.task, "codec"):
        codec_of(run, folder)


def _told(work: Callable[[Any], None], given: Any) -> int:
    """An error of the caller in one line, as the command line has it."""
    try:
        work(given)
    except ValueError as error:
        print(f"polyhead: {error}", file=sys.stderr)
        return 2
    return 0


def _sweep(order: Order, runs: list[ph.Run], note: pathlib.Path) -> int:
    """`polyhead sweep`, its workers forked instead of started."""

    class Worker(forked.Process):
        def begin(self) -> None:
            passed[0] = 0
            if "point" in order["fault"] and order["fault"].get("who") != "life":
                arm(order["root"], order["fault"], note)

        def end(self) -> None:
            note_points(note)

    subprocess.Popen = Worker  # type: ignore[assignment,misc]
    Local.poll_seconds = 0.01
    return write_failures(sweep.sweep(runs, order["folder"], workers=2, threads=1, progress=False))


passed = [0]
"""Operations that changed files in this process, since it was armed."""


def arm(root: str, fault: Order, note: pathlib.Path) -> None:
    """Die at the `point`-th operation that changes a file under `root`; of several processes the first to get there."""
    synced: dict[str, int] = {}

    def passing(name: str, path: Any, tear: int | None = None) -> None:
        where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not os.path.abspath(where).startswith(root):
            return
        passed[0] += 1
        if passed[0] != fault["point"]:
            return
        with contextlib.suppress(FileExistsError):
            with open(note, "x") as file:
                file.write(f"{name} {'folder' if os.path.isdir(where) else os.path.basename(where)}")
            if tear is not None and stat.S_ISREG(os.fstat(tear).st_mode):
                begin, end = synced.get(where, 0), os.fstat(tear).st_size
                os.ftruncate(tear, begin + int(fault.get("tear", 1.0) * (end - begin)))
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            if not arguments[2] & os.O_TRUNC and isinstance(arguments[0], str) and os.path.exists(arguments[0]):
                synced.setdefault(os.path.abspath(arguments[0]), os.path.getsize(arguments[0]))
            passing("open", arguments[0])
        elif event in ("os.rename", "os.link", "os.remove", "os.truncate", "os.mkdir"):
            passing(event.removeprefix("os."), arguments[0])

    plain = os.fsync

    def fsync(handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        passing("write", path, number)
        plain(number)
        synced[path] = os.fstat(number).st_size
        passing("fsync", path)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)


if __name__ == "__main__":
    serve()
