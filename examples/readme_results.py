"""Draw the README's figure and write its tables from the runs of `make demo`; nothing in them is typed by hand.

python examples/readme_results.py [runs/demo]

The table is that of the report and of the demo's last lines, to the digit.  What was measured is kept in
docs/results/demo.json.
"""

import json
import pathlib
import re
import sys

from polyhead import report
from polyhead.analysis import figures
from polyhead.config import digest
from polyhead.recipes import demo
from polyhead.report_data import read
from polyhead.report_text import floor_name

ROOT = pathlib.Path(__file__).parents[1]
KEPT = ROOT / "docs" / "results" / "demo.json"
PARTS = {"fuzzy": demo.fuzzy, "race": demo.race}
NAMES = {
    "iid": "known",
    "compositional": "unseen combinations",
    "novel_hexominoes": "unseen shapes: hexominoes",
    "novel_stripes": "unseen shapes: stripes",
}
LABELS = {"hyla": "HYLA", "softmax": "Softmax"}
DRAWN = ("recall", "gaussian_process", "mix", "ceiling")


def measured(folder):
    """What the demo's runs in `folder` say: tables, curves, settings."""
    found = {}
    for part, runs in PARTS.items():
        places = [folder / f"{run.name}-{digest(run)}" for run in runs()]
        entries = read(places)
        if any(entry.result is None for entry in entries):
            raise SystemExit(f"{folder}: the demo's runs are not finished; run `make demo` first")
        head, rows = report.results_table(places)
        found[part] = {
            "head": head,
            "rows": rows,
            "digests": [digest(entry.run) for entry in entries],
            "seconds": sum(entry.result.seconds for entry in entries),
            "steps": entries[0].run.train.steps,
            "environment": {k: entries[0].result.environment[k] for k in ("cpu", "torch", "products", "date")},
        }
        if part == "fuzzy":
            task = entries[0].run.task
            found["curves"] = {
                LABELS[entry.run.name.partition("-")[0]]: {
                    split: dict(zip(*entry.curve("eval", "r2", split), strict=True))
                    for split in ("iid", "compositional")
                }
                for entry in entries
            }
            floors = task.floors("compositional")
            found["floors"] = {floor_name(name): floors[name].mean for name in DRAWN}
    return found


def table(part):
    """The lines of a table in the README."""
    head, rows = part["head"], part["rows"]
    lines = ["| | " + " | ".join(NAMES[split] for split in head[1:]) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(cell.replace("\u00a0", " ") for cell in row) + " |" for row in rows)]


def lines(found):
    """What stands in the README between its markers."""
    fuzzy, race = found["fuzzy"], found["race"]
    machine = fuzzy["environment"]
    note = (
        f"R² per sequence after {fuzzy['steps']:,} steps, one seed, mean ± standard error over 2,048 sequences "
        f"(floors: 2,000). `make demo`, {(fuzzy['seconds'] + race['seconds']) / 60:.0f} core-minutes of training on "
        f"{machine['cpu']}, torch {machine['torch']}, {machine['date'][:10]}."
    )
    return "\n".join([*table(fuzzy), "", note])


def draw(found, path):
    """Known and unseen combinations over steps, side by side, with the floors of the unseen ones."""
    panels = []
    for title, split in (("known combinations", "iid"), ("unseen combinations", "compositional")):
        series = {
            label: {int(step): [value] for step, value in splits[split].items()}
            for label, splits in found["curves"].items()
        }
        panels.append((title, series, found["floors"] if split == "compositional" else {}))
    figures.lines(panels, path, x_label="training step", y_label="R²", limits=(0, 1.02))


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "demo")
    found = measured(folder)
    KEPT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(found, ROOT / "docs" / "figures" / "demo.svg")
    readme = ROOT / "README.md"
    marked = re.compile(r"(<!-- demo-results -->\n).*?(<!-- /demo-results -->)", re.S)
    text = readme.read_text(encoding="utf-8")
    readme.write_text(marked.sub(lambda m: f"{m[1]}{lines(found)}\n{m[2]}", text), encoding="utf-8")
    print(lines(found))


if __name__ == "__main__":
    main()
