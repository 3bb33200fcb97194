"""The committed results fit the present recipes: digests, counts, tables and verdicts agree."""

import itertools
import json
import pathlib
import re
import statistics

import pytest

from polyhead.config import digest
from polyhead.papers.hyla.long import SEEDS
from polyhead.papers.recipes import FIGURES, MINUTES, STUDIES
from polyhead.papers.reproduce import FORMAT, runs_of
from polyhead.train import read_result

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
SMALL = {path.parent.name: json.loads(path.read_text()) for path in sorted((RESULTS / "small").glob("*/results.json"))}


@pytest.mark.parametrize("name", SMALL)
def test_results_are_of_the_recipe(name):
    found = SMALL[name]
    assert (found["format"], found["figure"], found["scale"], found["failures"]) == (FORMAT, name, "small", [])
    seeds = f" --seeds {found['seeds']}" if "seeds" in found else ""
    assert found["command"] == f"polyhead reproduce {name} --scale small{seeds}"
    if name in STUDIES:
        runs = runs_of(FIGURES[name], "small", found.get("seeds"))
        assert sorted(run["digest"] for run in found["runs"]) == sorted(map(digest, runs))
        if not seeds:  # the minutes are those of the recipe's own runs
            assert MINUTES[name] == pytest.approx(found["training_seconds"] / 60, abs=0.05)
    for picture in found["pictures"]:
        assert (RESULTS / "small" / name / f"{picture}.png").exists()
    page = (RESULTS / "small" / name / "index.html").read_text()
    assert all(run["digest"] in page for run in found["runs"])


def test_make_campaign_makes_them_with_as_many_seeds():
    makefile = (RESULTS.parents[1] / "Makefile").read_text()
    studies = re.search(r"^STUDY := ((?:.*\\\n)*.*)$", makefile, re.M)[1].replace("\\\n", " ").split()
    wanted = {name + (f"={found['seeds']}" if "seeds" in found else "") for name, found in SMALL.items()}
    assert set(studies) == wanted


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


def test_the_page_of_numbers_repeats_table_a1():
    assert "table-a2" in SMALL
    by_model = {row[0]: (row[1], row[5]) for row in SMALL["table-a1"]["rows"]}
    shown = {row[0]: row for row in table(section("hyla.md", "Table A1"))}
    assert len(by_model) >= 15
    for model, (fuzzy, sraven) in list(by_model.items())[:15]:
        assert (rounded(shown[model][1]), rounded(shown[model][3])) == (rounded(fuzzy), rounded(sraven))


DUAL = {
    "Relational games": ("games",),
    "Which symbols, positions and relations": ("symbols",),
    "More softmax heads, or relational ones among them": ("split",),
    "Mathematics": ("maths",),
    "Sorting, order, SET": ("sorting", "order", "set"),
    "Images": ("images",),
}


@pytest.mark.parametrize("title", DUAL)
def test_the_page_on_dual_attention_repeats_its_results(title):
    """Every score in its tables is one of a run of that name; every difference it calls clear is of its page."""
    text = section("dual.md", title)
    rows = [[" + ".join(row[:2]), *row] for name in DUAL[title] for row in SMALL[name]["rows"]]
    scores = [(row[0].removesuffix(" (floor)"), cell) for row in table(text) for cell in row if "±" in cell]
    assert len(scores) >= 5
    for label, cell in scores:
        assert any(label in row and cell in row for row in rows), (label, cell)
    evidence = " ".join(verdict["evidence"] for name in DUAL[title] for verdict in SMALL[name]["verdicts"])
    prose = " ".join(line for line in text.splitlines() if line[:1] != "|")
    for claimed in re.findall(r"(?:clear|unclear|\*\*) \(\D*([+−][\d.]+ ± [\d.]+)", " ".join(prose.split())):
        assert claimed in evidence, claimed


def test_the_figure_of_the_long_trainings_has_all_models_that_come_along():
    """After a new model: python benchmarks/long_figure.py.  Of some runs there are scores alone."""
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


def test_pages_repeat_the_means_of_the_long_trainings():
    """Most of these were computed from rounded scores, and off by one in the last digit."""
    numbers = json.loads((RESULTS / "fuzzy" / "long" / "results.json").read_text())["numbers"]
    found = {  # without seed 6, which is no part of a mean
        label: {quantity: {seed: by[str(seed)] for seed in SEEDS if str(seed) in by} for quantity, by in of.items()}
        for label, of in numbers.items()
    }
    index, deviations = (" ".join((RESULTS / f"{page}.md").read_text().split()) for page in ("index", "deviations"))
    said = [(label, quantity) for label in ("HYLA", "Softmax", "Linear") for quantity in ("unseen", "novel")]
    for label, quantity in (*said, *((label, q) for label in ("HYLA", "Softmax") for q in ("gap", "late"))):
        wanted = over_seeds(found[label][quantity].values())
        assert wanted in index, (label, quantity, wanted)
        assert quantity != "unseen" or label == "Linear" or wanted in deviations, (label, wanted)
    hyla, softmax = (found[label]["unseen"] for label in ("HYLA", "Softmax"))
    *leads, last = (f"{hyla[seed] - softmax[seed]:.3f}" for seed in hyla)
    assert f"HYLA is ahead of softmax, by {', '.join(leads)} and {last}" in index
    short = json.loads((RESULTS / "fuzzy" / "length" / "results.json").read_text())["numbers"]
    names = {"HYLA": "HYLA", "Softmax": "softmax", "Linear": "linear heads", "Mixture": "*mixture*"}
    each = {said: ", ".join(f"{short[name]['unseen'][seed]:.3f}" for seed in "123") for name, said in names.items()}
    assert ", ".join(f"{said} {scores}" for said, scores in each.items()) in index
    swaps = json.loads((RESULTS / "fuzzy" / "inside" / "results.json").read_text())["numbers"]["HYLA"]
    for whose, told in (("the donor's", "donor's"), ("a third sequence's", "another's")):
        score = swaps[f"{whose}, against the donor's function"]
        wanted = f"{score['mean']:.2f} ± {score['standard_error']:.2f} {told}".replace("-", "−")
        assert wanted in deviations, wanted


def test_pages_repeat_the_scores_of_other_settings():
    index, deviations = (" ".join((RESULTS / f"{page}.md").read_text().split()) for page in ("index", "deviations"))
    wide = json.loads((RESULTS / "fuzzy" / "settings" / "results.json").read_text())["numbers"]
    seeds = sorted(wide["HYLA, width 8"]["unseen"])

    def said(name, quantity="unseen"):
        return ", ".join(f"{wide[name][quantity][seed]:.3f}".replace("-", "−") for seed in seeds)

    def lead(width=""):
        ours, theirs = (wide[name + width]["unseen"] for name in ("HYLA", "Softmax"))
        return over_seeds(ours[seed] - theirs[seed] for seed in seeds)

    eight = {name: said(f"{name}, width 8") for name in ("HYLA", "Softmax")}
    told = f"softmax has {eight['Softmax']} on unseen combinations, HYLA {eight['HYLA']}: it leads by"
    assert f"{told} {lead(', width 8')}, with width 2 in these seeds by {lead()}." in index
    never = (said(f"{name}, width 8", "novel") for name in ("HYLA", "Softmax"))
    assert "On terms that training never shows HYLA has {}, softmax {}.".format(*never) in index
    means = (over_seeds(wide[f"{name}, width 8"]["unseen"].values()).split()[0] for name in ("HYLA", "Softmax"))
    assert f"{' and '.join(means)} with width 8" in index
    linear = ", ".join(f"{score:.3f}" for _, score in sorted(wide["Linear, width 8"]["unseen"].items()))
    assert f"Linear heads of width 8 have {linear} in seeds 1, 2, 3;" in index
    drop, decay = (f"{wide[name]['unseen']['1']:.3f}" for name in ("Softmax, dropout 0.1", "Softmax, decay 1.0"))
    assert f"with dropout has {drop}, with ten times the decay {decay}." in index
    known = [f"{wide[name]['known']['1']:.3f}" for name in ("Softmax, decay 1.0", "Softmax")]
    told = f"with dropout 0.1 {drop}, with decay 1.0 {decay}, where known ones have {known[0]} in place of {known[1]} ("
    assert told in deviations
    told = f"with width 8 HYLA {eight['HYLA']}, softmax {eight['Softmax']}; with width 2"
    assert f"{told} {said('HYLA')} and {said('Softmax')}" in deviations


def test_pages_repeat_the_swaps_beside_their_control():
    found = json.loads((RESULTS / "swap_control.json").read_text())["r2"]
    inside = json.loads((RESULTS / "fuzzy" / "inside" / "results.json").read_text())["numbers"]
    rows = {row[0]: row[1:] for row in table(section("hyla.md", "Codes")) if row[0].endswith("inputs")}
    index = " ".join((RESULTS / "index.md").read_text().split())
    for label, third in itertools.product(("HYLA", "Softmax", "Linear"), ("other inputs", "same inputs")):
        runs = {seed: found[f"fuzzy-{label.lower()}-{seed}"] for seed in SEEDS}
        cells = next(cells for row, cells in rows.items() if row.startswith(label) and row.endswith(third))
        for cell, rule in zip(cells, ("donor", "own"), strict=True):
            gained = over_seeds(run["donor"][rule] - run[third][rule] for run in runs.values())
            assert cell.removeprefix("+") == gained, (label, third, rule)
        assert third == "other inputs" or cells[0] in index, label
        for seed, run in runs.items():  # the pairs are those of the page
            for whose, code in (("the donor's", "donor"), ("a third sequence's", "other inputs")):
                page = inside[label][f"{whose}, against the donor's function"]["by_seed"][str(seed)]
                assert run[code]["donor"] == pytest.approx(page, abs=1e-4), (label, seed, code)
    assert len(rows) == 6


def test_the_page_repeats_the_clusters_of_the_long_trainings():
    about = json.loads((RESULTS / "clusters.json").read_text())
    rows = {row[0]: row[1:] for row in table(section("hyla.md", "Codes")) if row[0].endswith((", term 1", ", term 2"))}
    assert len(rows) == 6
    for place, cells in rows.items():
        label, target = place.split(", ")
        wanted = []
        for measure in ("purity over chance", "similarity, same term less another"):
            runs = [about[measure][f"fuzzy-{label.lower()}-{seed}"] for seed in SEEDS]
            after, before = ([run[kind][f"{target}, layer 2"] for run in runs] for kind in ("trained", "untrained"))
            gained = [one - other for one, other in zip(after, before, strict=True)]
            wanted += map(over_seeds, (after, before, gained))
        assert [cell.removeprefix("+") for cell in cells] == wanted, place


HYLA = {
    "Fig. 2C and A3": ("fig-2c",),
    "Fig. 4A: data and width": ("fig-4a", "fig-4a-heads"),
    "Fig. 4B and A4: data and depth": ("fig-4b",),
    "Fig. 5C: number of heads": ("fig-5c",),
    "Fig. 5D and A5: features, fraction held out": ("fig-5d", "fig-a5"),
}


@pytest.mark.parametrize("title", HYLA)
def test_the_page_of_numbers_repeats_its_figures(title):
    """Every row of scores is the row of a figure of the section with the same settings; so is the floor in its text."""
    text = section("hyla.md", title)
    known = [(numbers(row[0]), row[1:]) for name in HYLA[title] for row in SMALL[name]["rows"]]
    scores = [row for row in table(text) if "±" in "".join(row)]
    assert len(scores) >= 2
    for label, *cells in scores:
        own = [re.search(r"[\d.]+ ± [\d.]+", cell)[0] for cell in cells]
        assert any(settings == numbers(label) and own == row[: len(own)] for settings, row in known), label
    notes = " ".join(note for name in HYLA[title] for note in SMALL[name]["notes"])
    for floor in re.findall(r"known combinations alone ([\d.]+\d)", text):
        assert f"known combinations: {floor}" in notes


def test_the_page_repeats_what_probes_read_without_training():
    found = json.loads((RESULTS / "probe_null.json").read_text())["verdicts"]
    rows = table((RESULTS / "hyla.md").read_text().replace("−", "-"))
    shown = {place: cells for place, *cells in rows if ", layer " in place and len(cells) == 4}
    assert len(shown) == 8
    for column, kind in enumerate(("a constant code", "untrained", "trained", "training")):
        parts = {part["name"].partition(" (")[0]: part for part in found[kind]["parts"]}
        assert {place: float(cells[column].partition(" ")[0]) for place, cells in shown.items()} == {
            place: round(part["mean"], 3) for place, part in parts.items()
        }
    assert sum(part["outcome"] == "holds" for part in found["untrained"]["parts"]) == 6
    assert {part["outcome"] for part in found["a constant code"]["parts"]} == {"no difference"}
    others = [part["outcome"] for part in found["another start"]["parts"]]  # untrained networks beside each other
    assert (others.count("no difference"), others.count("not enough evidence")) == (7, 1)
    assert {part["runs"] for kind in ("untrained", "a constant code") for part in found[kind]["parts"]} == {20}


def test_the_page_on_pooling_repeats_its_runs():
    found = json.loads((RESULTS / "pooling.json").read_text())["r2"]
    _, *rows = table((RESULTS / "pooling.md").read_text().replace("−", "-"))
    assert len(rows) == len(found) / 2 == 4
    columns = [f"{split}, {length}" for length in (16, 32) for split in ("iid", "compositional")]
    for (name, *cells), model in zip(rows, ("sum", "mean", "max", "query"), strict=True):
        wanted = [", ".join(f"{found[f'{model}-{seed}'][column]['r2']:.2f}" for seed in (1, 2)) for column in columns]
        assert cells == wanted, name


def test_the_page_on_codes_of_language_repeats_its_numbers():
    found = json.loads((RESULTS / "language_codes.json").read_text())["measured"]
    page = (RESULTS / "language_codes.md").read_text()

    def gained(row, layer, target, measures=("f1", "chance")):
        of, _, network = row.partition("; ")
        if network == "difference":
            both = (gained(f"{of}; {name}", layer, target, measures) for name in ("trained", "untrained"))
            return [after - before for after, before in zip(*both, strict=True)]
        values = found[network][of][layer][target]
        return [score - null for score, null in zip(*map(values.get, measures), strict=True)]

    def shown(values):
        return f"{statistics.fmean(values):+.3f} ± {statistics.stdev(values) / 5**0.5:.3f}".replace("-", "−")

    seen = 0
    for title, target, measures in (
        ("What follows", "next", ("f1", "chance")),
        ("The place in the word", "place", ("f1", "chance")),
        ("Neighbours", "next", ("purity", "by_chance")),
    ):
        _, *rows = table(section("language_codes.md", title))
        for row, *cells in rows:
            for layer, cell in enumerate(cells, start=1):
                assert cell == shown(gained(row, f"layer {layer}", target, measures)), (title, row, layer)
                seen += 1
        if measures[0] == "f1":
            assert f"token alone {shown(gained('token; trained', 'text', target))}" in " ".join(page.split()), target
    assert seen >= 60


def test_the_folder_is_no_larger_than_promised():
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= 15e6
