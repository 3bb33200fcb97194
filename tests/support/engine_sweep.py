"""Sweeps on a real local Ray in a process of their own, because a cluster changes the process that starts it.

    python engine_sweep.py FOLDER RUN.json ... LONG.json

It trains the runs, starts a long run that it stops by Ctrl-C when its first row is written, and asks for resources that
no machine has.  It prints as JSON: the outcomes, or the line of an error, of each of these three sweeps.
"""

import json
import pathlib
import sys

import dies_once  # noqa: F401  (a task of a user)

from polyhead import config
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines import Resources
from polyhead.scale.sweep.engines.ray import Ray
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.tasks import KINDS
from polyhead.train import Interrupted
from polyhead.train.store.folder import read_metrics


def stop_at_first_row(screen):
    if read_metrics(screen.jobs[0].folder) and screen.enabled:
        screen.enabled = False  # once
        raise KeyboardInterrupt


def described(outcome):
    if isinstance(outcome, Failure):
        return {"name": outcome.name, "code": outcome.code, "error": outcome.error}
    return {"name": outcome.name, "folder": str(outcome.folder), "scores": outcome.scores}


def swept(runs, folder, engine):
    try:
        return [described(outcome) for outcome in sweep(runs, folder, workers=2, engine=engine)]
    except (ValueError, Interrupted) as error:
        return str(error)


def main():
    folder = pathlib.Path(sys.argv[1])
    *runs, long = [config.load(path, KINDS) for path in sys.argv[2:]]
    said = [swept(runs, folder, Ray("local"))]
    SweepScreen.update = stop_at_first_row
    said.append(swept([long], folder, Ray("local")))
    said.append(swept([long], folder, Ray("local", Resources(gpus=64))))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
