# mypy: disallow-untyped-defs=False
"""Activations of relations inside the kernels, and their derivatives.  It imports triton, as kernels.py does."""

import triton.language as tl

from polyhead.ops.triton_tiles import jit, positive


@jit
def activate(u, C: tl.constexpr):
    """act(u); tanh(x) is 2 sigmoid(2 x) - 1, and a series near 0, where that difference would lose digits."""
    y = u
    if C.act == "relu":
        y = positive(u)
    elif C.act == "sigmoid":
        y = 1 / (1 + tl.exp(-u))
    elif C.act == "tanh":
        square = u * u
        tail = square * (62 / 2835 - square * (1382 / 155925 - square * (21844 / 6081075)))  # counts in float64
        series = u * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - tail))))
        y = tl.where(square < 0.01, series, 2 / (1 + tl.exp(-2 * u)) - 1)
    elif C.act == "silu":
        y = u / (1 + tl.exp(-u))
    elif C.act == "gelu":
        y = 0.5 * u * (1 + tl.erf(u * 0.7071067811865476))
    elif C.act == "gelu_tanh":
        y = u / (1 + tl.exp(-1.5957691216057308 * (u + 0.044715 * u * u * u)))
    return y


@jit
def slope(dy, u, C: tl.constexpr):
    """dy act'(u)."""
    if C.act == "relu":
        dy = tl.where(u <= 0, 0.0, dy)
    elif C.act == "sigmoid":
        y = 1 / (1 + tl.exp(-u))
        dy = dy * y * (1 - y)
    elif C.act == "tanh":
        y = 2 / (1 + tl.exp(-2 * u)) - 1
        dy = dy * (1 - y * y)
    elif C.act == "silu":
        y = 1 / (1 + tl.exp(-u))
        dy = dy * y * (1 + u * (1 - y))
    elif C.act == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * u * u)
        dy = dy * (0.5 * (1 + tl.erf(u * 0.7071067811865476)) + u * density)
    elif C.act == "gelu_tanh":
        y = 1 / (1 + tl.exp(-1.5957691216057308 * (u + 0.044715 * u * u * u)))
        dy = dy * y * (1 + u * (1 - y) * 1.5957691216057308 * (1 + 0.134145 * u * u))
    return dy
