"""An engine of sweeps whose workers end as a script says, without training."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import polyhead as ph
from polyhead.train import Result
from polyhead.train.store.folder import write_result


class Fake:
    """`script`: by seed, the exit code of each start (by default one start, with a result).  Code 0 leaves a result."""

    pause, queues = 0.0, False

    def __init__(self, script: Mapping[int, list[int]] | None = None) -> None:
        self.script = dict(script or {})
        self.started: list[int] = []
        self.working = self.most = 0
        self.closed = False

    def open(self, runs: Sequence[Any], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        return workers or 1

    def start(self, folders: Sequence[pathlib.Path]) -> list["Handle"]:
        return [self._start(folder) for folder in folders]

    def _start(self, folder: pathlib.Path) -> "Handle":
        config = ph.train.read_config(folder)
        self.started.append(config.seed)
        self.working += 1
        self.most = max(self.most, self.working)
        code = self.script.setdefault(config.seed, [0]).pop(0)
        (folder / "worker.log").write_text(f"polyhead: it said {code}\n")
        return Handle(self, folder, code)

    def stop(self, handles: Sequence[Any]) -> str:
        return f"stopped {len(handles)}"

    def close(self) -> None:
        self.closed = True


class Handle:
    """It works at the first poll, and has ended at the second."""

    def __init__(self, engine: Fake, folder: pathlib.Path, code: int) -> None:
        self.engine, self.folder, self.codes = engine, folder, [None, code]

    def code(self) -> int | None:
        found = self.codes.pop(0)
        if found is not None:
            self.engine.working -= 1
        if found == 0:
            leave(ph.train.read_config(self.folder), self.folder)
        return found


def leave(config: Any, folder: pathlib.Path) -> Result:
    """Write a result."""
    result = Result(config.name, ph.digest(config), 12, 6.0, 1, {}, "", {}, folder)
    write_result(result)
    return result
