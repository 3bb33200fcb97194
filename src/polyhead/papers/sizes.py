"""The scales of a study, and how a run of each scale is trained.

paper   the setting of the paper.
short   the paper's network, batch and rate, with fewer steps; only for fuzzy logic.
small   for two CPU cores: smaller networks, fewer steps, gradients clipped at 1.
smoke   a few steps.  Its numbers are meaningless.

The files of the figures define the sizes.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from polyhead.config import Position, RelativeBias, Train
from polyhead.spec.shapes import one_of

SCALES = ("paper", "short", "small", "smoke")


@dataclass(frozen=True)
class Setting:
    """The searched values: learning rate, weight decay and warm-up."""

    lr: float
    weight_decay: float
    warmup: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A network, its training, and the grid of searched settings."""

    dim: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    steps: int
    batch_size: int
    lrs: tuple[float, ...]
    decays: tuple[float, ...]
    warmups: tuple[int, ...]
    clip: float | None
    eval_batches: int
    seeds: int
    positions: Position = RelativeBias()  # noqa: RUF009 (frozen)
    betas: tuple[float, float] = (0.9, 0.999)
    final: float = 0.1
    dropout: float = 0.0
    act: str = "swiglu"
    """The activation of feed-forward layers; only the dual-attention study and language models read it."""
    norm_order: str = "pre"
    """Of the transformers of the dual-attention study."""

    def grid(self) -> tuple[Setting, ...]:
        """All settings of the grid."""
        return tuple(itertools.starmap(Setting, itertools.product(self.lrs, self.decays, self.warmups)))


# The scale `smoke`; figures change some of its fields.
SMOKE = Scale(
    dim=16, hidden=32, layers=2, heads=2, head_dim=8, steps=4, batch_size=8, clip=1.0,
    lrs=(2e-3,), decays=(0.0,), warmups=(1,), seeds=2, eval_batches=2,
)  # fmt: skip

Size = TypeVar("Size", bound=Scale)


def size(sizes: Mapping[str, Size], scale: str) -> Size:
    """The size called `scale`.  Raises ValueError for an unknown name."""
    return sizes[one_of("recipes", "scale", scale, sizes)]


def widened(shape: Size, factor: float, *, heads: bool = False) -> Size:
    """The size `factor` times as wide.  The paper multiplies the model, query-key-value and MLP widths.  Its code also
    multiplies the number of heads (`heads`), so that the width of a head is constant."""
    head_count = round(shape.heads * factor) if heads else shape.heads
    total = round(shape.heads * shape.head_dim * factor)
    wide = replace(shape, dim=round(shape.dim * factor), hidden=round(shape.hidden * factor))
    return replace(wide, heads=head_count, head_dim=total // head_count)


def one_setting(shape: Scale, scale: str) -> tuple[Setting, ...]:
    """The whole grid at paper scale; at other scales only the highest rate, as stated in the recipes."""
    if scale == "paper":
        return shape.grid()
    return (Setting(max(shape.lrs), shape.decays[0], shape.warmups[0]),)


def with_seeds(shape: Size, scale: str, seeds: int) -> Size:
    """At most `seeds` seeds below paper scale."""
    if scale == "paper":
        return shape
    return replace(shape, seeds=min(seeds, shape.seeds))


def training(shape: Scale, setting: Setting, splits: tuple[str, ...]) -> Train:
    """The training of a run of this size, scored on `splits` after every quarter; a very short one after every half."""
    eval_every = save_every = max(shape.steps // 4, 1)
    if shape.steps <= 8:
        eval_every, save_every = max(shape.steps // 2, 1), shape.steps
    return Train(
        steps=shape.steps,
        batch_size=shape.batch_size,
        lr=setting.lr,
        weight_decay=setting.weight_decay,
        betas=shape.betas,
        warmup=setting.warmup,
        final=shape.final,
        clip=shape.clip,
        evaluate=splits,
        eval_batches=shape.eval_batches,
        eval_every=eval_every,
        log_every=max(shape.steps // 60, 1),
        save_every=save_every,
    )
