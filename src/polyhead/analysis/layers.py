"""Probe the codes of every layer for any label, in our models or in foreign ones."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from polyhead.analysis.capture import as_array, codes
from polyhead.analysis.probe import probe
from polyhead.layers.taps import Taps

Array = np.ndarray
Labels = Int[Tensor, "..."] | Int[Array, "..."]  # (b) or (b n); the last batch may be smaller


def probe_layers(
    taps: Iterable[Sequence[Taps]],
    labels: Iterable[Labels],
    q_index: int | Sequence[int],
    k_index: int | Sequence[int],
    *,
    test: float = 0.5,
) -> list[dict[str, Any]]:
    """Probe the code of chosen pairs for given labels, layer by layer.

    `taps`: the result of `capture` for each batch.  `labels`: for each batch one label per sequence (b), or (b n) where
    the indices are n pairs; below 0 means no label.  The probe is fitted on the first sequences and scored on the last
    ones, a share `test` of all.  No sequence is in both parts.  Rows are {layer, name, f1, chance, n, classes}.

    >>> batches = [task.batch("iid", 60, seed=0, step=i) for i in range(2)]
    >>> answers = [(batch.targets[:, -1, 0] > 0.5).long() for batch in batches]
    >>> rows = probe_layers((capture(model, batch) for batch in batches), answers, -1, -1)

    Raises ValueError for batches with different layers, labels of another shape than their codes, and as `probe`.
    """
    if not 0 < test < 1:
        raise ValueError(f"probe_layers: test must be a share between 0 and 1 but is {test}")
    parts_by_layer: dict[int, list[Array]] = {}
    names: list[str] = []
    labels_of_batches: list[Array] = []
    for i, (layers, batch_labels) in enumerate(zip(taps, labels, strict=True)):
        names_here = [layer.name for layer in layers]
        if i == 0:
            names = names_here
        elif names_here != names:
            raise ValueError(f"probe_layers: {len(names)} layers in batch 0 but {len(layers)} others in batch {i}")
        labels_of_batches.append(as_array(batch_labels))
        for number, layer in enumerate(layers):
            layer_codes = as_array(codes(layer, q_index, k_index))
            parts_by_layer.setdefault(number, []).append(layer_codes)
            shape = layer_codes.shape[:-1]
            if labels_of_batches[-1].shape != shape:
                got = labels_of_batches[-1].shape
                raise ValueError(f"probe_layers: {shape} codes in batch {i} but labels of shape {got}")
    if not labels_of_batches:
        raise ValueError("probe_layers: taps must be of at least one batch, got none")

    # Sequences, not pairs, are divided: pairs of one sequence share their inputs.
    y = np.concatenate(labels_of_batches)
    is_tested = np.arange(len(y)) >= len(y) * (1 - test)
    is_tested = np.broadcast_to(is_tested.reshape(-1, *[1] * (y.ndim - 1)), y.shape)
    has_label = y >= 0
    train, held_out = ~is_tested[has_label], is_tested[has_label]
    rows = []
    for layer_index, (name, parts) in enumerate(zip(names, parts_by_layer.values(), strict=True)):
        x = np.concatenate(parts)[has_label]
        scores = probe(x, y[has_label], train=train, test=held_out).scores
        rows.append({"layer": layer_index, "name": name, **scores})
    return rows
