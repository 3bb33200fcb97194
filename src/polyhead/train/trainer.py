"""One run in its folder, from its checks to its result."""

from polyhead.config import Run
from polyhead.train.checks import check, read_all
from polyhead.train.device import process
from polyhead.train.folder import CHECKPOINT, Result, claim, clear, folder_of, read_result
from polyhead.train.loop import Loop
from polyhead.train.stop import Stop


def run(config: Run, *, progress: bool = True, resume: bool = False, again: bool = False) -> Result:
    """Train `config` in its folder and return what it reached; a finished run is returned as it is.

    `resume`: go on from the folder's checkpoint if there is one.  `again`: forget what is there and start over.
    Raises ValueError when the folder holds another run, or an unfinished one and neither is asked for; OSError when the
    disk is full (the last good checkpoint survives); Interrupted after Ctrl-C or SIGTERM, when everything is saved.
    """
    check(config)
    folder = folder_of(config)
    with claim(config, folder):
        if again:
            clear(folder)
        if (done := read_result(folder)) is not None:
            return done
        if (folder / CHECKPOINT).exists() and not resume:
            raise ValueError(
                f"train: {folder} holds an unfinished run; go on with `polyhead resume {folder}`, or train again"
            )
        read_all(config)
        config.task.keep(folder)
        with process(config) as device, Stop() as stop:
            loop = Loop(config, folder, device, progress)
            try:
                return loop.fit(stop)
            finally:
                loop.close()
