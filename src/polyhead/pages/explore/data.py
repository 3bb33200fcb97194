"""The numbers of an explore page: codes, relations and symbols of all pairs of tokens, one byte each.

    byte = round(255 sqrt(x / limit))                      if no x is negative
    byte = sign(x) round(127 sqrt(|x| / limit))            otherwise, as a signed byte

`limit` is the largest |x| of a group of heads.  The square root gives small numbers more resolution: a head that
attends to 200 tokens equally gives each 0.005.  For a causal model only the pairs with j <= i are stored.  Pairs that
a mask or a window hides as well are listed beside them: a byte a pair, 1 where it is hidden.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polyhead.analysis.capture import as_array
from polyhead.layers.taps import OWN, GroupTaps, Taps
from polyhead.ops.call import Masks

Array = np.ndarray
TOKENS = 512
"""The largest number of tokens that a page shows."""
NUMBERS = 20_000_000
"""The largest number of bytes in a page; large models show fewer tokens."""


@dataclass(frozen=True)
class PageContents:
    """The contents of a page: `tokens` as text, `layers` for the page's script, and their bytes."""

    tokens: tuple[str, ...]
    causal: bool
    layers: list[dict[str, Any]]
    numbers: bytes
    normalised: tuple[str, ...]  # how codes are made: the keys of `page.CODES`
    note: str  # which tokens are omitted and whether pairs are hidden, or empty

    @property
    def facts(self) -> str:
        """Its size as text."""
        heads = sum(group["heads"] for layer in self.layers for group in layer["groups"])
        return f"{len(self.tokens):,} tokens, {len(self.layers)} layers, {heads:,} heads"


def gather(taps: Sequence[Taps], tokens: Sequence[str], *, of: int = 0) -> PageContents:
    """The numbers of all pairs of one sequence, layer by layer.

    At most the first TOKENS tokens are used, or fewer if they need more than NUMBERS bytes.  `of`: the number of tokens
    before truncation.
    Raises ValueError for no layers, no tokens, several sequences, layers over other tokens, or numbers not finite.
    """
    _check(taps, tokens)
    causal = not any(np.triu(_visible(group), 1).any() for layer in taps for group in layer.groups)
    count = _shown(taps, len(tokens), causal)
    holder = _Holder(count, causal)
    names = [f"layer {i + 1}" for i in range(len(taps))]
    layers = [
        {"name": name, "own": layer.name, "groups": [holder.group(group, name) for group in layer.groups]}
        for name, layer in zip(names, taps, strict=True)
    ]
    ways = dict.fromkeys(way for layer in taps for group in layer.groups for way in _ways(group))
    of = max(of, len(tokens))
    notes = [] if count == of else [f"Of {of:,} tokens the first {count:,} are shown."]
    if holder.hides:
        notes.append("A mask or a window hides some pairs: they are shown as not visible, without numbers.")
    words = tuple(map(shown, tokens[:count]))
    return PageContents(words, causal, layers, b"".join(holder.parts), tuple(ways), " ".join(notes))


def shown(piece: str) -> str:
    """A token as visible text: dots for blanks, symbols for control characters.

    >>> shown(" if"), shown("\\t"), shown("\\0"), shown("")
    ('·if', '⇥', '␀', '∅')
    """
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
    return "".join(marks.get(c) or (chr(0x2400 + ord(c)) if ord(c) < 32 else c) for c in piece) or "∅"


def _check(taps: Sequence[Taps], tokens: Sequence[str]) -> None:
    if not taps:
        raise ValueError("explore: taps of at least one layer were wanted but none came")
    if not tokens:
        raise ValueError("explore: at least one token was wanted but the text is empty")
    for i, layer in enumerate(taps):
        for group in layer.groups:
            (b, t), s = group.q.shape[:2], group.k.shape[1]
            if b != 1:
                raise ValueError(f"explore: taps of one sequence were wanted but a batch of {b} came")
            if (t, s) != (len(tokens), len(tokens)):
                name = layer.name or f"layer {i + 1}"
                raise ValueError(f"explore: {name} must look at the {len(tokens)} tokens but has t = {t} and s = {s}")


def _visible(group: GroupTaps) -> Array:
    """True where a query may attend to a key (1|h t t)."""
    t = group.q.shape[1]
    look = Masks(group.mask, group.causal).visible(t, t, group.q.device)
    look = torch.ones(t, t, dtype=torch.bool) if look is None else look
    return as_array(look.expand(*look.shape[:-2], t, t)).reshape(-1, t, t)


def _hidden(group: GroupTaps, pairs: Array) -> Array | None:
    """Which of the stored `pairs` (n n) a mask or a window hides (1|h n'); None: none of them."""
    n = len(pairs)
    hidden = ~_visible(group)[:, :n, :n][:, pairs]
    return hidden if hidden.any() else None


def _stored(count: int, causal: bool) -> Array:
    """The pairs (n n) that a page stores."""
    return np.tril(np.ones((count, count), dtype=bool), 0 if causal else count)


def _ways(group: GroupTaps) -> Iterator[str]:
    """How the code of a group is made of its scores, and these of queries and keys."""
    pointwise = group.kind == "abstractor" and group.relation_act not in ("softmax", "identity")
    yield "act" if pointwise else group.normalise
    if group.kind != OWN and group.bias is not None:
        yield "bias"
    if group.kind != OWN and not math.isclose(group.scale, group.q.shape[-1] ** -0.5, rel_tol=1e-6):
        yield "scale"


def _shown(taps: Sequence[Taps], tokens: int, causal: bool) -> int:
    """The number of tokens that fit into a page."""
    whole = _stored(tokens, causal)
    pairs = each = 0  # planes of pairs, and numbers for each token
    for group in (group for layer in taps for group in layer.groups):
        pairs += group.q.shape[2]
        pairs += group.q_rel.shape[2] if group.relates and group.q_rel is not None else 0
        pairs += 0 if (hidden := _hidden(group, whole)) is None else len(hidden)
        each += 0 if group.assignments is None else group.assignments[0, 0].numel()

    def held(t: int) -> int:
        return (t * (t + 1) // 2 if causal else t * t) * pairs + t * each

    return max(t for t in range(1, min(tokens, TOKENS) + 1) if t == 1 or held(t) <= NUMBERS)


class _Holder:
    """Collects the bytes of arrays, one after another."""

    def __init__(self, count: int, causal: bool) -> None:
        self.count, self.parts, self.length, self.hides = count, list[bytes](), 0, False
        self.pairs = _stored(count, causal)

    def group(self, group: GroupTaps, layer: str) -> dict[str, Any]:
        """A group of heads in the form for the page's script.  Symbols are stored head by head."""
        code = self._pairs(group.code(), layer)
        related = self._pairs(group.relations(), layer) if group.relates else None
        symbols = group.assignments
        assigned = None if symbols is None else self._add(_float(symbols)[0, : self.count].transpose(1, 0, 2), layer)
        hidden = None if (found := _hidden(group, self.pairs)) is None else self._kept(found)
        self.hides |= hidden is not None
        arrays = {"code": code, "relations": related, "symbols": assigned, "hidden": hidden}
        return {"kind": group.kind, "heads": group.q.shape[2], **arrays}

    def _pairs(self, matrices: Float[Tensor, "1 n t t"], layer: str) -> dict[str, Any]:
        return self._add(_float(matrices)[0, :, : self.count, : self.count][:, self.pairs], layer)

    def _add(self, values: Array, layer: str) -> dict[str, Any]:
        """Store `values`; returns their place: offset, number of planes, row length, limit and sign."""
        if not np.isfinite(values).all():
            raise ValueError(f"explore: {layer} must have finite codes, relations and symbols but some are not")
        data, limit, signed = quantised(values)
        return self._kept(data) | {"limit": limit, "signed": signed}

    def _kept(self, data: Array) -> dict[str, int]:
        """Store `data`, a byte each; returns their place."""
        about = {"start": self.length, "planes": len(data), "row": data.shape[-1]}
        self.parts.append(data.tobytes())
        self.length += data.size
        return about


def quantised(values: Array) -> tuple[Array, float, bool]:
    """`values` as bytes, the largest absolute value, and whether any value is negative.

    >>> data, limit, signed = quantised(np.array([0.0, 0.25, 1.0]))
    >>> data.tolist(), limit, signed
    ([0, 128, 255], 1.0, False)
    >>> quantised(np.array([-0.5, 2.0]))[0].tolist()
    [-64, 127]
    """
    limit, signed = float(np.abs(values).max(initial=0)) or 1.0, bool(values.min(initial=0) < 0)
    root = np.sqrt(np.abs(values) / limit)
    if signed:
        return (np.sign(values) * np.rint(root * 127)).astype(np.int8), limit, True
    return np.rint(root * 255).astype(np.uint8), limit, False


def _float(tensor: Tensor) -> Array:
    return as_array(tensor.float())
