"""The report on run folders made by hand: every number is known beforehand."""

import dataclasses
import html
import json
import math
import pathlib
import re

import pytest
import torch

import polyhead as ph
from polyhead.config import save, stream
from polyhead.pages.report import codes as report_codes, headline as report_text, runs as report_data, writer as report
from polyhead.pages.report.runs import Summary
from polyhead.tasks import FuzzyLogic
from polyhead.tasks.task import Score
from polyhead.train.store.checkpoint import save_checkpoint

TASK = FuzzyLogic(variables=3, terms=2, length=10)
HEADS = {"softmax": ph.Softmax(4), "hyla": ph.Hyla(4), "linear": ph.Linear(4)}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_codes, "POINTS", 40)
    monkeypatch.setattr(report_codes, "PROBED", 200)
    monkeypatch.setattr(report_codes, "ZEROED", 30)
    monkeypatch.setattr(report, "SEQUENCES", 300)


def run_of(kind: str, seed: int, task: FuzzyLogic = TASK, lr: float = 1e-3) -> ph.Run:
    inputs, outputs = task.ends
    heads = (HEADS[kind],)
    model = ph.TransformerConfig(inputs, outputs, dim=16, layers=2, heads=heads, max_length=task.length)
    return ph.Run(name=kind, task=task, model=model, train=ph.Train(steps=100, lr=lr), seed=seed)


def fabricate(root: pathlib.Path, run: ph.Run, r2: float | None, *, checkpoint: bool = False) -> pathlib.Path:
    """A run folder as the trainer writes it; `r2` None leaves it unfinished."""
    folder = root / f"{run.name}-{run.seed}"
    folder.mkdir(parents=True)
    save(run, folder / "config.json")
    rows = [{"kind": "train", "step": s, "loss": 1.0 / s, "lr": 1e-3} for s in (20, 40, 60)]
    rows += [{"kind": "eval", "step": 60, "split": s, "loss": 0.1, "r2": 0.4} for s in ("iid", "compositional")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if r2 is not None:
        iid = {"loss": 0.1, "r2": 0.9, "r2_se": 0.011}
        result = {"name": run.name, "digest": ph.digest(run), "steps": 100, "seconds": 60.0 + run.seed}
        result |= {"parameters": 1234, "scores": {"iid": iid, "compositional": {**iid, "r2": r2, "r2_se": 0.022}}}
        result |= {"command": f"polyhead train {run.name} <fast>", "environment": {"torch": "2.0"}}
        (folder / "result.json").write_text(json.dumps(result))
    if checkpoint:
        torch.manual_seed(run.seed)
        model = ph.Transformer(run.model)
        optimiser = torch.optim.AdamW(model.parameters())
        save_checkpoint(
            folder, model, optimiser, {"digest": ph.digest(run), "step": 100, "seconds": 1.0, "scale": None}
        )
    return folder


def folders(tmp_path: pathlib.Path, scores: dict[str, list[float]], *, checkpoint: bool = False) -> list[pathlib.Path]:
    return [
        fabricate(tmp_path / "runs", run_of(kind, seed), r2, checkpoint=checkpoint)
        for kind, values in scores.items()
        for seed, r2 in enumerate(values)
    ]


def written(given: list[pathlib.Path], tmp_path: pathlib.Path) -> tuple[str, list[dict]]:
    """The page without its scripts, tags kept, and its figures."""
    text = report.write(given, tmp_path / "out" / "report.html", progress=False).read_text(encoding="utf-8")
    start = text.index('<script type="application/json" id="figures">') + 45
    figures = json.loads(text[start : text.index("</script>", start)])["figures"]
    return text[text.index("<header>") : start], figures


def plain(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("\xa0", " ").split())


def cells(page: str, name: str) -> list[str]:
    """The cells of the table row that starts with `name`."""
    row = next(r for r in page.split("<tr")[1:] if name in plain("<" + r.split("</th>")[0]))
    return [plain("<td" + cell) for cell in row.split("</tr>")[0].split("<td")[1:]]


def grouped(tmp_path: pathlib.Path, scores: dict[str, list[float]]) -> list[report_data.Group]:
    return report_data.groups(report_data.read(folders(tmp_path, scores)))


def axis(figures: list[dict], words: str) -> dict:
    """The first figure whose vertical axis says `words`."""
    return next(f for f in figures if words in str(f["layout"]["yaxis"]))


# ------------------------------------------------------------------------------------------------------------- numbers
def test_table_has_the_mean_and_standard_error_over_seeds(tmp_path: pathlib.Path) -> None:
    page, _ = written(folders(tmp_path, {"softmax": [0.7, 0.72, 0.77], "hyla": [0.5, 0.5, 0.5]}), tmp_path)
    # mean .73, deviations -.03 -.01 .04: variance .0026 / 2, error sqrt(.0013 / 3)
    assert cells(page, "Softmax") == ["0.900 ± 0.000", "0.730 ± 0.021", "3 seeds", "1,234", "61"]
    assert cells(page, "HYLA") == ["0.900 ± 0.000", "0.500 ± 0.000", "3 seeds", "1,234", "61"]


def test_one_seed_shows_the_error_over_sequences_and_says_so(tmp_path: pathlib.Path) -> None:
    page, _ = written(folders(tmp_path, {"softmax": [0.7], "hyla": [0.5]}), tmp_path)
    assert cells(page, "Softmax") == ["0.900 ± 0.011", "0.700 ± 0.022", "one seed", "1,234", "60"]
    text = plain(page)
    assert "± is over test sequences: with one seed each, other seeds may differ." in text
    assert "the order of two mechanisms may change with the next seed" in text
    assert "Softmax is ahead on unseen combinations in these runs (R² 0.70)" in text
    assert "beats" not in text


def test_floors_and_ceiling_are_rows_and_lines(tmp_path: pathlib.Path) -> None:
    page, figures = written(folders(tmp_path, {"softmax": [0.7, 0.71]}), tmp_path)
    floors = TASK.floors("compositional", sequences=300)
    for name, label in (("gaussian_process", "Gaussian process"), ("ridge", "Ridge"), ("ceiling", "Exact ceiling")):
        score = floors[name]
        wanted = f"{score.mean:.3f} ± {score.standard_error:.3f}".replace("-", "−")
        assert cells(page, label)[1] == wanted
        assert cells(page, label)[2] == "300 sequences"
    lines = [shape["x0"] for shape in figures[0]["layout"]["shapes"]]
    for name in ("gaussian_process", "ceiling"):
        assert any(line == pytest.approx(floors[name].mean) for line in lines)
    heights = [shape["y0"] for shape in axis(figures, "compositional R²")["layout"]["shapes"]]
    assert sorted(heights) == pytest.approx(sorted(score.mean for score in floors.values()))


def test_floors_of_several_split_seeds_are_their_mean(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is that of `Score.over`, of means that are near or far apart; what is known exactly has none."""
    given = {0: (0.4, 0.03, 150), 1: (0.42, 0.04, 150)}
    apart = {0: (0.4, 0.03, 150), 1: (0.6, 0.04, 150)}

    def floors(task: FuzzyLogic, split: str, *, sequences: int) -> dict[str, Score]:
        assert (split, sequences) == ("iid", 150)
        return {
            "drawn": Score(*given[task.split_seed]),
            "apart": Score(*apart[task.split_seed]),
            "exact": Score(0.5 + task.split_seed, 0.0, 0),
        }

    monkeypatch.setattr(FuzzyLogic, "floors", floors)
    tasks = [dataclasses.replace(TASK, split_seed=seed) for seed in (0, 1)]
    runs = [run_of(kind, i, task) for kind in ("softmax", "hyla") for i, task in enumerate(tasks)]
    found = report_data.groups(report_data.read([fabricate(tmp_path, run, 0.5) for run in runs]))
    table = report_data.baselines(found, ["iid"], sequences=300, progress=lambda line: None)
    assert table["drawn"]["iid"].mean == pytest.approx(0.41)
    assert table["drawn"]["iid"].error == pytest.approx((0.03**2 + 0.04**2) ** 0.5 / 2)
    assert table["drawn"]["iid"].values == (0.4, 0.42)
    assert table["apart"]["iid"].error == pytest.approx(0.1)
    assert table["exact"]["iid"] == Summary(1.0, None, (0.5, 1.5), "sequences")


def test_curves_are_the_rows_of_the_metrics(tmp_path: pathlib.Path) -> None:
    _, figures = written(folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]}), tmp_path)
    loss = axis(figures, "training loss")
    steps, losses = [20, 40, 60], [1 / 20, 1 / 40, 1 / 60]
    assert [(t["name"], t["x"], t["y"]) for t in loss["data"]] == [(n, steps, losses) for n in ("Softmax", "HYLA")]
    assert [t["line"]["color"] for t in loss["data"]] == ["#0072b2", "#009e73"]


# ------------------------------------------------------------------------------------------------------------ headline
@pytest.mark.parametrize(
    ("scores", "headline"),
    [
        (
            {"softmax": [0.7, 0.71, 0.72], "hyla": [0.5, 0.51, 0.52]},
            "Softmax beats HYLA on unseen combinations (R² 0.71)",
        ),
        (
            {"hyla": [0.7, 0.71, 0.72], "softmax": [0.5, 0.51, 0.52]},
            "HYLA beats Softmax on unseen combinations (R² 0.71)",
        ),
        (
            {"hyla": [0.66, 0.68, 0.72], "softmax": [0.6, 0.65, 0.7]},  # p = 0.35
            "HYLA is ahead on unseen combinations (R² 0.69), but the seeds do not settle it",
        ),
        (
            {"hyla": [0.70, 0.71, 0.72], "softmax": [0.69, 0.72, 0.71], "linear": [0.1, 0.11, 0.12]},
            "HYLA beats Linear on unseen combinations (R² 0.71); Softmax is too close to call",
        ),
        ({"hyla": [0.9], "softmax": [0.1, 0.1, 0.1]}, "HYLA is ahead on unseen combinations in these runs (R² 0.90)"),
        ({"linear": [0.3]}, "Linear reaches R² 0.30 on unseen combinations"),
    ],
)
def test_headline_claims_what_the_seeds_carry(tmp_path: pathlib.Path, scores: dict, headline: str) -> None:
    assert report_text.title(grouped(tmp_path, scores)) == headline


def test_welch_by_hand() -> None:
    """t = (mean a - mean b) / sqrt(va / na + vb / nb), Welch's degrees of freedom, Student's density integrated."""
    va, vb = 0.01 / 3, 0.02 / 2
    t, freedom = 0.3 / math.sqrt(va + vb), (va + vb) ** 2 / (va**2 / 2 + vb**2 / 1)
    x = torch.linspace(-t, t, 20_001, dtype=torch.float64)
    density = torch.exp(torch.distributions.StudentT(torch.tensor(freedom, dtype=torch.float64)).log_prob(x))
    a = Summary(0.6, va**0.5, (0.5, 0.7, 0.6), "seeds")
    b = Summary(0.3, vb**0.5, (0.2, 0.4), "seeds")
    assert report_text.p_value(a, b) == pytest.approx(1 - float(torch.trapezoid(density, x)), abs=1e-6)
    assert report_text.p_value(a, Summary(0.1, 0.1, (0.1,), "sequences")) is None
    sure, same = Summary(0.4, 0.0, (0.4, 0.4), "seeds"), Summary(0.4, 0.0, (0.4, 0.4, 0.4), "seeds")
    assert report_text.p_value(sure, same) == 1.0  # nothing spreads
    assert report_text.p_value(sure, Summary(0.5, 0.0, (0.5, 0.5), "seeds")) == 0.0


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (0.90, "Softmax is above it."),
        (0.53, "Softmax is above it."),
        (0.52, "Softmax is level with it, so no score here is evidence of composition."),  # 1.7 joint errors above
        (0.20, "Softmax is below it, so no score here is evidence of composition."),
    ],
)
def test_scores_are_set_against_the_best_floor(tmp_path: pathlib.Path, score: float, sentence: str) -> None:
    found = grouped(tmp_path, {"softmax": [score - 0.01, score, score + 0.01]})
    means = {"ridge": 0.3, "gaussian_process": 0.5, "ceiling": 0.99}
    table = {name: {"compositional": Summary(m, 0.01, (m,), "sequences")} for name, m in means.items()}
    text = " ".join(report_text.verdict(found, table))
    assert f"(Gaussian process) scores 0.500: {sentence}" in text
    assert "scores 0.990, the ceiling" in text
    assert f"falls by {0.9 - score:.3f} for Softmax" in text
    first, further = report_text.opening(found, table)
    assert len(first) <= 3
    assert sorted([*first, *further]) == sorted([*report_text.course(found), *report_text.verdict(found, table)])
    assert [words in line for words, line in zip(("falls by", "scores 0.500"), first[1:], strict=True)] == [True, True]


# ------------------------------------------------------------------------------------------------------ codes, probes
def test_maps_and_probes_of_every_layer(tmp_path: pathlib.Path) -> None:
    made = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]}, checkpoint=True)
    page, figures = written(made, tmp_path)
    maps = [f for f in figures if f["maps"]]
    assert len(maps) == 2 * 2 * 4
    assert all(len(f["maps"][method][i]) == 40 for f in maps for method in ("tsne", "pca") for i in (0, 1))
    rows = [ph.analysis.probe_model(ph.train.load_model(folder)[1], TASK, sequences=200, seed=0) for folder in made]
    wanted = [r for by in rows for r in by if (r["query"], r["layer"], r["target"]) == ("fixed", 1, "term 2")]
    numbers = wanted[1]["f1"], sum(row["chance"] for row in wanted) / 2
    assert cells(page, "layer 2, term 2 one query")[1:] == [f"{number:.3f}" for number in numbers]
    assert "scored on 200 of unseen combinations" in plain(page)


def test_maps_are_of_unseen_combinations_with_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], report_codes.query_codes

    def watched(model, task, split, sequences, *, pairs, seed, purpose):
        seen.append((task.inputs, split, pairs, purpose))
        return original(model, task, split, sequences, pairs=pairs, seed=seed, purpose=purpose)

    monkeypatch.setattr(report_codes, "query_codes", watched)
    found = report_codes.code_maps(ph.Transformer(run_of("hyla", 0).model), TASK, points=60)
    assert seen == [("fixed_context", "compositional", ((-1, -1),), "maps")]
    labels = found[0].labels
    assert list(labels) == ["function", "term 1", "term 2"]
    pairs = list(zip(labels["term 1"].tolist(), labels["term 2"].tolist(), strict=True))
    assert set(pairs) <= {tuple(row) for row in TASK.functions("compositional").tolist()}
    numbered = set(zip(pairs, labels["function"].tolist(), strict=True))
    assert len(numbered) == len(set(pairs)) == len(set(labels["function"].tolist()))


def test_probe_streams_are_their_own() -> None:
    """No stream of the probes or maps is one that training or evaluation draws from."""
    for split in ("iid", "compositional"):
        name = f"{TASK.name}/{split}"
        used = {stream(0, name, step) for step in range(50)}
        assert not used & {
            stream(0, f"{name}/{purpose}", step)
            for purpose in ("probe", "queries", "maps", "zero")
            for step in range(50)
        }


# -------------------------------------------------------------------------------------------- unfinished, damaged, odd
def test_unfinished_runs_show_curves_only(tmp_path: pathlib.Path) -> None:
    made = [*folders(tmp_path, {"softmax": [0.7]}), fabricate(tmp_path / "runs", run_of("hyla", 0), None)]
    page, figures = written(made, tmp_path)
    assert "hyla-0 is unfinished (60 of 100 steps): curves only, not in the table." in plain(page)
    assert "Softmax reaches" in plain(page)
    assert [trace["name"] for trace in axis(figures, "training loss")["data"]] == ["Softmax", "HYLA"]
    with pytest.raises(StopIteration):
        cells(page, "HYLA")


def test_no_finished_run_at_all(tmp_path: pathlib.Path) -> None:
    page, _ = written([fabricate(tmp_path / "runs", run_of("hyla", 0), None)], tmp_path)
    assert "No finished run with a score on unseen combinations yet" in plain(page)


def test_torn_rows_and_missing_or_damaged_checkpoints_are_noted(tmp_path: pathlib.Path) -> None:
    made = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]}, checkpoint=True)
    with (made[0] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    (made[0] / "checkpoint.safetensors").unlink()
    path = made[1] / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    page, figures = written(made, tmp_path)
    text = plain(page)
    assert "softmax-0: 1 of 6 lines of metrics.jsonl cannot be read." in text
    assert "softmax-0: no code maps and probes (" in text
    assert "hyla-0: no code maps and probes (" in text
    assert not [f for f in figures if f["maps"]]


def test_a_run_that_diverged_is_noted_and_not_ranked(tmp_path: pathlib.Path) -> None:
    page, _ = written(folders(tmp_path, {"softmax": [math.nan], "hyla": [0.6]}), tmp_path)
    assert "softmax-0 has scores that are not finite" in plain(page)
    assert "HYLA reaches R² 0.60" in plain(page)
    assert cells(page, "Softmax")[1] == "–"


def test_the_same_run_twice_counts_once(tmp_path: pathlib.Path) -> None:
    first = fabricate(tmp_path / "a", run_of("hyla", 0), 0.6)
    page, _ = written([first, fabricate(tmp_path / "b", run_of("hyla", 0), 0.6)], tmp_path)
    assert "hyla-0 is the same run as hyla-0 and counts once." in plain(page)
    assert cells(page, "HYLA")[2] == "one seed"


@pytest.mark.parametrize("finished_first", [True, False])
def test_of_the_same_run_twice_the_finished_one_counts(tmp_path: pathlib.Path, finished_first: bool) -> None:
    made = [fabricate(tmp_path / "a", run_of("hyla", 0), 0.6), fabricate(tmp_path / "b", run_of("hyla", 0), 0.6)]
    (made[finished_first] / "result.json").unlink()
    (entry,) = report_data.read(made)
    assert (entry.folder, entry.result is None) == (made[not finished_first], False)


def test_variants_are_told_apart_and_unequal_training_is_said(tmp_path: pathlib.Path) -> None:
    made = [
        fabricate(tmp_path / "a", run_of("hyla", 0, lr=1e-3), 0.6),
        fabricate(tmp_path / "b", run_of("hyla", 0, lr=3e-3), 0.7),
        fabricate(tmp_path / "c", run_of("hyla", 1, dataclasses.replace(TASK, split_seed=1), lr=3e-3), 0.8),
    ]
    found = report_data.groups(report_data.read(made))
    assert [(group.label, len(group.entries)) for group in found] == [("HYLA · lr 0.001", 1), ("HYLA · lr 0.003", 2)]
    assert report_data.unequal(found) == ["train.lr: 0.001 (HYLA · lr 0.001), 0.003 (HYLA · lr 0.003)"]


def test_mechanisms_are_named() -> None:
    def name(*heads: object) -> str:
        run = run_of("hyla", 0)
        return report_data.mechanism(dataclasses.replace(run, model=dataclasses.replace(run.model, heads=heads)))

    assert name(ph.Hyla(4)) == "HYLA"
    assert name(ph.Linear(4, normalise="rms_heads")) == "Linear (normalise rms_heads)"
    assert name(ph.Softmax(2), ph.Hyla(2, value_depth=2)) == "Softmax 2 + HYLA 2 (value depth 2)"
    assert name((ph.Softmax(4),), (ph.Hyla(4),)) == "Softmax, then HYLA"
    assert name(ph.Softmax(2), ph.Relational(2, relations=3)) == "Softmax 2 + Relational 2 (3 relations)"
    assert name(ph.Relational(4, symbols=ph.RelativeSymbols())) == "Relational (symbols by offset)"
    neighbours = ph.Relational(1, symmetric=True, relation_init="package", symbols=ph.RelationalSymbols())
    said = "Relational 1 (symmetric, relation init package, symbols by neighbours)"
    assert name(ph.Hyla(3), neighbours) == f"HYLA 3 + {said}"


def test_mistakes_are_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folders(tmp_path, {"softmax": [0.7], "hyla": [0.6]})
    other = fabricate(tmp_path / "x", run_of("linear", 0, dataclasses.replace(TASK, length=12)), 0.5)
    cases = {
        r"report: at least one run folder was wanted but none came": [],
        r"report: .*nowhere is not a run folder": [tmp_path / "nowhere"],
        r"report: runs of one task were wanted but length is 10 in softmax-0 and 12 in linear-0": [*made, other],
    }
    for text, given in cases.items():
        with pytest.raises(ValueError, match=f"^{text}$"):
            report.write(given, tmp_path / "r.html", progress=False)
    (made[0] / "result.json").write_text('{"name": "soft')
    with pytest.raises(ValueError, match=r"result\.json: not a result"):
        report.write(made, tmp_path / "r.html", progress=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(report, "baselines", None)  # noticed before the work
    for place in (tmp_path / "file" / "r.html", tmp_path):
        with pytest.raises(ValueError, match=r"^report: .* cannot be written \("):
            report.write(made[1:], place, progress=False)
    assert not (tmp_path / "r.html").exists()


# ---------------------------------------------------------------------------------------------------------------- page
def test_one_file_that_asks_for_nothing(tmp_path: pathlib.Path) -> None:
    made = folders(tmp_path, {"softmax": [0.7]})
    path = report.write(made, tmp_path / "r.html", title="<b>A & B</b>", progress=False)
    text = path.read_text(encoding="utf-8")
    assert text.count("* plotly.js v") == 1
    outside = text[: text.index("<script")]
    assert set(re.findall(r'(?:src|href)="([^"#]+)', outside)) == {"data:,"}
    assert "default-src 'none'" in outside
    assert "&lt;b&gt;A &amp; B&lt;/b&gt;" in outside
    assert "<b>A" not in outside
    assert "polyhead train softmax &lt;fast&gt;" in outside
    assert plain(outside).count('"kind": "FuzzyLogic"') == 1
    assert ph.digest(run_of("softmax", 0)) in outside


def test_progress_goes_to_standard_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = folders(tmp_path, {"softmax": [0.7]})
    path = report.write(made, tmp_path / "r.html")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"report: {path} (" in printed.err
    report.write(made, path, progress=False)
    assert capsys.readouterr().err == ""
