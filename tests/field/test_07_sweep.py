"""A pipe that closes early decides nothing: `polyhead sweep ... 2>&1 | head -1` finishes all of its runs."""

import subprocess
import sys

from tiny_runs import tiny

from polyhead import config


def test_a_sweep_finishes_after_its_pipe_has_closed(tmp_path):
    """One run finishes, one diverges: the exit code says so, whoever listens."""
    config.save(tiny(None, steps=2, warmup=0), tmp_path / "run.yaml")
    arguments = ["sweep", "run.yaml", "--train.lr", "1e38,1e-3", "--workers", "1", "--folder", "grid"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    sweep = subprocess.Popen([sys.executable, "-m", "polyhead", *arguments], cwd=tmp_path, **pipes)
    assert sweep.stdout is not None
    sweep.stdout.readline()
    sweep.stdout.close()
    assert sweep.wait() == 1
    assert len(list((tmp_path / "grid").glob("*/config.json"))) == 2
    assert len(list((tmp_path / "grid").glob("*/result.json"))) == 1
