"""Linear probes of the latent code, and their score on permuted labels.

Schug et al. 2024, section 3.2, figures 2B and 5F: per layer, a logistic regression from the code of the query attending
to itself (a vector over heads) to a term of its function (fuzzy logic) or to the rule behind it (SRAVEN), fitted on
training tasks, scored by F1 on unseen tasks.  The paper leaves averaging, regularisation and scaling open: here F1 is
the macro average, the classifier is scikit-learn's default (L2 with C = 1) on standardised codes.

The null of a probe is the same probe, fitted on permuted labels.  A code without information about the task has that
score.  Random guesses by the labels' frequencies are not a valid null: a classifier without information always predicts
the most frequent class, and scores lower.
"""

import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.analysis.capture import as_array, capture, codes, finite
from polyhead.analysis.geometry import purity
from polyhead.analysis.labels import distinct, targets, unreadable, views, with_field
from polyhead.config import Batch, Task, stream
from polyhead.spec.optional import optional
from polyhead.spec.shapes import check_number, one_of, shaped

Array = np.ndarray
Index = Array | Tensor | slice | list[int]
Device = torch.device | str
Row = dict[str, Any]
"""Names and numbers."""


@dataclass(frozen=True)
class Probe:
    """The outcome of one probe.

    `f1`: macro F1 on the held-out part, over the classes that occur there.  `chance`: the same score of the same
    classifier when the labels that it is fitted on are permuted, the mean over permutations.  `n`: held-out items.
    `classes`: the classes averaged over.  `predictions`: the predicted labels of the held-out part, in order.
    """

    f1: float
    chance: float
    n: int
    classes: int
    predictions: Array

    @property
    def scores(self) -> Row:
        """All but the predictions, as part of a row."""
        return {"f1": self.f1, "chance": self.chance, "n": self.n, "classes": self.classes}


@shaped
def probe(
    codes: Float[Tensor, "b h"] | Float[Array, "b h"],
    labels: Int[Tensor, " b"] | Int[Array, " b"],
    *,
    train: Index,
    test: Index,
    permutations: int = 1,
    seed: int = 0,
) -> Probe:
    """Fit a multinomial logistic regression on the items `train`, score it on the items `test` (indices, masks or
    slices).  `permutations`: refits on permuted labels for `chance`, drawn from `seed`; 0: none, and it is NaN.

    >>> probe(codes, labels, train=slice(0, 1000), test=slice(1000, 2000)).f1

    A held-out class that does not occur in the fitting part counts as F1 = 0.
    ValueError: fewer than two classes to fit, an empty part, parts that share items, or codes that are not finite.
    """
    x, y = finite(codes, "probe"), as_array(labels)
    fit, held = _chosen(train, len(x)), _chosen(test, len(x))
    _check(y, fit, held)
    with optional("probe", "polyhead[report]"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import f1_score
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    occurring = np.unique(y[held])

    def fitted(labels: Array) -> tuple[float, Array]:
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        guess = classifier.fit(x[fit], labels).predict(x[held])
        return float(f1_score(y[held], guess, labels=occurring, average="macro", zero_division=0.0)), guess

    f1, guess = fitted(y[fit])
    rng = np.random.default_rng(seed)
    nulls = [fitted(rng.permutation(y[fit]))[0] for _ in range(permutations)]
    return Probe(f1, float(np.mean(nulls)) if nulls else math.nan, len(held), len(occurring), guess)


def draws(
    task: Task, split: str, sequences: int, *, seed: int, purpose: str, device: Device = "cpu"
) -> Iterator[Batch]:
    """`sequences` sequences of `split` in batches of at most 512, from a separate seed stream."""
    for step, start in enumerate(range(0, sequences, 512)):
        generator = torch.Generator(device).manual_seed(stream(seed, f"{task.name}/{split}/{purpose}", step))
        yield task.sample(split, min(512, sequences - start), generator)


def query_codes(
    model: nn.Module,
    task: Task,
    split: str,
    sequences: int,
    *,
    pairs: str | Sequence[tuple[int, int]] = "self",
    seed: int = 0,
    purpose: str = "probe",
    query: Tensor | None = None,
    device: Device = "cpu",
) -> tuple[list[Float[Array, "b _"]], Batch]:
    """The codes of n chosen pairs for each layer, (b n h) with the heads of all groups, and the sequences.

    `pairs`: (query, key) positions, or a name in `task.pairs`: "self" is the last token attending to itself.
    `query`: one token (c,) or () that replaces the last one of every sequence; the targets stay those of the old token.
    Raises ValueError for a query of another shape, or of floats where tokens are integers, and for pairs of padding,
    which have no code.
    Fields of the task change the sequences: `replace(task, inputs="fixed_context")`, `replace(task, permuted=False)`.

    >>> layers, batch = query_codes(model, task, "compositional", 1000)
    >>> unlike, batch = query_codes(model, task, "compositional", 1000, pairs=((-1, 0), (-1, 1)))      # (1000, 2 heads)
    """
    check_number("query_codes", "sequences", sequences, 1)
    if isinstance(pairs, str):
        pairs = task.pairs[one_of("query_codes", "pairs", pairs, task.pairs)]
    i, j = [query for query, _ in pairs], [key for _, key in pairs]
    batches = list(draws(task, split, sequences, seed=seed, purpose=purpose, device=device))
    if hidden := sum(_padded(batch, i, j) for batch in batches):
        raise ValueError(
            f"query_codes: tokens of pairs must be real, but {hidden} of {sequences} sequences are shorter"
        )
    if query is not None:
        _check_token(query, batches[0].inputs[:, -1])
        batches = [_asked(batch, query) for batch in batches]
    found = [[codes(taps, i, j).flatten(1) for taps in capture(model, batch)] for batch in batches]
    return [as_array(torch.cat(layer)) for layer in zip(*found, strict=True)], Batch.cat(batches)


def probe_run(
    folder: str | pathlib.Path, *, sequences: int = 4096, queries: int = 3, seed: int = 0, device: Device = "cpu"
) -> list[Row]:
    """Probe every layer of a finished run for every part of its tasks.

    Rows are {pairs, layer, target, query, f1, chance, n, classes}.

    A probe is fitted on `sequences` sequences of training tasks (split `iid`), and scored on equally many of unseen
    tasks (`compositional`), from streams that neither training nor evaluation reads.  Besides the task, these vary
    between sequences:

        query "varies"   context and query
        query "alone"    the query: all sequences have the same context inputs, as in the paper (fuzzy logic)
        query "fixed"    the context: all sequences share one query token; scores are means over `queries` such probes

    The code depends on the query as well as on the task, so a linear probe finds more at one query than across all.  A
    task with a single query token (the zeros of SRAVEN) has one probe, called "fixed".  "chance" is the score of the
    same probe fitted on permuted labels.

    pairs: the name of a view, see `analysis.labels.views`: "self", and SRAVEN's "last_row".

    The terms of a fuzzy-logic task are sorted, so "term 1" and "term 2" have different priors and different sets of
    possible classes: compare each with its own chance level, not with each other.
    """
    from polyhead.train import load_model

    run, model = load_model(folder, device=device)
    return probe_model(model, run.task, sequences=sequences, queries=queries, seed=seed, device=device)


def probe_model(
    model: nn.Module,
    task: Task,
    *,
    sequences: int = 4096,
    queries: int = 3,
    seed: int = 0,
    device: Device = "cpu",
) -> list[Row]:
    """`probe_run` for a model in memory.

    Raises ValueError for a task without unseen combinations, or without a query token, such as images.
    """
    if why := unreadable(task):
        raise ValueError(f"probe: {why}, so there is no code to read")
    check_number("probe", "sequences", sequences, 2)
    check_number("probe", "queries", queries, 0)
    rows: list[Row] = []
    for name, (drawn, _) in views(task).items():
        (batch,) = draws(drawn, "iid", max(queries, 2), seed=seed, purpose="queries", device=device)
        tokens = batch.inputs[:, -1]
        alike = bool((tokens == tokens[0]).all())
        kinds: list[tuple[str, Task, Sequence[Tensor | None]]] = [("fixed" if alike else "varies", drawn, [None])]
        if (alone := with_field(drawn, "inputs", "fixed_context")) != drawn and not alike:
            kinds.append(("alone", alone, [None]))
        if queries and not alike:
            kinds.append(("fixed", drawn, list(tokens[:queries])))
        for kind, source, asked in kinds:
            probes = [
                _probes(model, source, name, kind, query, sequences=sequences, seed=seed, device=device)
                for query in asked
            ]
            for same in zip(*probes, strict=True):
                means = {figure: float(np.mean([row[figure] for row in same])) for figure in ("f1", "chance")}
                rows.append(same[0] | means)
    return rows


def _probes(
    model: nn.Module,
    task: Task,
    pairs: str,
    kind: str,
    query: Tensor | None,
    *,
    sequences: int,
    seed: int,
    device: Device,
) -> list[Row]:
    """One row per layer and target."""
    (fit, seen), (held, unseen) = (
        query_codes(model, task, split, sequences, pairs=pairs, seed=seed, query=query, device=device)
        for split in ("iid", "compositional")
    )
    known, labels = targets(seen), targets(unseen)
    rows: list[Row] = []
    for layer, (a, b) in enumerate(zip(fit, held, strict=True)):
        for name in known:
            x, y = np.concatenate([a, b]), np.concatenate([known[name], labels[name]])
            found = probe(x, y, train=slice(0, len(a)), test=slice(len(a), len(x)), seed=seed)
            about = {"pairs": pairs, "layer": layer, "target": name, "query": kind}
            rows.append(about | found.scores)
    return rows


def clusters(
    model: nn.Module,
    task: Task,
    split: str = "compositional",
    *,
    sequences: int = 1000,
    neighbours: int = 10,
    seed: int = 0,
    device: Device = "cpu",
) -> list[Row]:
    """The purity of each code's neighbours by layer and target: which target do clusters follow?

    Rows are {pairs, layer, target, purity, chance, n}: see `analysis.purity`; n counts equal sequences once.  On SRAVEN
    this measures whether "early layers cluster by magnitude, late ones by rule" (Schug et al. 2024, figures 5A, 5B,
    A6): compare "target value" with "rule", each above its own chance.
    """
    rows: list[Row] = []
    for name, (drawn, pairs) in views(task).items():
        layers, batch = query_codes(
            model, drawn, split, sequences, pairs=pairs, seed=seed, purpose="maps", device=device
        )
        kept = distinct(batch)
        for layer, found in enumerate(layers):
            for target, labels in targets(batch).items():
                share, chance = purity(found[kept], labels[kept], neighbours=neighbours)
                about = {"pairs": name, "layer": layer, "target": target}
                rows.append(about | {"purity": share, "chance": chance, "n": len(kept)})
    return rows


def _chosen(index: Index, n: int) -> Array:
    chosen = index if isinstance(index, slice) or len(index) else slice(0)  # NumPy takes [] for floats
    return np.arange(n)[chosen if isinstance(chosen, slice) else as_array(chosen)]


def _padded(batch: Batch, i: list[int], j: list[int]) -> int:
    """The number of sequences with padding among the queries `i` and keys `j`."""
    return 0 if batch.mask is None else int((~batch.mask[:, [*i, *j]]).any(1).sum())


def _asked(batch: Batch, query: Tensor) -> Batch:
    """The batch with another last token.  Its inputs are copied, as its targets may be views of the same memory."""
    inputs = batch.inputs.clone(memory_format=torch.contiguous_format)
    inputs[:, -1] = query
    return replace(batch, inputs=inputs)


def _check_token(query: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless `query` is like each of `tokens`: it would be broadcast, or rounded to an integer."""
    if query.shape != tokens.shape[1:] or query.is_floating_point() > tokens.is_floating_point():
        wanted, came = (f"{tuple(one.shape)}, {one.dtype}" for one in (tokens[0], query))
        raise ValueError(f"query_codes: query must be one token of {wanted}, but is {came}")


def _check(y: Array, fit: Array, held: Array) -> None:
    if not len(fit) or not len(held):
        raise ValueError(f"probe: both parts need items but train has {len(fit)} and test {len(held)}")
    if shared := len(np.intersect1d(fit, held)):
        raise ValueError(f"probe: train and test must not overlap but share {shared} items")
    if len(np.unique(y[fit])) < 2:
        raise ValueError(f"probe: at least 2 classes are needed in train but all labels are {y[fit][0]}")
