"""The widths of a group's heads, and its rows of the layer's joint projection."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Widths per head: `dim` of queries and keys, `value_dim` of values; `kv_heads` divides `heads`.

    `takes`: which of queries "q", keys "k" and values "v" come from the joint projection.
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
