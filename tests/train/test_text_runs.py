"""Runs of language models: stored files, accumulation, lazy logits, all together, killed and resumed."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from run_folders import losses, rows
from safetensors.torch import load_file
from torch import nn

import polyhead as ph
from polyhead.models.inputs_outputs import LazyLogits
from polyhead.tasks import Text
from polyhead.train import evaluate, evaluation as scoring, fast_products, load_model, run
from polyhead.train.checks import check
from polyhead.train.store.folder import read_metrics


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents of a few hundred bytes with a regular structure."""
    root = tmp_path_factory.mktemp("text")
    (root / "documents").mkdir()
    for i in range(40):
        lines = [f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(12)]
        (root / "documents" / f"{i:02}.py").write_text("\n".join(lines))
    return Text(str(root / "documents"), length=16, tokenizer="bytes", held_out=0.1, folder=str(root / "tokens"))


def config(text, folder, train=None, **model):
    shape: dict[str, Any] = {"dim": 16, "layers": 1, "heads": (ph.Softmax(2), ph.Hyla(2)), "causal": True}
    shape |= {"positions": ph.Rotary(), "norm": "rms", "feedforward": ph.Swiglu(24), "max_length": 16, **model}
    network = ph.TransformerConfig(ph.Tokens(256), ph.Logits(256, tied=True, scaled=True), **shape)
    how: dict[str, Any] = {"log_every": 1, "eval_every": 4, "save_every": 3, "eval_batches": 2, "steps": 8}
    how |= {"batch_size": 8, "warmup": 1, "lr": 3e-3, "evaluate": ("validation",), **(train or {})}
    return ph.Run(
        task=text,
        model=network,
        name="text",
        train=ph.Train(**how),
        seed=3,
        folder=str(folder),
        device="cpu",
        threads=1,
    )


def numbers(folder):
    return [{name: x for name, x in row.items() if name not in ("kind", "split")} for row in rows(folder)]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(config(text, folder), progress=False)
    return folder


@pytest.fixture
def lazy(monkeypatch):
    """All logits are lazy; the shapes of the streams they were asked of."""
    seen: list[torch.Size] = []
    plain = LazyLogits.cross_entropy

    def ask(self, targets):
        seen.append(self.x.shape)
        return plain(self, targets)

    monkeypatch.setattr(LazyLogits, "cross_entropy", ask)
    monkeypatch.setattr(scoring, "LAZY", 1)
    return seen


# ----------------------------------------------------------------------------------------------------- rows and folders
def test_rows_and_scores_of_a_text_run(text, whole):
    assert losses(whole)[-1] < losses(whole)[0]
    row = [row for row in read_metrics(whole) if row["kind"] == "train"][-1]
    assert {"loss", "bits_per_byte", "accuracy", "steps_per_second", "tokens_per_second"} <= row.keys()
    assert row["tokens_per_second"] == pytest.approx(row["steps_per_second"] * 8 * 16)
    scores = json.loads((whole / "result.json").read_text())["scores"]["validation"]
    assert scores["perplexity"] == pytest.approx(2.718281828459045 ** scores["loss"])
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / 0.6931471805599453, rel=0.05)
    assert rows(whole, "eval")[-1]["perplexity"] == scores["perplexity"]
    assert (whole / "tokenizer.json").is_file()
    settings, model = load_model(whole)
    with fast_products():  # as the run had them
        again = evaluate(model, settings.task, "validation", batches=2, batch_size=8, seed=3)
    assert again == scores


def test_the_tokenizer_is_kept_before_the_first_step(text, tmp_path, monkeypatch):
    """And is forgotten when one starts over, as the text may be another."""
    seen: list[bool] = []
    plain = Text.batch

    def batch(self, split, *args, **where):
        if split == "train":
            seen.append((tmp_path / "tokenizer.json").is_file())
        return plain(self, split, *args, **where)

    monkeypatch.setattr(Text, "batch", batch)
    run(config(text, tmp_path, {"steps": 1}), progress=False)
    assert seen == [True]
    kept = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps({**kept, "fingerprint": "another"}))
    run(config(text, tmp_path, {"steps": 1}), progress=False, again=True)
    assert json.loads((tmp_path / "data.json").read_text()) == kept


def test_another_vocabulary_is_refused_before_anything_is_written(text, tmp_path):
    wrong = config(text, tmp_path / "run")
    wrong = dataclasses.replace(wrong, model=dataclasses.replace(wrong.model, inputs=ph.Tokens(300)))
    wrong = dataclasses.replace(wrong, model=dataclasses.replace(wrong.model, outputs=ph.Logits(300)))
    with pytest.raises(
        ValueError, match=r"task's inputs are Tokens\(count=256.* but the model's are Tokens\(count=300"
    ):
        check(wrong)
    with pytest.raises(ValueError, match="the model's are"):
        run(wrong, progress=False)
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------- batches in parts
@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_a_batch_give_the_same_run(text, tmp_path, whole, parts):
    run(config(text, tmp_path, {"accumulate": parts}), progress=False)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-6)
    for ours, theirs in zip(numbers(tmp_path), numbers(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


SCORED = {
    "the first i + 1 tokens of row i": lambda row, column: column <= row,
    "the first row": lambda row, column: (row == 0) & (column >= 0),
}


@pytest.mark.parametrize(("which", "parts"), [*zip(SCORED, (4, 8), strict=True)])
def test_a_part_counts_by_its_scored_positions(text, tmp_path, monkeypatch, which, parts):
    """The mean loss of a part without a scored position is 0 / 0: it must not make the step NaN."""
    plain = Text.batch

    def batch(task, split, size, **where):
        drawn = plain(task, split, size, **where)
        scored = drawn.scored & SCORED[which](torch.arange(size)[:, None], torch.arange(task.length))
        return dataclasses.replace(drawn, scored=scored) if split == "train" else drawn

    monkeypatch.setattr(Text, "batch", batch)
    for count in (1, parts):
        run(config(text, tmp_path / str(count), {"accumulate": count, "steps": 4}), progress=False)
    assert losses(tmp_path / str(parts)) == pytest.approx(losses(tmp_path / "1"), rel=1e-6)
    ours, theirs = (load_file(tmp_path / str(count) / "checkpoint.safetensors") for count in (parts, 1))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)


def test_parts_must_divide_the_batch():
    with pytest.raises(ValueError, match="Train: accumulate must divide batch_size 8 but is 3"):
        ph.Train(batch_size=8, accumulate=3)
    with pytest.raises(ValueError, match="Train: accumulate must be at least 1 but is 0"):
        ph.Train(accumulate=0)
    assert ph.digest(ph.Train(accumulate=1)) == ph.digest(ph.Train())
    assert ph.digest(ph.Train(accumulate=2)) != ph.digest(ph.Train())


# ---------------------------------------------------------------------------------------------------------- lazy logits
def test_lazy_logits_give_the_same_run(text, tmp_path, whole, lazy):
    run(config(text, tmp_path), progress=False)
    assert set(lazy) == {(8, 16, 16)}
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)
    for ours, theirs in zip(numbers(tmp_path), numbers(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_logits_are_lazy_from_a_size_on(text, lazy, monkeypatch):
    torch.manual_seed(0)
    model, batch = ph.Transformer(config(text, pathlib.Path("x")).model), text.batch("train", 8, seed=0, step=0)
    for least, is_lazy in ((8 * 16 * 256, True), (8 * 16 * 256 + 1, False)):
        monkeypatch.setattr(scoring, "LAZY", least)
        assert isinstance(scoring.answers(model, text, batch), LazyLogits) is is_lazy
    monkeypatch.setattr(scoring, "LAZY", 1)
    monkeypatch.setattr(Text, "lazy", False)  # as of tasks whose loss knows logits only
    assert isinstance(scoring.answers(model, text, batch), torch.Tensor)


# ---------------------------------------------------------------------------------------------------- all of it at once
TOGETHER = {"precision": "bf16", "accumulate": 2, "clip": 1.0}


def test_everything_together(text, tmp_path, whole, lazy):
    """bf16, parts, lazy logits, checkpointing, fused AdamW: the plain run but for bf16."""
    run(config(text, tmp_path, {**TOGETHER, "clip": None}, checkpoint=True), progress=False)
    assert set(lazy) == {(4, 16, 16)}
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=0.02)
    assert losses(tmp_path) != pytest.approx(losses(whole), rel=1e-6)


@pytest.mark.compile
def test_everything_together_compiled(text, tmp_path, lazy, monkeypatch):
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: plain(self, backend="aot_eager"))
    for compiled in (True, False):
        settings = config(text, tmp_path / str(compiled), {**TOGETHER, "steps": 3}, checkpoint=True)
        run(dataclasses.replace(settings, compile=compiled), progress=False)
    assert set(lazy) == {(4, 16, 16)}
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-2)
