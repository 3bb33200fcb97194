"""What a language model must beat: compressors, and frequencies without context.  Lower is better.

    zlib       the split's bytes as one stream, level 9: it looks back 32 KiB and knows nothing of the training text
    lzma       the same with LZMA, preset 9, which looks back over all of them
    unigram    each token by its frequency in the training text, one added to each count

`zlib` is given by stretches of 64 KiB, flushed at the end of each (a few bytes more), for its standard error.
"""

import lzma
import zlib

import numpy as np
import torch

from polyhead.tasks.task import Score, check_split
from polyhead.tasks.text.task import Text

STRETCH = 1 << 16
COUNTED_TOKENS = 1 << 26  # tokens of training that are counted


def floors(task: Text, split: str, *, sequences: int) -> dict[str, Score]:
    """Bits per byte of each floor on the first tokens of `split`, as many as `sequences` sequences have.

    Raises ValueError for an unknown split.
    """
    check_split(task, split)
    if sequences < 1:
        raise ValueError(f"floors: sequences must be at least 1 but is {sequences}")
    corpus = task._corpus()
    tokens = np.array(corpus.tokens[split][: sequences * task.length + 1])
    whole = corpus.codec.decode(tokens[1:].tolist()).encode() if corpus.codec.count > 256 else tokens[1:].tobytes()
    bits = _surprise(corpus.tokens["train"][:COUNTED_TOKENS], corpus.codec.count)[tokens[1:]] / corpus.rate(split)
    return {
        "zlib": Score.of(torch.tensor(_zlib(whole))),
        "lzma": Score(8 * len(lzma.compress(whole, preset=9)) / len(whole), 0.0, 1),
        "unigram": Score.of(torch.tensor([part.mean() for part in _stretches(bits, task.length)])),
    }


def _zlib(data: bytes) -> list[float]:
    """Bits per byte of stretches of one stream."""
    packer, found = zlib.compressobj(9), []
    for part in _stretches(np.frombuffer(data, np.uint8), STRETCH):
        packed = packer.compress(part.tobytes()) + packer.flush(zlib.Z_SYNC_FLUSH)
        found.append(8 * len(packed) / len(part))
    return found


def _surprise(train: np.ndarray, count: int) -> np.ndarray:
    """Bits (c) of each token."""
    counts = np.bincount(train, minlength=count) + 1
    return -np.log2(counts / counts.sum())


def _stretches(array: np.ndarray, size: int) -> list[np.ndarray]:
    """The array in equal parts of about `size`."""
    return np.array_split(array, max(1, round(len(array) / size)))
