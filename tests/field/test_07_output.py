"""Output never decides a run: a closed pipe, a lost terminal or a full log does not end it."""

import os
import signal
import sys

import forked
import pytest
from run_folders import names, same

import polyhead as ph

TRAIN = """
import sys
from polyhead.cli.dispatch import main
sys.exit(main(["train", sys.argv[1], "--folder", sys.argv[2]]))
"""

TERM = """
import os, signal, sys
import polyhead as ph
from polyhead.cli.dispatch import main
ph.tasks.FuzzyLogic.batch = lambda *arguments, **more: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main(["--quiet", "train", sys.argv[1], "--folder", sys.argv[2]]))
"""

DURING_A_WRITE = """
import signal, sys
from polyhead.train.stop import leaving

class Busy:  # as streams of Python: a write inside of a write raises
    is_writing = False
    def write(self, text):
        if self.is_writing:
            raise RuntimeError("reentrant call")
        self.is_writing = True
        signal.raise_signal(signal.SIGINT)
    def flush(self):
        pass

sys.stderr = Busy()
with leaving():
    print("a line", file=sys.stderr)
"""

CLOSED = """
import os, sys
for number in (1, 2):
    os.close(number)
sys.stdout = sys.stderr = None
"""


@pytest.fixture
def recipe(tiny, tmp_path):
    path = tmp_path / "run.json"
    ph.config.save(tiny(None), path)
    return path


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


@pytest.mark.parametrize("output", ["a closed pipe", "a full device", "nothing"])
def test_a_run_ends_with_its_result_wherever_its_output_goes(recipe, tmp_path, uninterrupted, output):
    code = CLOSED + TRAIN if output == "nothing" else TRAIN
    with closed_pipe() if output == "a closed pipe" else open("/dev/full", "w") as stream:
        command = [sys.executable, "-c", code, str(recipe), str(tmp_path / "run")]
        process = forked.Process(command, stdout=stream, stderr=stream)
        assert process.wait() in (0, 1 if output == "a full device" else 0)  # 1: the table of scores was not printed
    same(tmp_path / "run", uninterrupted)


def test_nohup_keeps_a_run_from_the_end_of_its_terminal(tiny, tmp_path, at_step):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(7, lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert ph.train.run(tiny(tmp_path), progress=False).steps == 12
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_first_step_is_one_line(recipe, tmp_path):
    code, text = forked.run(TERM, recipe, tmp_path / "run")
    assert code == 130
    assert text == "polyhead: stopped at once; what was saved before is kept\n"
    assert "checkpoint.safetensors" not in names(tmp_path / "run")


def test_a_signal_during_a_write_ends_the_process_with_its_code():
    code, text = forked.run(DURING_A_WRITE)
    assert code == 130
    assert text == "polyhead: stopped at once; what was saved before is kept\n"
