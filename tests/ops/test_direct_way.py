"""The way from `ops.hyla(q, k, v)` to C++ is short: a reader follows it by "go to definition"."""

import pathlib
import sys
import traceback

import pytest
import torch
from compilers import READY

import polyhead
from polyhead import ops
from polyhead.ops.native import library

ROOT = str(pathlib.Path(polyhead.__file__).parent)
MAX_FRAMES, MAX_FILES = 7, 10

pytestmark = pytest.mark.skipif(not READY, reason="no compiler")


def test_there_are_few_frames_and_files_of_ours_before_c():
    """All files whose functions run before C++ gets the tensors, and the door."""
    tensors = torch.randn(3, 1, 64, 8, 8)
    ops.hyla(*tensors)  # what happens once is done
    files, frames = {str(pathlib.Path(ROOT, "ops", "__init__.py"))}, []

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT) and not frames:
            files.add(frame.f_code.co_filename)
        if frame.f_code is library.call.__code__ and not frames:
            stack = [caller for caller, _ in traceback.walk_stack(frame)]
            frames.extend(caller.f_code for caller in stack if caller.f_code.co_filename.startswith(ROOT))

    sys.setprofile(record)
    try:
        ops.hyla(*tensors)
    finally:
        sys.setprofile(None)
    names = sorted(pathlib.Path(file).relative_to(ROOT).as_posix() for file in files)
    assert len(names) <= MAX_FILES, names
    assert 0 < len(frames) <= MAX_FRAMES, frames
