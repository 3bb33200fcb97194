"""The worker: `python -m polyhead.train RUN/config.json` trains that run in its folder, or resumes it.

Exit codes (stop.py): 0 done; 1 the disk failed; 2 invalid input, or the run diverged; 3 another process of this run
ended (runs on several devices); 73 another process trains the run; 75 preempted and saved; 130 interrupted and saved.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from polyhead.train.messages import describe_os_error, print_notice, safe_error_stream
from polyhead.train.stop import DISK, DONE, INTERRUPTED, MISTAKE, Interrupted, end_with_launcher, leaving


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m polyhead.train", description="Train or resume one run in its folder."
    )
    parser.add_argument("config", help="RUN/config.json, or the folder RUN")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(argv)
    end_with_launcher()
    with safe_error_stream():
        return _train(pathlib.Path(arguments.config), progress=not arguments.quiet)


def _train(path: pathlib.Path, *, progress: bool) -> int:
    with leaving():  # importing these takes seconds
        from polyhead.train.store.folder import FolderInUse, read_config
        from polyhead.train.trainer import run
        from polyhead.train.world import PeerProcessEnded, leave
    folder: pathlib.Path | None = None
    try:
        with leaving():
            run(read_config(path), progress=progress, resume=True)
        return DONE
    except PeerProcessEnded as error:  # the process where the error happened reports it
        return leave(error.code)
    except FolderInUse as error:
        text, code = str(error), error.code
    except Interrupted as stop:
        text, code = str(stop), stop.code
    except KeyboardInterrupt:
        text, code = "interrupted", INTERRUPTED
    except ValueError as error:
        text, code, folder = str(error), MISTAKE, path
    except OSError as error:
        text, code, folder = describe_os_error(error), DISK, path
    _report(folder, text)
    return leave(code)


def _report(path: pathlib.Path | None, text: str) -> None:
    """Print `text`, and record it in the run's folder if `path` is given: then the run failed."""
    from polyhead.train.store.folder import write_failure
    from polyhead.train.world import speaks

    if speaks():
        print_notice(f"polyhead: {text}")
        if path is not None:
            folder = path if path.is_dir() else path.parent
            if (folder / "config.json").exists():  # or it is no run
                write_failure(folder, text)


if __name__ == "__main__":
    sys.exit(main())
