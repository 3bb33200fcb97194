"""The numbers of an explore page: codes, relations and symbols of all pairs of tokens, one byte each.

    byte = round(255 sqrt(x / limit))                      if no x is negative
    byte = sign(x) round(127 sqrt(|x| / limit))            otherwise, as a signed byte

`limit` is the largest |x| of a group of heads.  The square root gives small numbers more resolution: a head that
attends to 200 tokens equally gives each 0.005.  For a causal model only the pairs with j <= i are stored.  Pairs that
a mask or a window hides as well are listed beside them: a byte a pair, 1 where it is hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polyhead.analysis.capture import as_array
from polyhead.layers.taps import OWN, GroupTaps, Taps

Array = np.ndarray
# The largest number of tokens that a page shows.
TOKENS = 512
# The largest number of bytes for pairs in a page; large models show fewer tokens.
NUMBERS = 20_000_000


@dataclass(frozen=True)
class PageContents:
    """The contents of a page: `tokens` as text, `layers` for the page's script, and their bytes."""

    tokens: tuple[str, ...]
    causal: bool
    layers: list[dict[str, Any]]
    numbers: bytes
    normalised: tuple[str, ...]  # how codes are made: the keys of `page.CODES` and `page.MORE`
    note: str  # which tokens are omitted and whether pairs are hidden, or empty

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of heads of all layers."""
        groups = []
        for layer in self.layers:
            groups += layer["groups"]
        return groups

    @property
    def facts(self) -> str:
        """Its size as text."""
        num_heads = sum(group["heads"] for group in self.groups)
        parts = []
        for name, count in {"token": len(self.tokens), "layer": len(self.layers), "head": num_heads}.items():
            if count != 1:
                name += "s"
            parts.append(f"{count:,} {name}")
        return ", ".join(parts)


def gather(taps: Sequence[Taps], tokens: Sequence[str], *, of: int = 0) -> PageContents:
    """The numbers of all pairs of one sequence by layer: of the first TOKENS tokens, or fewer beyond NUMBERS bytes.

    Args:
        of: The number of tokens before truncation.

    Raises:
        ValueError: For no layers, no tokens, several sequences, layers over other tokens, or numbers not finite.
    """
    _check(taps, tokens)
    groups: list[GroupTaps] = []
    for layer in taps:
        groups += layer.groups
    causal = not any(np.triu(_visible(group), 1).any() for group in groups)  # no query sees a later key
    count = _tokens_that_fit(groups, len(tokens), causal)
    numbers = PageNumbers(count, causal)
    layers = []
    for i, layer in enumerate(taps):
        name = f"layer {i + 1}"
        described = [numbers.add_group(group, name) for group in layer.groups]
        layers.append({"name": name, "own": layer.name, "groups": described})

    normalised: dict[str, None] = {}  # each equation once, in the order of the groups
    for group in groups:
        normalised |= dict.fromkeys(_equations(group))
    notes = []
    all_tokens = max(of, len(tokens))
    if count < all_tokens:
        notes.append(f"Of {all_tokens:,} tokens the first {count:,} are shown.")
    if numbers.has_hidden_pairs:
        notes.append("A mask or a window hides some pairs: they are shown as not visible, without numbers.")
    words = tuple(map(visible_text, map(str, tokens[:count])))
    return PageContents(words, causal, layers, b"".join(numbers.parts), tuple(normalised), " ".join(notes))


# Control characters have symbols of their own from 0x2400 on.
MARKS = {code: chr(0x2400 + code) for code in range(32)}
MARKS |= str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\x7f": "␡"})


def visible_text(piece: str) -> str:
    """A token as visible text: dots for blanks, symbols for control characters.

    >>> visible_text(" if"), visible_text("\\t"), visible_text("\\0"), visible_text("")
    ('·if', '⇥', '␀', '∅')
    """
    return piece.translate(MARKS) or "∅"


def _check(taps: Sequence[Taps], tokens: Sequence[str]) -> None:
    if not taps:
        raise ValueError("explore: give the taps of at least one layer")
    if not tokens:
        raise ValueError("explore: the text must have at least one token but is empty")
    for i, layer in enumerate(taps):
        for group in layer.groups:
            b, t = group.q.shape[:2]
            s = group.k.shape[1]
            if b != 1:
                raise ValueError(f"explore: the taps must be of one sequence, got a batch of {b}")
            if (t, s) != (len(tokens), len(tokens)):
                name = layer.name or f"layer {i + 1}"
                raise ValueError(f"explore: {name} must look at the {len(tokens)} tokens but has t = {t} and s = {s}")


def _equations(group: GroupTaps) -> list[str]:
    """How the code of a group is made of its scores, and these of queries and keys: keys of `page.CODES` and `MORE`."""
    keys = [group.normalise]
    # The Abstractor's scores go through a function of their own.
    if group.kind == "abstractor" and group.relation_act not in ("softmax", "identity"):
        keys = ["act"]
    if group.kind == OWN:
        return keys
    if group.bias is not None:
        keys.append("bias")
    if not math.isclose(group.scale, group.q.shape[-1] ** -0.5, rel_tol=1e-6):
        keys.append("scale")
    return keys


# -------------------------------------------------------------------------------------------------------------- pairs
def _visible(group: GroupTaps) -> Array:
    """True where a query may attend to a key (1|h t t)."""
    t = group.q.shape[1]
    visible = group.visible()
    if visible is None:
        return np.ones((1, t, t), dtype=bool)
    return as_array(visible.expand(*visible.shape[:-2], t, t)).reshape(-1, t, t)


def _hidden(group: GroupTaps, pairs: Array) -> Array | None:
    """Which of the stored `pairs` (n n) a mask or a window hides (1|h n'); None: none of them."""
    n = len(pairs)
    hidden = ~_visible(group)[:, :n, :n][:, pairs]  # (1|h n')
    if hidden.any():
        return hidden
    return None


def _stored(count: int, causal: bool) -> Array:
    """The pairs (n n) that a page stores."""
    pairs = np.ones((count, count), dtype=bool)
    if causal:
        return np.tril(pairs)
    return pairs


def _tokens_that_fit(groups: Sequence[GroupTaps], tokens: int, causal: bool) -> int:
    """The number of tokens the numbers of whose pairs fit into a page."""
    all_pairs = _stored(tokens, causal)
    planes = 0  # of a byte for each pair
    for group in groups:
        planes += group.q.shape[2]
        if group.relates and group.q_rel is not None:
            planes += group.q_rel.shape[2]
        hidden = _hidden(group, all_pairs)
        if hidden is not None:
            planes += len(hidden)
    count = min(tokens, TOKENS)
    while count > 1 and planes * _stored(count, causal).sum() > NUMBERS:
        count -= 1
    return count


# ------------------------------------------------------------------------------------------------------------- numbers
class PageNumbers:
    """The bytes of a page: arrays, one after another."""

    def __init__(self, count: int, causal: bool) -> None:
        self.count = count
        self.pairs = _stored(count, causal)
        self.parts: list[bytes] = []
        self.length = 0
        self.has_hidden_pairs = False

    def add_group(self, group: GroupTaps, layer: str) -> dict[str, Any]:
        """Store a group of heads; returns its description for the page's script.  Symbols are stored head by head."""
        described: dict[str, Any] = {"kind": group.kind, "heads": group.q.shape[2]}
        described["code"] = self._add_pairs(group.code(), layer)
        described["relations"] = described["symbols"] = described["hidden"] = None
        if group.relates:
            described["relations"] = self._add_pairs(group.relations(), layer)
        if group.assignments is not None:
            symbols = as_array(group.assignments.float())[0, : self.count]  # (t h n)
            described["symbols"] = self._add(symbols.transpose(1, 0, 2), layer)
        # Pairs that a mask or a window hides have no numbers.
        hidden = _hidden(group, self.pairs)
        if hidden is not None:
            described["hidden"] = self._add_bytes(hidden)
            self.has_hidden_pairs = True
        return described

    def _add_pairs(self, matrices: Float[Tensor, "1 n t t"], layer: str) -> dict[str, Any]:
        values = as_array(matrices.float())[0, :, : self.count, : self.count]  # (n t t)
        return self._add(values[:, self.pairs], layer)  # only the stored pairs: (n pairs)

    def _add(self, values: Array, layer: str) -> dict[str, Any]:
        """Store `values`; returns where: offset, number of planes, row length, limit and sign."""
        if not np.isfinite(values).all():
            raise ValueError(f"explore: {layer} must have finite codes, relations and symbols but some are not")
        data, limit, signed = quantised(values)
        return {**self._add_bytes(data), "limit": limit, "signed": signed}

    def _add_bytes(self, data: Array) -> dict[str, int]:
        """Store `data`, a byte each; returns where."""
        start = self.length
        self.parts.append(data.tobytes())
        self.length += data.size
        return {"start": start, "planes": len(data), "row": data.shape[-1]}


def quantised(values: Array) -> tuple[Array, float, bool]:
    """`values` as bytes, the largest absolute value, and whether any value is negative.

    >>> data, limit, signed = quantised(np.array([0.0, 0.25, 1.0]))
    >>> data.tolist(), limit, signed
    ([0, 128, 255], 1.0, False)
    >>> quantised(np.array([-0.5, 2.0]))[0].tolist()
    [-64, 127]
    """
    limit = float(np.abs(values).max(initial=0)) or 1.0
    signed = bool(values.min(initial=0) < 0)
    root = np.sqrt(np.abs(values) / limit)  # from 0 to 1
    if signed:
        return (np.sign(values) * np.rint(root * 127)).astype(np.int8), limit, True
    return np.rint(root * 255).astype(np.uint8), limit, False
