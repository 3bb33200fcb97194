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
    found: list[list[Array]] = []
    truth: list[Array] = []
    names: list[str] = []
    for i, (layers, wanted) in enumerate(zip(taps, labels, strict=True)):
        names = names or [layer.name for layer in layers]
        if [layer.name for layer in layers] != names:
            raise ValueError(f"probe_layers: {len(names)} layers in batch 0 but {len(layers)} others in batch {i}")
        found.append([as_array(codes(layer, q_index, k_index)) for layer in layers])
        truth.append(as_array(wanted))
        shape = found[i][0].shape[:-1]
        if truth[i].shape != shape:
            raise ValueError(f"probe_layers: {shape} codes in batch {i} but labels of shape {truth[i].shape}")
    if not found:
        raise ValueError("probe_layers: at least one batch was wanted but none came")
    y = np.concatenate(truth)
    known = y >= 0
    held = np.broadcast_to((np.arange(len(y)) >= len(y) * (1 - test)).reshape(-1, *[1] * (y.ndim - 1)), y.shape)[known]
    rows: list[dict[str, Any]] = []
    for layer, name in enumerate(names):
        x = np.concatenate([batch[layer] for batch in found])[known]
        rows.append({"layer": layer, "name": name} | probe(x, y[known], train=~held, test=held).scores)
    return rows
