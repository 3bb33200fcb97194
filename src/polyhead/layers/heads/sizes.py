"""The widths of a group's heads, and its rows of the layer's joint projection."""

from collections.abc import Sequence
from dataclasses import dataclass

from polyhead.config import Mechanism, SymbolHeads


@dataclass(frozen=True)
class Sizes:
    """Numbers of heads of a group, and widths per head.

    Attributes:
        dim: Width of queries and keys.
        value_dim: Width of values.
        kv_heads: Number of heads of keys and values, which divides `heads`.
        takes: Which of queries "q", keys "k" and values "v" come from the joint projection.
    """

    heads: int
    dim: int
    value_dim: int
    kv_heads: int
    takes: str = "qkv"

    def __str__(self) -> str:
        """
        >>> print(Sizes(8, 16, 16, 2))
        heads=8, dim=16, value_dim=16, kv_heads=2
        """
        text = f"heads={self.heads}, dim={self.dim}, value_dim={self.value_dim}"
        if self.kv_heads != self.heads:
            text += f", kv_heads={self.kv_heads}"
        return text

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of rows of this group in the query, key and value projections."""
        q = self.heads * self.dim * ("q" in self.takes)
        k = self.kv_heads * self.dim * ("k" in self.takes)
        v = self.kv_heads * self.value_dim * ("v" in self.takes)
        return q, k, v


def sizes_of(mechanism: Mechanism, width: int, total_heads: int) -> Sizes:
    """The sizes of a mechanism in a model of this width: those that are None are width // total_heads.

    Raises:
        ValueError: If a size is None, and the heads do not divide the model width.
    """
    missing = [f"{name}=" for name in ("dim", "value_dim") if getattr(mechanism, name) is None]
    if width % total_heads and missing:
        group = "" if total_heads == mechanism.heads else f" in all ({mechanism.heads} of them here)"
        raise ValueError(
            f"{type(mechanism).__name__}: {total_heads} heads{group} do not divide the model width {width}: "
            f"give {' and '.join(missing)} (per head)"
        )
    takes = "v" if mechanism.share else "qkv"
    if isinstance(mechanism, SymbolHeads):
        # Values are no rows of the projection, nor are queries and keys of hidden features.
        takes = "" if mechanism.share or mechanism.hidden else "qk"
    dim, value_dim = mechanism.dim or width // total_heads, mechanism.value_dim or width // total_heads
    return Sizes(mechanism.heads, dim, value_dim, mechanism.kv_heads or mechanism.heads, takes)


def check_shared(caller: str, heads: Sequence[Mechanism], sizes: Sequence[Sizes]) -> None:
    """Raise a ValueError unless each group that shares queries and keys comes after one that has as many."""
    for i, mechanism in enumerate(heads):
        if not mechanism.share:
            continue
        size = sizes[i]
        before = "there is none"
        if i > 0:
            group = sizes[i - 1]
            if (group.heads, group.dim, group.kv_heads) == (size.heads, size.dim, size.kv_heads):
                continue
            before = f"it has {group.heads}, {group.dim} and {group.kv_heads}"
        raise ValueError(
            f"{caller}: {type(mechanism).__name__}(share=True) needs a group before it of {size.heads} heads, "
            f"dim {size.dim} and kv_heads {size.kv_heads} but {before}"
        )
