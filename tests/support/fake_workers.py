"""An engine of sweeps whose workers end as a script says, without training."""

import polyhead as ph
from polyhead.train import Result
from polyhead.train.store.folder import write_result


class FakeWorker:
    """A worker that works at the first poll and has ended at the second."""

    def __init__(self, engine, folder, code):
        self.engine, self.folder, self.code = engine, folder, code
        self.num_polls = 0

    def __call__(self):
        self.num_polls += 1
        if self.num_polls == 1:
            return None
        if self.num_polls == 2:
            self.engine.num_working -= 1
            if self.code == 0:
                run = ph.train.read_config(self.folder)
                write_result(Result(run.name, ph.digest(run), 12, 6.0, 1, {}, "", {}, self.folder))
        return self.code


class Fake:
    """`script`: exit codes by seed, by default 0, which leaves a result.  `refusal`: why it cannot be opened."""

    poll_seconds = 0.0

    def __init__(self, script=None, refusal=None):
        self.script, self.refusal = script or {}, refusal
        self.started = []
        self.is_closed = False
        self.num_working = self.max_working = 0

    def open(self, runs, folder, workers):
        if self.refusal:
            raise ValueError(self.refusal)
        return workers or 1

    def start(self, folders):
        workers = []
        for folder in folders:
            seed = ph.train.read_config(folder).seed
            self.started.append(seed)
            self.num_working += 1
            self.max_working = max(self.max_working, self.num_working)
            code = self.script.get(seed, 0)
            (folder / "worker.log").write_text(f"polyhead: it said {code}\n")
            workers.append(FakeWorker(self, folder, code))
        return workers

    def stop(self):
        return f"stopped {self.num_working}"

    def close(self):
        self.is_closed = True
