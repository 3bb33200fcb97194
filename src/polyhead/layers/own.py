"""Positions and feed-forward layers of a user: their configuration defines what they compute.

A configuration of positions has one of these methods:

    bias(own, distance)          added to the scores (h ...), for distances (...) = query position - key position
    rotate(own, x, positions)    transforms queries or keys x (b t h d) at positions (b|1 t), before the scores
    vectors(own, positions)      added to the inputs of the first layer (b|1 t m)

`own` is the module; its attributes are the parameters that `parameters(heads, dim, max_length)` returns, by name.  A
configuration of a feed-forward layer has `module(dim)`, which returns an nn.Module from (... m) to (... m).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.config import FeedForward, Position
from polyhead.layers.device import Device, Placement
from polyhead.layers.projection import distances
from polyhead.ops.rope import check_range

WAYS = ("bias", "rotate", "vectors")


class OwnParameters(nn.Module):
    """A module with the parameters that the method `parameters` of a user's configuration returns, if it has one."""

    _initial: Callable[[], Mapping[str, Tensor]]

    def _hold(
        self, rule: object, sizes: tuple[int, ...], device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Register the parameters of the configuration `rule` for these sizes."""
        kind = type(rule).__name__
        self._initial = dict
        if hasattr(rule, "parameters"):
            self._initial = partial(rule.parameters, *sizes)
        for name, value in self._initial().items():
            if hasattr(self, name) or not isinstance(value, Tensor):
                raise ValueError(f"{kind}: parameter {name!r} must be a tensor under a name that is free")
            parameter = value.detach().to(device=device, dtype=dtype or value.dtype, copy=True)  # it may be a constant
            setattr(self, name, nn.Parameter(parameter))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin anew, from torch's default generator."""
        for name, value in self._initial().items():
            getattr(self, name).copy_(value)


def way_of(positions: Position) -> str:
    """Which of the methods `WAYS` a user's positions have.  Raises ValueError unless it is exactly one."""
    ways = [method for method in WAYS if hasattr(positions, method)]
    if len(ways) != 1:
        kind, methods = type(positions).__name__, " and ".join(ways) or "none"
        raise ValueError(f"{kind}: positions have one method of {', '.join(WAYS)} but it has {methods}")
    return ways[0]


class OwnPositions(OwnParameters):
    """A user's positions in one layer: a bias or a rotation."""

    like: Tensor

    def __init__(
        self, positions: Position, heads: int, dim: int, max_length: int, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.rule, self.way, self.sizes = positions, way_of(positions), (heads, dim, max_length)
        self.compute: Callable[..., Tensor] = getattr(positions, self.way)
        self.register_buffer("like", torch.empty(0, **placement), persistent=False)
        self._hold(positions, self.sizes, **placement)

    def forward(self, t: int, s: int, *, offset: int = 0) -> Float[Tensor, "h {t}+{s}-1"]:
        """The bias of query i and key j in column j - i + t - 1, as in `RelativePositionBias`."""
        return self._bias(distances(t, s, offset, self.like.device))

    def dense(self, queries: Int[Tensor, "#b t"], keys: Int[Tensor, "#b s"]) -> Float[Tensor, "#b h t s"]:
        """The bias between the given positions."""
        return self._bias(queries[..., :, None] - keys[..., None, :]).movedim(0, -3)

    def leave_meta(self, x: Tensor) -> None:
        """Move to x's device from the meta device: no state dict holds `like`."""
        if self.like.is_meta and not x.is_meta and not torch.compiler.is_compiling():
            self.like = torch.empty_like(self.like, device=x.device)

    def _bias(self, distance: Tensor) -> Tensor:
        bias, expected = self.compute(self, distance), (self.sizes[0], *distance.shape)
        if tuple(bias.shape) != expected:
            kind = type(self.rule).__name__
            raise ValueError(f"{kind}: bias must be {expected} (heads, then distances) but is {tuple(bias.shape)}")
        return bias

    def rotate(self, x: Float[Tensor, "b t h d"], positions: Int[Tensor, "#b t"]) -> Float[Tensor, "b t h d"]:
        """Queries or keys at their positions."""
        return self.compute(self, x, positions)

    def extra_repr(self) -> str:
        return repr(self.rule)


class OwnVectors(OwnPositions):
    """A user's positions: vectors that are added to the inputs."""

    def forward(  # type: ignore[override]  # it is called with positions, not with lengths
        self, positions: Int[Tensor, "#b t"]
    ) -> Float[Tensor, "#b t m"]:
        """The vectors of `positions`, integers in [0, max_length)."""
        check_range(type(self.rule).__name__, positions, self.sizes[2])
        return self.compute(self, positions)


class OwnFeedForward(nn.Module):
    """A user's feed-forward layer, initialised by its own module."""

    def __init__(self, kind: FeedForward, dim: int, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind, self.dim = kind, dim
        with torch.device(torch.get_default_device() if device is None else device):
            self.layer = self._made().to(dtype=dtype)

    def _made(self) -> nn.Module:
        module = None
        if hasattr(self.kind, "module"):
            module = self.kind.module(self.dim)
        if not isinstance(module, nn.Module):
            kind = type(self.kind).__name__
            raise ValueError(f"{kind}: a feed-forward layer has a method module(dim) that returns an nn.Module")
        return module

    def reset_parameters(self) -> None:
        """Begin anew, from torch's default generator."""
        self.layer.load_state_dict(self._made().state_dict())

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return self.layer(x)
