"""The oracle (oracle.py) for arrays of NumPy: what a row of the table of mechanisms computes."""

import numpy as np
import oracle
import torch

from polyhead import spec


def tensors_of(arrays):
    """By name; what is no array stays."""
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


def sight(b, h, t, s, *, edges=None, **limits):
    """(b h t s), True where attention is allowed."""
    edges = None if edges is None else torch.tensor(edges)
    return oracle.visible((b, h, t, s), {**tensors_of(limits), "cu_seqlens": edges}).numpy()


def run(op, arrays, *, options, edges=None, **limits):
    """The output (b t h e) of an op for float64 arrays by name.

    `options` and `limits` are those of the op; with a `code` (b h t s), it is taken in place of that of q and k.
    """
    edges = None if edges is None else torch.tensor(edges)
    tensors, row = tensors_of(arrays), spec.mechanism(op)
    weight = {name: tensors.pop(name) for name in row.optional if name in tensors}
    return oracle.answer(
        row.folder, tensors, {**tensors_of({**options, **limits}), **weight, "cu_seqlens": edges}
    ).numpy()
