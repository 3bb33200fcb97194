"""What an installation brings: wheels are built of this tree, installed into empty environments, and used from there.

    python benchmarks/fresh_install.py --out docs/results/install.md
    python benchmarks/fresh_install.py --here            only the seconds to the first layer, in this environment

Needs a package index and hatchling; torch for the CPU is taken where pip finds one.
"""

import argparse
import csv
import datetime
import pathlib
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
BUILD = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
CLEAN = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
LAYER = """
import time
began = time.process_time()
import torch
loaded = time.process_time()
import polyhead as ph
y = ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Hyla(4)], causal=True)(torch.randn(2, 10, 64))
print(f"{loaded - began:.1f} s for torch, then {time.process_time() - loaded:.2f} s to {tuple(y.shape)}")
"""
JAX = """
import sys, time
began = time.process_time()
import jax.numpy as jnp
loaded = time.process_time()
from polyhead import jaxside
q = jnp.ones((2, 10, 8, 16))
y = jaxside.hyla(q, q, q, causal=True)
took = time.process_time() - loaded
print(f"{loaded - began:.1f} s for jax, then {took:.1f} s to {y.shape}; torch imported: {'torch' in sys.modules}")
"""
FEATURES = (  # what is asked for in Python or of the command line, without its extra
    "import polyhead as ph; ph.report",
    "import polyhead as ph; ph.reproduce.reproduce('fig-2c')",
    "import polyhead as ph, numpy as np; ph.analysis.embed(np.eye(5))",
    "import polyhead as ph; ph.tasks.Images('digits').batch('train', 2, seed=0, step=0)",
    "import polyhead as ph; ph.compat.huggingface.register()",
    "import polyhead.jaxside",
    "polyhead demo",
    "polyhead sweep fuzzy-hyla --ray local",
    "polyhead train lm-hyla --task.tokenizer tiktoken:gpt2",
    "polyhead train fuzzy-hyla --track tensorboard",
)
USES = (
    "polyhead list mechanisms",
    "polyhead train fuzzy-hyla --train.steps 5 --train.batch_size 8 --train.eval_batches 1 --folder run",
    "polyhead resume run",
)


class Environment:
    """An empty environment in `place`."""

    def __init__(self, place: pathlib.Path) -> None:
        self.place, self.bin = place, place / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)

    def install(self, *packages: str) -> dict[str, float]:
        """Megabytes of each package that this adds, by name and version."""
        before = self.packages()
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "-q"]
        subprocess.run([*command, "--disable-pip-version-check", "--no-compile", *packages], check=True)
        return {name: size for name, size in self.packages().items() if name not in before}

    def packages(self) -> dict[str, float]:
        return {
            about.name.removesuffix(".dist-info").replace("-", " "): self.size(about / "RECORD")
            for about in sorted(self.place.glob("lib/*/site-packages/*.dist-info"))
        }

    @staticmethod
    def size(record: pathlib.Path) -> float:
        """Megabytes of the files in a RECORD."""
        with record.open(encoding="utf-8", newline="") as lines:
            files = [record.parents[1] / row[0] for row in csv.reader(lines)]
        return sum(path.stat().st_size for path in files if path.is_file()) / 1e6

    def run(self, what: str) -> str:
        """What a command, or a program of Python, prints; of an error its last line."""
        words = what.split() if what.startswith("polyhead ") else ["python", "-W", "ignore", "-c", what]
        command = [str(self.bin / words[0]), *words[1:]]
        done = subprocess.run(command, env=CLEAN, cwd=self.place, capture_output=True, text=True, encoding="utf-8")
        return (done.stdout if done.returncode == 0 else done.stderr).strip()


def wheel(project: pathlib.Path, folder: pathlib.Path) -> str:
    """Build the wheel of `project`."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=project, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return str(folder / done.stdout.split()[-1])


def rows(table: Iterable[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in table]


def sizes(added: dict[str, float]) -> list[str]:
    """A table of packages, the largest first, and their sum."""
    order = sorted(added.items(), key=lambda pair: -pair[1])
    table = [(name, f"{size:.1f}") for name, size in order] + [("all", f"{sum(added.values()):.1f}")]
    return rows([("installed", "MB"), ("---", "---:"), *table])


def last(text: str) -> str:
    return text.splitlines()[-1].removeprefix("polyhead.spec.optional.MissingPackage: ").removeprefix("polyhead: ")


def core(folder: pathlib.Path, torch: str) -> list[str]:
    """polyhead without an extra."""
    here = Environment(folder / "core")
    here.install(torch)
    own = here.install(wheel(ROOT, folder))
    first = [here.run(LAYER) for _ in range(2)][1]  # the second: files are in memory, as after an installation
    used = [(f"`{what}`", last(here.run(what))) for what in USES]
    missing = [(f"`{what}`", f"`{last(here.run(what))}`") for what in FEATURES]
    return [
        "## The core, beyond torch",
        "",
        *sizes(own),
        "",
        f"First layer, seconds of CPU: {first}.",
        "",
        *rows([("the core alone", "last line"), ("---", "---"), *used]),
        "",
        "## An extra that is missing",
        "",
        *rows([("asked for", "the line"), ("---", "---"), *missing]),
        "",
    ]


def jax(folder: pathlib.Path) -> list[str]:
    """polyhead-jax."""
    here = Environment(folder / "jax")
    added = here.install(wheel(ROOT / "packaging" / "jax", folder))
    asked = ("import polyhead as ph; ph.MultiHeadAttention",)
    missing = [(f"`{what}`", f"`{last(here.run(what))}`") for what in asked]
    return [
        "## polyhead-jax, without torch",
        "",
        *sizes(added),
        "",
        f"First call, seconds of CPU: {[here.run(JAX) for _ in range(2)][1]}.",
        "",
        *rows([("asked for", "the line"), ("---", "---"), *missing]),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="a Markdown file (default: only printed)")
    parser.add_argument("--torch", default="torch==2.13.0", help="what is installed first")
    parser.add_argument("--here", action="store_true", help="time the first layer in this environment, install nothing")
    given = parser.parse_args()
    if given.here:
        for program in (LAYER, JAX):
            subprocess.run([sys.executable, "-c", program], check=True)
        return
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    with tempfile.TemporaryDirectory() as folder:
        parts = core(pathlib.Path(folder), given.torch) + jax(pathlib.Path(folder))
    today, machine = datetime.date.today().isoformat(), f"Python {platform.python_version()}, {platform.machine()}"
    head = [f"# What an installation brings: polyhead {version}", ""]
    head += [f"`python benchmarks/fresh_install.py`, {today}, {machine}. Megabytes on the disk, without bytecode.", ""]
    text = "\n".join(head + parts).rstrip() + "\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
