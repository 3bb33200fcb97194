"""Position encodings: rotary embedding, T5 relative bias, ALiBi, learned and sinusoidal vectors.

Constants (angles, bucket indices, slopes) are not parameters and are not in the state dict.  They are recomputed
whenever the module is moved, cast or materialised, so they are never rounded to half precision and never uninitialised.
"""

import abc
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from polyhead import config
from polyhead.layers.device import Device, Placement
from polyhead.layers.heads.sizes import sizes_of
from polyhead.layers.projection import distances
from polyhead.ops.call import sequence_ranges
from polyhead.ops.latent_code import at_least_float32
from polyhead.ops.rope import check_even, check_range, check_shape, rope, rope_angles, rotate
from polyhead.spec import LAYOUTS
from polyhead.spec.shapes import check_count, check_number, one_of

__all__ = ["AlibiBias", "LearnedPositions", "RelativePositionBias", "RotaryEmbedding", "SinusoidalPositions"]


def starts_in(cu_seqlens: Int[Tensor, "_"], t: int) -> Int[Tensor, "t"]:
    """For each of `t` packed tokens the first row of its sequence; rows after the last sequence form one more."""
    return sequence_ranges(cu_seqlens, t)[0]


def places_in(cu_seqlens: Int[Tensor, "_"], t: int) -> Int[Tensor, "1 t"]:
    """The position of each of `t` packed tokens within its own sequence.

    >>> places_in(torch.tensor([0, 3, 5]), 5)
    tensor([[0, 1, 2, 0, 1]])
    """
    return (torch.arange(t, device=cu_seqlens.device) - starts_in(cu_seqlens, t))[None]


class Constant(nn.Module):
    """A constant: `make()` is computed on the CPU in float64 or int64; `.value` holds it on the module's device, in at
    least float32.

    `make` must be picklable.  `.to(device)`, `.half()`, `.double()` and `.to_empty()` recompute the value.
    """

    value: Tensor

    def __init__(self, make: Callable[[], Tensor], device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.make = make
        if device is None:
            device = torch.get_default_device()
        like = torch.empty(0, device=device, dtype=at_least_float32(dtype or torch.get_default_dtype()))
        self.register_buffer("value", self._made(like), persistent=False)

    def _made(self, like: Tensor) -> Tensor:
        with torch.device("cpu"):
            value = self.make()
        if value.is_floating_point() and like.is_floating_point():
            value = value.to(at_least_float32(like.dtype))
        return value.to(like.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Constant":
        super()._apply(fn, recurse)
        self.value = self._made(self.value)
        return self

    def forward(self, like: Tensor) -> Tensor:
        """The value.  It is computed here if `load_state_dict(assign=True)` left the module on the meta device."""
        if self.value.is_meta and not like.is_meta and not torch.compiler.is_compiling():
            self.value = self._made(torch.empty_like(self.value, device=like.device))
        return self.value


def leave_meta(module: nn.Module, _: object = None) -> None:
    """Compute constants that are on the meta device where the module's parameters no longer are: compiled and exported
    code cannot do it later."""
    like = next((p.new_empty(0) for p in module.parameters() if not p.is_meta), None)
    if like is None:
        return
    for part in module.modules():
        if isinstance(part, Constant):
            part(like)


def _angle_table(dim: int, theta: float, length: int) -> Tensor:
    angles = rope_angles(torch.arange(length), dim, theta)
    return torch.cat((angles.cos(), angles.sin()), -1)


class RotaryEmbedding(nn.Module):
    """`ops.rope` from a table of `max_length` positions; it has no parameters and may be shared by all layers.

    >>> rotary = RotaryEmbedding(16, max_length=128)
    >>> q, where = torch.randn(2, 10, 4, 16), torch.arange(10)
    >>> rotary(q, where[:, None]).shape
    torch.Size([2, 10, 4, 16])
    """

    def __init__(
        self,
        dim: int,
        theta: float = 1e4,
        max_length: int = 2048,
        layout: str = "interleaved",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        one_of("RotaryEmbedding", "layout", layout, LAYOUTS)
        check_even("RotaryEmbedding", dim)
        check_count("RotaryEmbedding", "max_length", max_length)
        check_number("RotaryEmbedding", "theta", theta, 0, above=True)
        self.dim, self.theta, self.max_length, self.layout = dim, float(theta), max_length, layout
        self.table = Constant(functools.partial(_angle_table, dim, self.theta, max_length), device, dtype)

    def forward(
        self, x: Float[Tensor, "... d"], positions: Int[Tensor, "..."], *, check: bool = True
    ) -> Float[Tensor, "... d"]:
        """`x` rotated by its positions, integers in [0, max_length) that broadcast to `x.shape[:-1]`.

        Args:
            check: Whether to check the range of positions, which synchronises a GPU.

        Raises:
            ValueError: For a wrong width, positions that do not broadcast and, in eager mode, positions out of range.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"RotaryEmbedding: d = {self.dim} but x (... d) = {tuple(x.shape)}")
        check_shape("RotaryEmbedding", positions, tuple(x.shape[:-1]))
        if check:
            check_range("RotaryEmbedding", positions, self.max_length)
        table = self.table(x)
        if at_least_float32(x.dtype) != table.dtype:  # a float64 input of a float32 module still gets float64 angles
            return rope(x, positions, theta=self.theta, layout=self.layout)
        # A row of the table has the cosines, then the sines, of a position's d/2 angles.
        cos, sin = table[positions.long()].chunk(2, -1)
        return rotate(x, cos, sin, self.layout)


def rotary_tables(
    positions: config.Rotary, layers: Sequence[Sequence[config.Mechanism]], dim: int, max_length: int, device: Device
) -> nn.ModuleDict:
    """One rotary table per head width, shared by all layers.

    Raises:
        ValueError: For heads that must divide `dim` but do not.
    """
    widths: set[int] = set()
    for heads in layers:
        num_heads = config.total_heads(heads)
        for group in heads:
            widths.add(sizes_of(group, dim, num_heads).dim)
    tables = nn.ModuleDict()
    for width in sorted(widths):
        tables[str(width)] = RotaryEmbedding(width, positions.theta, max_length, positions.layout, device)
    return tables


def build_bias(
    positions: object, heads: int, max_length: int, **placement: Unpack[Placement]
) -> "RelativePositionBias | AlibiBias":
    """A layer's own module of positions.

    Raises:
        ValueError: For positions that are neither RelativeBias nor Alibi.
    """
    if isinstance(positions, config.RelativeBias):
        buckets = positions.buckets or max_length
        reach = positions.max_distance or buckets
        return RelativePositionBias(heads, buckets, reach, positions.bidirectional, **placement)
    if isinstance(positions, config.Alibi):
        return AlibiBias(heads, **placement)
    raise ValueError(f"MultiHeadAttention: positions must be Rotary(), RelativeBias() or Alibi() but is {positions!r}")


# ----------------------------------------------------------------------------------------------------- relative biases
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


def _bucket_table(buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The buckets of the distances -reach ... reach; larger distances have the same buckets as the ends."""
    reach = max(buckets, max_distance)
    table = relative_buckets(np.arange(-reach, reach + 1), buckets, max_distance, bidirectional)
    return torch.tensor(table.tolist())


class PositionBias(nn.Module, abc.ABC):
    """A bias on the scores that depends on the distance of query and key."""

    @abc.abstractmethod
    def bias(self, distance: Int[Tensor, "..."]) -> Float[Tensor, "... h"]:
        """The bias of each head for these distances, query position minus key position."""

    def forward(
        self, t: int, s: int, *, offset: int = 0, device: torch.device | None = None
    ) -> Float[Tensor, "h {t}+{s}-1"]:
        """The bias by offset: column j - i + t - 1 for query i and key j.

        Args:
            offset: The position of query 0 minus that of key 0.  Causal attention aligns the last query with the last
                key and needs `offset = s - t`.
            device: By default the device of the module's parameters or constants.
        """
        if device is None:
            device = next(itertools.chain(self.parameters(), self.buffers())).device
        return self.bias(distances(t, s, offset, device)).T

    def dense(self, queries: Int[Tensor, "#b t"], keys: Int[Tensor, "#b s"]) -> Float[Tensor, "#b h t s"]:
        """The bias between the given positions."""
        return self.bias(queries[..., :, None] - keys[..., None, :]).movedim(-1, -3)


class RelativePositionBias(PositionBias):
    """T5's learned bias on the scores: one number per head and bucket of distances (`relative_buckets`).

    `table` is (heads, buckets).  The bias is returned by offset, so no (t s) tensor is needed.
    """

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        if bidirectional and (buckets < 4 or buckets % 2):
            raise ValueError(f"RelativePositionBias: buckets must be even and at least 4 but is {buckets}")
        check_number("RelativePositionBias", "buckets", buckets, 2)
        check_number("RelativePositionBias", "max_distance", max_distance, 1)
        self.heads, self.buckets, self.max_distance, self.bidirectional = heads, buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(heads, buckets, **placement))
        table = functools.partial(_bucket_table, buckets, max_distance, bidirectional)
        self.bucket = Constant(table, placement.get("device"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1 / buckets), not truncated."""
        nn.init.normal_(self.table, std=self.buckets**-0.5)

    def bias(self, distance: Int[Tensor, "..."]) -> Float[Tensor, "... h"]:
        """The numbers of the distances' buckets."""
        # Row 0 is the distance -reach; distances beyond the ends share the buckets of the ends.
        reach = max(self.buckets, self.max_distance)
        bucket = self.bucket(self.table)[distance.long().clamp(-reach, reach) + reach]
        return F.embedding(bucket, self.table.T)


def alibi_slopes(heads: int) -> Float[Tensor, " h"]:
    """`2^(-8 i / heads)` for i = 1 .. heads.  If heads is not a power of two: the slopes of the next lower power p,
    then every second slope of 2 p (Press et al. 2022, appendix).

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    power = 2 ** int(math.log2(heads))
    first, second = torch.arange(1, power + 1), 2 * torch.arange(heads - power) + 1
    exponents = torch.cat((8.0 * first / power, 4.0 * second / power)).double()
    return 2.0**-exponents


class AlibiBias(PositionBias):
    """`-slope_h |i - j|` on the scores: no parameters, and no limit on the length (Press et al. 2022)."""

    def __init__(self, heads: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        check_count("AlibiBias", "heads", heads)
        self.heads = heads
        self.slopes = Constant(functools.partial(alibi_slopes, heads), **placement)

    def bias(self, distance: Int[Tensor, "..."]) -> Float[Tensor, "... h"]:
        """Minus the slopes times the absolute distances."""
        return -self.slopes(distance) * distance.abs()[..., None]


# -------------------------------------------------------------------------------------------------- vectors for inputs
class LearnedPositions(nn.Module):
    """A learned vector per position, to be added to the inputs; `table` is (max_length, dim)."""

    def __init__(self, max_length: int, dim: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        check_count("LearnedPositions", "max_length", max_length)
        self.max_length, self.dim = max_length, dim
        self.table = nn.Parameter(torch.empty(max_length, dim, **placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02^2), as in GPT-2."""
        nn.init.normal_(self.table, std=0.02)

    def forward(self, positions: Int[Tensor, "..."], *, check: bool = True) -> Float[Tensor, "... m"]:
        """The vectors of `positions`, integers in [0, max_length).

        Args:
            check: Whether to check the range of positions, which synchronises a GPU.

        Raises:
            ValueError: For positions out of range, in eager mode.
        """
        if check:
            check_range("LearnedPositions", positions, self.max_length)
        return F.embedding(positions.long(), self.table)


def _sinusoidal_table(dim: int, theta: float, length: int) -> Tensor:
    angles = rope_angles(torch.arange(length), dim, theta)
    # Sine and cosine of an angle are adjacent: (length, dim/2, 2) -> (length, dim).
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


class SinusoidalPositions(nn.Module):
    """`sin(w), cos(w)` in turn, w = position * theta^(-2 j / dim), to be added to the inputs (Vaswani et al. 2017,
    §3.5)."""

    like: Tensor

    def __init__(self, max_length: int, dim: int, theta: float = 1e4, **placement: Unpack[Placement]) -> None:
        super().__init__()
        check_even("SinusoidalPositions", dim)
        check_count("SinusoidalPositions", "max_length", max_length)
        check_number("SinusoidalPositions", "theta", theta, 0, above=True)
        self.max_length, self.dim, self.theta = max_length, dim, float(theta)
        self.table = Constant(functools.partial(_sinusoidal_table, dim, self.theta, max_length), **placement)
        self.register_buffer("like", torch.empty(0, **placement), persistent=False)

    def forward(self, positions: Int[Tensor, "..."], *, check: bool = True) -> Float[Tensor, "... m"]:
        """The vectors of `positions`, in the module's dtype; arguments and errors as in `LearnedPositions`."""
        if check:
            check_range("SinusoidalPositions", positions, self.max_length)
        return self.table(positions)[positions.long()].to(self.like.dtype)
