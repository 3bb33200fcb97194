"""The ways from `ops.hyla(q, k, v)` to C++ and from a command to the first update are short: a reader follows them."""

import re
import sys
import traceback

import pytest
import torch
from compilers import READY
from scripts import PACKAGE, ROOT

from polyhead import ops
from polyhead.cli import main
from polyhead.ops.native import library
from polyhead.train.optimiser import AdamW

OURS = f"{PACKAGE}/"
OUTPUT_AND_NETWORK = r"ops/|layers/|models/(?!build)|cli/output|train/(messages|progress|tracking)"
MAX_FRAMES, MAX_FILES, MAX_FILES_TO_AN_UPDATE = 7, 10, 20


def traced(action, end, left_out="nothing"):
    """Files of ours in which a function runs before `end`, but not within an import or `left_out`, and frames at it."""
    files, frames = set(), []

    def record(frame, event, argument):
        code = frame.f_code
        if event != "call" or frames or not (code is end or code.co_filename.startswith(OURS)):
            return
        stack = [caller.f_code for caller, _ in traceback.walk_stack(frame)]
        ours = [caller for caller in stack if caller.co_filename.startswith(OURS)]
        names = [caller.co_filename.removeprefix(OURS) for caller in ours]
        if not any(re.match(left_out, name) for name in names) and "<module>" not in {c.co_name for c in ours}:
            files.add(names[0])
        if code is end:
            frames.extend(ours)

    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
    return files, frames


@pytest.mark.skipif(not READY, reason="no compiler")
def test_there_are_few_frames_and_files_of_ours_before_c():
    """All files whose functions run before C++ gets the tensors, and the door."""
    tensors = torch.randn(3, 1, 64, 8, 8)
    ops.hyla(*tensors)  # what happens once is done
    files, frames = traced(lambda: ops.hyla(*tensors), library.call.__code__)
    assert len(files | {"ops/__init__.py"}) <= MAX_FILES, files
    assert 0 < len(frames) <= MAX_FRAMES, frames


def test_the_files_of_ours_before_the_first_update_are_those_of_the_table(tmp_path, monkeypatch):
    def update(optimiser):
        raise ValueError("here it ends")

    monkeypatch.setattr(AdamW, "step", update)
    words = ["train", "fuzzy-softmax", "--train.batch-size", "2", "--folder", str(tmp_path), "--device", "cpu"]
    files, frames = traced(lambda: main(words), update.__code__, OUTPUT_AND_NETWORK)
    table = (ROOT / "docs" / "design.md").read_text().partition("## From `polyhead train")[2].partition("Output is")[0]
    assert frames
    assert files == set(re.findall(r"`([\w/]+\.py)`", table))
    assert len(files) <= MAX_FILES_TO_AN_UPDATE
