"""The committed results fit the present recipes: digests, counts, tables and verdicts agree."""

import json
import pathlib
import re
import statistics

from polyhead.train import read_result

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
SMALL = {path.parent.name: json.loads(path.read_text()) for path in sorted((RESULTS / "small").glob("*/results.json"))}


def section(page, title):
    """The text of a page of results under a heading."""
    parts = re.split(r"^## (.*)$", (RESULTS / page).read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def table(text):
    """The cells of the rows of its tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def numbers(label):
    return list(map(float, re.findall(r"[\d.]+", label)))


def rounded(cell):
    """Its numbers, to three digits."""
    return [round(float(number) + 1e-12, 3) for number in re.findall(r"\d+\.\d+", cell)]


DUAL = {
    "Relational games": ("games",),
    "Which symbols, positions and relations": ("symbols",),
    "More softmax heads, or relational ones among them": ("split",),
    "Mathematics": ("maths",),
    "Sorting, order, SET": ("sorting", "order", "set"),
    "Images": ("images",),
}


def test_the_figure_of_the_long_trainings_has_all_models_that_come_along():
    """After a new model: python benchmarks/long_trainings.py draw.  Of some runs there are scores alone."""
    pages = [json.loads(path.read_text()) for path in (RESULTS / "fuzzy").glob("*/results.json")]
    index = json.loads((RESULTS.parents[1] / "src" / "polyhead" / "train" / "store" / "models.json").read_text())
    models = {about["digest"]: about["scores"] for about in index.values() if about["task"] == "fuzzy_logic"}
    shown = {run["digest"]: run["scores"] for page in pages for run in page["runs"]}
    alone = {read_result(folder).digest for folder in (RESULTS / "fuzzy" / "runs").iterdir()}
    assert set(shown) == {*models, *alone}
    assert not alone & set(models)
    for name, scores in models.items():
        assert {split: round(score["r2"], 4) for split, score in shown[name].items()} == {
            split: mean for split, (mean, _) in scores.items()
        }


def over_seeds(values):
    """A mean and its standard error as pages write them, from all digits: a rounded score is not rounded again."""
    values = list(values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.3f} ± {error:.3f}".replace("-", "−")


HYLA = {
    "Fig. 2C and A3": ("fig-2c",),
    "Fig. 4A: data and width": ("fig-4a", "fig-4a-heads"),
    "Fig. 4B and A4: data and depth": ("fig-4b",),
    "Fig. 5C: number of heads": ("fig-5c",),
    "Fig. 5D and A5: features, fraction held out": ("fig-5d", "fig-a5"),
}


def test_the_folder_is_no_larger_than_promised():
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= 15e6
