"""Zeroing the code of a head equals zeroing its weights; the drop of the score equals one computed by hand."""

import pytest
import torch
from refusals import refusing

import polyhead as ph
from polyhead.analysis import query_codes, swap_codes, zero_heads
from polyhead.analysis.probe import draws
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.tasks.base import Task

FUZZY, RAVEN = FuzzyLogic(variables=3, terms=2, length=8), Sraven(features=2, values=5)
HEADS = [
    (ph.Softmax(3),),
    (ph.Linear(3),),
    (ph.Linear(3, normalise="rms_heads"),),
    (ph.Hyla(3),),
    (ph.Hyla(3, value_depth=2),),
    (ph.Softmax(1), ph.Hyla(2)),
]


def model_of(task: Task, *heads: object) -> ph.Transformer:
    torch.manual_seed(0)
    inputs, outputs = task.ends
    options = {"positions": ph.RelativeBias(), "max_length": task.length, "bias": True}
    return ph.Transformer(ph.TransformerConfig(inputs, outputs, dim=12, layers=2, heads=heads, dropout=0.5, **options))


def scores(model: ph.Transformer, task: Task, sequences: int, seed: int = 0) -> torch.Tensor:
    """The score of each sequence, with the present weights of the model."""
    model.eval()
    with torch.no_grad():
        by_batch = [
            task.metrics(model(batch.inputs), batch)[task.metric]
            for batch in draws(task, "compositional", sequences, seed=seed, purpose="zero")
        ]
    return torch.cat(by_batch).double()


def without(model: ph.Transformer, layer: int, head: int | None) -> None:
    """Take heads away by their output weights: only where a head's value goes through its own rows of `out`."""
    out = model.blocks[layer].attention.out.weight
    size_of_head = out.shape[1] // model.blocks[layer].attention.total_heads
    with torch.no_grad():
        out[:, slice(None) if head is None else slice(head * size_of_head, (head + 1) * size_of_head)] = 0


@pytest.mark.parametrize(
    ("heads", "task"), [(heads, (FUZZY, RAVEN)[n % 2]) for n, heads in enumerate(HEADS)], ids=lambda x: str(x)[:40]
)
def test_rows_are_every_head_and_layer_of_every_mechanism(task: Task, heads: tuple) -> None:
    model = model_of(task, *heads)
    rows = zero_heads(model.train(), task, sequences=40, seed=3)
    assert model.training
    count = sum(group.heads for group in heads)
    layers_and_heads = [(None, None), *((layer, head) for layer in (0, 1) for head in (*range(count), None))]
    assert [(row["layer"], row["head"]) for row in rows] == layers_and_heads
    assert rows[0]["drop"] == rows[0]["drop_se"] == 0
    baseline_scores = scores(model, task, 40, seed=3)
    assert rows[0]["score"] == pytest.approx(baseline_scores.mean().item())
    assert rows[0]["se"] == pytest.approx(baseline_scores.std().item() / 40**0.5)
    assert all(row["drop"] == pytest.approx(rows[0]["score"] - row["score"], rel=1e-5, abs=1e-9) for row in rows)
    assert rows == zero_heads(model, task, sequences=40, seed=3)


@pytest.mark.parametrize("heads", [(ph.Softmax(3),), (ph.Linear(3),), (ph.Softmax(1), ph.Linear(2))], ids=str)
def test_a_zeroed_head_is_a_head_without_output_weights(heads: tuple) -> None:
    """Where heads only add, the code of one may as well be kept and its output thrown away."""
    rows = zero_heads(model_of(FUZZY, *heads), FUZZY, sequences=600)
    baseline_scores = scores(model_of(FUZZY, *heads), FUZZY, 600)
    for row in rows[1:]:
        model = model_of(FUZZY, *heads)
        without(model, row["layer"], row["head"])
        drops = baseline_scores - scores(model, FUZZY, 600)
        assert row["drop"] == pytest.approx(drops.mean().item(), rel=1e-4)
        assert row["drop_se"] == pytest.approx(drops.std().item() / 600**0.5, rel=1e-3)
        assert row["n"] == 600


class Weighed(FuzzyLogic):
    """Sequences that do not count the same."""

    def amounts(self, batch: ph.Batch) -> torch.Tensor:
        return 1 + batch.inputs[:, 0, 0]


def test_a_sequence_counts_as_much_as_the_task_says(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Weighed(variables=3, terms=2, length=8)
    model = model_of(task, ph.Linear(2))
    amounts = torch.cat([task.amounts(b) for b in draws(task, "compositional", 600, seed=0, purpose="zero")]).double()
    baseline_scores, rows = scores(model, task, 600), zero_heads(model, task, sequences=600)
    without(model, 1, None)
    for row, values in ((rows[0], baseline_scores), (rows[-1], baseline_scores - scores(model, task, 600))):
        expected = (amounts * values).sum() / amounts.sum()
        assert row["drop" if row["layer"] else "score"] == pytest.approx(expected.item(), rel=1e-4)
        assert expected.item() != pytest.approx(values.mean().item(), rel=1e-3)
    monkeypatch.setattr(FuzzyLogic, "better", "lower")  # a drop is a rise of the score
    model = model_of(task, ph.Linear(2))
    assert zero_heads(model, task, sequences=600)[-1]["drop"] == pytest.approx(-rows[-1]["drop"])


def test_mistakes_are_one_line() -> None:
    model = model_of(FUZZY, ph.Linear(2))
    with refusing("zero_heads: sequences must be at least 2 but is 1"):
        zero_heads(model, FUZZY, sequences=1)
    with refusing("FuzzyLogic: unknown split 'compositonal'; did you mean 'compositional'"):
        zero_heads(model, FUZZY, "compositonal")


@pytest.mark.parametrize("function", [zero_heads, swap_codes, query_codes])
def test_a_model_of_another_dtype_is_given_inputs_of_its_own(function) -> None:
    model = model_of(FUZZY, ph.Hyla(3)).double()
    count = "pairs" if function is swap_codes else "sequences"
    assert function(model, FUZZY, "compositional", **{count: 4})
