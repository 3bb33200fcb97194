"""The shape of a cloud of latent codes: two-dimensional maps, and how alike the mean codes of classes are.

Schug et al. 2024, figures 2D, A2 (t-SNE of codes) and 5E (cosine similarity of mean codes).
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.analysis.capture import as_array
from polyhead.shapes import one_of, shaped

Array = np.ndarray
METHODS = ("tsne", "pca")


def embed(
    codes: Float[Tensor, "b h"] | Float[Array, "b h"], method: str = "tsne", seed: int = 0, *, perplexity: float = 30.0
) -> Float[Array, "b 2"]:
    """Two coordinates per code.

    `pca`: the two directions of largest variance.  `tsne`: Barnes-Hut t-SNE started from them (van der Maaten &
    Hinton 2008); `perplexity` is cut to (b - 1) / 3 when there are few codes.  Runs on one thread, so equal inputs
    give equal maps. ValueError: fewer than 4 codes, codes that are not finite, an unknown method.
    """
    x = _checked(codes)
    one_of("embed", "method", method, METHODS)
    from sklearn.decomposition import PCA

    if x.shape[1] < 2:  # one head: its code already is a line
        x = np.concatenate([x, np.zeros_like(x)], axis=1)
    flat = np.allclose(x, x[0], rtol=0, atol=1e-12 * max(1.0, float(np.abs(x).max())))
    if flat:  # no variance at all: every map is one point
        return np.zeros((len(x), 2))
    plane = PCA(2, svd_solver="full").fit_transform(x)
    if method == "pca":
        return plane
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    start = plane / plane[:, 0].std() * 1e-4
    tsne = TSNE(perplexity=min(perplexity, (len(x) - 1) / 3), init=start.astype(np.float32), random_state=seed)
    with threadpool_limits(1):  # sums over threads come in any order
        return tsne.fit_transform(x).astype(np.float64)


@shaped
def similarity(
    codes: Float[Tensor, "b h"] | Float[Array, "b h"], labels: Int[Tensor, " b"] | Int[Array, " b"]
) -> tuple[Int[Array, " c"], Float[Array, "c c"]]:
    """Cosine similarity between the mean codes of all classes: (classes in ascending order, matrix).

    A class whose mean code is exactly zero has similarity 0 to every class, itself included.
    """
    x, y = as_array(codes).astype(np.float64), as_array(labels)
    classes = np.unique(y)
    means = np.stack([x[y == label].mean(0) for label in classes])
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    unit = np.divide(means, norms, out=np.zeros_like(means), where=norms > 0)
    return classes, unit @ unit.T


def _checked(codes: Any) -> Array:
    x = as_array(codes).astype(np.float64)
    if len(x) < 4:
        raise ValueError(f"embed: at least 4 codes are needed for a map but {len(x)} came")
    if not np.isfinite(x).all():
        raise ValueError(f"embed: codes must be finite but {int((~np.isfinite(x)).any(1).sum())} of {len(x)} are not")
    return x
