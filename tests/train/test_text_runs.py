"""Runs of language models: stored files, accumulation, lazy logits, all together, killed and resumed."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from run_folders import copied, losses, rows
from safetensors.torch import load_file
from texts import write_documents
from tiny_runs import tiny
from torch import nn

import polyhead as ph
from polyhead.cli import main
from polyhead.models.inputs_outputs import LazyLogits
from polyhead.tasks import Text
from polyhead.train import network, run
from polyhead.train.store.folder import read_metrics


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    return Text(str(write_documents(root, 40)), length=16, tokenizer="bytes", held_out=0.1, folder=str(root / "tokens"))


def config(text, folder, **changes):
    settings: dict[str, Any] = {"task": text, "inputs": ph.Tokens(256), "layers": 1, "max_length": 16, "causal": True}
    settings |= {"outputs": ph.Logits(256, tied=True, scaled=True), "positions": ph.Rotary(), "norm": "rms"}
    settings |= {"feedforward": ph.Swiglu(24), "dropout": 0.0, "residual_dropout": 0.0, "name": "text"}
    settings |= {"steps": 8, "batch_size": 8, "warmup": 1, "lr": 3e-3, "eval_every": 4, "save_every": 3}
    return tiny(folder, **settings | {"evaluate": ("validation",), **changes})


def numbers(folder):
    return [{name: x for name, x in row.items() if name not in ("kind", "split")} for row in rows(folder)]


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(config(text, folder), progress=False)
    return folder


@pytest.fixture
def lazy(monkeypatch):
    """All logits are lazy; the shapes of the streams they were asked of."""
    shapes: list[torch.Size] = []
    cross_entropy = LazyLogits.cross_entropy

    def ask(self, targets):
        shapes.append(self.x.shape)
        return cross_entropy(self, targets)

    monkeypatch.setattr(LazyLogits, "cross_entropy", ask)
    monkeypatch.setattr(network, "LAZY", 1)
    return shapes


# ----------------------------------------------------------------------------------------------------- rows and folders
def test_scores_on_another_text_than_that_of_the_training_come_with_a_line(uninterrupted, tmp_path, capsys):
    copied(uninterrupted, tmp_path)
    record = tmp_path / "data.json"
    record.write_text(record.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    assert main(["eval", str(tmp_path), "--splits", "iid", "--device", "cpu"]) == 0
    assert "was begun with another text of" in capsys.readouterr().err
    record.write_text(record.read_text().replace('"digest": "bytes"', '"digest": "other"'))
    assert main(["eval", str(tmp_path), "--device", "cpu"]) == 2


def test_rows_and_scores_of_a_text_run(text, uninterrupted):
    assert losses(uninterrupted)[-1] < losses(uninterrupted)[0]
    row = [row for row in read_metrics(uninterrupted) if row["kind"] == "train"][-1]
    assert {"loss", "bits_per_byte", "accuracy", "steps_per_second", "tokens_per_second"} <= row.keys()
    assert row["tokens_per_second"] == pytest.approx(row["steps_per_second"] * 8 * 16)
    scores = json.loads((uninterrupted / "result.json").read_text())["scores"]["validation"]
    assert scores["perplexity"] == pytest.approx(2.718281828459045 ** scores["loss"])
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / 0.6931471805599453, rel=0.05)
    assert rows(uninterrupted, "eval")[-1]["perplexity"] == scores["perplexity"]
    assert (uninterrupted / "data.json").is_file()


# ----------------------------------------------------------------------------------------------------- batches in parts
SCORED = {
    "the first i + 1 tokens of row i": lambda row, column: column <= row,
    "the first row": lambda row, column: (row == 0) & (column >= 0),
}


@pytest.mark.parametrize(("scored_positions", "parts"), list(zip(SCORED, (4, 8), strict=True)))
def test_a_part_counts_by_its_scored_positions(text, tmp_path, monkeypatch, scored_positions, parts):
    """The mean loss of a part without a scored position is 0 / 0: it must not make the step NaN."""
    draw_batch = Text.batch

    def batch(task, split, size, **options):
        drawn = draw_batch(task, split, size, **options)
        scored = drawn.scored & SCORED[scored_positions](torch.arange(size)[:, None], torch.arange(task.length))
        return dataclasses.replace(drawn, scored=scored) if split == "train" else drawn

    monkeypatch.setattr(Text, "batch", batch)
    for count in (1, parts):
        run(config(text, tmp_path / str(count), accumulate=count, steps=4), progress=False)
    for row, expected_row in zip(numbers(tmp_path / str(parts)), numbers(tmp_path / "1"), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-6, nan_ok=True)
    assert losses(tmp_path / str(parts)) == pytest.approx(losses(tmp_path / "1"), rel=1e-6)
    accumulated, expected = (load_file(tmp_path / str(count) / "checkpoint.safetensors") for count in (parts, 1))
    for name, value in expected.items():
        torch.testing.assert_close(accumulated[name], value, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- lazy logits
def test_lazy_logits_give_the_same_run(text, tmp_path, uninterrupted, lazy):
    run(config(text, tmp_path), progress=False)
    assert set(lazy) == {(8, 16, 16)}
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), rel=1e-5)
    for row, expected_row in zip(numbers(tmp_path), numbers(uninterrupted), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-3, abs=1e-5)


# ---------------------------------------------------------------------------------------------------- all of it at once
TOGETHER = {"precision": "bf16", "accumulate": 2, "clip": 1.0, "checkpoint": True}


@pytest.mark.compile
def test_everything_together_compiled(text, tmp_path, lazy, monkeypatch):
    compiled_modules: list[nn.Module] = []
    compile_module = nn.Module.compile

    def traced(self):
        compiled_modules.append(self)
        compile_module(self, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", traced)
    for compiled in (True, False):
        run(config(text, tmp_path / str(compiled), **TOGETHER, steps=3, compile=compiled), progress=False)
    assert set(lazy) == {(4, 16, 16)}
    assert len(compiled_modules) == 1
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-2)
    names = [load_file(tmp_path / str(compiled) / "checkpoint.safetensors").keys() for compiled in (True, False)]
    assert names[0] == names[1]
