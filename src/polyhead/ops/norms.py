"""Normalisation of the last dimension, computed in at least float32.

rms_norm(x)   = x / sqrt(mean(x^2) + eps) * weight                    (Zhang and Sennrich 2019, eq. 4)
layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias    (Ba et al. 2016; var divides by the width)
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.latent_code import at_least_float32
from polyhead.spec.shapes import shaped


@shaped
def rms_norm(
    x: Float[Tensor, "... d"], weight: Float[Tensor, " d"] | None, eps: float = 1e-5
) -> Float[Tensor, "... d"]:
    """Divide each vector by its root mean square: `x / sqrt(mean(x^2) + eps) * weight`; eps is inside the root.

    float16 and bfloat16 are computed in float32, gain included, and rounded once at the end.

    >>> rms_norm(torch.tensor([3.0, 4.0]), None, eps=0.0)       # root mean square sqrt(12.5)
    tensor([0.8485, 1.1314])
    """
    dtype = at_least_float32(x.dtype)
    return F.rms_norm(x.to(dtype), (x.shape[-1],), _cast(weight, dtype), eps).to(x.dtype)


@shaped
def layer_norm(
    x: Float[Tensor, "... d"],
    weight: Float[Tensor, " d"] | None,
    bias: Float[Tensor, " d"] | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "... d"]:
    """Shift each vector to mean 0 and scale it to variance 1, then `* weight + bias`.

    float16 and bfloat16 are computed in float32 and rounded once at the end.

    >>> layer_norm(torch.tensor([1.0, 3.0]), None, eps=0.0)
    tensor([-1.,  1.])
    """
    dtype = at_least_float32(x.dtype)
    return F.layer_norm(x.to(dtype), (x.shape[-1],), _cast(weight, dtype), _cast(bias, dtype), eps).to(x.dtype)


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The parameter in a dtype, if there is one: PyTorch's norms want that of their input."""
    if parameter is None:
        return None
    return parameter.to(dtype)
