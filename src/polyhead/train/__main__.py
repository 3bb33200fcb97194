"""The worker: `python -m polyhead.train RUN/config.json` trains that run in its folder, or goes on where it stopped.

Exit codes (stop.py): 0 done, 1 the disk failed, 2 a mistake in the input or a run that diverged, 75 preempted and saved
(inside a Slurm batch job it has asked to be queued again), 130 interrupted and saved; of a run on several devices 3:
another process of it ended.
"""

import argparse
import sys
from collections.abc import Sequence

from polyhead.train.stop import DISK, DONE, INTERRUPTED, MISTAKE, Interrupted, Preempted, leaving, requeue


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m polyhead.train", description="Train or resume one run in its folder."
    )
    parser.add_argument("config", help="RUN/config.json, or the folder RUN")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    asked = parser.parse_args(argv)
    with leaving(again=True):  # importing these takes seconds
        from polyhead.train.store.folder import read_config
        from polyhead.train.trainer import run
        from polyhead.train.world import Lost, leave
    try:
        with leaving(again=True):
            run(read_config(asked.config), progress=not asked.quiet, resume=True)
    except Preempted as stop:
        _tell(str(stop))
        _tell(requeue())  # which may be the end of this process
        return leave(stop.code)
    except Interrupted as stop:
        return _say(str(stop), stop.code)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except Lost as error:  # told where it happened
        return leave(error.code)
    except ValueError as error:
        return _say(str(error), MISTAKE)
    except OSError as error:
        return _say(error.strerror or str(error), DISK)
    return DONE


def _say(text: str, code: int) -> int:
    from polyhead.train.world import leave

    _tell(text)
    return leave(code)


def _tell(text: str) -> None:
    from polyhead.train.world import speaks

    if text and speaks():
        print(f"polyhead: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
