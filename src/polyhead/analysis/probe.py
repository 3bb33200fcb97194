"""Linear probes of the latent code, and their score on permuted labels.

A probe is a logistic regression, one for each layer (Schug et al. 2024, figures 2B and 5F).  It reads the latent code
of the query attending to itself and predicts a term of the function (fuzzy logic) or the rule (SRAVEN).  It is fitted
on training tasks and scored by F1 on unseen ones.  The paper leaves averaging, regularisation and scaling open: here F1
is the macro average, and the classifier is scikit-learn's default (L2 with C = 1) on standardised codes.  The null of a
probe is the same probe, fitted on permuted labels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.analysis.capture import as_array, capture, codes, finite
from polyhead.analysis.geometry import purity
from polyhead.analysis.labels import distinct, targets, unreadable, views, with_field
from polyhead.layers.taps import Taps
from polyhead.spec.optional import optional
from polyhead.spec.shapes import check_number, one_of, shaped
from polyhead.tasks.base import Batch, Task, portion, stream

Array = np.ndarray
Index = Array | Tensor | slice | list[int]
Device = torch.device | str
# How many sequences the draw for query tokens has.
MAX_QUERIES = 512
# Names and numbers.
Row = dict[str, Any]
# Of a batch: (b), or (b n) for n pairs; the last batch may be smaller.
Labels = Int[Tensor, "..."] | Int[Array, "..."]


@dataclass(frozen=True)
class Probe:
    """The outcome of one probe.

    Attributes:
        f1: Macro F1 on the held-out part, over the classes that occur there.
        chance: The same with permuted labels in the fitting part.
        n: The number of held-out items.
        classes: The number of classes in the held-out part.
        predictions: Those for the held-out part, in order.
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
    seed: int = 0,
) -> Probe:
    """Fit a multinomial logistic regression on the items `train`, score it on the items `test`.

    Items are indices, a mask or a slice.  A held-out class that does not occur in the fitting part counts as F1 = 0.

    >>> probe(codes, labels, train=slice(0, 1000), test=slice(1000, 2000)).f1

    Args:
        seed: That of the permuted labels for `chance`.

    Raises:
        ValueError: For fewer than two classes to fit, an empty part, parts that share items, or codes not finite.
    """
    x, y = finite(codes, "probe"), as_array(labels)
    fit, held_out = _indices("train", train, len(x)), _indices("test", test, len(x))
    if not len(fit) or not len(held_out):
        raise ValueError(f"probe: both parts need items but train has {len(fit)} and test {len(held_out)}")
    num_shared = len(np.intersect1d(fit, held_out))
    if num_shared:
        raise ValueError(f"probe: train and test must not overlap but share {num_shared} items")
    if len(np.unique(y[fit])) < 2:
        raise ValueError(f"probe: at least 2 classes are needed in train but all labels are {y[fit][0]}")
    with optional("probe", "polyhead[report]"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import f1_score
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    occurring = np.unique(y[held_out])

    def fitted(labels: Array) -> tuple[float, Array]:
        """The score and the predictions of a classifier that is fitted on these labels."""
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        predictions = classifier.fit(x[fit], labels).predict(x[held_out])
        score = f1_score(y[held_out], predictions, labels=occurring, average="macro", zero_division=0.0)
        return float(score), predictions

    f1, predictions = fitted(y[fit])
    shuffled = np.random.default_rng(seed % 2**64).permutation(y[fit])  # a run's seed may be negative
    chance, _ = fitted(shuffled)
    return Probe(f1, chance, len(held_out), len(occurring), predictions)


def _indices(name: str, index: Index, n: int) -> Array:
    """The numbers of the chosen ones of n items.  Raises ValueError, which calls them `name`."""
    try:
        if not isinstance(index, slice):
            index = as_array(index) if len(index) else slice(0)  # NumPy takes [] for floats
        return np.arange(n)[index]
    except (IndexError, TypeError) as error:
        raise ValueError(f"probe: {name} must choose among {n} items ({error})") from None


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
    """The codes of n chosen pairs for each layer, (b, n h) with the heads of all groups, and the sequences.

    Fields of the task change the sequences: `replace(task, inputs="fixed_context")`, `replace(task, permuted=False)`.

    >>> layers, batch = query_codes(model, task, "compositional", 1000)
    >>> unlike, batch = query_codes(model, task, "compositional", 1000, pairs=((-1, 0), (-1, 1)))      # (1000, 2 heads)

    Args:
        pairs: (query, key) positions, or a name in `task.pairs`: "self" is the last token attending to itself.
        query: One token (c,) or () that replaces the last one of every sequence; targets stay those of the old token.

    Raises:
        ValueError: For a query of another shape or kind than the tokens, and for pairs of padding, which have no code.
    """
    check_number("query_codes", "sequences", sequences, 1)
    if isinstance(pairs, str):
        pairs = task.pairs[one_of("query_codes", "pairs", pairs, task.pairs)]
    if np.shape(pairs)[1:] != (2,):
        raise ValueError(f"query_codes: pairs must be (query, key) positions, such as [(-1, 0)], got {pairs!r}")
    query_indices, key_indices = map(list, zip(*pairs, strict=True))
    batches = list(draws(task, split, sequences, seed=seed, purpose=purpose, device=device))
    num_padded = 0
    for batch in batches:
        if batch.mask is not None:
            num_padded += int((~batch.mask[:, [*query_indices, *key_indices]]).any(1).sum())
    if num_padded:
        raise ValueError(
            f"query_codes: tokens of pairs must be real, but {num_padded} of {sequences} sequences are shorter"
        )
    if query is not None:
        batches = [_with_query(batch, query) for batch in batches]
    # Only the chosen pairs are kept: the taps of a whole layer are large.
    codes_by_layer: dict[int, list[Tensor]] = {}
    for batch in batches:
        for i, taps in enumerate(capture(model, batch)):
            codes_by_layer.setdefault(i, []).append(codes(taps, query_indices, key_indices).flatten(1))
    return [as_array(torch.cat(parts)) for parts in codes_by_layer.values()], Batch.cat(batches)


def _with_query(batch: Batch, query: Tensor) -> Batch:
    """The batch with another last token.  Its inputs are copied, as its targets may be views of the same memory."""
    token = batch.inputs[0, -1]
    # A query of another shape would be broadcast, and a float would be rounded to an integer.
    if query.shape != token.shape or query.is_floating_point() > token.is_floating_point():
        raise ValueError(
            f"query_codes: query must be one token of {tuple(token.shape)}, {token.dtype}, "
            f"but is {tuple(query.shape)}, {query.dtype}"
        )
    inputs = batch.inputs.clone(memory_format=torch.contiguous_format)
    inputs[:, -1] = query
    return replace(batch, inputs=inputs)


def probe_model(
    model: nn.Module, task: Task, *, sequences: int = 4096, queries: int = 3, seed: int = 0, device: Device = "cpu"
) -> list[Row]:
    """Probe every layer of a model for every part of its tasks.

    A probe is fitted on `sequences` sequences of training tasks (split `iid`), and scored on equally many of unseen
    tasks (`compositional`); training and evaluation read none of them.  Besides the task, these vary:

        query "varies"   context and query
        query "alone"    the query: all sequences have the same context inputs, as in the paper (fuzzy logic)
        query "fixed"    the context: all sequences share one query token; scores are means over `queries` such probes

    With a fixed query, the target of the last token is no label; other labels must not depend on that token.
    A linear probe finds more at one query than across all.  A task with a single query token (the zeros of SRAVEN) has
    one probe, called "fixed".  The terms of fuzzy logic are sorted, so their priors and possible classes differ:
    compare each with its own chance level, not with each other.

    >>> rows = probe_model(model, task, sequences=100, queries=1)

    Returns:
        Rows {pairs, layer, target, query, f1, chance, n, classes}; `pairs` is the name of a view, see `analysis.views`.

    Raises:
        ValueError: For a task without unseen combinations, or without a query token, such as images.
    """
    reason = unreadable(task)
    if reason:
        raise ValueError(f"probe: {reason}, so there is no code to read")
    check_number("probe", "sequences", sequences, 2)
    check_number("probe", "queries", queries, 0)
    if queries > MAX_QUERIES:
        raise ValueError(f"probe: queries must be at most {MAX_QUERIES} but is {queries}")
    rows: list[Row] = []
    for view, (drawn, _) in views(task).items():
        for kind, source, query_tokens in _query_kinds(drawn, queries, seed=seed, device=device):
            probes = []
            for query in query_tokens:
                layer_rows = _probe_query(model, source, view, query, sequences=sequences, seed=seed, device=device)
                probes.append(layer_rows)
            # One row for each layer and target: the mean over the queries.
            for of_queries in zip(*probes, strict=True):
                f1, chance = np.mean([(row["f1"], row["chance"]) for row in of_queries], axis=0).tolist()
                rows.append({**of_queries[0], "query": kind, "f1": f1, "chance": chance})
    return rows


def _query_kinds(
    task: Task, queries: int, *, seed: int, device: Device
) -> list[tuple[str, Task, Sequence[Tensor | None]]]:
    """What varies, the task to draw from, and the tokens that replace the last one; None: each sequence has its own."""
    (batch,) = draws(task, "iid", MAX_QUERIES, seed=seed, purpose="queries", device=device)
    distinct_tokens = batch.inputs[:, -1].unique(dim=0)
    if len(distinct_tokens) == 1:
        return [("fixed", task, [None])]
    kinds: list[tuple[str, Task, Sequence[Tensor | None]]] = [("varies", task, [None])]
    one_context = with_field(task, "inputs", "fixed_context")
    if one_context != task:
        kinds.append(("alone", one_context, [None]))
    if queries:
        tokens = distinct_tokens
        if tokens.is_floating_point():  # in the order of the draws; of a vocabulary a few draws may be equal
            (batch,) = draws(task, "iid", max(queries, 2), seed=seed, purpose="queries", device=device)
            tokens = batch.inputs[:, -1]
        kinds.append(("fixed", task, list(tokens[:queries])))
    return kinds


def _probe_query(
    model: nn.Module, task: Task, pairs: str, query: Tensor | None, *, sequences: int, seed: int, device: Device
) -> list[Row]:
    """One row per layer and target: {pairs, layer, target, query, f1, chance, n, classes}, without what varies."""
    fit, fit_batch = query_codes(model, task, "iid", sequences, pairs=pairs, seed=seed, query=query, device=device)
    held_out, held_out_batch = query_codes(
        model, task, "compositional", sequences, pairs=pairs, seed=seed, query=query, device=device
    )
    fit_labels, held_out_labels = targets(fit_batch), targets(held_out_batch)
    if query is not None:
        fit_labels.pop("target value", None)  # that of the token which the query replaced
    rows: list[Row] = []
    for layer, (fit_codes, held_out_codes) in enumerate(zip(fit, held_out, strict=True)):
        x = np.concatenate([fit_codes, held_out_codes])
        train, test = slice(0, len(fit_codes)), slice(len(fit_codes), len(x))
        for target in fit_labels:
            y = np.concatenate([fit_labels[target], held_out_labels[target]])
            scores = probe(x, y, train=train, test=test, seed=seed).scores
            rows.append({"pairs": pairs, "layer": layer, "target": target, "query": "", **scores})
    return rows


def probe_layers(
    taps: Iterable[Sequence[Taps]],
    labels: Iterable[Labels],
    q_index: int | Sequence[int],
    k_index: int | Sequence[int],
    *,
    test: float = 0.5,
) -> list[Row]:
    """Probe the code of chosen pairs for given labels, layer by layer: rows {layer, name, f1, chance, n, classes}.

    The probe is fitted on the first sequences and scored on the last ones; no sequence is in both parts.

    >>> batches = [task.batch("iid", 60, seed=0, step=i) for i in range(2)]
    >>> answers = [(batch.targets[:, -1, 0] > 0.5).long() for batch in batches]
    >>> rows = probe_layers((capture(model, batch) for batch in batches), answers, -1, -1)

    Args:
        taps: The result of `capture` for each batch.
        labels: For each batch one label per sequence (b), or (b n) for indices of n pairs; below 0 means no label.
        test: The share of all sequences that is scored.

    Raises:
        ValueError: For batches with different layers, labels of another shape than the codes, and as `probe`.
    """
    if not 0 < test < 1:
        raise ValueError(f"probe_layers: test must be a share between 0 and 1 but is {test}")
    labels_of_batches: list[Array] = []
    codes_by_layer: dict[tuple[int, str], list[Array]] = {}
    for layers, batch_labels in zip(taps, labels, strict=True):
        y = as_array(batch_labels)
        labels_of_batches.append(y)
        for number, layer in enumerate(layers):
            x = as_array(codes(layer, q_index, k_index))
            if x.shape[:-1] != y.shape:
                raise ValueError(f"probe_layers: {x.shape[:-1]} codes in a batch but labels of shape {y.shape}")
            codes_by_layer.setdefault((number, layer.name), []).append(x)
    if not labels_of_batches:
        raise ValueError("probe_layers: taps must be of at least one batch, got none")

    # Sequences, not pairs, are divided: pairs of one sequence share their inputs.
    y = np.concatenate(labels_of_batches)
    is_tested = np.zeros(y.shape, dtype=bool)
    is_tested[len(y) - portion(test, len(y)) :] = True
    has_label = y >= 0
    train, held_out = ~is_tested[has_label], is_tested[has_label]
    rows = []
    for (number, name), parts in codes_by_layer.items():
        if len(parts) != len(labels_of_batches):
            raise ValueError(f"probe_layers: batches must have the same layers but {len(parts)} have {number} {name!r}")
        x = np.concatenate(parts)[has_label]
        scores = probe(x, y[has_label], train=train, test=held_out).scores
        rows.append({"layer": number, "name": name, **scores})
    return rows


def clusters(
    model: nn.Module,
    task: Task,
    split: str = "compositional",
    *,
    sequences: int = 1000,
    neighbours: int = 10,
    labels: Callable[[Batch], dict[str, Array]] = targets,
    seed: int = 0,
    device: Device = "cpu",
) -> list[Row]:
    """The purity of each code's neighbours by layer and target: rows {pairs, layer, target, purity, chance, n}.

    Which target do clusters follow?  On SRAVEN: do early layers cluster by the size of numbers, and late ones by rule
    (Schug et al. 2024, section 4.4, figures 5A, 5B, A6)?  See `analysis.purity`; n counts equal sequences once.

    Args:
        labels: Gives the integer labels (b) of a batch by name.
    """
    rows: list[Row] = []
    for view, (drawn, pairs) in views(task).items():
        layers, batch = query_codes(
            model, drawn, split, sequences, pairs=pairs, seed=seed, purpose="maps", device=device
        )
        unique = distinct(batch)  # equal sequences are no further evidence
        for layer, layer_codes in enumerate(layers):
            for target, values in labels(batch).items():
                share, chance = purity(layer_codes[unique], values[unique], neighbours=neighbours)
                numbers = {"purity": share, "chance": chance, "n": len(unique)}
                rows.append({"pairs": view, "layer": layer, "target": target, **numbers})
    return rows
