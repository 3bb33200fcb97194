"""Numbers that PyTorch and JAX modules share: ALiBi slopes, T5 buckets, widths, the tokens that balance relations.

And Holm's correction, which reports and claims of papers share.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PROBE = 32
"""Tokens on which the weights of relations are balanced."""

SYMBOL_HEADS = 4
"""Default number of heads of symbolic attention, if it divides the widths."""

TRUNCATION = 0.87962566103423978
"""Standard deviation of a unit normal truncated at +-2."""


def swiglu_width(dim: int) -> int:
    """The hidden width of SwiGLU by default: the multiple of 64 that is nearest to 8/3 dim, at least 64.

    >>> swiglu_width(64), swiglu_width(512)
    (192, 1344)
    """
    return max(64, round(dim / 24) * 64)


def alibi_slopes(heads: int) -> list[float]:
    """`2^(-8 i / heads)` for i = 1 .. heads.  If heads is not a power of two: the slopes of the next lower power p,
    then every second slope of 2 p (Press et al. 2022, appendix).

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    power = 2 ** int(math.log2(heads))
    exponents = [-8.0 * i / power for i in range(1, power + 1)]
    exponents += [-4.0 * i / power for i in range(1, 2 * (heads - power), 2)]
    return [2.0**exponent for exponent in exponents]


def relative_buckets(
    distance: NDArray[np.integer], buckets: int, max_distance: int, bidirectional: bool = False
) -> NDArray[np.int64]:
    """The T5 bucket of each `distance` = query position - key position.

    With `m = buckets // 2`: n < m has bucket n.  Larger n up to `max_distance` have logarithmic buckets,
    `m + floor(log(n / m + eps) / log(max_distance / m) * (buckets - m))`; all beyond share the last bucket.  n is the
    distance clipped at 0, so the query itself and all keys after it share bucket 0.  If bidirectional, n is the
    absolute distance, and the keys after the query use the upper half of the buckets.

    float32 and eps = 2^-23, as in the original (Raffel et al. 2020; code of Schug et al.).
    """
    after = np.zeros_like(distance, dtype=np.int64)
    n = distance.clip(min=0)
    if bidirectional:
        buckets //= 2
        after = (distance < 0) * np.int64(buckets)
        n = np.abs(distance)
    exact = buckets // 2
    # No distance is left for logarithmic buckets; their formula would divide by zero or change its sign.
    if max_distance <= exact:
        return after + n.clip(max=buckets - 1)
    small = n.astype(np.float32) / np.float32(exact) + np.finfo(np.float32).eps
    ratio = np.log(small) / np.log(np.float32(max_distance / exact))
    large = exact + (ratio * np.float32(buckets - exact)).clip(max=buckets).astype(np.int64)
    return after + np.where(n < exact, n, large.clip(max=buckets - 1))


def check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise ValueError for numbers of T5's buckets and of the largest distance that have no meaning."""
    if bidirectional and (buckets < 4 or buckets % 2):
        raise ValueError(f"RelativePositionBias: buckets must be even and at least 4 but is {buckets}")
    if buckets < 2:
        raise ValueError(f"RelativePositionBias: buckets must be at least 2 but is {buckets}")
    if max_distance < 1:
        raise ValueError(f"RelativePositionBias: max_distance must be at least 1 but is {max_distance}")


def bucket_table(buckets: int, max_distance: int, bidirectional: bool) -> NDArray[np.int64]:
    """The buckets of the distances -reach ... reach; larger distances have the same buckets as the ends."""
    reach = max(buckets, max_distance)
    return relative_buckets(np.arange(-reach, reach + 1), buckets, max_distance, bidirectional)


def holm(values: Sequence[float]) -> list[float]:
    """P-values corrected for multiple tests by Holm: of n, the smallest times n, the next times n - 1 and so on, made
    non-decreasing.

    >>> holm([0.04, 0.01])
    [0.04, 0.02]
    """
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        # A larger value never gets a smaller result than the one before it.
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected
