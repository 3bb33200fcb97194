"""Probes find the information in a code and nothing else; chance is the score without information."""

import dataclasses
import importlib
import itertools
import pathlib

import numpy as np
import pytest
import scipy.stats
import torch

import polyhead as ph
from polyhead.analysis import probe as run_probe, probe_model, probe_run, purity, query_codes
from polyhead.analysis.probe import _check_token, clusters, draws
from polyhead.models.build import build
from polyhead.tasks import FuzzyLogic, Sraven


def clouds(n: int, classes: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes that sit around one point per class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    return np.eye(classes)[labels] + noise * rng.normal(size=(n, classes)), labels


def test_the_test_part_is_held_out() -> None:
    """Labels of the held-out part decide the score and nothing else."""
    codes, labels = clouds(600, 3, 0.05)
    shuffled = labels.copy()
    shuffled[400:] = np.random.default_rng(2).permutation(labels[400:])
    honest = run_probe(codes, labels, train=slice(0, 400), test=slice(400, 600))
    fooled = run_probe(codes, shuffled, train=slice(0, 400), test=slice(400, 600))
    assert (honest.predictions == fooled.predictions).all()
    assert honest.f1 > 0.99
    assert fooled.f1 < 0.5


@pytest.mark.parametrize("unfitted", [True, False])
def test_f1_is_the_macro_average_over_held_out_classes(unfitted: bool) -> None:
    """From counts of true and false positives.  A class that was never fitted has 0; one that no held-out item has does
    not count: guessing it costs recall of the others."""
    codes, labels = clouds(900, 4, 0.6)
    fit, held = np.arange(600), np.arange(600, 900)
    fit, held = (fit[labels[fit] != 3], held) if unfitted else (fit, held[labels[held] != 2])
    found = run_probe(codes, labels, train=fit, test=held)
    scores = []
    for label in np.unique(labels[held]):
        mine, truth = found.predictions == label, labels[held] == label
        scores.append(2 * (mine & truth).sum() / (mine.sum() + truth.sum()))
    assert (found.predictions == 2).any()
    assert (found.n, found.classes, min(scores) == 0) == (len(held), 4 if unfitted else 3, unfitted)
    assert found.f1 == pytest.approx(np.mean(scores))


def test_scale_of_a_head_does_not_matter() -> None:
    codes, labels = clouds(900, 4, 0.4)
    parts = {"train": slice(0, 600), "test": slice(600, 900)}
    stretched = codes * np.array([1e-3, 1, 50, 1e4]) + 7
    assert run_probe(stretched, labels, **parts).f1 == pytest.approx(run_probe(codes, labels, **parts).f1, abs=1e-3)


def test_chance_is_the_same_probe_on_permuted_labels() -> None:
    """By hand: the labels of the fitting part are permuted, those of the held-out part are not."""
    codes, labels = clouds(700, 4, 0.3)
    parts = {"train": slice(0, 500), "test": slice(500, 700)}
    rng, scores = np.random.default_rng(7), []
    for _ in range(3):
        shuffled = labels.copy()
        shuffled[:500] = rng.permutation(labels[:500])
        scores.append(run_probe(codes, shuffled, **parts, permutations=0).f1)
    found = run_probe(codes, labels, **parts, permutations=3, seed=7)
    assert found.chance == pytest.approx(np.mean(scores))
    assert found.chance < 0.45 < 0.9 < found.f1
    assert np.isnan(run_probe(codes, labels, **parts, permutations=0).chance)


def test_what_says_nothing_is_at_the_null() -> None:
    """Codes that are constant, in twenty repeats exactly; codes that are noise, by the test."""
    gaps = []
    for repeat in range(20):
        rng = np.random.default_rng(repeat)
        labels = rng.choice(6, 600, p=[0.4, 0.2, 0.15, 0.1, 0.1, 0.05])
        parts = {"train": slice(0, 300), "test": slice(300, 600), "seed": repeat}
        constant = run_probe(np.ones((600, 4)), labels, **parts)
        assert constant.f1 == constant.chance
        noise = run_probe(rng.normal(size=(600, 4)), labels, **parts)
        gaps.append(noise.f1 - noise.chance)
    assert abs(scipy.stats.ttest_1samp(gaps, 0.0).statistic) < 2.1


def test_tensors_masks_and_indices_name_the_same_parts() -> None:
    codes, labels = clouds(300, 3, 0.3)
    mask = np.arange(300) < 200
    by_slice = run_probe(codes, labels, train=slice(0, 200), test=slice(200, 300))
    by_mask = run_probe(torch.tensor(codes), torch.tensor(labels), train=torch.tensor(mask), test=~mask)
    assert by_slice.f1 == by_mask.f1


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
    codes, labels = clouds(300, 3, 0.3)
    arguments = {"codes": codes, "labels": labels, "train": slice(0, 200), "test": slice(200, 300)} | change
    with pytest.raises(ValueError, match="^" + text + "$"):
        run_probe(**arguments)


def test_tasks_without_a_token_to_read_are_one_line() -> None:
    games = ph.tasks.RelationalGames()
    model = ph.Transformer(ph.TransformerConfig(*games.ends, dim=8, layers=1, heads=ph.Softmax(2)))
    for task in (games, ph.tasks.ObjectSorting(), ph.tasks.Maths()):
        line = rf"^probe: {task.name.replace('_', ' ')} has no token that stands for what is asked, so there is no code"
        with pytest.raises(ValueError, match=line):
            probe_model(model, task)
    with pytest.raises(ValueError, match=r"has no split of unseen combinations \(compositional\), only train, iid, so"):
        probe_model(model, KnownOnly())


class KnownOnly(FuzzyLogic):
    splits = ("train", "iid")


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
    assert drawn == [("iid", 2), *once * 4]
    wanted = [(q, i, f"term {k}") for q in ("varies", "alone", "fixed") for i in (0, 1) for k in (1, 2)]
    assert [(row["query"], row["layer"], row["target"]) for row in rows] == wanted
    assert all(row["n"] == 700 and 0 <= row["f1"] <= 1 and 0 < row["chance"] < 1 for row in rows)
    run, model = ph.train.load_model(tmp_path / "run")
    (known, seen), (unseen, new) = (query_codes(model, run.task, s, 700) for s in ("iid", "compositional"))
    terms = torch.cat([seen.latents["terms"], new.latents["terms"]])
    both = np.concatenate([known[1], unseen[1]])
    wanted = run_probe(both, terms[:, 1], train=slice(0, 700), test=slice(700, 1400))
    assert (rows[3]["f1"], rows[3]["chance"]) == (wanted.f1, wanted.chance)
    known, unseen = (
        query_codes(model, dataclasses.replace(run.task, inputs="fixed_context"), s, 700)
        for s in ("iid", "compositional")
    )
    assert (known[1].inputs[:, :-1, :-1] == unseen[1].inputs[:, :-1, :-1]).all()  # one context for both
    both = np.concatenate([known[0][1], unseen[0][1]])
    terms = torch.cat([known[1].latents["terms"], unseen[1].latents["terms"]])
    alone = run_probe(both, terms[:, 1], train=slice(0, 700), test=slice(700, 1400))
    assert (rows[7]["f1"], rows[7]["chance"]) == (alone.f1, alone.chance)
    assert rows == probe_run(tmp_path / "run", sequences=700, queries=2)
    assert rows != probe_run(tmp_path / "run", sequences=700, queries=2, seed=1)


def test_each_use_of_a_task_has_a_stream_of_its_own() -> None:
    uses = ("probe", "queries", "maps", "zero", "look")
    seen = [next(draws(TASK, "iid", 8, seed=0, purpose=purpose)).inputs for purpose in uses]
    seen.append(TASK.batch("iid", 8, seed=0, step=0).inputs)  # training and evaluation
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))


def test_a_network_with_a_constant_code_is_exactly_at_the_null() -> None:
    """Without queries and keys all scores are zero, in every layer: no term can be read."""
    model = build(small_run("unused").model)
    for block in model.blocks:
        block.attention.qkv.weight.data.zero_()  # it has no bias
    rows = probe_model(model, TASK, sequences=100, queries=0)
    assert len(rows) == 8
    assert all(row["f1"] == row["chance"] > 0 for row in rows)


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


# -------------------------------------------------------------------------------------------------------------- SRAVEN
RAVEN = Sraven(features=2, values=5)


def raven_model(*heads: object) -> ph.Transformer:
    torch.manual_seed(0)
    inputs, outputs = RAVEN.ends
    at = {"positions": ph.RelativeBias(), "max_length": RAVEN.length}
    return ph.Transformer(ph.TransformerConfig(inputs, outputs, dim=12, layers=2, heads=heads, **at)).eval()


@pytest.mark.parametrize("heads", [(ph.Softmax(3),), (ph.Linear(1), ph.Hyla(2))], ids=str)
def test_codes_of_chosen_pairs_are_those_that_the_layer_returns(heads: tuple) -> None:
    """Of more sequences than there are in a batch."""
    model = raven_model(*heads)
    layers, batch = query_codes(model, RAVEN, "iid", 514, pairs=((-1, 3), (5, -2)))
    last, _ = query_codes(model, RAVEN, "iid", 514, pairs="last_row")
    itself, _ = query_codes(model, RAVEN, "iid", 514)
    x = model.inputs(batch.inputs)
    # the last row holds panels 6, 7 and the query: the last of two features of each is at 13 and 15
    places = [((-1, 3), (5, -2)), ((17, 13), (17, 15)), ((17, 17),)]
    for block, *found in zip(model.blocks, layers, last, itself, strict=True):
        with torch.no_grad():
            _, every = block.attention(block.norm1(x), return_code=True)
            x = block(x)
        for code, pairs in zip(found, places, strict=True):
            wanted = torch.cat([every[:, :, i, j] for i, j in pairs], dim=1)
            torch.testing.assert_close(torch.tensor(code), wanted, rtol=1e-4, atol=1e-5)


def test_unknown_pairs_are_named() -> None:
    with pytest.raises(ValueError, match=r"^query_codes: unknown pairs 'last_rwo'; did you mean 'last_row'\?"):
        query_codes(raven_model(ph.Linear(2)), RAVEN, "iid", 4, pairs="last_rwo")


def test_a_query_that_is_no_token_is_refused() -> None:
    """It was broadcast to all numbers of a token, and floats were cut to integers."""
    model = ph.Transformer(small_run(None).model)
    said = r"^query_codes: query must be one token of \(4,\), torch.float32, but is \(\), torch.float32$"
    with pytest.raises(ValueError, match=said):
        query_codes(model, TASK, "iid", 4, query=torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"one token of \(\), torch.int64, but is \(\), torch.float32$"):
        _check_token(torch.tensor(2.5), torch.tensor([1, 2]))
    _check_token(torch.tensor(1), torch.tensor([1, 2]))


def test_sraven_is_probed_for_rule_and_value_in_both_views() -> None:
    """The one query token is fixed; "last_row" is fitted and scored without permutations."""
    model = raven_model(ph.Linear(4))
    rows = probe_model(model, RAVEN, sequences=300, seed=1)
    wanted = [(v, i, t, "fixed") for v in ("self", "last_row") for i in (0, 1) for t in ("rule", "target value")]
    assert [(row["pairs"], row["layer"], row["target"], row["query"]) for row in rows] == wanted
    plain = dataclasses.replace(RAVEN, permuted=False)
    for name, task, row in (("self", RAVEN, rows[2]), ("last_row", plain, rows[6])):
        parts = [query_codes(model, task, s, 300, pairs=name, seed=1) for s in ("iid", "compositional")]
        both = np.concatenate([layers[1] for layers, _ in parts])
        rules = torch.cat([batch.latents["query_rules"][:, -1] for _, batch in parts])
        result = run_probe(both, rules, train=slice(0, 300), test=slice(300, 600), seed=1)
        assert (row["f1"], row["chance"], row["classes"]) == (result.f1, result.chance, result.classes)
    assert (parts[0][1].latents["query_rules"][:, -1] == parts[0][1].latents["rules"][:, -1]).all()


def test_clusters_follow_what_is_written_into_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes made of the rule in one layer and of the target value in the other, by hand."""
    model = raven_model(ph.Linear(4))
    _, batch = query_codes(model, RAVEN, "compositional", 200, purpose="maps")
    value, rule = batch.targets[:, -1].numpy(), batch.latents["query_rules"][:, -1].numpy()
    made = [np.eye(8)[value], np.eye(8)[rule]]
    module = importlib.import_module("polyhead.analysis.probe")  # the package gives the function of that name
    monkeypatch.setattr(module, "query_codes", lambda *_, **__: (made, batch))
    rows = {(r["pairs"], r["layer"], r["target"]): r for r in clusters(model, RAVEN, sequences=200, neighbours=5)}
    assert len(rows) == 2 * 2 * 2
    assert rows["self", 0, "target value"]["purity"] == rows["self", 1, "rule"]["purity"] == 1.0
    for layer, target, labels in ((0, "rule", rule), (1, "target value", value)):
        row = rows["self", layer, target]
        assert (row["purity"], row["chance"]) == purity(made[layer], labels, neighbours=5)
        assert abs(row["purity"] - row["chance"]) < 0.1
