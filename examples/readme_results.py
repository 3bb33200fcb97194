"""All that the README says of the demo, from the runs of `make demo`: figure, table, sentences, and the time it takes.

python examples/readme_results.py [runs/demo [CORE_MINUTES]]
python examples/readme_results.py --kept     # the README again from docs/results, after new models in `models/`

Nothing of it is typed by hand, so that after other steps or seeds (`FUZZY_STEPS` in papers/demo.py) this one command
is all there is to do; tests hold the README to it.  The table is that of the report and of the demo's last lines, to
the digit.  What was measured is kept in docs/results/demo.json, the core-minutes in `MINUTES` for `polyhead list`.
"""

import json
import math
import pathlib
import re
import sys
import textwrap

from polyhead.analysis import figures
from polyhead.cli.demo import NAMES
from polyhead.config import digest
from polyhead.pages import report
from polyhead.pages.report.runs import read
from polyhead.papers import demo
from polyhead.train.store import shipped

ROOT = pathlib.Path(__file__).parents[1]
README, RECIPES = ROOT / "README.md", ROOT / "src" / "polyhead" / "papers" / "recipes.py"
KEPT = ROOT / "docs" / "results" / "demo.json"
LONG = ROOT / "docs" / "results" / "fuzzy" / "long" / "results.json"
PARTS = {"fuzzy": demo.fuzzy, "race": demo.race}
LABELS = {"hyla": "HYLA", "softmax": "Softmax"}
PAPER_STEPS = 50_000
WIDTH = 128
RACERS = {"dual": "Softmax 1 + Relational 1 (symmetric)", "corelnet": "CoRelNet", "softmax": "Softmax"}
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
            floors = {split: task.floors(split) for split in ("iid", "compositional")}
            found["floors"] = {
                split: {task.words.floors[name].label: table[name].mean for name in DRAWN}
                for split, table in floors.items()
            }
    return found


def table(part):
    """The lines of a table in the README."""
    head, rows = part["head"], part["rows"]
    lines = ["| | " + " | ".join(NAMES[split] for split in head[1:]) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(cell.replace("\u00a0", " ") for cell in row) + " |" for row in rows)]


def score(part, label, split):
    """Mean and standard error in a table."""
    cells = {row[0]: row[part["head"].index(split)] for row in part["rows"]}
    return tuple(float(x.replace("−", "-")) for x in cells[label].split("\u00a0±\u00a0"))


def minutes(found):
    """Core-minutes of all training."""
    return sum(found[part]["seconds"] for part in PARTS) / 60


def apart(a, b):
    """Whether two scores differ by more than two standard errors: 1, 0 or -1."""
    difference = a[0] - b[0]
    return 0 if abs(difference) <= 2 * math.hypot(a[1], b[1]) else 1 if difference > 0 else -1


def says(found):
    """What is seen, in sentences that follow from the numbers."""
    fuzzy = found["fuzzy"]
    hyla, softmax = ([score(fuzzy, name, split) for split in ("iid", "compositional")] for name in ("HYLA", "Softmax"))
    known, unseen = (apart(a, b) for a, b in zip(hyla, softmax, strict=True))
    at = {1: "HYLA is ahead", -1: "softmax is ahead", 0: "the two are level"}
    joined = "and" if known == unseen else "though"
    mixture = score(fuzzy, "Mixture", "compositional")
    below = [name for name, one in (("HYLA", hyla), ("softmax", softmax)) if apart(one[1], mixture) < 0]
    shown = {0: "both reach it", 1: f"{''.join(below)} shows no composition yet", 2: "neither shows composition yet"}
    steps = f"After {fuzzy['steps']:,} steps {at[unseen]} on unseen combinations, {joined} {at[known]} on known ones."
    return textwrap.fill(
        "Each function of the task below joins two parts. Where training showed both, but never together, R² (1 is "
        f"perfect) of softmax is {softmax[1][0]:.3f}, against {softmax[0][0]:.3f} on known combinations; of HYLA "
        f"{hyla[1][0]:.3f}, against {hyla[0][0]:.3f}. {steps} A baseline that only adds up training functions has "
        f"{mixture[0]:.3f}, so {shown[len(below)]}. {full()}",
        WIDTH,
    )


def full():
    """What the same networks reach after all of the paper's steps, by the cards of the models that come along.

    Every seed has a split of its own, so each is compared with the baseline of its own split.
    """
    found = {row: {} for row in LABELS}
    for name in demo.full():
        _, row, seed = name.split("-")
        found[row][seed] = shipped.models()[name]["scores"]["compositional"][0]
    floors = json.loads(LONG.read_text(encoding="utf-8"))["numbers"]["Mixture"]["unseen"]
    n, floor = len(found["hyla"]), {seed: floors[seed] for seed in found["hyla"]}
    hyla, softmax, mixture = (sum(each.values()) / len(each) for each in (*found.values(), floor))
    above = sum(score > floor[seed] for seed, score in found["hyla"].items())
    seeds = f"means of {n} splits, HYLA above it in {above}" if n > 1 else "one split"
    return f"After {PAPER_STEPS:,} HYLA has {hyla:.3f}, softmax {softmax:.3f}, that baseline {mixture:.3f} ({seeds})."


def limits(found):
    """What is not shown, and the demo's other half."""
    fuzzy, race = found["fuzzy"], found["race"]
    dual, corelnet, softmax = (score(race, label, "novel_hexominoes") for label in RACERS.values())
    known = [f"{score(race, label, 'iid')[0]:.3f}" for label in RACERS.values()]
    part = f"{100 * fuzzy['steps'] / PAPER_STEPS:.0f} % of its training"
    return textwrap.fill(
        f"This is one seed, one task, heads of width 2 as in HYLA's paper and {part}. [docs/results](docs/results/) "
        "has more, and softmax of width 8, close to HYLA over five splits. "
        'The other half asks: "is a shape between two of its kind?" On unseen shapes '
        f"dual attention (one softmax head, one that compares) is right in {told(dual)}, CoRelNet, which only "
        f"compares, in {told(corelnet)}, softmax in {told(softmax)}; on known shapes in {', '.join(known)}. Chance is "
        "0.5; two seeds settle no order.",
        WIDTH,
    )


def told(value):
    """As in the table."""
    return f"{value[0]:.3f} ± {value[1]:.3f}"


def lines(found):
    """The table, how it was measured, and what it does not show."""
    fuzzy = found["fuzzy"]
    machine = fuzzy["environment"]
    note = (
        f"R² per sequence after {fuzzy['steps']:,} steps, one seed, mean ± standard error over 2,048 sequences "
        f"(floors: 2,000). `make demo`, {minutes(found):.0f} core-minutes of training on "
        f"{machine['cpu']}, torch {machine['torch']}, {machine['date'][:10]}."
    )
    return "\n".join([*table(fuzzy), "", note, "", limits(found)])


def draw(found, path):
    """Known and unseen combinations over steps, side by side, with their floors."""
    panels = []
    for title, split in (("known combinations", "iid"), ("unseen combinations", "compositional")):
        series = {
            label: {int(step): [value] for step, value in splits[split].items()}
            for label, splits in found["curves"].items()
        }
        panels.append((title, series, found["floors"][split]))
    figures.save(figures.lines(panels, x_label="training step", y_label="R²", limits=(0, 1.02)), path)


def main():
    if sys.argv[1:] == ["--kept"]:
        write(json.loads(KEPT.read_text(encoding="utf-8")))
        return
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "demo")
    found = measured(folder)
    if len(sys.argv) > 2:  # by the processor's clock: where others had a part of it, that of the wall says too much
        factor = float(sys.argv[2]) / minutes(found)
        for part in PARTS:
            found[part]["seconds"] *= factor
    KEPT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(found, ROOT / "docs" / "figures" / "demo.svg")
    write(found)
    recipes = RECIPES.read_text(encoding="utf-8")
    RECIPES.write_text(re.sub(r'("demo": )[\d.]+', rf"\g<1>{minutes(found):.1f}", recipes), encoding="utf-8")
    print(lines(found))


def write(found):
    """Its passages of the README."""
    text = README.read_text(encoding="utf-8")
    for name, passage in PASSAGES.items():
        text = put(text, name, passage(found))
    README.write_text(text, encoding="utf-8")


PASSAGES = {"demo-says": says, "demo-results": lines}
"""What stands in the README between markers of these names."""


def put(text, name, passage):
    """`text` with `passage` between the markers called `name`."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
    return marked.sub(lambda m: f"{m[1]}{passage}\n{m[2]}", text)


if __name__ == "__main__":
    main()
