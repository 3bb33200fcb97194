"""Questions and answers as tokens.

A token is a printable ASCII character or one of three special tokens: 0 padding, 1 start, 2 end.

>>> encode(["2*x"], 5)
tensor([[21, 13, 91,  0,  0]], dtype=torch.uint8)
>>> decode(encode(["2*x"], 5))
['2*x']
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

PAD, START, END = 0, 1, 2
FIRST = ord(" ") - 3  # the blank is token 3
VOCABULARY = 3 + 95
NAMES = {PAD: "pad", START: "start", END: "end", ord(" ") - FIRST: "␣"}
BUCKETS = 10  # of questions by hash: 0 is validation, 1 is iid, the others are train

Pair = tuple[str, str]


def encode(texts: Sequence[str], width: int) -> Int[Tensor, "b t"]:
    """Tokens (n width), in uint8, of printable ASCII texts of at most `width` characters, padded."""
    padded = b"".join([text.encode("ascii").ljust(width, b"\0") for text in texts])
    codes = np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), width)
    return torch.from_numpy(np.maximum(codes, FIRST) - np.uint8(FIRST))  # 0, behind the end, becomes PAD


def decode(tokens: Int[Tensor, "b t"]) -> list[str]:
    """The texts of rows of tokens, each up to its end or padding; a start token is omitted."""
    texts = []
    for row in tokens.tolist():
        text = ""
        for position, token in enumerate(row):
            if token in (PAD, END):
                break
            if token != START or position > 0:
                text += chr(max(token, 3) + FIRST)
        texts.append(text)
    return texts


def characters(tokens: Sequence[int]) -> tuple[str, ...]:
    """A printable name for each token: blanks are made visible, special tokens have names."""
    return tuple(NAMES.get(token, chr(token + FIRST)) for token in tokens)


def bucket(question: str) -> int:
    """The bucket of a question, by a hash that is the same on every machine and in every process."""
    return zlib.crc32(question.encode()) % BUCKETS
