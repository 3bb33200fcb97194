"""Rotary position embedding: each pair of components of a vector is rotated by an angle proportional to the position.

    (x_a, x_b) -> (x_a cos w - x_b sin w, x_a sin w + x_b cos w),   w = position * theta^(-2 j / d),   j = 0 .. d/2 - 1

`layout` says which components form pair j: (2j, 2j + 1) for "interleaved" (the paper), (j, j + d/2) for "half".
Source: Su et al. 2021, eq. 34; positions count from 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.ops.latent_code import at_least_float32
from polyhead.ops.readable import is_readable
from polyhead.spec import LAYOUTS
from polyhead.spec.shapes import check_number, one_of, shaped


@shaped
def rope(
    x: Float[Tensor, "... d"], positions: Int[Tensor, "..."], *, theta: float = 1e4, layout: str = "interleaved"
) -> Float[Tensor, "... d"]:
    """Rotate `x` by its positions: dot products of rotated vectors depend on positions only by their difference.

    Angles and products are in at least float32; the result has the dtype of `x`.

    >>> rope(torch.tensor([1.0, 0.0]), torch.tensor(1))         # one pair, turned by one radian
    tensor([0.5403, 0.8415])

    Args:
        positions: Integers from 0, which broadcast to `x.shape[:-1]`: `(t,)` for x `(b t d)`, and `(t, 1)` or
            `(b, t, 1)` for x `(b t h d)`.
        layout: Which components form a pair: a name of `spec.LAYOUTS`.

    Raises:
        ValueError: For an odd width, an unknown layout, a theta of 0 or less, positions that do not fit, or a negative
            position.  Only eager code checks for negative positions, because the check reads data.
    """
    one_of("rope", "layout", layout, LAYOUTS)
    check_number("rope", "theta", theta, 0, above=True)
    check_even("rope", x.shape[-1])
    check_shape("rope", positions, tuple(x.shape[:-1]))
    check_range("rope", positions)
    angles = rope_angles(positions, x.shape[-1], theta)
    dtype = at_least_float32(x.dtype)
    return rotate(x, angles.cos().to(dtype), angles.sin().to(dtype), layout)


def rope_angles(positions: Tensor, dim: int, theta: float = 1e4) -> Tensor:
    """`positions * theta^(-2 j / dim)` for j = 0 .. dim/2 - 1: (...) -> (..., dim/2).

    In float64 (a float32 angle is off by 0.006 at position 100,000), except where the device has none.
    """
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / -dim  # (dim/2)
    return positions.to(dtype)[..., None] * theta**exponents


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the pairs of `x` (..., d) by angles given as `cos` and `sin` (..., d/2), and compute in their dtype.

    The result has the dtype of `x`.
    """
    wide = x.to(cos.dtype)
    if layout == "half":
        a, b = wide.chunk(2, -1)  # (... d/2) each
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)
    pairs = wide.unflatten(-1, (-1, 2))  # (... d/2 2)
    if _viewable_as_complex(wide):
        rotated = torch.view_as_complex(pairs) * torch.complex(cos, sin)  # (... d/2)
        return torch.view_as_real(rotated).flatten(-2).to(x.dtype)
    a, b = pairs.unbind(-1)  # (... d/2) each
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def _viewable_as_complex(x: Tensor) -> bool:
    """Eager mode: one complex product is ten times faster than four real ones.  Compilers prefer the real ones."""
    if torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda"):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # under vmap strides do not tell those of samples
    return x.stride(-1) == 1 and all(n % 2 == 0 for n in (x.storage_offset(), *x.stride()[:-1]))


# --------------------------------------------------------------------------------------------------------------- checks
def check_even(function: str, dim: int) -> None:
    """Raise ValueError unless the width is even: components are rotated in pairs."""
    if dim % 2:
        raise ValueError(f"{function}: the width must be even but is {dim}")


def check_shape(function: str, positions: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless positions are integers and broadcast to `shape`."""
    if positions.is_floating_point():
        raise ValueError(f"{function}: positions must be of an integer dtype but are {positions.dtype}")
    lead = len(shape) - positions.dim()
    if lead < 0 or any(n not in (1, m) for n, m in zip(positions.shape, shape[lead:], strict=True)):
        raise ValueError(f"{function}: positions of shape {tuple(positions.shape)} do not broadcast to {shape}")


def check_range(function: str, positions: Tensor, limit: int | None = None, name: str = "max_length") -> None:
    """Raise ValueError unless positions are integers in [0, limit).  Their values are checked where `is_readable`."""
    if positions.is_floating_point():
        raise ValueError(f"{function}: positions must be integers but are {positions.dtype}")
    if not is_readable(positions) or not positions.numel():
        return
    low, high = map(int, positions.aminmax())
    if low < 0:
        raise ValueError(f"{function}: positions must not be negative but hold {low}")
    if limit is not None and high >= limit:
        raise ValueError(f"{function}: positions must be below {name} = {limit} but reach {high}")
