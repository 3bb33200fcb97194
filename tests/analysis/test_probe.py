"""Probes find the information in a code and nothing else; chance is the score without information."""

import dataclasses
import importlib
import itertools
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refusing

import polyhead as ph
from polyhead.analysis import codes, probe as run_probe, probe_layers, probe_model, purity, query_codes
from polyhead.analysis.labels import targets, views
from polyhead.analysis.probe import clusters, draws
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
    train_rows, test_rows = np.arange(600), np.arange(600, 900)
    if unfitted:
        train_rows = train_rows[labels[train_rows] != 3]
    else:
        test_rows = test_rows[labels[test_rows] != 2]
    result = run_probe(codes, labels, train=train_rows, test=test_rows)
    scores = []
    for label in np.unique(labels[test_rows]):
        predicted, labelled = result.predictions == label, labels[test_rows] == label
        scores.append(2 * (predicted & labelled).sum() / (predicted.sum() + labelled.sum()))
    assert (result.predictions == 2).any()
    assert (result.n, result.classes, min(scores) == 0) == (len(test_rows), 4 if unfitted else 3, unfitted)
    assert result.f1 == pytest.approx(np.mean(scores))


def test_chance_is_the_same_probe_on_permuted_labels() -> None:
    """By hand: the labels of the fitting part are permuted, those of the held-out part are not."""
    codes, labels = clouds(700, 4, 0.3)
    parts = {"train": slice(0, 500), "test": slice(500, 700)}
    shuffled = labels.copy()
    shuffled[:500] = np.random.default_rng(2**64 - 7).permutation(labels[:500])
    result = run_probe(codes, labels, **parts, seed=-7)
    assert result.chance == run_probe(codes, shuffled, **parts).f1
    assert result.chance < 0.45 < 0.9 < result.f1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.zeros(299, int)}, "probe: b = 300 in codes but 299 in labels (b) = (299,)"),
        ({"labels": np.ones(300, int)}, "probe: at least 2 classes are needed in train but all labels are 1"),
        ({"train": slice(0, 0)}, "probe: both parts need items but train has 0 and test 100"),
        ({"train": slice(0, 201)}, "probe: train and test must not overlap but share 1 items"),
        ({"train": [300]}, "probe: train must choose among 300 items (index 300 is out of bounds"),
        ({"codes": np.full((300, 3), np.nan)}, "probe: codes must be finite but 300 of 300 are not"),
    ],
)
def test_mistakes_are_one_line(change: dict, message: str) -> None:
    codes, labels = clouds(300, 3, 0.3)
    with refusing(message):
        run_probe(**{"codes": codes, "labels": labels, "train": slice(0, 200), "test": slice(200, 300)} | change)


# -------------------------------------------------------------------------------------------------------- labels, views
def test_every_latent_of_whole_numbers_is_a_label() -> None:
    latents = {"terms": torch.tensor([[1, 5], [2, 3]]), "rule": torch.tensor([4, 4]), "noise": torch.rand(2, 3)}
    latents |= {"flags": torch.ones(2, 3, dtype=torch.bool), "panels": torch.ones(2, 3, 3, dtype=torch.long)}
    values = torch.rand(2, 4, 1)
    actual = targets(ph.Batch(values, values, None, torch.ones(2, 4, dtype=torch.bool), latents))
    expected = {"term 1": [1, 2], "term 2": [5, 3], "rule": [4, 4]}
    assert {name: labels.tolist() for name, labels in actual.items()} == expected


def test_the_views_of_sraven_are_the_query_and_the_panels_to_its_left() -> None:
    task = Sraven(features=2, values=5)
    plain = dataclasses.replace(task, permuted=False)
    assert views(task) == {"self": (task, ((-1, -1),)), "last_row": (plain, ((-1, 13), (-1, 15)))}
    panels = plain.batch("iid", 8, seed=0, step=0).latents["panels"]
    assert panels.flatten(1)[:, [13, 15]].tolist() == panels[:, 2, :2, 1].tolist()  # the query's feature
    assert Sraven(features=3, grid=4).pairs["last_row"] == ((-1, 38), (-1, 41), (-1, 44))


def test_tasks_that_are_not_probed_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing("probe: maths has no token that stands for what is asked, so there is no code to read"):
        probe_model(torch.nn.Identity(), ph.tasks.Maths())
    monkeypatch.setattr(FuzzyLogic, "splits", ("train", "iid"))
    with refusing("probe: fuzzy logic has no split compositional, only train, iid"):
        probe_model(torch.nn.Identity(), FuzzyLogic())


TASK = FuzzyLogic(variables=3, terms=2, length=8)


HEADS = ph.Softmax(2, dim=2, value_dim=2), ph.Hyla(3, dim=2, value_dim=2)
MODEL = ph.TransformerConfig(*TASK.ends, dim=8, layers=2, heads=HEADS, max_length=TASK.length)


def test_probes_fit_known_and_score_unseen_combinations() -> None:
    torch.manual_seed(0)
    model = build(MODEL)
    rows = probe_model(model, TASK, sequences=700, queries=2)
    expected = itertools.product(("varies", "alone", "fixed"), (0, 1), ("term 1", "term 2"))
    assert [(row["query"], row["layer"], row["target"]) for row in rows] == list(expected)
    assert {row["n"] for row in rows} == {700}
    fixed_context = dataclasses.replace(TASK, inputs="fixed_context")
    (two_sequences,) = draws(TASK, "iid", 2, seed=0, purpose="queries")
    # By hand, term 2 in the second layer; of fixed queries the mean.
    for row_index, task, queries in (
        (3, TASK, [None]),
        (7, fixed_context, [None]),
        (11, TASK, two_sequences.inputs[:, -1]),
    ):
        scores = []
        for query in queries:
            parts = [query_codes(model, task, split, 700, query=query) for split in ("iid", "compositional")]
            codes = np.concatenate([layers[1] for layers, _ in parts])
            terms = torch.cat([batch.latents["terms"] for _, batch in parts])[:, 1]
            result = run_probe(codes, terms, train=slice(0, 700), test=slice(700, 1400))
            scores.append((result.f1, result.chance))
            first, second = (batch.inputs for _, batch in parts)
            if task is fixed_context:
                assert (first[:, :-1, :-1] == second[:, :-1, :-1]).all()  # one for both
            if query is not None:
                assert (first[:, -1] == query).all()
        assert (rows[row_index]["f1"], rows[row_index]["chance"]) == pytest.approx(np.mean(scores, axis=0))
    assert rows == probe_model(model, TASK, sequences=700, queries=2)
    assert rows != probe_model(model, TASK, sequences=700, queries=2, seed=1)


def test_each_use_of_a_task_has_a_stream_of_its_own() -> None:
    uses = ("probe", "queries", "maps", "zero", "look")
    inputs = [next(draws(TASK, "iid", 8, seed=0, purpose=purpose)).inputs for purpose in uses]
    inputs.append(TASK.batch("iid", 8, seed=0, step=0).inputs)  # training and evaluation
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(inputs, 2))


def test_a_network_with_a_constant_code_is_exactly_at_the_null() -> None:
    """Without queries and keys all scores are zero, in every layer: no term can be read."""
    model = build(MODEL)
    for block in model.blocks:
        block.attention.qkv.weight.data.zero_()  # it has no bias
    rows = probe_model(model, TASK, sequences=100, queries=0)
    assert len(rows) == 8
    assert all(row["f1"] == row["chance"] > 0 for row in rows)
    with refusing("probe: queries must be at most 512 but is 513"):
        probe_model(model, TASK, queries=513)


# -------------------------------------------------------------------------------------------------------------- SRAVEN
RAVEN = Sraven(features=2, values=5)


def raven_model(*heads: object) -> ph.Transformer:
    torch.manual_seed(0)
    inputs, outputs = RAVEN.ends
    options = {"positions": ph.RelativeBias(), "max_length": RAVEN.length}
    return ph.Transformer(ph.TransformerConfig(inputs, outputs, dim=12, layers=2, heads=heads, **options)).eval()


@pytest.mark.parametrize("heads", [(ph.Softmax(3),), (ph.Linear(1), ph.Hyla(2))], ids=str)
def test_codes_of_chosen_pairs_are_those_that_the_layer_returns(heads: tuple) -> None:
    """Of more sequences than there are in a batch."""
    model = raven_model(*heads)
    layers, batch = query_codes(model, RAVEN, "iid", 514, pairs=((-1, 3), (5, -2)))
    last, _ = query_codes(model, RAVEN, "iid", 514, pairs="last_row")
    itself, _ = query_codes(model, RAVEN, "iid", 514)
    x = model.inputs(batch.inputs)
    # the last row holds panels 6, 7 and the query: the last of two features of each is at 13 and 15
    chosen_pairs = [((-1, 3), (5, -2)), ((17, 13), (17, 15)), ((17, 17),)]
    for block, *codes_of_layer in zip(model.blocks, layers, last, itself, strict=True):
        with torch.no_grad():
            _, all_codes = block.attention(block.norm1(x), return_code=True)
            x = block(x)
        for code, pairs in zip(codes_of_layer, chosen_pairs, strict=True):
            expected = torch.cat([all_codes[:, :, i, j] for i, j in pairs], dim=1)
            torch.testing.assert_close(torch.tensor(code), expected, rtol=1e-4, atol=1e-5)


def test_a_query_that_is_no_token_unknown_pairs_and_no_sequence_are_refused() -> None:
    """It was broadcast to all numbers of a token, and floats were cut to integers."""
    model = ph.Transformer(MODEL)
    with refusing("query_codes: query must be one token of (4,), torch.float32, but is (), torch.float32"):
        query_codes(model, TASK, "iid", 4, query=torch.tensor(0.5))
    with refusing("query_codes: unknown pairs 'last_rwo'; did you mean 'last_row'?"):
        query_codes(model, RAVEN, "iid", 4, pairs="last_rwo")
    with refusing("query_codes: pairs must be (query, key) positions, such as [(-1, 0)], got (1, 2)"):
        query_codes(model, TASK, "iid", 4, pairs=(1, 2))
    with refusing("query_codes: sequences must be at least 1 but is 0"):
        query_codes(model, TASK, "iid", 0)


class Viewed(FuzzyLogic):
    """Its inputs are a view of a stored table; its longest sequences have no padding."""

    table: ClassVar[torch.Tensor] = torch.rand(4, 8, 4)
    real: ClassVar[list[int]] = [8, 8, 8, 8]

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> ph.Batch:
        batch = super().sample(split, batch_size, generator)
        mask = torch.arange(8) < torch.tensor(self.real)[:, None]
        return dataclasses.replace(batch, inputs=self.table, mask=mask)


def test_another_query_leaves_the_memory_of_a_task_alone_and_padding_has_no_code(monkeypatch) -> None:
    """The code of a masked key is 0, so a probe would read the length of the sequence from it."""
    task, model = Viewed(variables=3, terms=2, length=8), ph.Transformer(MODEL)
    before = task.table.clone()
    _, batch = query_codes(model, task, "iid", 4, query=torch.zeros(4))
    assert batch.inputs[:, -1].eq(0).all()
    assert torch.equal(task.table, before)
    monkeypatch.setattr(Viewed, "real", [8, 3, 8, 7])
    with refusing("query_codes: tokens of pairs must be real, but 2 of 4 sequences are shorter"):
        query_codes(model, task, "iid", 4)
    query_codes(model, task, "iid", 4, pairs=[(0, 2), (-6, 1)])


def test_sraven_is_probed_for_rule_and_value_in_both_views() -> None:
    """The one query token is fixed; "last_row" is fitted and scored without permutations."""
    model = raven_model(ph.Linear(4))
    rows = probe_model(model, RAVEN, sequences=300, seed=1)
    expected = itertools.product(("self", "last_row"), (0, 1), ("rule", "target value"))
    assert [(row["pairs"], row["layer"], row["target"]) for row in rows] == list(expected)
    assert {row["query"] for row in rows} == {"fixed"}
    plain = dataclasses.replace(RAVEN, permuted=False)
    parts = [query_codes(model, plain, split, 300, pairs="last_row", seed=1) for split in ("iid", "compositional")]
    codes_of_layer = np.concatenate([layers[1] for layers, _ in parts])
    rules = torch.cat([batch.latents["query_rules"][:, -1] for _, batch in parts])
    result = run_probe(codes_of_layer, rules, train=slice(0, 300), test=slice(300, 600), seed=1)
    assert (rows[6]["f1"], rows[6]["chance"], rows[6]["classes"]) == (result.f1, result.chance, result.classes)


@dataclasses.dataclass(frozen=True)
class Bits(ph.Task):
    """The parity of bits: there are two query tokens, and the target depends on them."""

    name, splits = "bits", ("train", "validation", "iid", "compositional")
    ends, length = (ph.Tokens(2), ph.Logits(2)), 8

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> ph.Batch:
        bits = torch.randint(2, (batch_size, self.length), generator=generator)
        return ph.Batch(bits, bits.cumsum(1) % 2, None, bits > -1, {"first": bits[:, 0]})

    loss = metrics = None


@pytest.mark.parametrize("seed", [0, -1])
def test_two_query_tokens_vary_and_the_target_of_a_replaced_one_is_no_label(seed: int) -> None:
    """Of seed 0 the first two draws are equal."""
    task = Bits()
    model = build(ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=ph.Hyla(2)))
    rows = probe_model(model, task, sequences=60, queries=2, seed=seed)
    labels = [(row["query"], row["target"]) for row in rows]
    assert labels == [("varies", "first"), ("varies", "target value"), ("fixed", "first")]


def test_clusters_follow_what_is_written_into_the_code_and_copies_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes made by hand of the target value in one layer and of the rule in the other; each sequence occurs often."""
    model = raven_model(ph.Linear(4))
    _, batch = query_codes(model, RAVEN, "compositional", 200, purpose="maps")
    value, rule = batch.targets[:, -1].numpy(), batch.latents["query_rules"][:, -1].numpy()
    codes_by_layer = [np.eye(8)[value], np.eye(8)[rule]]
    twice = np.concatenate([np.arange(200), np.arange(200)])
    repeated = [codes[twice] for codes in codes_by_layer], batch.map(lambda array: array[twice])
    module = importlib.import_module("polyhead.analysis.probe")  # the package gives the function of that name
    monkeypatch.setattr(module, "query_codes", lambda *_, **__: repeated)
    rows = {(r["pairs"], r["layer"], r["target"]): r for r in clusters(model, RAVEN, sequences=400, neighbours=5)}
    assert len(rows) == 2 * 2 * 2
    assert rows["self", 0, "target value"]["purity"] == rows["self", 1, "rule"]["purity"] == 1.0
    for layer, target, labels in ((0, "rule", rule), (1, "target value", value)):
        row = rows["self", layer, target]
        assert row["n"] == 200
        assert (row["purity"], row["chance"]) == pytest.approx(purity(codes_by_layer[layer], labels, neighbours=5))
        assert abs(row["purity"] - row["chance"]) < 0.1


# ----------------------------------------------------------------------------------------------- any label, any layer
B, T = 24, 5
PAIRS = [0, 2, -1], [1, 2, 0]


@pytest.fixture
def labelled():
    """(taps of two layers, labels of three pairs) of two batches; a pair's label is the token its query stands on."""
    torch.manual_seed(0)
    table, layers = torch.randn(3, 8), [ph.MultiHeadAttention(8, [ph.Softmax(2), ph.Hyla(2)]) for _ in range(2)]
    batches = []
    for count in (B, B // 2):
        tokens, taps = torch.randint(3, (count, T)), []
        with torch.no_grad():
            for layer in layers:
                layer(table[tokens], taps=taps)
        batches.append((taps, tokens[:, PAIRS[0]]))
    return batches


def split(batches):
    return [taps for taps, _ in batches], [labels for _, labels in batches]


def test_layers_are_probed_one_by_one_and_whole_sequences_held_out(labelled):
    taps, labels = split(labelled)
    labels[0][20, 1] = labels[0][0, 0] = -1  # no label
    rows = probe_layers(iter(taps), iter(labels), *PAIRS, test=0.25)
    assert [row["layer"] for row in rows] == [0, 1]
    y = torch.cat(labels).numpy()
    held_out = np.repeat(np.arange(36) >= 27, 3).reshape(36, 3)[y >= 0]
    for layer, row in enumerate(rows):
        x = torch.cat([codes(layers_of_batch[layer], *PAIRS) for layers_of_batch in taps]).numpy()[y >= 0]
        expected = run_probe(x, y[y >= 0], train=~held_out, test=held_out)
        assert (row["f1"], row["chance"], row["n"], row["classes"]) == (expected.f1, expected.chance, 27, 3)


def test_mistakes_of_probes_of_layers(labelled):
    taps, labels = split(labelled)
    for arguments, share, message in (
        ((taps, labels, -1, -1), 0.5, "probe_layers: (24,) codes in a batch but labels of shape (24, 3)"),
        (([], [], -1, -1), 0.5, "probe_layers: taps must be of at least one batch, got none"),
        (([taps[0], taps[1][:1]], labels, *PAIRS), 0.5, "batches must have the same layers but 1 have 1 ''"),
        ((taps, labels, *PAIRS), 1.0, "probe_layers: test must be a share between 0 and 1 but is 1.0"),
    ):
        with refusing(message):
            probe_layers(*arguments, test=share)
