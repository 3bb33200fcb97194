"""Latent codes, attention and figures of a report, on runs of a few steps: the numbers are those of the analysis."""

import re
import xml.dom.minidom

import numpy as np
import pytest
from reported import TASK, plain, small, trained, written
from some import some

import polyhead as ph
from polyhead.analysis import look, probe_model, swap_codes, zero_heads
from polyhead.analysis.probe import draws
from polyhead.pages.report import attention, codes
from polyhead.tasks import RelationalGames, Sraven
from polyhead.train import load_model

RAVEN = Sraven(features=2, values=5)


@pytest.fixture(autouse=True, scope="module")
def _small():
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        patch.setattr(codes, "embed", lambda points, seed: points[:, :2])  # t-SNE takes its time
        yield


@pytest.fixture(scope="module")
def raven(tmp_path_factory):
    """Two seeds of HYLA on SRAVEN: their folders and models, the page and its figures as files."""
    root = tmp_path_factory.mktemp("runs")
    folders = [trained(root, RAVEN, "hyla", (ph.Hyla(3, dim=4, value_dim=4),), seed) for seed in (0, 1)]
    page = written(folders, root / "r.html", static=root / "figures")
    return folders, [load_model(folder)[1] for folder in folders], page, root / "figures"


def over_seeds(values):
    mean, error = np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5
    return f"{mean:.3f} ± {error:.3f}".replace("-", "−")


def test_probes_are_those_of_the_analysis_over_seeds(raven):
    _, models, page, _ = raven
    scores, chances = [], []
    for seed, model in enumerate(models):
        for row in probe_model(model, RAVEN, sequences=200, seed=seed):
            if (row["pairs"], row["layer"], row["target"]) == ("last_row", 1, "rule"):
                scores.append(row["f1"])
                chances.append(row["chance"])
    cells = page.cells("rule, pairs last_row, fixed, layer 2")
    assert cells == [over_seeds(scores), f"{np.mean(chances):.3f}"]


def test_zeroed_heads_are_those_of_the_analysis(raven):
    _, models, page, _ = raven
    rows = [zero_heads(model, RAVEN, sequences=30, seed=seed) for seed, model in enumerate(models)]
    assert page.cells("layer 2, all heads: fall") == [over_seeds([by_run[-1]["drop"] for by_run in rows])]


def test_swapped_codes_have_the_test_of_the_protocol(tmp_path):
    folders = [trained(tmp_path, TASK, "hyla", (ph.Hyla(4),), seed) for seed in range(5)]
    page = written(folders, tmp_path / "r.html")
    donor, other = [], []
    for seed, folder in enumerate(folders):
        rows = {row["code"]: row for row in swap_codes(load_model(folder)[1], TASK, pairs=20, seed=seed)}
        donor.append(rows["donor"]["donor"])
        other.append(rows["other"]["donor"])
    assert page.cells("the donor's") == [over_seeds(donor)]
    (row,) = re.findall(r"Does it follow the donor.*?</tbody>", page.content, flags=re.DOTALL)
    assert f"{np.mean(donor) - np.mean(other):.3f}".replace("-", "−") in plain("<" + row)


def test_every_figure_is_a_file_with_the_same_name(raven):
    _, _, page, figures = raven
    names = set(re.findall(r'<figure id="([^"]+)"', page.content))
    for ending in (".png", ".svg"):
        assert {path.stem for path in figures.iterdir() if path.suffix == ending} == names
    assert len(list(figures.iterdir())) == 2 * len(names)
    assert {"results", "curves-loss", "probes", "heads", "map-hyla-seed-0"} <= names
    assert "distribute-three</text>" in page.figure("map-hyla-seed-0")
    assert page.content.index(">Maps of the latent code</h2>") < page.content.index('<figure id="map-hyla-seed-0"')


def test_figures_are_well_formed_and_follow_the_theme_and_ids_are_unlike(raven):
    for svg in some(re.findall(r"<svg.*?</svg>", raven[2].content, flags=re.DOTALL)):
        xml.dom.minidom.parseString(svg)
        assert "var(--ink" in svg
    ids = re.findall(r'\bid="([^"]+)"', raven[2].content)
    assert len(ids) == len(set(ids))


def test_matrices_of_a_layer_are_those_of_look(tmp_path):
    task = RelationalGames(examples=20)
    heads = (ph.Softmax(1), ph.Relational(1, symbols=ph.SymbolicAttention(count=5), relations=3))
    folder = trained(tmp_path, task, "dual", heads, evaluate=("iid", "novel"))
    _, model = load_model(folder)
    (batch,) = draws(task, "novel", 2, seed=0, purpose="look")
    layer = look(model, batch, sample=1)[0]
    panels = attention.matrices(layer)
    assert [title for title, *_ in panels["attention"]] == ["head 1 (softmax)", "head 2 (relational)"]
    np.testing.assert_array_equal(panels["relations"][2][1], layer.groups[1].relations[2])
    np.testing.assert_array_equal(panels["symbols"][0][1], layer.groups[1].assignments[:, 0])
    page = written([folder], tmp_path / "r.html")
    assert "Input 2, layer 1: relations." in page.words


def test_a_run_without_codes_says_why(tmp_path):
    task = RelationalGames(examples=20)
    run = trained(tmp_path, task, "softmax", (ph.Softmax(2),), evaluate=("iid", "novel"))
    words = written([run], tmp_path / "r.html").words
    assert "softmax-0: no code maps and probes (relational games has no token that stands for what is asked)" in words
