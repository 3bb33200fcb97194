"""As on Windows without a compiler: no fcntl, no fork, none of the signals of POSIX, neither g++ nor clang++."""

import os
import subprocess
import sys

import pytest
from scripts import ROOT

SYSTEM = """
import os, signal, sys, sysconfig
sysconfig.get_paths()
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "posix_spawn", "sched_getaffinity", "getuid", "O_NOFOLLOW"):
    if hasattr(os, name):
        delattr(os, name)
for name in dir(signal):
    if name.startswith("SIG") and name not in ("SIGINT", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGKILL"):
        if not name.startswith("SIG_"):
            delattr(signal, name)
"""
"""What every process runs first."""

USE = """
import sys, pathlib
import torch, polyhead as ph
from polyhead.ops.native import library
from polyhead.papers.recipes import RECIPES
from polyhead.train.store.folder import FolderInUse, claim, is_claimed

q, k, v = torch.randn(3, 1, 300, 4, 8)
exact = ph.ops.hyla(q.double(), k.double(), v.double(), impl="reference")
assert (ph.ops.hyla(q, k, v) - exact).abs().max() < 1e-3
assert library.load_error("hyla") == library.NO_COMPILER
assert library.lacks_compiler()

recipe = RECIPES["fuzzy-hyla"]()
folder = pathlib.Path("claimed")
with claim(recipe, folder):
    assert is_claimed(folder)
    try:
        with claim(recipe, folder):
            raise AssertionError("two processes train in one folder")
    except FolderInUse:
        pass
assert not is_claimed(folder)
"""


@pytest.fixture
def other_system(tmp_path):
    """Run Python with arguments on that system; returns what it printed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SYSTEM)
    (tmp_path / "bin").mkdir()
    paths = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    environment = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": paths, "POLYHEAD_NATIVE_CACHE": str(tmp_path / "cache")}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"POLYHEAD_NATIVE_FLAGS": "-O2"}  # so that builds which came with the package are not taken

    def run(*arguments):
        command = [sys.executable, *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout + result.stderr

    return run


def test_functions_and_locks_need_no_posix(other_system):
    text = other_system("-c", USE)
    assert text.count("no native code") == 1
    assert "HYLA takes 8 to 19 times as long" in text
    assert "install g++" in text
