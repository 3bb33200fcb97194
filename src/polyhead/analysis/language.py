"""What the codes of a language model say of the text that it reads: kinds of characters, and places in words.

The labels need nothing but the text of each token, so any model of any library can be probed: ours, or one of Hugging
Face.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.analysis.capture import as_array, codes
from polyhead.analysis.geometry import purity
from polyhead.analysis.probe import Row, probe
from polyhead.layers.taps import Taps
from polyhead.spec.shapes import check_number, one_of

Array = np.ndarray
Look = Callable[[Int[Tensor, "b t"]], Sequence[Taps]]
Labels = dict[str, Int[Array, "..."]]
Vectors = dict[tuple[str, str], Float[Array, "b n _"]]
"""By layer and what it is: the vectors of n tokens of each window."""

KINDS = ("newline", "space", "letter", "digit", "punctuation")
PLACES = ("outside", "1st", "2nd", "3rd or 4th", "later")
TARGETS = ("next", "this", "place")
FREQUENT = 256
"""Tokens that the reference "token" tells apart; all others are one."""
TOGETHER = 32
"""Windows of one forward pass."""


def text_labels(pieces: Sequence[str]) -> dict[str, Int[Array, " t"]]:
    """Labels (t) of tokens, given the text of each; -1: no label.

    "this": the kind of the token's first character, an index of `KINDS`.  "next": that of the token after it.  "place":
    how many characters of a word end with the token, an index of `PLACES`.  Words are letters, digits and "_".

    >>> labels = text_labels(["if", " x", "1", ":", "\\n"])
    >>> [KINDS[i] for i in labels["this"]]
    ['letter', 'space', 'digit', 'punctuation', 'newline']
    >>> [PLACES[i] for i in labels["place"]]
    ['2nd', '1st', '2nd', 'outside', 'outside']

    Control characters have no label: a NUL separates documents.  Neither has a token without text, such as a byte of a
    longer character.
    """
    this = np.array([_kind(piece) for piece in pieces], dtype=np.int64)
    place, count = np.empty_like(this), 0
    for i, piece in enumerate(pieces):
        word = len(piece) - max((j + 1 for j, c in enumerate(piece) if not (c.isalnum() or c == "_")), default=0)
        count = count + word if word == len(piece) else word
        place[i] = -1 if this[i] < 0 else min(count, 3 if count < 5 else 4)
    return {"next": np.append(this[1:], -1), "this": this, "place": place}


def _kind(piece: str) -> int:
    first = piece[:1]
    if not first or "\N{REPLACEMENT CHARACTER}" in piece or not (first.isprintable() or first.isspace()):
        return -1
    tests = (first in "\r\n", first.isspace(), first.isalpha(), first.isdigit())
    return tests.index(True) if any(tests) else KINDS.index("punctuation")


def probe_text(
    look: Look,
    fit: Int[Tensor, "b t"],
    held: Int[Tensor, "_ _"],
    pieces: Callable[[Sequence[int]], Sequence[str]],
    *,
    places: Sequence[int],
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
) -> list[Row]:
    """Probe every layer for the labels of `text_labels`: fitted on the windows `fit`, scored on the windows `held`.

    `look`: tokens -> taps.  `pieces`: tokens -> the text of each.  `places`: which tokens of a window are probed.
    `targets`: for which labels.
    Rows are {layer, of, target, f1, chance, n, classes, purity, by_chance}; `chance` as in `probe`, the last two as in
    `purity`.  "of" is what is read:

        self              the code of a token attending to itself
        previous          that of it attending to the token before it
        input             what the layer reads, for reference: usually the normed residual stream
        input, directions    as many random directions of it as a code has numbers, drawn from `seed`
        token             which token it is, in the row of layer "text"; it has no purity

    A layer whose input is not known (of some foreign models) has no reference.  Raises ValueError for places that are
    not 1 to t - 1, and as `probe`.

    >>> model = Transformer(TransformerConfig(Tokens(256), Logits(256), dim=32, layers=2, heads=Hyla(4), causal=True))
    >>> look = lambda ids: capture(model, Batch(ids, ids, None, torch.ones_like(ids), {}))
    >>> text = torch.tensor([*b"return a + b2  # 17" * 200])[: 96 * 32].view(96, 32)
    >>> pieces = lambda tokens: [chr(token) for token in tokens]
    >>> rows = probe_text(look, text[:64], text[64:], pieces, places=range(8, 32, 8))
    """
    _check(fit, held, places, targets)
    (known, truth), (unseen, answers) = (_read(look, windows, pieces, places, seed) for windows in (fit, held))
    tokens = [as_array(windows)[:, list(places)] for windows in (fit, held)]
    for part, one in zip((known, unseen), tokens, strict=True):
        part["text", "token"] = _one_hot(one, tokens[0])
    rows: list[Row] = []
    for (layer, of), vectors in known.items():
        for target in targets:
            a, b = truth[target] >= 0, answers[target] >= 0
            x, y = vectors[a], truth[target][a]
            z, w = unseen[layer, of][b], answers[target][b]
            train, test = slice(0, len(x)), slice(len(x), len(x) + len(z))
            found = probe(np.concatenate([x, z]), np.concatenate([y, w]), train=train, test=test, seed=seed)
            share, chance = purity(z, w) if of != "token" else (None, None)
            about = {"layer": layer, "of": of, "target": target}
            rows.append(about | found.scores | {"purity": share, "by_chance": chance})
    return rows


def _check(fit: Tensor, held: Tensor, places: Sequence[int], targets: Sequence[str]) -> None:
    """Raise ValueError for labels that are not known, and for places outside the windows."""
    for target in targets:
        one_of("probe_text", "target", target, TARGETS)
    for place in places:
        check_number("probe_text", "place", place, 1)
    if len(places) == 0:  # may be an array
        raise ValueError("probe_text: places must be tokens of a window, at least one, but are none")
    if max(places) >= min(fit.shape[1], held.shape[1]):
        raise ValueError(
            f"probe_text: places must be below {min(fit.shape[1], held.shape[1])} but one is {max(places)}"
        )


def _read(
    look: Look, windows: Tensor, pieces: Callable[[Sequence[int]], Sequence[str]], places: Sequence[int], seed: int
) -> tuple[Vectors, Labels]:
    """The vectors of the probed tokens of all windows, and their labels (b n)."""
    chosen, before = list(places), [place - 1 for place in places]
    parts: dict[tuple[str, str], list[Array]] = {}
    for some in windows.split(TOGETHER):
        for i, taps in enumerate(look(some)):
            found = {"self": codes(taps, chosen, chosen), "previous": codes(taps, chosen, before)}
            if taps.x is not None:
                found["input"] = taps.x[:, chosen].float()
                generator = torch.Generator().manual_seed(seed)
                size = found["input"].shape[-1], found["self"].shape[-1]
                found["input, directions"] = found["input"].cpu() @ torch.randn(size, generator=generator)
            for of, vectors in found.items():
                parts.setdefault((taps.name or f"layer {i + 1}", of), []).append(as_array(vectors))
    labels = [text_labels(pieces(row)) for row in windows.tolist()]
    known = {target: np.stack([row[target][chosen] for row in labels]) for target in labels[0]}
    return {what: np.concatenate(several) for what, several in parts.items()}, known


def _one_hot(tokens: Int[Array, "b n"], fitted: Int[Array, "_ _"]) -> Float[Array, "b n _"]:
    """Which of the most frequent tokens of the fitting part each token is."""
    names, counts = np.unique(fitted, return_counts=True)
    kept = names[np.argsort(-counts, kind="stable")[:FREQUENT]]
    return (tokens[..., None] == kept).astype(np.float64)
