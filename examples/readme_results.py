"""Draw the README's figure and write its table from the runs of `make demo`; nothing in them is typed by hand.

python examples/readme_results.py [runs/demo]
"""

import json
import pathlib
import re
import statistics
import sys

from polyhead.analysis import figures
from polyhead.config import from_dict
from polyhead.tasks import KINDS

ROOT = pathlib.Path(__file__).parents[1]
LABELS = {"softmax": "Softmax", "linear": "Linear", "hyla": "HYLA"}
FLOORS = {
    "mix": "mixture of training functions",
    "gaussian_process": "Gaussian process",
    "recall": "recall of training functions",
    "nearest_neighbour": "nearest neighbour",
    "ridge": "ridge regression",
}
SPLITS = ("iid", "compositional", "novel")


def read(folder):
    """Results by mechanism, and the task they share."""
    found, task = {}, None
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text())
        task = from_dict(json.loads((path.parent / "config.json").read_text()), KINDS).task
        found.setdefault(LABELS[result["name"].partition("-")[0]], []).append(result)
    if task is None:
        raise SystemExit(f"{folder}: no finished runs here; run `make demo` first")
    return found, task


def cell(values):
    """Mean and standard error over seeds."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def table(found, floors):
    """The lines of the README between its markers."""
    lines = ["| | known combinations (`iid`) | **unseen combinations (`compositional`)** | unseen parts (`novel`) |"]
    lines.append("|---|---|---|---|")
    order = sorted(found, key=lambda k: -statistics.mean(r["scores"]["compositional"]["r2"] for r in found[k]))
    for label in order:
        scores = [[r["scores"][split]["r2"] for r in found[label]] for split in SPLITS]
        lines.append(f"| {label} | {cell(scores[0])} | **{cell(scores[1])}** | {cell(scores[2])} |")
    for key, label in (*FLOORS.items(), ("context_mean", "mean of the examples"), ("ceiling", "exact ceiling")):
        each = [floors[split][key] for split in SPLITS]
        lines.append(f"| *{label}* | " + " | ".join(f"{s.mean:.3f} ± {s.standard_error:.3f}" for s in each) + " |")
    first = next(iter(found.values()))[0]
    count, machine = len(found[order[0]]), first["environment"]
    seconds = sum(r["seconds"] for results in found.values() for r in results)
    note = (
        f"R² per sequence, mean ± standard error over {count} seeds (floors: over "
        f"{floors['iid']['ridge'].count:,} sequences). `make demo`, {first['steps']:,} steps each, "
        f"{seconds / 60:.1f} core-minutes of training on {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['date'][:10]}."
    )
    return "\n".join([*lines, "", note])


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "demo")
    found, task = read(folder)
    floors = {split: task.floors(split, sequences=8000) for split in SPLITS}
    unseen = floors["compositional"]
    figures.results(
        {label: [r["scores"]["compositional"]["r2"] for r in results] for label, results in found.items()},
        ROOT / "docs" / "figures" / "demo.svg",
        floors={"Gaussian process": unseen["gaussian_process"].mean, "Exact ceiling": unseen["ceiling"].mean},
    )
    readme = ROOT / "README.md"
    marked = re.compile(r"(<!-- demo-results -->\n).*?(<!-- /demo-results -->)", re.S)
    readme.write_text(marked.sub(lambda m: f"{m[1]}{table(found, floors)}\n{m[2]}", readme.read_text()))
    print(table(found, floors))


if __name__ == "__main__":
    main()
