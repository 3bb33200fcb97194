"""Baselines of language models: compressors, and token frequencies without context.  Lower is better.

    zlib       the split's bytes as one stream, level 9: its window is 32 KiB, and it has not seen the training text
    lzma       the same with LZMA, preset 9, whose window is the whole split
    unigram    each token by its frequency in the training text, with one added to each count

They compress what the tokens say, and count each byte of the text, as models do.  The standard error of `zlib` comes
from chunks of 64 KiB; a flush after each costs a few bytes more.
"""

import lzma
import zlib

import numpy as np
import torch

from polyhead.tasks.task import Score, check_baselines
from polyhead.tasks.text.task import Text
from polyhead.tasks.text.tokens import Bytes

STRETCH = 1 << 16
COUNTED_TOKENS = 1 << 26  # most training tokens to count


def baselines(task: Text, split: str, *, sequences: int) -> dict[str, Score]:
    """Bits per byte of each baseline on the first `sequences` sequences of `split`, in the order of the text.

    Raises ValueError for an unknown split, or one that is shorter than a sequence.
    """
    check_baselines(task, split, sequences)
    corpus = task._corpus()
    tokens = np.array(task._tokens(split)[: sequences * task.length + 1])
    if isinstance(corpus.codec, Bytes):
        data = tokens[1:].tobytes()
    else:
        data = corpus.codec.decode(tokens[1:].tolist()).encode()
    rate = corpus.rate(split)
    size = rate * (len(tokens) - 1)  # of the text, which is longer than `data` if the tokenizer loses some
    bits = _surprise(corpus.tokens["train"][:COUNTED_TOKENS], corpus.codec.count)[tokens[1:]] / rate
    return {
        "zlib": Score.of(torch.tensor(_zlib(data), dtype=torch.double) * (len(data) / size)),
        "lzma": Score(8 * len(lzma.compress(data, preset=9)) / size, 0.0, 1),
        "unigram": Score.of(torch.tensor([part.mean() for part in _stretches(bits, task.length)])),
    }


def _zlib(data: bytes) -> list[float]:
    """Bits per byte of each chunk of one compressed stream."""
    packer = zlib.compressobj(9)
    bits = []
    for part in _stretches(np.frombuffer(data, np.uint8), STRETCH):
        packed = packer.compress(part.tobytes()) + packer.flush(zlib.Z_SYNC_FLUSH)
        bits.append(8 * len(packed) / len(part))
    return bits


def _surprise(train: np.ndarray, count: int) -> np.ndarray:
    """Bits (c) of each of `count` tokens by its training frequency."""
    counts = np.bincount(train, minlength=count) + 1
    return -np.log2(counts / counts.sum())


def _stretches(array: np.ndarray, size: int) -> list[np.ndarray]:
    """The array in parts of equal length, about `size`."""
    return np.array_split(array, max(1, round(len(array) / size)))
