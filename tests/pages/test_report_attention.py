"""The report's section on single inputs shows the numbers of `analysis.look`, for runs of every task."""

import base64
import dataclasses
import html
import json
import pathlib
import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

import polyhead as ph
from polyhead.analysis import figures as still, look
from polyhead.analysis.probe import draws
from polyhead.config import save
from polyhead.models.build import build
from polyhead.pages.report import (
    attention as report_looks,
    attention_section as report_look_section,
    glossary as report_terms,
    headline as report_text,
    runs as report_data,
    writer as report,
)
from polyhead.pages.report.runs import groups, headline, mechanism, read
from polyhead.tasks import KINDS, Maths, ObjectSorting, RelationalGames, SetCards
from polyhead.tasks.relational_games import task as relational_games
from polyhead.train import load_model
from polyhead.train.store.checkpoint import save_checkpoint

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


def fabricate(root: pathlib.Path, task: ph.Task, model: Any, seed: int = 0, name: str = "run") -> pathlib.Path:
    """A finished run as the trainer leaves it, untrained."""
    run = ph.Run(name=name, task=task, model=model, train=ph.Train(steps=10), seed=seed)
    folder = root / f"{name}-{seed}"
    folder.mkdir(parents=True)
    save(run, folder / "config.json")
    splits = [split for split in ("iid", "compositional", "novel") if split in task.splits]
    scores = {split: {"loss": 0.1, task.metric: 0.6, f"{task.metric}_se": 0.01} for split in splits}
    rows = [{"kind": "train", "step": s, "loss": 1.0 / s, "lr": 1e-3} for s in (1, 2)]
    rows += [{"kind": "eval", "step": 2, "split": split, **scores[split]} for split in splits]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"name": name, "digest": ph.digest(run), "steps": 10, "seconds": 1.0, "parameters": 9, "scores": scores}
    (folder / "result.json").write_text(json.dumps({**result, "command": "polyhead", "environment": {}}))
    torch.manual_seed(seed)
    made = build(model)
    state = {"digest": ph.digest(run), "step": 10, "seconds": 1.0, "scale": None}
    save_checkpoint(folder, made, torch.optim.AdamW(made.parameters()), state)
    return folder


def written(folders: list[pathlib.Path], path: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """The page in plain words, and what its scripts read."""
    content = report.write(folders, path, progress=False).read_text(encoding="utf-8")
    start = content.index('<script type="application/json" id="figures">') + 45
    held = json.loads(content[start : content.index("</script>", start)].replace("<\\/", "</"))
    body = re.sub(r"<[^>]+>", " ", content[content.index("<header>") : start])
    return " ".join(html.unescape(body).split()), held


def values(one: dict[str, Any]) -> np.ndarray:
    return np.array(one["z"]) * one["limit"] / 1000


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str, dict[str, Any]]:
    folder = fabricate(tmp_path_factory.mktemp("runs"), GAMES, model_of(GAMES), name="dual")
    return folder, *written([folder], folder.parent / "r.html")


def test_the_page_holds_what_look_finds(games: tuple[pathlib.Path, str, dict[str, Any]]) -> None:
    folder, words, held = games
    (found,) = held["looks"]
    _, model = load_model(folder)
    (batch,) = draws(GAMES, "novel", 3, seed=0, purpose="look")
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


def test_guessing_is_a_row_a_line_and_a_sentence(games: tuple[pathlib.Path, str, dict[str, Any]]) -> None:
    _, words, held = games
    assert "Chance draws every answer at random 0.500 0.500 exact" in words
    assert "Guessing scores 0.500: Softmax 1 + Relational 1" in words
    assert "; ± is over test images" in words
    assert "sequences" not in words
    assert "Accuracy on unseen shapes; horizontal lines: Chance, Known pairs." in words
    lines = [shape for figure in held["figures"] for shape in figure["layout"].get("shapes", [])]
    ends = [tuple(shape[end] for end in ("x0", "x1", "y0", "y1")) for shape in lines]
    assert (
        0.5,
        0.5,
        0,
        1,
    ) in ends  # across the results; then across the curves
    assert ends.count((0, 1, 0.5, 0.5)) == 5
    assert len(lines) == 7
    assert {shape["line"]["dash"] for shape in lines} == {"dash", "dot"}


@pytest.mark.parametrize("task", [GAMES, SetCards(), ph.tasks.PairwiseOrder(), ph.tasks.Images()], ids=lambda t: t.name)
def test_chance_is_the_mean_over_all_constant_answers(task: Any) -> None:
    batch, classes = task.batch("validation", 20, seed=0, step=0), task.ends[1].count
    answers = torch.eye(classes)[:, None, None].expand(-1, 20, 1, -1)
    scores = [task.metrics(answer, batch)["accuracy"].mean().item() for answer in answers]
    chance = task.floors("validation")["chance"]
    assert chance.mean == pytest.approx(sum(scores) / classes)
    with pytest.raises(ValueError, match="unknown split 'ood'"):
        task.floors("ood")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ph.tasks.Text], ids=lambda kind: kind.__name__)
def test_what_needs_no_relation_is_told_in_words(kind: type[ph.Task]) -> None:
    """Every floor that a task has, or why it has none beside guessing."""
    task = task_of(kind)
    names = set(task.floors("validation", sequences=20)) if hasattr(task, "floors") else set()
    assert names == set(task.words.floors)
    told = " ".join(f"{a} {b}" for a, b in report_terms.definitions(task))
    beyond = {"known_pairs", "known_objects", "symbol_counts", "mix"} & names
    assert all(task.words.floors[name].label.lower() in told.lower().replace("mix ", "mixture ") for name in beyond)
    assert beyond or " floor " in told


@pytest.mark.parametrize(("name", "words"), [("known_pairs", "the pairs of objects"), ("known_objects", "one number")])
def test_the_best_floor_that_needs_no_relation(name: str, words: str, tmp_path: pathlib.Path) -> None:
    task = ph.tasks.PairwiseOrder()
    found = groups(read([fabricate(tmp_path, task, model_of(task))]))
    table = {
        key: {"compositional": report_data.Summary(mean, None, (mean,), "sequences")}
        for key, mean in {"chance": 0.5, name: 0.9}.items()
    }
    (line,) = (line for line in report_text.verdict(found, table) if line.startswith("Without any relation"))
    assert words in line
    assert "scores 0.900" in line
    assert line.endswith("is below it.")


def test_splits_are_told_in_words(tmp_path: pathlib.Path) -> None:
    folder = fabricate(tmp_path, GAMES, model_of(GAMES))
    result = json.loads((folder / "result.json").read_text())
    result["scores"] = {f"novel_{shapes}": result["scores"]["novel"] for shapes in ("hexominoes", "stripes")}
    (folder / "result.json").write_text(json.dumps(result))
    words, _ = written([folder], tmp_path / "r.html")
    for said in ("Novel hexominoes accuracy (one seed", "novel hexominoes accuracy", "on unseen shapes (hexominoes)"):
        assert said in words
    assert "novel_" not in words[: words.index("Every run, exactly")]


def test_the_image_is_in_the_page_with_its_patches_numbered(games: tuple[pathlib.Path, str, dict[str, Any]]) -> None:
    folder, *_ = games
    content = (folder.parent / "r.html").read_text(encoding="utf-8")
    images = re.findall(r'<image href="data:image/png;base64,([^"]+)"', content)
    (batch,) = draws(GAMES, "novel", 3, seed=0, purpose="look")
    assert len(images) == 3
    for image, pixels in zip(images, batch.inputs, strict=True):
        np.testing.assert_array_equal(decoded(base64.b64decode(image)), (pixels * 255).round().permute(1, 2, 0))
    numbers = re.findall(r"<text [^>]*>(\d+)</text>", content)
    assert numbers == [str(i + 1) for i in range(9)] * 3


def decoded(file: bytes) -> np.ndarray:
    """The pixels of a PNG file of eight bits and three colours, without filters."""
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    place, parts = 8, {}
    while place < len(file):
        (size,) = struct.unpack(">I", file[place : place + 4])
        name, data = file[place + 4 : place + 8], file[place + 8 : place + 8 + size]
        assert struct.unpack(">I", file[place + 8 + size : place + 12 + size]) == (zlib.crc32(name + data),)
        parts[name], place = data, place + 12 + size
    width, height, *kind = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert kind == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_run_of_any_task_can_be_shown(kind: type[ph.Task], tmp_path: pathlib.Path) -> None:
    task = task_of(kind)
    (found,) = groups(read([fabricate(tmp_path, task, model_of(task))]))
    (one,) = report_looks.looks([found], lambda line: None)
    assert one.note == ""
    assert one.split == next(split for split in ("compositional", "novel", "iid") if split in task.splits)
    assert len(one.examples) == 3
    assert all("the model says" in example.text for example in one.examples)
    packed = [report_look_section._packed(report_looks.maps(layer)) for layer in one.examples[0].layers]
    assert all(part["attention"] for part in packed)
    assert json.dumps(packed, allow_nan=False)


@pytest.mark.parametrize(
    ("task", "title", "term"),
    [
        (
            *(
                GAMES,
                "Softmax 1 + Relational 1 (3 relations, symbols from a library) reaches accuracy 0.60 on unseen shapes",
            ),
            "Unseen shapes.",
        ),
        (Maths(question=30, answer=6), "on longer questions than in training", "right to the last character"),
        pytest.param(SetCards(), "on unseen triples", "The share of correct answers.", marks=pytest.mark.campaign),
        pytest.param(ph.tasks.Images(), "on fresh data", "The share of correct answers.", marks=pytest.mark.campaign),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_page_of_a_task_whose_codes_are_not_probed(
    task: ph.Task, title: str, term: str, tmp_path: pathlib.Path
) -> None:
    words, held = written([fabricate(tmp_path, task, model_of(task))], tmp_path / "r.html")
    assert title in words
    assert term in words
    assert words.count("No code maps and probes: ") == 1
    assert "Probe F1" not in words
    assert len(held["looks"]) == 1


def test_an_order_is_told_by_the_names_of_its_tokens(tmp_path: pathlib.Path) -> None:
    task = ObjectSorting(length=4, examples=50)
    words, held = written([fabricate(tmp_path, task, model_of(task))], tmp_path / "r.html")
    encoder, decoder, _ = held["looks"][0]["examples"][0]
    places = [int(name.split("#")[1]) for name in encoder["attention"][0]["rows"]]  # "1: #37", ...
    answer = [str(place + 1) for place in np.argsort(places)]
    assert decoder["attention"][0]["rows"] == ["start", *answer[:-1]]
    assert f"Answer {' '.join(answer)}; the model says " in words


def test_a_question_and_its_answer_are_written_out(tmp_path: pathlib.Path) -> None:
    task = Maths(question=30, answer=6)
    words, held = written([fabricate(tmp_path, task, model_of(task))], tmp_path / "r.html")
    (batch,) = draws(task, "compositional", 3, seed=0, purpose="look")
    layers = held["looks"][0]["examples"][1]
    question, answer = task.texts(batch)[1]
    assert f"{question} Answer {answer.replace('-', '−')}; the model says " in words
    assert [layer["name"] for layer in layers] == ["encoder 1", "decoder 1", "cross 1"]
    assert layers[2]["attention"][0]["rows"] == ["start", *answer]
    assert layers[2]["attention"][0]["columns"] == list(question.replace(" ", "␣"))
    assert ["relations" in layer for layer in layers] == [True, True, False]


def test_what_cannot_be_shown_says_why_in_a_line(tmp_path: pathlib.Path) -> None:
    folders = [
        fabricate(tmp_path, GAMES, model_of(GAMES), name="dual"),
        fabricate(tmp_path, GAMES, ph.CoRelNetConfig(*GAMES.ends, dim=8), name="corelnet"),
        fabricate(tmp_path, GAMES, model_of(GAMES, (ph.Softmax(2),)), name="damaged"),
        fabricate(tmp_path, GAMES, model_of(GAMES, (ph.Linear(2),)), name="burst"),
    ]
    path = folders[2] / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    run, model = load_model(folders[3])
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.fill_(torch.inf)
    state = {"digest": ph.digest(run), "step": 10, "seconds": 1.0, "scale": None}
    save_checkpoint(folders[3], model, torch.optim.AdamW(model.parameters()), state)
    words, held = written(folders, tmp_path / "r.html")
    why = "corelnet-0: no attention maps (look: a model with attention was wanted but a CoRelNet came, without taps)"
    assert why in words
    assert "damaged-0: no attention maps (" in words
    assert "burst-0: no attention maps (its figures are not finite)" in words
    assert len(held["looks"]) == 1
    assert "CoRelNet" in [mechanism(run) for run in [groups(read(folders))[1].entries[0].run]]
    assert "model.layers" not in words.split("Learning curves")[0].split("settings that differ")[-1]


def test_one_seed_of_each_mechanism_and_relations_in_sight(tmp_path: pathlib.Path) -> None:
    folders = [fabricate(tmp_path, GAMES, model_of(GAMES, (ph.Softmax(2),)), name="softmax")]
    folders += [fabricate(tmp_path, GAMES, model_of(GAMES), seed, "dual") for seed in (0, 1)]
    _, held = written(folders, tmp_path / "r.html")
    content = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert len(held["looks"]) == 2
    first = content.index('id="look-1"')
    assert "Relational 1" in content[content.rindex("<h3>", 0, first) : first]
    assert content.rindex("<details><summary>Softmax, seed 0", 0, content.index('id="look-2"')) > first
    assert [list(one["figures"]) for one in held["looks"]] == [["attention", "relations", "symbols"], ["attention"]]


def test_long_sequences_show_their_end_and_large_models_fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ph.tasks.FuzzyLogic(length=12)
    model = ph.Transformer(model_of(task))
    (batch,) = draws(task, "compositional", 3, seed=0, purpose="look")
    monkeypatch.setattr(report_looks, "TOKENS", 8)
    example = next(report_looks._examples(model, task, batch))
    (layer,), (whole,) = example.layers, look(model, batch, task=task)
    assert layer.senders == ("5", "6", "7", "8", "9", "10", "11", "query")
    np.testing.assert_allclose(layer.groups[1].relations, whole.groups[1].relations[:, 4:, 4:])
    np.testing.assert_allclose(layer.groups[1].assignments, whole.groups[1].assignments[4:])
    size = 8 * 8 * (2 + 3) + 8 * 5 * 4
    for cells, count in ((3 * size, 3), (3 * size - 1, 2), (size, 1), (size - 1, 1)):
        monkeypatch.setattr(report_looks, "CELLS", cells)
        found = list(report_looks._examples(model, task, batch))
        assert len(found) == count
    assert len(found[0].layers[0].senders) == 4


def test_still_pictures_of_every_layer(
    games: tuple[pathlib.Path, str, dict[str, Any]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, *_ = games
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        still, "heat", lambda panels, path, **more: drawn.setdefault(path.stem, (panels, more)) and path
    )
    report.export([folder], tmp_path, formats=("svg",), progress=False)
    _, model = load_model(folder)
    (batch,) = draws(GAMES, "novel", 3, seed=0, purpose="look")
    (wanted,) = look(model, batch)
    slug = "look-softmax-1-relational-1-3-relations-symbols-from-a-library-seed-0"
    assert {f"{slug}-{kind}-layer1" for kind in report_looks.KINDS} <= set(drawn)
    panels, more = drawn[f"{slug}-relations-layer1"]
    assert [title for title, *_ in panels] == [f"layer 1, relation {i}" for i in (1, 2, 3)]
    np.testing.assert_allclose(panels[2][1], wanted.groups[1].relations[2])
    image, rows, columns = more["picture"]
    np.testing.assert_allclose(image, batch.inputs[0].permute(1, 2, 0))
    assert (rows, columns, more["grouped"]) == (3, 3, False)


def test_the_headline_is_the_most_telling_split_that_was_scored(tmp_path: pathlib.Path) -> None:
    folder = fabricate(tmp_path, GAMES, model_of(GAMES))
    assert headline(groups(read([folder]))) == "novel"
    result = json.loads((folder / "result.json").read_text())
    del result["scores"]["novel"]
    (folder / "result.json").write_text(json.dumps(result))
    assert headline(groups(read([folder]))) == "iid"


def test_an_encoder_that_differs_is_named() -> None:
    task = Maths()
    model = model_of(task, (ph.Softmax(2),))
    run = ph.Run(task=task, model=model)
    assert mechanism(run) == "Softmax"
    changed = dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, heads=DUAL))
    assert (
        mechanism(dataclasses.replace(run, model=changed))
        == "Softmax 1 + Relational 1 (3 relations, symbols from a library), decoder Softmax"
    )


def test_text_is_shown_as_text_and_what_comes_next(tmp_path):
    """Not as the numbers of its tokens."""
    (tmp_path / "text.txt").write_text("a <b>\n" * 40)
    task = ph.tasks.Text(str(tmp_path / "text.txt"), length=6, folder=str(tmp_path / "tokens"))
    batch = task.batch("iid", 2, seed=0, step=0)
    outputs = torch.zeros(2, 6, 256)
    outputs[:, :, ord("z")] = 1.0
    text = bytes([*batch.inputs[0].tolist(), batch.targets[0, -1].item()]).decode()
    last = text[-1].replace("\n", "\\n")
    said = report_looks.describe(task, batch, outputs, 0)
    shown = text[:-1].replace("\0", "")  # which stands between documents
    assert said == f"“…{shown}” is followed by “{last}”; the model says “z”."
    names = look(build(model_of(task)), dataclasses.replace(batch, inputs=batch.inputs[:1]), task=task)[0].receivers
    assert "".join(names).replace("␣", " ").replace("\\n", "\n").replace("\\x00", "\0") == text[:-1]
