"""The geometry of latent codes: two-dimensional maps, purity of neighbours, similarity of class means.

Schug et al. 2024, figures 2D, A2 (t-SNE of codes), 5A, 5B (what the clusters follow) and 5E (cosine similarity of mean
codes).
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.analysis.capture import as_array, finite
from polyhead.spec.optional import optional
from polyhead.spec.shapes import shaped

Array = np.ndarray


def embed(codes: Float[Tensor, "b h"] | Float[Array, "b h"], seed: int = 0) -> Float[Array, "b 2"]:
    """A map of codes: two coordinates (b 2) per code, by Barnes-Hut t-SNE (van der Maaten & Hinton 2008).

    It begins with the two directions of largest variance.  Its perplexity is 30, or less for few codes.  It runs on one
    thread, so equal inputs give equal maps.

    Raises:
        ValueError: For fewer than 4 codes, and codes that are not finite.
    """
    x = finite(codes, "embed")
    if len(x) < 4:
        raise ValueError(f"embed: a map needs at least 4 codes, got {len(x)}")
    with optional("embed", "polyhead[report]"):
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits

    if x.shape[1] < 2:  # a single head: the code has one dimension
        x = np.concatenate([x, np.zeros_like(x)], axis=1)
    largest = float(np.abs(x).max())
    # scikit-learn's distances in float32 would leave their range; a map does not depend on the scale.
    if largest and not 1e-9 < largest < 1e9:
        x = x / largest
    rounding = 1e-12 * float(np.abs(x).max())
    if np.allclose(x, x[0], rtol=0, atol=rounding):  # all codes are equal, so they share one point
        return np.zeros((len(x), 2))
    plane = PCA(2, svd_solver="full").fit_transform(x)
    start = plane / plane[:, 0].std() * 1e-4  # as small as scikit-learn's own start
    tsne = TSNE(perplexity=min(30.0, (len(x) - 1) / 3), init=start.astype(np.float32), random_state=seed % 2**32)
    with threadpool_limits(1):  # the order of sums depends on threads
        return tsne.fit_transform(x).astype(np.float64)


@shaped
def similarity(
    codes: Float[Tensor, "b h"] | Float[Array, "b h"],
    labels: Int[Tensor, " b"] | Int[Array, " b"],
    *,
    centred: bool = False,
) -> tuple[Int[Array, " c"], Float[Array, "c c"]]:
    """Cosine similarity between the mean codes of all classes: (classes in ascending order, matrix).

    A class whose mean code is zero, or only rounding after centring, has similarity 0 to every class, itself included.

    Args:
        centred: Whether to subtract the mean over classes first.  Otherwise, a component that all classes share brings
            every similarity near 1: softmax codes, for example, are all positive.

    Raises:
        ValueError: For codes that are not finite.
    """
    classes, mean = means(codes, labels)
    rounding = 0.0
    if centred:
        rounding = 1e-12 * np.abs(mean).max()
        mean = mean - mean.mean(0)
    norms = np.linalg.norm(mean, axis=1, keepdims=True)  # (c 1)
    unit = np.divide(mean, norms, out=np.zeros_like(mean), where=norms > rounding)
    return classes, unit @ unit.T


@shaped
def means(
    codes: Float[Tensor, "b h"] | Float[Array, "b h"], labels: Int[Tensor, " b"] | Int[Array, " b"]
) -> tuple[Int[Array, " c"], Float[Array, "c h"]]:
    """The mean code of every class: (classes in ascending order, means).  Raises ValueError if a code is not finite."""
    x, y = finite(codes, "means"), as_array(labels)
    classes = np.unique(y)
    return classes, np.stack([x[y == label].mean(0) for label in classes])


@shaped
def purity(
    codes: Float[Tensor, "b h"] | Float[Array, "b h"],
    labels: Int[Tensor, " b"] | Int[Array, " b"],
    *,
    neighbours: int = 10,
) -> tuple[float, float]:
    """Whether codes of one class are close together: the purity and its chance level.

    The purity is the mean share of each code's nearest `neighbours` with the same label.  The chance level is the
    purity under random labels, sum_c n_c (n_c - 1) / (n (n - 1)).  Distances are Euclidean.  Codes at equal distance
    share the remaining `neighbours` places, so identical codes score exactly the chance level.

    >>> purity(np.array([[0.0], [0.1], [5.0], [5.1]]), np.array([0, 0, 1, 1]), neighbours=1)
    (1.0, 0.3333333333333333)
    """
    x, y = torch.as_tensor(finite(codes, "purity")), torch.as_tensor(as_array(labels))
    n = len(x)
    if not 1 <= neighbours < n:
        raise ValueError(f"purity: neighbours must be 1 to {n - 1}, fewer than the {n} codes, but is {neighbours}")
    purities = []
    for start in range(0, n, 512):
        distance = torch.cdist(x[start : start + 512], x, compute_mode="donot_use_mm_for_euclid_dist")  # (k n)
        rows = torch.arange(len(distance))
        distance[rows, rows + start] = torch.inf  # not its own neighbour
        border = distance.kthvalue(neighbours, dim=1, keepdim=True).values  # (k 1): that of the farthest neighbour
        near, tied = distance < border, distance == border
        share = (neighbours - near.sum(1)).double() / tied.sum(1)  # of a neighbour, for each code at the border
        same = y[start : start + 512, None] == y
        purities.append(((near & same).sum(1) + share * (tied & same).sum(1)) / neighbours)
    counts = y.unique(return_counts=True)[1].double()
    return float(torch.cat(purities).mean()), float((counts * (counts - 1)).sum() / (n * (n - 1)))
