"""Runs of every kind of model, end to end: encoder-decoders, classifiers of images and sequences, a baseline."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tiny_runs import crashed, tiny

from polyhead import config
from polyhead.config import Classes, CoRelNetConfig, Learned, Logits, Patches, Tokens, TransformerConfig
from polyhead.models.transformer import Transformer
from polyhead.tasks import KINDS, Images, Maths
from polyhead.tasks.base import Batch
from polyhead.tasks.classification import Classification
from polyhead.train import evaluate, fast_products, load_model, run
from polyhead.train.network import predict

SPLITS = ("train", "iid")
MATHS = Maths(question=60, answer=5)


@dataclass(frozen=True)
class Begins(Classification):
    """With which token does a sequence begin?  It has 3 to 6 tokens, then padding."""

    name: ClassVar[str] = "begins"
    splits: ClassVar[tuple[str, ...]] = SPLITS
    ends: ClassVar[Any] = (Tokens(4), Classes(4))
    length: ClassVar[int] = 6

    def sample(self, split, batch_size, generator):
        mask = torch.arange(6) < torch.randint(3, 7, (batch_size, 1), generator=generator)
        tokens = torch.where(mask, torch.randint(4, (batch_size, 6), generator=generator), 3)
        return Batch(tokens, tokens[:, :1], mask, torch.ones(batch_size, 1, dtype=torch.bool), {})


DUAL = [config.Softmax(2), config.Relational(2, symbols=config.PositionSymbols())]
SMALL: dict[str, Any] = {"dim": 16, "layers": 1, "heads": DUAL, "max_length": 6, "positions": Learned()}
ENCODER = TransformerConfig(MATHS.source, Logits(7), **{**SMALL, "max_length": 60}, dropout=0.1)
PATCHES = Patches((1, 8, 8), (4, 2), class_token=True)
MODELS = {
    "sequences": (
        MATHS,
        TransformerConfig(MATHS.ends[0], replace(MATHS.ends[1], tied=True), **SMALL, causal=True, encoder=ENCODER),
    ),
    "images": (Images(), TransformerConfig(PATCHES, Classes(10, "class"), **{**SMALL, "max_length": 9})),
    "tokens": (Begins(), TransformerConfig(Tokens(4), Classes(4), **SMALL, residual_dropout=0.1)),
    "baseline": (Images(), CoRelNetConfig(Patches((1, 8, 8), (4, 4)), Classes(10), dim=16)),
}


def a_run(name, folder, **changes):
    task, model = MODELS[name]
    settings = {"steps": 8, "batch_size": 16, "warmup": 2, "lr": 1e-2, "evaluate": SPLITS, "eval_batches": 2, "seed": 3}
    return tiny(folder, name=name, task=task, model=model, **settings | changes)


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    monkeypatch.setattr("polyhead.tasks.KINDS", (*KINDS, Begins))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_killed_run_resumes_to_the_same_bits(name, tmp_path):
    uninterrupted = a_run(name, tmp_path / "uninterrupted", save_every=4)
    killed = a_run(name, tmp_path / "killed", save_every=4)
    result = run(uninterrupted, progress=False)
    crashed(killed, 6)
    resumed = run(killed, progress=False, resume=True)
    assert resumed.scores == result.scores
    stored, model = load_model(tmp_path / "uninterrupted")
    resumed_model = load_model(tmp_path / "killed")[1]
    assert resumed.parameters == sum(p.numel() for p in resumed_model.parameters())
    state = resumed_model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert stored.model == uninterrupted.model
    with fast_products():  # as the run had them
        scores = evaluate(model, uninterrupted.task, "iid", batches=2, batch_size=16, seed=3)
    assert scores == result.scores["iid"]


def test_the_source_and_its_mask_reach_the_model():
    task, settings = MODELS["sequences"]
    torch.manual_seed(0)
    model = Transformer(settings).eval()
    batch = task.batch("train", 8, seed=0, step=0)
    outputs = predict(model, task, batch)
    assert torch.equal(outputs, model(batch.inputs, source=batch.source, source_mask=batch.source_mask))
    padded = replace(batch, source=torch.where(batch.source_mask, batch.source, 3))
    assert torch.equal(predict(model, task, padded), outputs)
    assert not torch.equal(predict(model, task, replace(batch, source_mask=None)), outputs)


@pytest.mark.parametrize(
    ("task", "model", "text"),
    [
        ("sequences", {"encoder": None}, r"source: the task has Tokens\(count=.* but the model None"),
        ("sequences", {"encoder": replace(ENCODER, inputs=Tokens(8))}, r"source: .* but the model Tokens\(count=8"),
        ("images", {"inputs": replace(PATCHES, image=(3, 8, 8))}, r"inputs: the task has Patches\(image=\(1"),
        ("images", {"outputs": Classes(3)}, r"outputs: .*Classes\(count=10.* but the model Classes\(count=3"),
        ("tokens", {"encoder": replace(ENCODER, max_length=6)}, "source: the task has None but the model Tokens"),
        ("sequences", {"encoder": replace(ENCODER, max_length=59)}, "model.encoder.max_length must be at least 60"),
        ("sequences", {"causal": False}, "the inputs of Maths hold its targets, so the model must have causal=True"),
        ("images", {"max_length": 8}, "model.max_length must be at least 9, the task's tokens, but is 8$"),
        ("tokens", {"outputs": Logits(4)}, r"outputs: the task has Classes\(count=4.* but the model Logits\(count=4"),
    ],
)
def test_a_model_that_does_not_fit_the_task_is_one_line(task, model, text, tmp_path):
    with pytest.raises(ValueError, match=f"train: {text}") as error:
        run(a_run(task, tmp_path, **model), progress=False)
    assert "\n" not in str(error.value)
