"""A sweep in a process of its own, as engines change the process that they run in.

    python engine_sweep.py FOLDER ENGINE RUN.json ...     prints the outcomes as JSON, or the line of the error

`ENGINE`: local, ray, slurm; ray-CPUS and ray-gpus-GPUS ask for resources; ray@ADDRESS names a cluster.  With STOP=1 in
the environment the sweep gets a Ctrl-C when its first run has written its first row.
"""

import json
import os
import sys

import dies_once  # noqa: F401  (a task of a user)

from polyhead import config
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines import Resources
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.engines.ray import Ray
from polyhead.scale.sweep.engines.slurm import Slurm
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.tasks import KINDS
from polyhead.train import Interrupted
from polyhead.train.store.folder import read_metrics


def stop_at_first_row(screen):
    if read_metrics(screen.jobs[0].folder) and screen.enabled:
        screen.enabled = False  # once
        raise KeyboardInterrupt


def engine_of(name):
    if name == "local":
        return Local()
    if name == "slurm":
        return Slurm(cluster="local")
    if name.startswith("ray@"):
        return Ray(name.removeprefix("ray@"))
    if name.startswith("ray-gpus-"):
        return Ray("local", Resources(gpus=float(name.removeprefix("ray-gpus-"))))
    if name.startswith("ray-"):
        return Ray("local", Resources(cpus=int(name.removeprefix("ray-"))))
    return Ray("local")


def described(outcome):
    if isinstance(outcome, Failure):
        return {"name": outcome.name, "code": outcome.code, "error": outcome.error}
    return {"name": outcome.name, "folder": str(outcome.folder), "scores": outcome.scores}


def main():
    folder, engine, *paths = sys.argv[1:]
    runs = [config.load(path, KINDS) for path in paths]
    if os.environ.get("STOP"):
        SweepScreen.update = stop_at_first_row
    try:
        outcomes = sweep(runs, folder, workers=2, engine=engine_of(engine))
        print(json.dumps([described(outcome) for outcome in outcomes]))
    except (ValueError, Interrupted) as error:
        print(json.dumps(str(error)))


if __name__ == "__main__":
    main()
