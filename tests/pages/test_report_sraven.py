"""The report on SRAVEN runs, and figures as files: against the analysis computed by hand."""

import dataclasses
import html
import json
import pathlib
import re
import sys

import numpy as np
import pytest

import polyhead as ph
from polyhead.analysis import embed, figures as still, probe_model, purity, query_codes, similarity, zero_heads
from polyhead.pages.report import codes as report_codes, sections as report_sections, writer as report
from polyhead.tasks import FuzzyLogic, Sraven

RAVEN, FUZZY = Sraven(features=2, values=5), FuzzyLogic(variables=3, terms=2, length=8)
NAMES = ["constant", "+1", "+2", "−1", "−2", "sum", "difference", "distribute-three"]


def trained(task: ph.Task, root: pathlib.Path, name: str, heads: object, seed: int = 0) -> pathlib.Path:
    """The folder of a run of a few steps."""
    inputs, outputs = task.ends
    at = {"max_length": task.length, "positions": ph.RelativeBias()}
    model = ph.TransformerConfig(inputs, outputs, dim=12, layers=2, heads=(heads,), **at)
    train = ph.Train(steps=3, batch_size=8, warmup=1, eval_batches=1, eval_every=2, log_every=1)
    folder = root / f"{name}-{seed}"
    run = ph.Run(task=task, model=model, name=name, train=train, seed=seed, device="cpu", folder=str(folder))
    ph.train.run(run, progress=False)
    return folder


@pytest.fixture(scope="module")
def small() -> None:
    """Little of everything."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"POINTS": 60, "PROBED": 150, "ZEROED": 20, "NEIGHBOURS": 5, "SAMPLES": 3}.items():
            patch.setattr(report_codes, name, value)
        patch.setattr(report, "SEQUENCES", 100)
        patch.setattr(report_codes, "embed", lambda codes, method, seed: embed(codes, "pca"))  # t-SNE takes its time
        yield


@pytest.fixture(scope="module")
def folders(small: None, tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    root = tmp_path_factory.mktemp("runs")
    return [trained(RAVEN, root, "hyla", ph.Hyla(3)), trained(RAVEN, root, "hyla", ph.Hyla(3), 1)]


@pytest.fixture(scope="module")
def written(folders: list[pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """The page in plain words and its figures."""
    path = tmp_path_factory.mktemp("page") / "r.html"
    content = report.write(folders, path, progress=False).read_text(encoding="utf-8")
    start = content.index('<script type="application/json" id="figures">') + 45
    shown = json.loads(content[start : content.index("</script>", start)])["figures"]
    body = re.sub(r"<[^>]+>", " ", content[content.index("<header>") : start])
    captions = re.findall(r'id="(figure-\d+)".*?<figcaption>(.*?)</figcaption>', content[:start])
    named = {figure: html.unescape(caption) for figure, caption in captions}
    words = " ".join(html.unescape(body).replace("\xa0", " ").split())
    return words, [{**figure, "caption": named[figure["id"]]} for figure in shown]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not drawn: test_figures.py draws one of every kind."""

    def save(figure: object, path: pathlib.Path) -> pathlib.Path:
        path.touch()
        return path

    monkeypatch.setattr(still, "save", save)


def captioned(shown: list[dict], words: str) -> dict:
    """The first figure whose caption begins so."""
    return next(figure for figure in shown if figure["caption"].startswith(words))


def test_floors_ceiling_and_words_are_those_of_the_task(written: tuple[str, list[dict]]) -> None:
    words, shown = written
    floors = RAVEN.floors("compositional", sequences=100)
    for name, label in (("same_slot", "Same slot"), ("known_combinations", "Known combinations")):
        assert re.search(rf"{label} [^–]*?{floors[name].mean:.3f} ± {floors[name].standard_error:.3f}", words)
    assert f"A solver that knows the whole family scores {floors['ceiling'].mean:.3f}, the ceiling." in words
    lines = [shape["x0"] for shape in shown[0]["layout"]["shapes"]]
    assert lines == pytest.approx(
        [floors[n].mean for n in sorted(("known_combinations", "ceiling"), key=lambda n: floors[n].mean)]
    )
    assert "Can the rules be read off the latent code?" in words
    assert "Accuracy The share of sequences in which every symbol of the last panel is right." in words
    assert not re.search(r"\bterms?\b(?! of the)", words.split("What the words mean")[1])
    assert "Gaussian" not in words
    assert "novel" not in words


def test_both_views_are_probed(folders: list[pathlib.Path], written: tuple[str, list[dict]]) -> None:
    words, shown = written
    means: dict[tuple[str, int, str], list[float]] = {}
    for seed, folder in enumerate(folders):
        _, model = ph.train.load_model(folder)
        for row in probe_model(model, RAVEN, sequences=150, seed=seed):
            means.setdefault((row["pairs"], row["layer"], row["target"]), []).append(row["f1"])
    for view in ("self", "last_row"):
        figure = captioned(shown, f"Pairs “{view}”: macro F1")
        ticks = figure["layout"]["xaxis"]["ticktext"]
        assert ticks == [f"layer {i}<br>{t}" for t in ("rule", "target value") for i in (1, 2)]
        wanted = [np.mean(means[view, layer, target]) for target in ("rule", "target value") for layer in (0, 1)]
        assert figure["data"][0]["y"] == pytest.approx(wanted)
        error = np.std(means[view, 1, "rule"], ddof=1) / 2**0.5
        assert f"layer 2, rule pairs “{view}” {wanted[1]:.3f} ± {error:.3f}" in words
    assert "all sequences have the same query token" in words.lower()


def test_clusters_are_purities_of_the_mapped_codes(
    folders: list[pathlib.Path], written: tuple[str, list[dict]]
) -> None:
    _, shown = written
    found = []
    for seed, folder in enumerate(folders):
        _, model = ph.train.load_model(folder)
        layers, batch = query_codes(model, RAVEN, "compositional", 60, seed=seed, purpose="maps")
        labels = (batch.latents["query_rules"][:, -1], batch.targets[:, -1])
        found.append([purity(codes, y, neighbours=5)[0] for y in labels for codes in layers])
    figure = captioned(shown, "Pairs “self”: share of the nearest codes")
    assert figure["data"][0]["y"] == pytest.approx(np.mean(found, axis=0).tolist())


def test_similar_rules_and_codes_by_rule(folders: list[pathlib.Path], written: tuple[str, list[dict]]) -> None:
    _, shown = written
    _, model = ph.train.load_model(folders[0])
    mats = [
        figure for figure in shown if figure["caption"].startswith("Layer ") and figure["data"][0]["type"] == "heatmap"
    ]
    assert len(mats) == 2 * 2 * 2 * 2  # seeds, views, plain and centred, layers
    layers, batch = query_codes(model, RAVEN, "compositional", 60, seed=0, purpose="maps")
    rules = batch.latents["query_rules"][:, -1].numpy()
    for k, (centred, layer) in enumerate([(False, 0), (False, 1), (True, 0), (True, 1)]):
        classes, wanted = similarity(layers[layer], rules, centred=centred)
        np.testing.assert_allclose(np.array(mats[k]["data"][0]["z"]), wanted, atol=1e-4)
        names = [NAMES[i] for i in classes]
        assert mats[k]["layout"]["xaxis"]["ticktext"] == mats[k]["layout"]["yaxis"]["ticktext"] == names
    drawn = captioned(shown, "Codes of layer 2, pairs “self”: sequences")["data"][0]["z"]
    chosen = np.concatenate([np.flatnonzero(rules == rule)[:3] for rule in classes])
    np.testing.assert_allclose(np.array(drawn), layers[1][chosen].T, atol=1e-4)
    mean = captioned(shown, "Codes of layer 2, pairs “self”: the mean")["data"][0]["z"]
    np.testing.assert_allclose(np.array(mean)[:, 0], layers[1][rules == classes[0]].mean(0), atol=1e-4)
    plain = dataclasses.replace(RAVEN, permuted=False)
    layers, batch = query_codes(model, plain, "compositional", 60, pairs="last_row", seed=0, purpose="maps")
    classes, wanted = similarity(layers[0], batch.latents["rules"][:, -1])
    np.testing.assert_allclose(np.array(mats[4]["data"][0]["z"]), wanted, atol=1e-4)
    rows = captioned(shown, "Codes of layer 2, pairs “last_row”: the mean")["layout"]["yaxis"]["ticktext"]
    assert rows == [f"key {key}, head {head}" for key in (13, 15) for head in (1, 2, 3)]


def test_maps_are_coloured_by_value_and_by_rule(folders: list[pathlib.Path], written: tuple[str, list[dict]]) -> None:
    words, shown = written
    maps = [figure for figure in shown if figure["maps"]]
    assert [figure["caption"] for figure in maps] == ["by target", "by rule"] * 2 * 2 * 2
    _, model = ph.train.load_model(folders[0])
    _, batch = query_codes(model, RAVEN, "compositional", 60, seed=0, purpose="maps")
    assert maps[0]["data"][0]["marker"]["color"] == batch.targets[:, -1].tolist()
    assert maps[1]["data"][0]["text"] == [NAMES[i] for i in batch.latents["query_rules"][:, -1].tolist()]
    assert "Layer 2, pairs “last_row”" in words
    found = sorted({NAMES.index(word) for word in re.search(r"Rules: (.*?) HYLA", words)[1].split() if word in NAMES})
    assert found == sorted(set(batch.latents["query_rules"][:, -1].tolist()) | set(found))


def test_zeroed_heads(folders: list[pathlib.Path], written: tuple[str, list[dict]]) -> None:
    words, shown = written
    every = []
    for seed, folder in enumerate(folders):
        _, model = ph.train.load_model(folder)
        rows = zero_heads(model, RAVEN, sequences=20, seed=seed)
        every.append(rows)
        wanted = [[r["drop"] for r in rows if r["layer"] == i and r["head"] is not None] for i in (0, 1)]
        figure = captioned(shown, f"HYLA, seed {seed}: fall of accuracy")
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
    values, words, layers, heads = report_sections.drops(rows)
    assert np.isnan(values[0, 1])
    assert values[1].tolist() == [1.0, 1.1]
    assert (layers, heads) == (["layer 1", "layer 2"], ["1", "2"])
    assert words[1][1] == "layer 2, head 2: fall 1.100 ± 0.100"


# -------------------------------------------------------------------------------------------------------------- export
def test_every_figure_as_png_and_svg(quick: None, folders: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
    files = report.export(folders[:1], tmp_path / "new" / "figures", progress=False)
    assert {path.name for path in files} == {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    stems = ["results", "curves-loss", "curves-iid", "curves-compositional", "probes-self-fixed"]
    stems += ["probes-last_row-fixed", "clusters-self", "clusters-last_row", "heads-hyla-seed-0"]
    for view in ("self", "last_row"):
        stems += [f"alike-hyla-seed-0-{view}", f"codes-hyla-seed-0-{view}"]
        stems += [f"map-hyla-seed-0-{view}-layer{layer}" for layer in (1, 2)]
    stems += [f"look-hyla-seed-0-attention-layer{layer}" for layer in (1, 2)]
    assert {path.name for path in files} == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}


def test_exported_figures_hold_the_numbers(
    folders: list[pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, tuple] = {}
    for kind in ("results", "lines", "heat", "code_maps"):
        monkeypatch.setattr(
            still, kind, lambda data, path, **options: drawn.setdefault(path.stem, (data, options)) and path
        )
    report.export(folders, tmp_path, formats=("pdf",), progress=False)
    _, model = ph.train.load_model(folders[1])
    rows = zero_heads(model, RAVEN, sequences=20, seed=1)
    (panel,), options = drawn["heads-hyla-seed-1"]
    assert panel[1].tolist() == [[r["drop"] for r in rows if r["layer"] == i and r["head"] is not None] for i in (0, 1)]
    assert options["label"] == "fall of accuracy"
    panels, _ = drawn["probes-self-fixed"]
    assert [title for title, _, _ in panels] == ["rule", "target value"]
    rows = probe_model(model, RAVEN, sequences=150, seed=1)
    assert panels[1][1]["HYLA"][2][1] == rows[3]["f1"]
    assert panels[1][2]["chance"][2] == pytest.approx(rows[3]["chance"], abs=0.02)
    layers, batch = query_codes(model, RAVEN, "compositional", 60, seed=1, purpose="maps")
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


def test_page_and_files_of_fuzzy_logic_in_one_go(
    small: None, quick: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(FUZZY, tmp_path, "mixed", ph.Linear(2))
    counted: list[int] = []
    plain = report.analyse
    monkeypatch.setattr(report, "analyse", lambda found, say: counted.append(1) or plain(found, say))
    path = report.write([folder], tmp_path / "r.html", static=tmp_path / "files", progress=False)
    assert len(counted) == 1
    assert "Which rules share a code?" not in path.read_text(encoding="utf-8")
    stems = {file.stem for file in (tmp_path / "files").iterdir()}
    assert {"probes-self-varies", "probes-self-fixed", "heads-linear-seed-0", "map-linear-seed-0-self-layer2"} <= stems
    assert not [stem for stem in stems if stem.startswith(("alike", "codes"))]


def test_mistakes(folders: list[pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "baselines", None)  # noticed before the work
    with pytest.raises(ValueError, match=r"^export: unknown format 'gif' \(choose from png, svg, pdf\)$"):
        report.export(folders, tmp_path, formats=("gif",))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^report: .*file cannot be written \("):
        report.export(folders, tmp_path / "file", progress=False)
    with pytest.raises(ValueError, match=r"^report: .*file cannot be written \("):
        report.write(folders, tmp_path / "r.html", static=tmp_path / "file", progress=False)


def test_figures_that_cannot_be_drawn_are_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"^figures needs matplotlib: pip install 'polyhead\[report\]'"):
        report.write([], tmp_path / "r.html", static=tmp_path / "files", progress=False)
    assert not (tmp_path / "files").exists()
