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


@pytest.fixture
def qkv():
    tensors = torch.randn(3, 1, 64, 8, 8)
    ops.hyla(*tensors, impl="native")  # what happens once is done
    return tensors


def test_there_are_few_frames_of_ours_before_c(monkeypatch, qkv):
    frames, call = [], library.call

    def recorded(*arguments):
        frames.extend(frame for frame in traceback.extract_stack() if frame.filename.startswith(ROOT))
        return call(*arguments)

    monkeypatch.setattr(library, "call", recorded)
    ops.hyla(*qkv)
    assert len(frames) + 1 <= MAX_FRAMES, frames  # and library.call itself


def test_the_tensors_of_a_call_pass_through_few_files(qkv):
    """Files whose functions run before C++ gets the tensors, but for checks, which pass nothing on."""
    files = {str(pathlib.Path(ROOT, "ops", "__init__.py"))}

    def record(frame, event, argument):
        is_check = frame.f_code.co_name.startswith(("check_", "<"))
        if event == "call" and frame.f_code.co_filename.startswith(ROOT) and not is_check:
            files.add(frame.f_code.co_filename)

    sys.setprofile(record)
    try:
        ops.hyla(*qkv, impl="native")
    finally:
        sys.setprofile(None)
    names = sorted(pathlib.Path(file).relative_to(ROOT).as_posix() for file in files)
    assert len(names) <= MAX_FILES, names
