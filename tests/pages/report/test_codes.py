"""Codes in a report, on SRAVEN runs and on networks trained in full, and figures as files: against the analysis."""

import dataclasses
import itertools
import json
import pathlib
import re
from functools import partial

import numpy as np
import pytest
from refusals import refusing
from reported import HEADS, TASK, Written, fabricate, plain, run_of, small, trained, written

import polyhead as ph
from polyhead.analysis import embed, figures as still, probe_model, purity, query_codes, similarity, zero_heads
from polyhead.pages.report import codes, headline, sections, trained as in_full, writer as report
from polyhead.pages.report.page import Page
from polyhead.pages.report.runs import Entry, SeedGroup
from polyhead.tasks import Sraven

RAVEN = Sraven(features=2, values=5)
NAMES = ["constant", "+1", "+2", "−1", "−2", "sum", "difference", "distribute-three"]


@pytest.fixture(scope="module")
def few() -> None:
    with pytest.MonkeyPatch.context() as patch:
        small(patch, POINTS=60, PROBED=150, ZEROED=20, NEIGHBOURS=5, SAMPLES=3, SEQUENCES=100)
        patch.setattr(codes, "embed", lambda codes, method, seed: embed(codes, "pca"))  # t-SNE takes its time
        yield


@pytest.fixture(scope="module")
def folders(few: None, tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    root = tmp_path_factory.mktemp("runs")
    return [trained(root, RAVEN, "hyla", (ph.Hyla(3, dim=4, value_dim=4),), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[pathlib.Path]) -> list[ph.Transformer]:
    return [ph.train.load_model(folder)[1] for folder in folders]


@pytest.fixture(scope="module")
def page(folders: list[pathlib.Path]) -> Written:
    return written(folders, folders[0].parent / "r.html")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not drawn: test_figures.py draws one of every kind."""

    def save(figure: object, path: pathlib.Path) -> pathlib.Path:
        path.touch()
        return path

    monkeypatch.setattr(still, "save", save)


def test_ceiling_and_words_are_those_of_the_task(page: Written) -> None:
    words = page.words
    ceiling = RAVEN.floors("compositional", sequences=100)["ceiling"].mean
    assert f"A solver that knows the whole family scores {ceiling:.3f}, the ceiling." in words
    assert "Can the rules be read off the latent code?" in words
    assert "Accuracy The share of sequences in which every symbol of the last panel is right." in words
    assert not re.search(r"\bterms?\b(?! of the)", words.split("What the words mean")[1])
    assert "Gaussian" not in words
    assert "novel" not in words


def test_both_views_are_probed(models: list[ph.Transformer], page: Written) -> None:
    words = page.words
    means: dict[tuple[str, int, str], list[float]] = {}
    for seed, model in enumerate(models):
        for row in probe_model(model, RAVEN, sequences=150, seed=seed):
            means.setdefault((row["pairs"], row["layer"], row["target"]), []).append(row["f1"])
    for view in ("self", "last_row"):
        figure = page.captioned(f"Pairs “{view}”: macro F1")
        ticks = figure["layout"]["xaxis"]["ticktext"]
        assert ticks == [f"layer {i}<br>{t}" for t in ("rule", "target value") for i in (1, 2)]
        wanted = [np.mean(means[view, layer, target]) for target in ("rule", "target value") for layer in (0, 1)]
        assert figure["data"][0]["y"] == pytest.approx(wanted)
        error = np.std(means[view, 1, "rule"], ddof=1) / 2**0.5
        assert f"layer 2, rule pairs “{view}” {wanted[1]:.3f} ± {error:.3f}" in words
    assert "all sequences have the same query token" in words.lower()


def test_clusters_are_purities_of_the_mapped_codes(models: list[ph.Transformer], page: Written) -> None:
    found = []
    for seed, model in enumerate(models):
        layers, batch = query_codes(model, RAVEN, "compositional", 60, seed=seed, purpose="maps")
        labels = (batch.latents["query_rules"][:, -1], batch.targets[:, -1])
        found.append([purity(codes, y, neighbours=5)[0] for y in labels for codes in layers])
    figure = page.captioned("Pairs “self”: share of the nearest codes")
    assert figure["data"][0]["y"] == pytest.approx(np.mean(found, axis=0).tolist())


def test_similar_rules_and_codes_by_rule(models: list[ph.Transformer], page: Written) -> None:
    model = models[0]
    layers = [figure for figure in page.figures if figure["caption"].startswith("Layer ")]
    mats = [figure for figure in layers if figure["data"][0]["type"] == "heatmap"]
    assert len(mats) == 2 * 2 * 2 * 2  # seeds, views, plain and centred, layers
    assert {colour for _, colour in mats[0]["data"][0]["colorscale"]} <= set(page.held["dark"])  # zero stayed white
    layers, batch = query_codes(model, RAVEN, "compositional", 60, seed=0, purpose="maps")
    rules = batch.latents["query_rules"][:, -1].numpy()
    for k, (centred, layer) in enumerate([(False, 0), (False, 1), (True, 0), (True, 1)]):
        classes, wanted = similarity(layers[layer], rules, centred=centred)
        np.testing.assert_allclose(np.array(mats[k]["data"][0]["z"]), wanted, atol=1e-4)
        names = [NAMES[i] for i in classes]
        assert mats[k]["layout"]["xaxis"]["ticktext"] == mats[k]["layout"]["yaxis"]["ticktext"] == names
    drawn = page.captioned("Codes of layer 2, pairs “self”: sequences")["data"][0]["z"]
    chosen = np.concatenate([np.flatnonzero(rules == rule)[:3] for rule in classes])
    np.testing.assert_allclose(np.array(drawn), layers[1][chosen].T, atol=1e-4)
    mean = page.captioned("Codes of layer 2, pairs “self”: the mean")["data"][0]["z"]
    np.testing.assert_allclose(np.array(mean)[:, 0], layers[1][rules == classes[0]].mean(0), atol=1e-4)
    plain = dataclasses.replace(RAVEN, permuted=False)
    layers, batch = query_codes(model, plain, "compositional", 60, pairs="last_row", seed=0, purpose="maps")
    classes, wanted = similarity(layers[0], batch.latents["rules"][:, -1])
    np.testing.assert_allclose(np.array(mats[4]["data"][0]["z"]), wanted, atol=1e-4)
    rows = page.captioned("Codes of layer 2, pairs “last_row”: the mean")["layout"]["yaxis"]["ticktext"]
    assert rows == [f"key {key}, head {head}" for key in (13, 15) for head in (1, 2, 3)]


def test_maps_are_coloured_by_value_and_by_rule(models: list[ph.Transformer], page: Written) -> None:
    words = page.words
    maps = [figure for figure in page.figures if figure["maps"]]
    assert [figure["caption"] for figure in maps] == ["by target", "by rule"] * 2 * 2 * 2
    _, batch = query_codes(models[0], RAVEN, "compositional", 60, seed=0, purpose="maps")
    assert maps[0]["data"][0]["marker"]["color"] == batch.targets[:, -1].tolist()
    assert maps[1]["data"][0]["text"] == [NAMES[i] for i in batch.latents["query_rules"][:, -1].tolist()]
    assert "Layer 2, pairs “last_row”" in words
    legend = re.search(r"Rules: (.*?) HYLA", words)[1].split()
    assert {NAMES[rule] for rule in batch.latents["query_rules"][:, -1].tolist()} <= set(legend)


def test_marks_of_a_legend_have_the_names_of_every_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """They had those of the first; and without any label the report was not written."""
    monkeypatch.setattr(Sraven, "class_name", lambda self, target, label: f"{target}-{label}")
    entry = Entry(pathlib.Path("run"), run_of("hyla", task=RAVEN), (), None, ())

    def words(**labels: list[int]) -> str:
        held = {name: np.array(values) for name, values in labels.items()}
        made = codes.CodeMap("self", 0, np.zeros((2, 1)), {}, np.zeros(2), held, {})
        one = codes.CheckpointAnalysis(entry, SeedGroup("HYLA", "hyla", (entry,)), maps=(made,))
        return plain(sections.legend(one, headline.PARTS))

    assert [word for word in words(rule=[0, 1], shape=[1, 2]).split() if "-" in word or word == "or"] == [
        "rule-0", "rule-1", "or", "shape-1", "shape-2",
    ]  # fmt: skip
    assert words() == ""


def test_zeroed_heads(models: list[ph.Transformer], page: Written) -> None:
    words = page.words
    every = []
    for seed, model in enumerate(models):
        rows = zero_heads(model, RAVEN, sequences=20, seed=seed)
        every.append(rows)
        wanted = [[r["drop"] for r in rows if r["layer"] == i and r["head"] is not None] for i in (0, 1)]
        figure = page.captioned(f"HYLA, seed {seed}: fall of accuracy")
        np.testing.assert_allclose(np.array(figure["data"][0]["z"]), wanted, atol=1e-4)
    for label, pick in {
        "nothing: accuracy": lambda rows: rows[0]["score"],
        "layer 2, all heads: fall": lambda rows: rows[-1]["drop"],
        "layer 1, the head that matters most: fall": lambda rows: max(r["drop"] for r in rows[1:4]),
    }.items():
        values = [pick(rows) for rows in every]
        cell = f"{label} {np.mean(values):.3f} ± {np.std(values, ddof=1) / 2**0.5:.3f}".replace("-", "−")
        assert cell in words


def test_layers_of_unequal_heads_leave_cells_empty() -> None:
    rows = tuple({"layer": i, "head": h, "drop": i + h / 10, "drop_se": 0.1} for i, h in ((0, 0), (1, 0), (1, 1)))
    values, words, layers, heads = sections.drops(rows)
    assert np.isnan(values[0, 1])
    assert values[1].tolist() == [1.0, 1.1]
    assert (layers, heads) == (["layer 1", "layer 2"], ["1", "2"])
    assert words[1][1] == "layer 2, head 2: fall 1.100 ± 0.100"


# -------------------------------------------------------------------------------------------------------------- export
def test_every_figure_as_png_and_svg_holds_the_numbers(quick, folders, models, page, tmp_path, monkeypatch):
    drawn = {}

    def noted(draw, data, path, **options):
        drawn[path.stem] = (data, options)
        return draw(data, path, **options)

    for kind in ("results", "lines", "heat", "code_maps"):
        monkeypatch.setattr(still, kind, partial(noted, getattr(still, kind)))
    files = report.export(folders, tmp_path / "new" / "figures", progress=False)
    assert set(files) == set((tmp_path / "new" / "figures").iterdir())
    stems = ["results", "curves-loss", "curves-iid", "curves-compositional", "clusters-self", "clusters-last_row"]
    stems += ["probes-self-fixed", "probes-last_row-fixed", *(f"heads-hyla-seed-{seed}" for seed in (0, 1))]
    stems += [f"look-hyla-seed-0-attention-layer{layer}" for layer in (1, 2)]
    for run in itertools.product((0, 1), ("self", "last_row")):
        own = "hyla-seed-{}-{}".format(*run)
        stems += [f"alike-{own}", f"codes-{own}", f"map-{own}-layer1", f"map-{own}-layer2"]
    assert {path.name for path in files} == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    (panel,), options = drawn["heads-hyla-seed-1"]
    np.testing.assert_allclose(panel[1], page.captioned("HYLA, seed 1: fall")["data"][0]["z"], atol=1e-4)
    assert options["label"] == "fall of accuracy"
    panels, _ = drawn["probes-self-fixed"]
    assert [title for title, _, _ in panels] == ["rule", "target value"]
    shown = page.captioned("Pairs “self”: macro F1")["data"][0]["y"]
    assert [np.mean(series["HYLA"][i]) for _, series, _ in panels for i in (1, 2)] == pytest.approx(shown)
    layers, batch = query_codes(models[1], RAVEN, "compositional", 60, seed=1, purpose="maps")
    panels, _ = drawn["alike-hyla-seed-1-self"]
    assert panels[3][1].tolist() == similarity(layers[1], batch.latents["query_rules"][:, -1], centred=True)[1].tolist()
    panels, options = drawn["map-hyla-seed-1-self-layer2"]
    assert panels[1][2].tolist() == batch.latents["query_rules"][:, -1].tolist()
    assert set(options["names"]["t-SNE, by rule"].values()) <= set(NAMES)
    panels, _ = drawn["curves-loss"]
    assert sorted(panels[0][1]["HYLA"]) == [1, 2, 3]
    assert [len(values) for values in panels[0][1]["HYLA"].values()] == [2, 2, 2]
    assert drawn["results"][0] == {
        "HYLA": [json.loads((f / "result.json").read_text())["scores"]["compositional"]["accuracy"] for f in folders]
    }


def test_page_and_files_of_fuzzy_logic_in_one_go(few, quick, tmp_path, monkeypatch):
    folder = trained(tmp_path, TASK, "linear", (ph.Linear(2),))
    counted, analyse = [], report.analyse
    monkeypatch.setattr(report, "analyse", lambda found, say: counted.append(1) or analyse(found, say))
    found = written([folder], tmp_path / "r.html", static=tmp_path / "files")
    assert len(counted) == 1
    assert "Which rules share a code?" not in found.words
    stems = {file.stem for file in (tmp_path / "files").iterdir()}
    assert {"probes-self-varies", "probes-self-fixed", "heads-linear-seed-0", "map-linear-seed-0-self-layer2"} <= stems
    assert not [stem for stem in stems if stem.startswith(("alike", "codes"))]


# ------------------------------------------------------------------------------------------------------ trained in full
def test_scores_are_new_and_codes_are_swapped_and_mapped(tmp_path, monkeypatch):
    small(monkeypatch, SEQUENCES=120, PROBED=64, ZEROED=8)
    runs = (("softmax", 0), ("hyla", 0), ("hyla", 1))
    how = {"softmax": "bf16", "hyla": "fp32"}
    given = [trained(tmp_path, TASK, row, (HEADS[row],), n, batch_size=16, precision=how[row]) for row, n in runs]
    full, asked = in_full.measure(given, ["iid", "compositional"], lambda line: None), []
    assert [(group.label, len(group.entries)) for group in full.found] == [("Softmax", 1), ("HYLA", 2)]
    _, model = ph.load(given[0])
    wanted = ph.train.evaluate(model, TASK, "compositional", seed=0, batches=7, batch_size=16, precision="bf16")["r2"]
    assert full.found[0].score("compositional").mean == pytest.approx(wanted)
    assert wanted != ph.train.read_result(given[0]).scores["compositional"]["r2"]
    assert [len(rows) for rows in full.swaps.values()] == [1, 2]
    assert full.swaps["HYLA"][1] == ph.analysis.swap_codes(ph.load(given[2])[1], TASK, pairs=20)
    out = Page()
    in_full.section(out, full)
    page = plain("".join(out.parts))
    monkeypatch.setattr(report, "measure", lambda names, splits, say: asked.append((names, splits)) or full)
    whole = written(given[:1], tmp_path / "r.html", trained=["fuzzy-hyla"]).words
    assert asked == [(["fuzzy-hyla"], ["iid", "compositional"])]
    assert whole.index(in_full.sentence(full)) < whole.index(page)
    assert all(words in page for words in ("HYLA: donor's function", "composes nothing", "2 seeds"))
    mean = sum(rows[1]["donor"] for rows in full.swaps["HYLA"]) / 2
    assert headline.number(mean) in page
    assert page.count("with the sequence's own code, the donor's and another's") == 2
    assert in_full.sentence(full).startswith("Trained in full (3 steps, ")
    assert "The training had 3 steps." in page  # no word of models that come with polyhead: these do not
    assert "the scores on 112 sequences a split" in page  # 7 whole batches of 16, not the 120 that were asked for
    index = {str(entry.folder): {"digest": ph.digest(entry.run)} for group in full.found for entry in group.entries}
    monkeypatch.setattr(in_full.shipped, "models", lambda: index)
    in_full.section(ours := Page(), full)
    assert "These models come with polyhead (polyhead list models); their training had 3 steps." in "".join(ours.parts)
    bars = [trace for trace in out.figures[0]["data"] if trace["type"] == "bar"]
    assert [trace["name"] for trace in bars] == ["Softmax", "HYLA"]
    assert all(min(trace["y"]) >= -1 for trace in bars)
    assert sum(figure["maps"] is not None for figure in out.figures) == len(out.figures) - 1


def test_a_run_that_is_not_finished_is_not_trained_in_full(tmp_path):
    with refusing("softmax-0 is not finished, so it is not trained in full"):
        in_full.measure([fabricate(tmp_path, run_of("softmax"), None)], ["iid"], lambda line: None)


@pytest.mark.parametrize(
    ("own", "donor", "other", "says"),
    [
        (0.9, 0.8, 0.1, "the output follows the donor."),
        (0.9, 0.3, 0.0, "the output moves towards the donor, but does not follow it."),
        (0.9, 0.3, 0.25, "the output does not follow the donor."),
        (0.05, 0.04, 0.04, "the output does not follow the donor."),  # of a network that learned nothing
        (-0.4, -0.1, -0.15, "the output does not follow the donor."),
    ],
)
def test_what_came_of_a_swap_is_said(own, donor, other, says):
    scores = {"own": (-0.5, own), "donor": (donor, 0.0), "other": (other, 0.0)}
    rows = [
        {"code": code, "donor": to_donor, "own": to_own, "donor_se": 0.05, "own_se": 0.05}
        for code, (to_donor, to_own) in scores.items()
    ]
    line = in_full._moved("HYLA", [rows], "R²")
    assert says in line
    assert f"is −0.50, {donor:.2f}, {other:.2f} with".replace("-", "−") in line
    assert line.endswith(f"A sequence's own score is {own:.2f}.".replace("-", "−"))
