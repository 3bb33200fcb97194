"""An engine of sweeps whose workers end as a script says, without training."""

import polyhead as ph
from polyhead.train import Result
from polyhead.train.store.folder import write_result


class Handle:
    """The answers of its polls.  It can be asked to end, as a worker of this machine can."""

    def __init__(self, polls):
        self.polls, self.ended = polls, None

    def code(self):
        if self.ended is None:
            self.ended = next(self.polls)
        return self.ended

    def terminate(self):
        self.ended = 130


class Fake:
    """`script`: by seed, the exit code of each start (by default one start, with a result).  Code 0 leaves a result."""

    pause, queues = 0.0, False

    def __init__(self, script=None):
        self.script, self.started, self.closed = dict(script or {}), [], False
        self.working = self.most = 0

    def open(self, runs, folder, workers, threads):
        return workers or 1

    def start(self, folders):
        handles = []
        for folder in folders:
            seed = ph.train.read_config(folder).seed
            self.started.append(seed)
            self.working += 1
            self.most = max(self.most, self.working)
            code = self.script.setdefault(seed, [0]).pop(0)
            (folder / "worker.log").write_text(f"polyhead: it said {code}\n")
            handles.append(Handle(self._worked(folder, code)))
        return handles

    def _worked(self, folder, code):
        """It works at the first poll, and has ended at the second."""
        yield None
        self.working -= 1
        if code == 0:
            leave(ph.train.read_config(folder), folder)
        yield code

    def stop(self, handles):
        return f"stopped {len(handles)}"

    def close(self):
        self.closed = True


def leave(config, folder):
    """Write a result."""
    result = Result(config.name, ph.digest(config), 12, 6.0, 1, {}, "", {}, folder)
    write_result(result)
    return result
