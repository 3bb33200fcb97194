"""Runs of every kind of model, end to end: encoder-decoders, classifiers of images and sequences, a baseline."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from some import some
from tiny_runs import crashed
from torch.nn import functional as F

import polyhead as ph
from polyhead import config
from polyhead.analysis.ablate import zero_heads
from polyhead.config import Batch, Classes, CoRelNetConfig, Learned, Logits, Patches, Task, Tokens, TransformerConfig
from polyhead.models.transformer import Transformer
from polyhead.scale.population import training as population
from polyhead.scale.population.stacked import Stack, unsupported_reason
from polyhead.tasks import KINDS
from polyhead.train import evaluate, fast_products, load_model, run
from polyhead.train.evaluation import predict

SPLITS = ("train", "iid")


@dataclass(frozen=True)
class Backwards(Task):
    """Write a word backwards.  Words are 3 to 5 letters 1 ... 6; 0 is the stop and the start."""

    name: ClassVar[str] = "backwards"
    metric: ClassVar[str] = "exact"
    splits: ClassVar[tuple[str, ...]] = SPLITS
    ends: ClassVar[Any] = (Tokens(7), Logits(7))
    source: ClassVar[Any] = Tokens(7)
    length: ClassVar[int] = 6

    def sample(self, split, batch_size, generator):
        letters = torch.randint(1, 7, (batch_size, 5), generator=generator)
        lengths = torch.randint(3, 6, (batch_size, 1), generator=generator)
        real = torch.arange(5) < lengths
        where = (lengths - 1 - torch.arange(5)).clamp(min=0)
        word = letters.gather(1, where) * real
        end = torch.zeros(batch_size, 1, dtype=torch.long)
        scored = F.pad(real, (1, 0), value=True)
        return Batch(torch.cat((end, word), 1), torch.cat((word, end), 1), None, scored, {}, letters * real, real)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[batch.scored], batch.targets[batch.scored])

    def metrics(self, outputs, batch):
        right = (outputs.argmax(-1) == batch.targets) | ~batch.scored
        return {"exact": right.all(1).float(), "letters": right.float().mean(1)}


@dataclass(frozen=True)
class Brightest(Task):
    """Which quarter of an image is the brightest; or, of a sequence, which token is the commonest."""

    name: ClassVar[str] = "brightest"
    metric: ClassVar[str] = "accuracy"
    splits: ClassVar[tuple[str, ...]] = SPLITS
    length: ClassVar[int] = 6
    image: bool = True

    @property
    def ends(self):
        return (Patches((1, 4, 4), (2, 2)) if self.image else Tokens(4)), Classes(4)

    def sample(self, split, batch_size, generator):
        label = torch.randint(4, (batch_size,), generator=generator)
        scored = torch.ones(batch_size, 1, dtype=torch.bool)
        if self.image:
            images = torch.rand(batch_size, 1, 4, 4, generator=generator)
            bright = F.one_hot(label, 4).view(-1, 1, 2, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
            return Batch(images + 4.0 * bright, label[:, None], None, scored, {})
        mask = torch.arange(6) < torch.randint(3, 7, (batch_size, 1), generator=generator)
        noise = torch.randint(4, (batch_size, 6), generator=generator)
        tokens = torch.where(torch.arange(6) < 2, label[:, None], noise)
        return Batch(torch.where(mask, tokens, 3), label[:, None], mask, scored, {})

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten())

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch.targets).float()[:, 0]}


DUAL = [config.Softmax(2), config.Relational(2, symbols=config.PositionSymbols())]
SMALL: dict[str, Any] = {"dim": 16, "layers": 1, "heads": DUAL, "max_length": 6, "positions": Learned()}
READS = TransformerConfig(Tokens(7), Logits(7), **SMALL, dropout=0.1)
MODELS = {
    "sequences": (Backwards(), TransformerConfig(Tokens(7), Logits(7, tied=True), **SMALL, causal=True, encoder=READS)),
    "images": (
        Brightest(),
        TransformerConfig(
            Patches((1, 4, 4), (2, 1), class_token=True), Classes(4, "class"), **{**SMALL, "max_length": 9}
        ),
    ),
    "tokens": (Brightest(image=False), TransformerConfig(Tokens(4), Classes(4), **SMALL, residual_dropout=0.1)),
    "baseline": (Brightest(), CoRelNetConfig(Patches((1, 4, 4), (2, 2)), Classes(4), dim=16)),
}


def a_run(name, folder, **train):
    task, model = MODELS[name]
    given = {"steps": 8, "batch_size": 16, "warmup": 2, "lr": 1e-2, "evaluate": SPLITS, "eval_batches": 2} | train
    return ph.Run(
        task,
        model,
        name=name,
        train=ph.Train(**given),
        folder=None if folder is None else str(folder),
        device="cpu",
        threads=1,
    )


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    monkeypatch.setattr("polyhead.tasks.KINDS", (*KINDS, Backwards, Brightest))


@pytest.mark.parametrize("name", MODELS)
def test_a_killed_run_resumes_to_the_same_bits(name, tmp_path):
    whole, part = (a_run(name, tmp_path / place, save_every=4) for place in ("whole", "part"))
    result = run(whole, progress=False)
    crashed(part, 6)
    again = run(part, progress=False, resume=True)
    assert again.scores == result.scores
    assert again.parameters == sum(p.numel() for p in load_model(tmp_path / "part")[1].parameters())
    one, two = (load_model(tmp_path / place)[1].state_dict() for place in ("whole", "part"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    stored, model = load_model(tmp_path / "whole")
    assert stored.model == whole.model
    with fast_products():  # as the run had them
        scores = evaluate(model, whole.task, "iid", batches=2, batch_size=16)
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


def test_heads_of_other_models_are_zeroed():
    """Of the decoder's self-attention, and of a classifier."""
    for name in ("sequences", "images"):
        task, settings = MODELS[name]
        rows = zero_heads(Transformer(settings), task, "iid", sequences=8)
        places = [(row["layer"], row["head"]) for row in rows]
        assert places == [(None, None), *((0, head) for head in range(4)), (0, None)]


@pytest.mark.parametrize(
    ("task", "model", "text"),
    [
        ("sequences", {"encoder": None}, r"the task's source is Tokens\(count=7.* but the model's is None"),
        ("sequences", {"encoder": replace(READS, inputs=Tokens(8))}, r"the task's source is .*7.* is Tokens\(count=8"),
        (
            "images",
            {"inputs": Patches((3, 4, 4), (2, 2), class_token=True)},
            r"the task's inputs are Patches\(image=\(1",
        ),
        ("images", {"outputs": Classes(3)}, r"the task's outputs are Classes\(count=4.* are Classes\(count=3"),
        ("tokens", {"encoder": replace(READS, max_length=6)}, r"the task's source is None but the model's is Tokens"),
        ("sequences", {"encoder": replace(READS, max_length=5)}, r"model.encoder.max_length must be at least 6, the"),
        ("images", {"max_length": 8}, r"model.max_length must be at least 9, the task's tokens, but is 8$"),
        ("tokens", {"outputs": Logits(4)}, r"the task's outputs are Classes\(count=4.* are Logits\(count=4"),
    ],
)
def test_a_model_that_does_not_fit_the_task_is_one_line(task, model, text, tmp_path):
    config = a_run(task, tmp_path)
    with pytest.raises(ValueError, match=f"train: {text}") as error:
        run(replace(config, model=replace(config.model, **model)), progress=False)
    assert "\n" not in str(error.value)


def test_populations_leave_out_unsupported_models(tmp_path):
    reasons = {name: unsupported_reason(a_run(name, tmp_path)) for name in MODELS}
    assert reasons == {
        "sequences": "it is an encoder-decoder",
        "images": None,
        "tokens": "residual_dropout cannot be drawn for it",
        "baseline": "a CoRelNetConfig is no transformer",
    }
    frozen = [config.Relational(4, symbols=config.SymbolicAttention(trainable=False))]
    image = a_run("images", tmp_path)
    assert unsupported_reason(replace(image, model=replace(image.model, heads=frozen))) == "its symbols are frozen"
    with pytest.raises(ValueError, match=r"^population: sequences must be trained alone: it is an encoder-decoder$"):
        Stack([a_run("sequences", tmp_path)], torch.device("cpu"), 1)
    runs = [replace(a_run(name, None), folder=None, seed=seed) for name in ("sequences", "images") for seed in (0, 1)]
    assert [len(group) for group in population.groups(runs)] == [1, 1, 2]


def test_a_population_of_classifiers_is_each_of_them(tmp_path):
    """Images, symbols and dropout of the code: the losses they have alone."""
    runs = [replace(a_run("images", None), folder=None, seed=seed) for seed in (0, 1)]
    heads = [config.Softmax(2), config.Relational(2)]
    runs = [replace(one, model=replace(one.model, dropout=0.2, heads=heads)) for one in runs]
    together = population.train(runs, tmp_path / "together", progress=False)
    for one, result in some(zip(runs, together, strict=True)):
        alone = run(replace(one, folder=str(tmp_path / f"alone-{one.seed}")), progress=False)
        assert result.scores["iid"]["loss"] == pytest.approx(alone.scores["iid"]["loss"], rel=1e-4)


def test_a_configuration_file_of_any_model(tmp_path):
    for name in MODELS:
        one = a_run(name, None)
        config.save(one, tmp_path / "run.json")
        assert config.load(tmp_path / "run.json", (Backwards, Brightest)) == one
    values = json.loads((tmp_path / "run.json").read_text())
    values["model"] = config.to_dict(MODELS["tokens"][1])
    del values["model"]["kind"]  # as people write it: the usual model
    assert config.from_dict(values, (Backwards, Brightest)).model == MODELS["tokens"][1]
    assert a_run("tokens", None).transformer == MODELS["tokens"][1]
    with pytest.raises(ValueError, match="baseline: a transformer was wanted but the model is a CoRelNetConfig"):
        _ = a_run("baseline", None).transformer
