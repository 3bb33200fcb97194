"""Questions and answers as tokens, and pools of questions from files in the published layout.

A token is a printable ASCII character or one of three special tokens: 0 padding, 1 start, 2 end.

>>> encode(["2*x"], 5)
tensor([[21, 13, 91,  0,  0]], dtype=torch.uint8)
>>> decode(encode(["2*x"], 5))
['2*x']
"""

import functools
import pathlib
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from polyhead.tasks.maths.modules import DIFFICULTIES

PAD, START, END = 0, 1, 2
FIRST = ord(" ") - 3  # the blank is token 3
VOCABULARY = 3 + 95
NAMES = {PAD: "pad", START: "start", END: "end", ord(" ") - FIRST: "␣"}
BUCKETS = 10  # of questions by hash: 0 is validation, 1 is iid, the others are train

# The modules with an extrapolation file in the published data, and the suffix of that file's name.
SUFFIXES = {
    "algebra__polynomial_roots": "_big",
    "arithmetic__add_or_sub": "_big",
    "arithmetic__mul": "_big",
    "arithmetic__div": "_big",
    "arithmetic__add_sub_multiple": "_longer",
    "arithmetic__mul_div_multiple": "_longer",
    "arithmetic__mixed": "_longer",
    "comparison__kth_biggest": "_more",
    "comparison__sort": "_more",
    "comparison__closest": "_more",
    "measurement__conversion": "",
    "numbers__round_number": "_big",
    "numbers__place_value": "_big",
    "probability__swr_p_sequence": "_more_samples",
    "probability__swr_p_level_set": "_more_samples",
}

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


# ---------------------------------------------------------------------------------------------------------------- files
def levels(difficulty: str) -> tuple[str, ...]:
    """The difficulties in `difficulty`: three for "mixed", else one."""
    return DIFFICULTIES if difficulty == "mixed" else (difficulty,)


@functools.lru_cache(maxsize=2)
def from_files(folder: str, module: str, difficulty: str, sizes: tuple[int, int]) -> dict[str, list[Pair]]:
    """The questions and answers of a module in the published layout, by split; they alternate line by line.

    Raises:
        ValueError: For a missing file, and for lines that are not ASCII or too long.
    """
    root = pathlib.Path(folder)
    train = []
    for level in levels(difficulty):
        train += _file(root / f"train-{level}" / f"{module}.txt", sizes)
    iid = _file(root / "interpolate" / f"{module}.txt", sizes)
    novel = []
    if module in SUFFIXES:
        novel = _file(root / "extrapolate" / f"{module}{SUFFIXES[module]}.txt", sizes)
    # A question is in one split alone: that of the largest numbers first, training last.
    splits: dict[str, list[Pair]] = {"novel": [], "iid": [], "validation": [], "train": []}
    questions: set[str] = set()
    for split, pairs in (("novel", novel), ("iid", iid)):
        splits[split] = [pair for pair in pairs if pair[0] not in questions]
        questions.update(dict(splits[split]))
    for question, answer in train:
        if question not in questions:
            split = "validation" if bucket(question) == 0 else "train"
            splits[split].append((question, answer))
    return splits


def _file(path: pathlib.Path, sizes: tuple[int, int]) -> list[Pair]:
    """The questions and answers of a file."""
    try:
        lines = path.read_text(encoding="ascii").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"Maths: {path}: byte {error.start + 1} is no ASCII character") from None
    except OSError as error:
        where = "the published layout has train-easy, train-medium, train-hard, interpolate and extrapolate"
        raise ValueError(f"Maths: {path} cannot be read ({error.strerror}); {where} in the folder") from None
    if lines[-1] == "":
        lines.pop()
    if not lines or len(lines) % 2:
        raise ValueError(f"Maths: {path} must have a question and an answer in turn, got {len(lines)} lines")
    for number, line in enumerate(lines):
        limit = sizes[number % 2]
        if not 1 <= len(line) <= limit or not line.isprintable():
            name = ("question", "answer")[number % 2]
            raise ValueError(f"Maths: {path}, line {number + 1}: {name} must have 1 to {limit} characters: {line!r}")
    return list(zip(lines[::2], lines[1::2], strict=True))


def tokens(pairs: Iterable[Pair], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Questions (n s) and answers (n t) as tokens; `sizes`: the most characters of each."""
    questions, answers = zip(*pairs, strict=True)
    return encode(questions, sizes[0]), encode(answers, sizes[1])
