"""One run in its folder, from its checks to its result."""

import contextlib
import pathlib
from collections.abc import Sequence

from polyhead.config import Run, check_run, digest
from polyhead.models.build import build
from polyhead.train.checks import check, check_read_back, read_all
from polyhead.train.device import process
from polyhead.train.loop import Callback, alone
from polyhead.train.stop import StopSignals
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.claims import claim
from polyhead.train.store.files import DAMAGED, Damaged, set_aside
from polyhead.train.store.folder import (
    CHECKPOINT,
    RESULT,
    Result,
    clear,
    expected,
    folder_of,
    kept_rows,
    read_result,
    saves,
)
from polyhead.train.world import World


def run(
    config: Run,
    *,
    progress: bool = True,
    resume: bool = False,
    again: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train `config` in its folder and return its result; a finished run is not trained again.

    `resume`: continue from the folder's checkpoint if there is one.  `again`: delete the earlier training and restart.
    `callbacks`: called with every row of metrics.jsonl when it is written (kind "train" or "eval", step, split,
    numbers), only in the first of several processes.  An exception in a callback ends the run; its last checkpoint
    remains.
    Damaged files are renamed, and the run resumes from the last undamaged checkpoint.  After a disk error, writing is
    retried until it works.
    Raises ValueError if the folder holds another run, or an unfinished one and neither `resume` nor `again` is given,
    and while another thread of this process trains;
    OSError if the disk fails before the first step; Interrupted after Ctrl-C, SIGTERM or SIGUSR1, with the run saved.
    """
    check_run("train.run", config)
    world, folder = World.here(config.device), folder_of(config)
    with world.joined(), contextlib.ExitStack() as held:
        check(config, world.size)
        if world.on_rank_zero(lambda: begin(config, folder, held, resume, again)):
            result = read_result(folder)
            assert result is not None
            return result
        if not world.first:
            read_all(config)
        with process(config, world.device) as device, StopSignals() as stop:
            loop = alone(config, folder, device, progress, stop, world, callbacks=callbacks)
            try:
                return loop.fit(stop)[0]
            finally:
                loop.close()


def begin(config: Run, folder: pathlib.Path, held: contextlib.ExitStack, resume: bool, again: bool) -> int:
    """Lock the folder; returns 1 if the run is already finished, else 0."""
    check_read_back(config)
    if not folder.exists():
        build(config.model, device="meta")  # a model that cannot be built leaves no folder
    held.enter_context(claim(config, folder))
    if again:
        clear(folder)
    if _done(config, folder, resume) is not None:
        return 1
    if saves(folder) and not resume and not (folder / (RESULT + DAMAGED)).exists():
        raise ValueError(
            f"train: {folder} holds an unfinished run; resume it with `polyhead resume {folder}` (resume=True), "
            "or delete its training and start over with --again (again=True)"
        )
    read_all(config)
    config.task.keep(folder)
    return 0


def _done(config: Run, folder: pathlib.Path, resume: bool) -> Result | None:
    """The result of a finished run, or None if it is damaged, or if `resume` and the model is damaged."""
    try:
        result = read_result(folder)
    except Damaged as error:
        set_aside(folder / RESULT, error)
        return None
    if result is not None and result.digest != digest(config):
        raise ValueError(f"{folder / RESULT} is that of run {result.digest} but the folder's run is {digest(config)}")
    if result is not None and resume and (folder / CHECKPOINT).exists():
        try:
            metadata = read_checkpoint(folder, digest(config))[1]
        except Damaged:  # the caller renames it
            return None
        kept_rows(folder, *expected(config.train.steps, metadata.get("rows", 0), result))  # prints what is lost
    return result
