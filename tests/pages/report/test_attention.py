"""The report's section on single inputs shows the numbers of `analysis.look`, for runs of every task."""

import base64
import dataclasses
import io
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reported import LOSSES, Written, fabricate, grouped, keep, scored, written

import polyhead as ph
from polyhead.analysis import figures as still, look
from polyhead.analysis.probe import draws
from polyhead.analysis.relations import GroupLook, LayerLook
from polyhead.models.build import build
from polyhead.pages.report import attention as looks, glossary, headline as text, runs, writer as report
from polyhead.pages.report.attention_section import _packed, section
from polyhead.pages.report.page import STEPS, Page
from polyhead.tasks import KINDS, Maths, ObjectSorting, RelationalGames
from polyhead.tasks.relational_games import task as relational_games
from polyhead.train import load_model

DUAL = (ph.Softmax(1), ph.Relational(1, symbols=ph.SymbolicAttention(count=5), relations=3))
GAMES = RelationalGames(examples=20)
SMALL = {"Maths": {"question": 30, "answer": 6}, "RelationalGames": {"examples": 20}, "Sraven": {"features": 2}}


def task_of(kind: type[ph.Task]) -> ph.Task:
    return kind(**SMALL.get(kind.__name__, {}))


def model_of(task: ph.Task, heads: Any = DUAL) -> ph.TransformerConfig:
    inputs, outputs = task.ends
    same: dict[str, Any] = {"dim": 8, "layers": 1, "heads": heads, "max_length": 64}
    if task.source is not None:
        same |= {"causal": True, "encoder": ph.TransformerConfig(task.source, outputs, **same)}
    return ph.TransformerConfig(inputs, outputs, **same)


def made(root: pathlib.Path, task: ph.Task, model: Any = None, seed: int = 0, name: str = "run") -> pathlib.Path:
    """A finished run as the trainer leaves it, untrained."""
    run = ph.Run(name=name, task=task, model=model or model_of(task), train=ph.Train(steps=100), seed=seed)
    splits = [split for split in ("iid", "compositional", "novel") if split in task.splits]
    rows = [*LOSSES, *scored(20, task.metric, **dict.fromkeys(splits, 0.6))]
    return fabricate(root, run, dict.fromkeys(splits, (0.6, 0.01)), rows, checkpoint=True)


def drawn(task: ph.Task, split: str, seed: int = 0) -> ph.Batch:
    """The inputs that a report shows."""
    (batch,) = draws(task, split, 3, seed=seed, purpose="look")
    return batch


def values(one: dict[str, Any]) -> np.ndarray:
    return np.array(one["z"]) * one["limit"] / 1000


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Written]:
    folder = made(tmp_path_factory.mktemp("runs"), GAMES, name="dual")
    return folder, written([folder], folder.parent / "r.html")


def test_the_page_holds_what_look_finds(games: tuple[pathlib.Path, Written]) -> None:
    folder, page = games
    words, (found,) = page.words, page.held["looks"]
    _, model = load_model(folder)
    batch = drawn(GAMES, "novel")
    assert list(found["figures"]) == ["attention", "relations", "symbols"]
    assert len(found["examples"]) == 3
    for i, layers in enumerate(found["examples"]):
        (wanted,), (layer,) = look(model, batch, sample=i), layers
        assert [one["name"] for one in layer["attention"]] == ["head 1 (softmax)", "head 2 (relational)"]
        assert [one["name"] for one in layer["relations"]] == ["relation 1", "relation 2", "relation 3"]
        relational = wanted.groups[1]
        for one, group in zip(layer["attention"], wanted.groups, strict=True):
            np.testing.assert_allclose(values(one), group.attention[0], atol=1e-3)
            assert (one["signed"], one["limit"]) == (False, pytest.approx(group.attention.max(), abs=1e-5))
            assert one["rows"] == one["columns"] == list("123456789")
        for one, related in zip(layer["relations"], relational.relations, strict=True):
            np.testing.assert_allclose(values(one), related, atol=1e-3 * one["limit"])
            assert one["signed"] == (relational.relations.min() < 0)
        for head, one in enumerate(layer["symbols"]):
            np.testing.assert_allclose(values(one), relational.assignments[:, head], atol=1e-3)
            assert (one["columns"], len(one["z"][0])) == (None, 5)
    assert "Where does it look, and what does it compare?" in words
    said = [int(model(batch.inputs[i : i + 1]).argmax()) for i in range(3)]
    right, given = ("No", "Yes"), ("no", "yes")
    for i in range(3):
        told = f"{right[int(batch.targets[i, 0])]}; the model says {given[said[i]]}."
        assert f"{relational_games.QUESTIONS[GAMES.game]} {told}" in words


def test_guessing_is_a_row_a_line_and_a_sentence(games: tuple[pathlib.Path, Written]) -> None:
    words, opening = games[1].words, "Accuracy during training: dotted on fresh data, solid on unseen shapes. Grey: "
    assert games[1].figures[0]["caption"] == f"{opening}baselines without a network on unseen shapes."
    assert "Chance draws every answer at random 0.500 0.500 exact" in words
    assert "Guessing scores 0.500: Softmax 1 + Relational 1" in words
    assert "; ± is over test images" in words
    assert "sequences" not in words
    assert "Accuracy on unseen shapes; horizontal lines: Chance, Known pairs." in words
    lines = [shape for figure in games[1].figures for shape in figure["layout"].get("shapes", [])]
    ends = [tuple(shape[end] for end in ("x0", "x1", "y0", "y1")) for shape in lines]
    assert (0.5, 0.5, 0, 1) in ends  # across the results; then across the curves
    assert ends.count((0, 1, 0.5, 0.5)) == 5
    assert len(lines) == 7
    assert {shape["line"]["dash"] for shape in lines} == {"dash", "dot"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ph.tasks.Text], ids=lambda kind: kind.__name__)
def test_what_needs_no_relation_is_told_in_words(kind: type[ph.Task]) -> None:
    """Every floor that a task has, or why it has none beside guessing."""
    task = task_of(kind)
    names = set(task.floors("validation", sequences=20)) if hasattr(task, "floors") else set()
    assert names == set(task.words.floors)
    told = " ".join(f"{a} {b}" for a, b in glossary.definitions(task))
    beyond = {"known_pairs", "known_objects", "symbol_counts", "mix"} & names
    assert all(task.words.floors[name].label.lower() in told.lower().replace("mix ", "mixture ") for name in beyond)
    assert beyond or " floor " in told


@pytest.mark.parametrize(("name", "words"), [("known_pairs", "the pairs of objects"), ("known_objects", "one number")])
def test_the_best_floor_that_needs_no_relation(name: str, words: str, tmp_path: pathlib.Path) -> None:
    task = ph.tasks.PairwiseOrder()
    found = grouped([made(tmp_path, task)])
    table = {key: {"compositional": runs.summary([x], None)} for key, x in {"chance": 0.5, name: 0.9}.items()}
    (line,) = (line for line in text.verdict(found, table) if line.startswith("Without any relation"))
    assert words in line
    assert "scores 0.900" in line
    assert line.endswith("is below it.")


def test_splits_are_told_in_words_and_the_most_telling_one_is_the_headline(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path, GAMES)
    assert runs.headline(grouped([folder])) == "novel"
    result = json.loads((folder / "result.json").read_text())
    novel = result["scores"].pop("novel")
    (folder / "result.json").write_text(json.dumps(result))
    assert runs.headline(grouped([folder])) == "iid"
    result["scores"] = {f"novel_{shapes}": novel for shapes in ("hexominoes", "stripes")}
    (folder / "result.json").write_text(json.dumps(result))
    words = written([folder], tmp_path / "r.html").words
    for said in ("Novel hexominoes accuracy (one seed", "novel hexominoes accuracy", "on unseen shapes (hexominoes)"):
        assert said in words
    assert "novel_" not in words[: words.index("Every run, exactly")]
    (folder / "result.json").unlink()
    words = written([folder], tmp_path / "r.html").words  # the curves and floors of its own splits
    assert "Accuracy on unseen shapes; horizontal lines: Chance, Known pairs." in words
    assert "No floors" not in words


def test_splits_of_a_users_own_are_in_the_table_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = ("train", "validation", "larger", "iid")
    monkeypatch.setattr(RelationalGames, "splits", property(lambda self: splits))
    monkeypatch.setattr(RelationalGames, "floors", lambda self, *given, **options: {})
    run = ph.Run(name="own", task=GAMES, model=model_of(GAMES), train=ph.Train(steps=100))
    folder = fabricate(tmp_path, run, dict.fromkeys(splits, (0.6, 0.01)))
    assert runs.headline(grouped([folder])) == "larger"
    assert report.results_table([folder])[0] == ["", "iid", "larger"]
    beside = ["novel_x", "novel", "larger", "iid", "train"]
    assert runs.in_order(["train", "larger", "novel_x", "iid", "novel"], runs.HEADLINE) == beside


def test_the_image_is_in_the_page_with_its_patches_numbered(games: tuple[pathlib.Path, Written]) -> None:
    content = games[1].content
    images = re.findall(r'<image href="data:image/png;base64,([^"]+)"', content)
    assert len(images) == 3
    for image, pixels in zip(images, drawn(GAMES, "novel").inputs, strict=True):
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))))
        np.testing.assert_array_equal(shown, (pixels * 255).round().permute(1, 2, 0))
    numbers = re.findall(r"<text [^>]*>(\d+)</text>", content)
    assert numbers == [str(i + 1) for i in range(9)] * 3


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_run_of_any_task_can_be_shown(kind: type[ph.Task], tmp_path: pathlib.Path) -> None:
    task = task_of(kind)
    (one,) = looks.looks(grouped([made(tmp_path, task)]), lambda line: None)
    assert one.note == ""
    assert one.split == next(split for split in ("compositional", "novel", "iid") if split in task.splits)
    assert text.title([one.group]).partition(" on ")[2].startswith(text.split_words(task, one.split))
    assert len(one.examples) == 3
    assert all("the model says" in example.text for example in one.examples)
    packed = [_packed(looks.maps(layer)) for layer in one.examples[0].layers]
    assert all(part["attention"] for part in packed)
    assert ["relations" in part for part in packed] == ([True] if task.source is None else [True, True, False])
    assert json.dumps(packed, allow_nan=False)


def test_the_page_of_a_task_whose_codes_are_not_probed(tmp_path: pathlib.Path) -> None:
    page = written([made(tmp_path, Maths(question=30, answer=6))], tmp_path / "r.html")
    assert "symbols from a library) reaches exact match 0.60 on longer questions than in training" in page.words
    assert "right to the last character" in page.words
    assert page.words.count("No code maps and probes: ") == 1
    assert "Probe F1" not in page.words
    assert len(page.held["looks"]) == 1


def test_what_cannot_be_shown_says_why_in_a_line(tmp_path: pathlib.Path) -> None:
    folders = [
        made(tmp_path, GAMES, name="dual"),
        made(tmp_path, GAMES, ph.CoRelNetConfig(*GAMES.ends, dim=8), name="corelnet"),
        made(tmp_path, GAMES, model_of(GAMES, (ph.Softmax(2),)), name="damaged"),
        made(tmp_path, GAMES, model_of(GAMES, (ph.Linear(2),)), name="burst"),
    ]
    path = folders[2] / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    run, model = load_model(folders[3])
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.fill_(torch.inf)
    keep(folders[3], run, model)
    page = written(folders, tmp_path / "r.html")
    why = "corelnet-0: no attention maps (look: a model with attention was wanted but a CoRelNet came, without taps)"
    assert why in page.words
    assert "damaged-0: no attention maps (" in page.words
    assert "burst-0: no attention maps (its figures are not finite)" in page.words
    assert len(page.held["looks"]) == 1
    assert page.cells("CoRelNet")
    assert "model.layers" not in page.words.split("Learning curves")[0].split("settings that differ")[-1]


def test_one_seed_of_each_mechanism_and_relations_in_sight(tmp_path: pathlib.Path) -> None:
    folders = [made(tmp_path, GAMES, model_of(GAMES, (ph.Softmax(2),)), name="softmax")]
    folders += [made(tmp_path, GAMES, seed=seed, name="dual") for seed in (1, 2)]
    page = written(folders, tmp_path / "r.html")
    dual, softmax = page.held["looks"]
    first = page.content.index('id="look-1"')
    assert "Relational 1" in page.content[page.content.rindex("<h3>", 0, first) : first]
    assert page.content.rindex("<details><summary>Softmax, seed 0", 0, page.content.index('id="look-2"')) > first
    assert [list(one["figures"]) for one in (dual, softmax)] == [["attention", "relations", "symbols"], ["attention"]]
    _, model = load_model(folders[1])
    for i, (layer,) in enumerate(dual["examples"]):  # inputs of the run's own seed
        wanted = look(model, drawn(GAMES, "novel", seed=1), sample=i)[0].groups[0].attention
        np.testing.assert_allclose(values(layer["attention"][0]), wanted[0], atol=1e-3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("most", "cells", "examples", "left"),
    # 5 matrices of most by most, and most by 4 by 5 symbols, in each of at most three examples
    [(8, 3 * 480, 3, 8), (8, 3 * 480 - 1, 2, 8), (8, 480, 1, 8), (8, 479, 1, 4), (6, 3 * 300 - 1, 2, 6)],
)
def test_of_long_inputs_the_end_is_shown_and_less_of_it_where_there_is_much(
    most, cells, examples, left, monkeypatch, games
):
    found = grouped([games[0]])
    (whole,) = looks.looks(found, lambda line: None)
    monkeypatch.setattr(looks, "TOKENS", most)
    monkeypatch.setattr(looks, "CELLS", cells)
    (cut,) = looks.looks(found, lambda line: None)
    assert len(cut.examples) == examples
    section(out := Page(), [whole])
    assert "are shown" not in "".join(out.parts)
    section(out := Page(), [cut])
    assert f"Of sequences longer than {left} tokens the last {left} are shown." in "".join(out.parts)
    for example, full in zip(cut.examples, whole.examples, strict=False):
        (layer,), (all_of,) = example.layers, full.layers
        assert layer.receivers == layer.senders == all_of.receivers[-left:]
        for part, group in zip(layer.groups, all_of.groups, strict=True):
            np.testing.assert_array_equal(part.attention, group.attention[:, -left:, -left:])
        related, symbols = layer.groups[1].relations, layer.groups[1].assignments
        np.testing.assert_array_equal(related, all_of.groups[1].relations[:, -left:, -left:])
        np.testing.assert_array_equal(symbols, all_of.groups[1].assignments[-left:])


def test_matrices_of_a_kind_share_a_scale_and_small_numbers_keep_their_size() -> None:
    """A limit of 1.4e-6 was written as 1e-6, and all numbers of the matrix with it."""
    relations = np.array([[[-3.4, -1.0]], [[-0.5, -0.1]]]) * 1e-6
    group = GroupLook("relational", np.ones((1, 1, 2)), relations, None)
    found = looks.maps(LayerLook("layer 1", ("a",), ("b", "c"), (group,)))["relations"]
    assert [(one.limit, one.signed) for one in found] == [(pytest.approx(3.4e-6), True)] * 2
    for one, wanted in zip(_packed({"relations": found})["relations"], relations, strict=True):
        np.testing.assert_allclose(np.array(one["z"]) * one["limit"] / STEPS, wanted, atol=2e-9)


def test_still_pictures_of_every_layer(games, tmp_path, monkeypatch):
    folder, files = games[0], {}
    monkeypatch.setattr(still, "heat", lambda panels, path, **more: files.update({path.stem: (panels, more)}) or path)
    report.export([folder], tmp_path, formats=("svg",), progress=False)
    batch = drawn(GAMES, "novel")
    (wanted,) = look(load_model(folder)[1], batch)
    slug = "look-softmax-1-relational-1-3-relations-symbols-from-a-library-seed-0"
    assert {f"{slug}-{kind}-layer1" for kind in looks.KINDS} <= set(files)
    panels, more = files[f"{slug}-relations-layer1"]
    assert [title for title, *_ in panels] == [f"layer 1, relation {i}" for i in (1, 2, 3)]
    np.testing.assert_allclose(panels[2][1], wanted.groups[1].relations[2])
    image, rows, columns = more["picture"]
    np.testing.assert_allclose(image, batch.inputs[0].permute(1, 2, 0))
    assert (rows, columns, more["grouped"]) == (3, 3, False)


def test_questions_and_answers_are_written_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text not as the numbers of its tokens."""
    sorting, maths = ObjectSorting(length=4, examples=50), Maths(question=30, answer=6)
    (tmp_path / "text.txt").write_text("a <b>\n" * 40)
    text = ph.tasks.Text(str(tmp_path / "text.txt"), length=6, folder=str(tmp_path / "tokens"))

    def told(task: ph.Task, batch: ph.Batch, class_: int) -> str:
        outputs = torch.zeros(*batch.targets.shape, task.ends[1].count)
        outputs[..., class_] = 1.0
        return looks.describe(task, batch, outputs, 1)

    batch = drawn(sorting, "iid")
    order = " ".join(str(place + 1) for place in batch.targets[1].tolist())
    assert told(sorting, batch, 2) == f"Answer {order}; the model says 3 3 3 3."
    batch = drawn(maths, "compositional")
    question, answer = maths.texts(batch)[1]
    assert told(maths, batch, 0).startswith(f"{question} Answer {answer.replace('-', '−')}; the model says ")
    batch = drawn(text, "iid")
    shown = bytes(batch.inputs[1].tolist()).decode().replace("\0", "")  # which stands between documents
    following = chr(batch.targets[1, -1]).replace("\n", "\\n").replace("\0", "\\x00")
    assert told(text, batch, ord("z")) == f"“…{shown}” is followed by “{following}”; the model says “z”."
    one = dataclasses.replace(batch, inputs=batch.inputs[1:2])
    names = "".join(look(build(model_of(text)), one, task=text)[0].receivers)
    assert names.replace("␣", " ").replace("\\n", "\n").replace("\\x00", "") == shown
    monkeypatch.setattr(ObjectSorting, "asked", lambda *_: "Which?")
    monkeypatch.setattr(ObjectSorting, "written", lambda *_: "the X of Y")
    assert told(sorting, drawn(sorting, "iid"), 2) == "Which? The X of Y; the model says the X of Y."
