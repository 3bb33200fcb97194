"""Probes find what is in the code and nothing else; chance is what guessing scores."""

import dataclasses
import pathlib

import numpy as np
import pytest
import torch

import polyhead as ph
from polyhead.analysis import probe as run_probe
from polyhead.analysis import probe_model, probe_run, query_codes
from polyhead.analysis.probe import chance_f1, draws, targets
from polyhead.tasks import FuzzyLogic


def clusters(n: int, classes: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes that sit around one point per class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    return np.eye(classes)[labels] + noise * rng.normal(size=(n, classes)), labels


def test_separable_codes_are_read_and_noise_is_at_chance() -> None:
    codes, labels = clusters(1200, 5, 0.05)
    found = run_probe(codes, labels, train=slice(0, 800), test=slice(800, 1200))
    assert found.f1 > 0.99
    assert (found.n, found.classes) == (400, 5)
    assert (found.predictions == labels[800:]).mean() > 0.99
    noise = np.random.default_rng(1).normal(size=codes.shape)
    blind = run_probe(noise, labels, train=slice(0, 800), test=slice(800, 1200))
    assert abs(blind.f1 - blind.chance) < 0.08
    assert blind.chance == pytest.approx(found.chance)


def test_the_test_part_is_held_out() -> None:
    """Labels of the held-out part decide the score and nothing else."""
    codes, labels = clusters(600, 3, 0.05)
    shuffled = labels.copy()
    shuffled[400:] = np.random.default_rng(2).permutation(labels[400:])
    honest = run_probe(codes, labels, train=slice(0, 400), test=slice(400, 600))
    fooled = run_probe(codes, shuffled, train=slice(0, 400), test=slice(400, 600))
    assert (honest.predictions == fooled.predictions).all()
    assert honest.f1 > 0.99
    assert fooled.f1 < 0.5


def test_f1_is_the_macro_average_over_held_out_classes() -> None:
    """Against F1 from counts of true and false positives, with a class that was never fitted."""
    codes, labels = clusters(900, 4, 0.6)
    fit = np.flatnonzero((np.arange(900) < 600) & (labels != 3))
    held = np.arange(600, 900)
    found = run_probe(codes, labels, train=fit, test=held)
    scores = []
    for label in range(4):
        mine, truth = found.predictions == label, labels[held] == label
        scores.append(2 * (mine & truth).sum() / (mine.sum() + truth.sum()))
    assert scores[3] == 0
    assert found.f1 == pytest.approx(np.mean(scores))


def test_classes_that_no_held_out_item_has_do_not_count() -> None:
    """Guessing a class that does not occur costs recall of the others, not a zero of its own."""
    codes, labels = clusters(900, 4, 0.6)
    held = np.flatnonzero((np.arange(900) >= 600) & (labels != 2))
    found = run_probe(codes, labels, train=slice(0, 600), test=held)
    assert (found.predictions == 2).any()
    scores = []
    for label in (0, 1, 3):
        mine, truth = found.predictions == label, labels[held] == label
        scores.append(2 * (mine & truth).sum() / (mine.sum() + truth.sum()))
    assert found.classes == 3
    assert found.f1 == pytest.approx(np.mean(scores))


def test_scale_of_a_head_does_not_matter() -> None:
    codes, labels = clusters(900, 4, 0.4)
    parts = {"train": slice(0, 600), "test": slice(600, 900)}
    stretched = codes * np.array([1e-3, 1, 50, 1e4]) + 7
    assert run_probe(stretched, labels, **parts).f1 == pytest.approx(run_probe(codes, labels, **parts).f1, abs=1e-3)


def test_chance_is_the_mean_over_many_guessers() -> None:
    rng = np.random.default_rng(0)
    fit = rng.choice(4, 500, p=[0.5, 0.3, 0.15, 0.05])
    held = rng.choice(4, 60, p=[0.1, 0.2, 0.3, 0.4])
    frequency = np.bincount(fit, minlength=4) / len(fit)
    scores = []
    for _ in range(6000):
        guess = rng.choice(4, len(held), p=frequency)
        each = [2 * ((guess == c) & (held == c)).sum() / ((guess == c).sum() + (held == c).sum()) for c in range(4)]
        scores.append(np.mean(each))
    error = np.std(scores) / len(scores) ** 0.5
    assert error < 1e-3
    assert abs(chance_f1(fit, held) - np.mean(scores)) < 4 * error


def test_chance_at_the_edges() -> None:
    assert chance_f1(np.zeros(10, int), np.zeros(7, int)) == pytest.approx(1.0)
    assert chance_f1(np.zeros(10, int), np.ones(7, int)) == 0.0
    assert chance_f1(np.array([0, 1]), np.array([0, 1] * 4000)) == pytest.approx(0.5, abs=1e-4)


def test_tensors_masks_and_indices_name_the_same_parts() -> None:
    codes, labels = clusters(300, 3, 0.3)
    mask = np.arange(300) < 200
    by_slice = run_probe(codes, labels, train=slice(0, 200), test=slice(200, 300))
    by_mask = run_probe(torch.tensor(codes), torch.tensor(labels), train=torch.tensor(mask), test=~mask)
    assert by_slice.f1 == by_mask.f1


def test_targets_names_every_integer_latent() -> None:
    latents = {"terms": torch.tensor([[1, 5], [2, 3]]), "rule": torch.tensor([4, 4]), "noise": torch.rand(2, 3)}
    found = targets(latents)
    assert {name: values.tolist() for name, values in found.items()} == {
        "term 1": [1, 2],
        "term 2": [5, 3],
        "rule": [4, 4],
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": np.zeros(299, int)}, r"probe: b = 300 in codes but 299 in labels \(b\) = \(299,\)"),
        ({"labels": np.ones(300, int)}, "probe: at least 2 classes are needed in train but all labels are 1"),
        ({"train": slice(0, 0)}, "probe: both parts need items but train has 0 and test 100"),
        ({"train": slice(0, 201)}, "probe: train and test must not overlap but share 1 items"),
        ({"codes": np.full((300, 3), np.nan)}, "probe: codes must be finite but 300 of 300 are not"),
    ],
)
def test_mistakes(change: dict, text: str) -> None:
    codes, labels = clusters(300, 3, 0.3)
    arguments = {"codes": codes, "labels": labels, "train": slice(0, 200), "test": slice(200, 300)} | change
    with pytest.raises(ValueError, match="^" + text + "$"):
        run_probe(**arguments)


TASK = FuzzyLogic(variables=3, terms=2, length=8)


def small_run(folder: object) -> ph.Run:
    inputs, outputs = TASK.ends
    heads = (ph.Softmax(2, dim=2, value_dim=2), ph.Hyla(3, dim=2, value_dim=2))
    model = ph.TransformerConfig(inputs, outputs, dim=8, layers=2, heads=heads, max_length=TASK.length)
    train = ph.Train(steps=2, batch_size=4, eval_batches=1, warmup=1)
    return ph.Run(task=TASK, model=model, train=train, device="cpu", folder=str(folder))


def test_probe_run_fits_known_and_scores_unseen_combinations(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ph.train.run(small_run(tmp_path / "run"), progress=False)
    drawn, plain = [], FuzzyLogic.sample

    def watched(self: FuzzyLogic, split: str, batch_size: int, generator: torch.Generator) -> ph.Batch:
        drawn.append((split, batch_size))
        return plain(self, split, batch_size, generator)

    monkeypatch.setattr(FuzzyLogic, "sample", watched)
    rows = probe_run(tmp_path / "run", sequences=700, queries=2)
    once = [("iid", 512), ("iid", 188), ("compositional", 512), ("compositional", 188)]
    assert drawn == [("iid", 2), *once * 3]
    wanted = [(q, i, f"term {k}") for q in ("varies", "fixed") for i in (0, 1) for k in (1, 2)]
    assert [(row["query"], row["layer"], row["target"]) for row in rows] == wanted
    assert all(row["n"] == 700 and 0 <= row["f1"] <= 1 and 0 < row["chance"] < 1 for row in rows)
    run, model = ph.train.load_model(tmp_path / "run")
    (known, seen), (unseen, new) = (query_codes(model, run.task, s, 700) for s in ("iid", "compositional"))
    terms = torch.cat([seen.latents["terms"], new.latents["terms"]])
    both = np.concatenate([known[1], unseen[1]])
    wanted = run_probe(both, terms[:, 1], train=slice(0, 700), test=slice(700, 1400))
    assert (rows[3]["f1"], rows[3]["chance"]) == (wanted.f1, wanted.chance)
    assert rows[0]["chance"] == rows[2]["chance"] != rows[1]["chance"]
    assert rows == probe_run(tmp_path / "run", sequences=700, queries=2)
    assert rows != probe_run(tmp_path / "run", sequences=700, queries=2, seed=1)


def test_a_fixed_query_is_the_last_token_of_every_sequence() -> None:
    """The mean over queries of probes made by hand; the first layer's code of a linear head is then one for all."""
    torch.manual_seed(0)
    run = small_run(None)
    model = ph.Transformer(dataclasses.replace(run.model, heads=(ph.Linear(4),)))
    (batch,) = draws(TASK, "iid", 2, seed=3, purpose="queries")
    f1 = []
    for token in batch.inputs[:, -1]:
        (known, seen), (unseen, new) = (
            query_codes(model, TASK, s, 300, seed=3, query=token) for s in ("iid", "compositional")
        )
        assert np.ptp(np.concatenate([known[0], unseen[0]]), axis=0).max() < 1e-6
        assert np.ptp(known[1], axis=0).min() > 1e-6
        labels = torch.cat([seen.latents["terms"], new.latents["terms"]])[:, 0]
        codes = np.concatenate([known[1], unseen[1]])
        f1.append(run_probe(codes, labels, train=slice(0, 300), test=slice(300, 600)).f1)
    rows = probe_model(model, TASK, sequences=300, queries=2, seed=3)
    row = next(r for r in rows if (r["query"], r["layer"], r["target"]) == ("fixed", 1, "term 1"))
    assert row["f1"] == pytest.approx(np.mean(f1))


def test_query_codes_are_those_of_the_last_token_and_all_groups() -> None:
    """Against the codes that each layer itself returns for all pairs."""
    model = ph.Transformer(small_run(None).model)
    layers, batch = query_codes(model, TASK, "compositional", 600)
    assert [code.shape for code in layers] == [(600, 5), (600, 5)]
    x = model.inputs(batch.inputs)
    for block, code in zip(model.blocks, layers, strict=True):
        _, every = block.attention(block.norm1(x), return_code=True)
        torch.testing.assert_close(torch.tensor(code), every[:, :, -1, -1].detach(), rtol=1e-4, atol=1e-5)
        x = block(x)


def test_a_term_written_into_the_code_is_found() -> None:
    """A layer whose scores carry the first input variable; the label is that variable in four steps."""
    torch.manual_seed(0)
    model = ph.Transformer(small_run(None).model)
    with torch.no_grad():
        model.inputs.linear.weight[0] = torch.tensor([4.0, 0, 0, 0])
    layers, batch = query_codes(model, TASK, "iid", 1500)
    labels = (batch.inputs[:, -1, 0] * 4).long()
    found = run_probe(layers[0], labels, train=slice(0, 1000), test=slice(1000, 1500))
    other = run_probe(layers[0], labels.roll(1), train=slice(0, 1000), test=slice(1000, 1500))
    assert found.f1 > 0.6
    assert abs(other.f1 - other.chance) < 0.15
