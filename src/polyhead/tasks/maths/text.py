"""Questions and answers as tokens, and pools of questions: from files in the published layout or from the package
`mathematics-dataset`.

A token is a printable ASCII character or one of three special tokens: 0 padding, 1 start, 2 end.

>>> encode(["2*x"], 5)
tensor([[21, 13, 91,  0,  0]])
>>> decode(encode(["2*x"], 5))
['2*x']
"""

import functools
import importlib.util
import pathlib
import random
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from polyhead.config import stream
from polyhead.spec.shapes import one_of
from polyhead.tasks.maths.modules import DIFFICULTIES

PAD, START, END = 0, 1, 2
FIRST = ord(" ") - 3  # the blank is token 3
VOCABULARY = 3 + 95
NAMES = {PAD: "pad", START: "start", END: "end", ord(" ") - FIRST: "␣"}
PATIENCE = 1000  # draws from the package until a question is short enough
BUCKETS = 10  # of questions by hash: 0 is validation, 1 is iid, the others are train

SUFFIXES = {
    "algebra__polynomial_roots": "_big",
    **dict.fromkeys(("arithmetic__add_or_sub", "arithmetic__mul", "arithmetic__div"), "_big"),
    **dict.fromkeys(("arithmetic__add_sub_multiple", "arithmetic__mul_div_multiple", "arithmetic__mixed"), "_longer"),
    **dict.fromkeys(("comparison__kth_biggest", "comparison__sort", "comparison__closest"), "_more"),
    "measurement__conversion": "",
    **dict.fromkeys(("numbers__round_number", "numbers__place_value"), "_big"),
    **dict.fromkeys(("probability__swr_p_sequence", "probability__swr_p_level_set"), "_more_samples"),
}
"""The modules with an extrapolation file in the published data, and the suffix of that file's name."""

Pair = tuple[str, str]


def encode(texts: Sequence[str], width: int) -> Int[Tensor, "b t"]:
    """Tokens (n width) of printable ASCII texts of at most `width` characters, padded."""
    return _small(texts, width).long()


def _small(texts: Sequence[str], width: int) -> Tensor:
    """`encode` in uint8: an eighth of the memory."""
    padded = b"".join([text.encode("ascii").ljust(width, b"\0") for text in texts])
    codes = np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), width)
    return torch.from_numpy(np.maximum(codes, FIRST) - np.uint8(FIRST))  # 0, behind the end, becomes PAD


def decode(tokens: Int[Tensor, "b t"]) -> list[str]:
    """The texts of rows of tokens, each up to its end or padding; a start token is omitted."""
    texts = []
    for row in tokens.tolist():
        row = row[1:] if row[:1] == [START] else row
        stop = next((i for i, token in enumerate(row) if token in (PAD, END)), len(row))
        texts.append("".join(chr(max(token, 3) + FIRST) for token in row[:stop]))
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
    """The questions and answers of a module in the published layout, by split.

    The files are `train-easy/MODULE.txt` etc., `interpolate/...` and, if it exists, `extrapolate/...`; questions and
    answers alternate line by line.

    Raises ValueError for a missing file, and for lines that are not ASCII or too long.
    """
    root = pathlib.Path(folder)
    train = [pair for level in levels(difficulty) for pair in _file(root / f"train-{level}" / f"{module}.txt", sizes)]
    questions = {"train": train, "iid": list(_file(root / "interpolate" / f"{module}.txt", sizes))}
    if module in SUFFIXES:
        questions["novel"] = list(_file(root / "extrapolate" / f"{module}{SUFFIXES[module]}.txt", sizes))
    return divided(questions)


def _file(path: pathlib.Path, sizes: tuple[int, int]) -> Iterator[Pair]:
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
        raise ValueError(f"Maths: {path} has {len(lines)} lines, but a question and an answer in turn were wanted")
    for i in range(0, len(lines), 2):
        for what, line, most in (("question", i, sizes[0]), ("answer", i + 1, sizes[1])):
            if not 1 <= len(lines[line]) <= most or not lines[line].isprintable():
                problem = f"{len(lines[line])} came" if lines[line].isprintable() else f"{lines[line]!r} came"
                raise ValueError(f"Maths: {path}, line {line + 1}: {what} of 1 to {most} characters wanted, {problem}")
        yield lines[i], lines[i + 1]


def divided(parts: dict[str, list[Pair]]) -> dict[str, list[Pair]]:
    """`found` with validation taken from `train`; a question that is in a held-out split is removed from `train`."""
    seen: set[str] = set()
    splits: dict[str, list[Pair]] = {}
    for split in ("novel", "iid"):
        if split in parts:
            splits[split] = [pair for pair in parts[split] if pair[0] not in seen]
            seen |= {pair[0] for pair in splits[split]}
    rest = [pair for pair in parts["train"] if pair[0] not in seen]
    splits["validation"] = [pair for pair in rest if bucket(pair[0]) == 0]
    splits["train"] = [pair for pair in rest if bucket(pair[0]) != 0]
    return splits


# -------------------------------------------------------------------------------------------------------------- package
@functools.lru_cache(maxsize=2)
def from_package(module: str, difficulty: str, sizes: tuple[int, int], count: int) -> dict[str, list[Pair]]:
    """`count` questions for training and a tenth for each held-out split, from the package `mathematics-dataset`.

    The package draws from the global generators of Python and NumPy: their states are seeded before and restored after.
    """
    makers = _package()
    area, _, name = module.partition("__")
    one_of("Maths", "module", module, [f"{a}__{n}" for a, members in makers.test().items() for n in members])
    states = random.getstate(), np.random.get_state()
    random.seed(stream(0, f"maths/package/{module}/{difficulty}"))
    np.random.seed(stream(0, f"maths/package/{module}/{difficulty}") % 2**32)
    try:
        names = levels(difficulty)
        train = [makers.train(_third(DIFFICULTIES.index(level)))[area][name] for level in names]
        held = max(1, count // BUCKETS)
        questions = {
            "train": list(_drawn(train, count + held, sizes)),
            "iid": list(_drawn([makers.test()[area][name]], held, sizes)),
        }
        if module in SUFFIXES:
            questions["novel"] = list(_drawn([makers.test_extra()[area][name + SUFFIXES[module]]], held, sizes))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return divided(questions)


def _third(level: int) -> Any:
    """The part of a range of entropies for a difficulty, divided as in the package's script."""

    def part(span: tuple[float, float]) -> tuple[float, float]:
        width = (span[1] - span[0]) / len(DIFFICULTIES)
        return span[0] + level * width, span[0] + (level + 1) * width

    return part


def _drawn(makers: Sequence[Any], count: int, sizes: tuple[int, int]) -> Iterator[Pair]:
    """`count` questions by the makers in turn.  Raises ValueError if a maker exceeds the sizes `PATIENCE` times."""
    for i in range(count):
        for _ in range(PATIENCE):
            problem = makers[i % len(makers)]()
            pair = str(problem.question), str(problem.answer)
            if len(pair[0]) <= sizes[0] and len(pair[1]) <= sizes[1]:
                yield pair
                break
        else:
            raise ValueError(
                f"Maths: {PATIENCE} draws gave no question within {sizes[0]} characters and an answer within "
                f"{sizes[1]}; allow more"
            )


def _package() -> Any:
    """The package's modules.  One file was written for sympy 1.4 and NumPy 1; it is patched while it is imported."""
    name = "mathematics_dataset.sample.polynomials"
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError("Maths: data='package' needs mathematics-dataset; pip install mathematics-dataset")
    if name not in sys.modules:
        text = pathlib.Path(spec.origin).read_text(encoding="utf-8")
        text = text.replace("sympy.solvers.diophantine import", "sympy.solvers.diophantine.diophantine import")
        text = re.sub(r"\bnp\.object\b", "object", text)
        text = re.sub(r"(\w+)\.itemset\((\w+), (\w+)\)", r"\1[\2] = \3", text)
        mended = importlib.util.module_from_spec(spec)
        sys.modules[name] = mended
        exec(compile(text, spec.origin, "exec"), mended.__dict__)
    from mathematics_dataset.modules import modules  # type: ignore[import-not-found]

    return modules


def tokens(pairs: Iterable[Pair], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Questions (n s) and answers (n t) as tokens (uint8): two million questions take 0.4 GB."""
    questions, answers = zip(*pairs, strict=True)
    return _small(questions, sizes[0]), _small(answers, sizes[1])
