"""Text is tokenised once, into files that NumPy maps into memory.

    FOLDER/stdlib-1a2b3c4d/        one folder for each choice of data, tokenizer, held_out, limit, and state of files
        manifest.json              counts of tokens and bytes of each split
        train.bin                  tokens of 1, 2 or 4 bytes; the same for validation and iid
        tokenizer.json             if the tokenizer was trained on this text

A corpus is written beside its place and then renamed.  One process writes; the others wait for it.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from filelock import FileLock

from polyhead.tasks.record import write
from polyhead.tasks.text import sources, tokens as text_tokens
from polyhead.tasks.text.sources import SPLITS, File, Piece
from polyhead.tasks.text.tokens import Bytes, Codec

VERSION = 3
AT_ONCE = 64  # pieces that are encoded at once, on all cores
SAMPLE = 64 << 20  # most bytes of text to train a tokenizer on
COPIED = 0.01  # if copies are a larger share of the held-out bytes, a line says so
CHECKED = 1 << 16  # characters by which a tokenizer from a file is checked


@dataclass(frozen=True, eq=False)
class Request:
    """Fields of `Text`, the codec unless it is to be trained, and the files as a task first found them."""

    data: str
    tokenizer: str
    codec: Codec | None
    held_out: float
    limit: int | None
    column: str
    files: tuple[File, ...]

    def path(self, folder: pathlib.Path) -> pathlib.Path:
        """The place of the corpus in `folder`."""
        codec = getattr(self.codec, "digest", self.tokenizer)
        files = [(str(file.path), file.size, file.changed) for file in self.files]
        identity = (VERSION, self.data, codec, self.held_out, self.limit, self.column, files)
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.data)[-40:].strip("-")
        return folder / f"{name}-{_digest(repr(identity).encode())[:12]}"

    def pieces(self) -> Iterator[Piece]:
        """The text.  Raises ValueError if it cannot be read."""
        if self.limit is not None:
            return sources.read_hub(self.data.removeprefix("hub:"), self.held_out, self.limit, self.column)
        return sources.read_files(self.files, self.held_out)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The memory-mapped tokens of each split, the codec, and the manifest."""

    tokens: dict[str, np.ndarray]
    codec: Codec
    manifest: dict[str, Any]

    def rate(self, split: str) -> float:
        """Mean bytes of text per token of `split`.  A separator between documents counts as one byte."""
        counts = self.manifest["splits"][split]
        return float(counts["bytes"] / max(1, counts["tokens"] - (self.codec.end is not None)))


@functools.lru_cache(maxsize=8)
def open_corpus(request: Request, folder: pathlib.Path) -> Corpus:
    """The corpus for `request`, tokenised if it does not exist yet.  Raises ValueError for one that is damaged."""
    path = request.path(folder)
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():  # another process may have written it meanwhile
                    _write(path, request)
    except OSError as error:
        raise ValueError(f"Text: {error.filename or path}: {error.strerror or error}") from None
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        codec = request.codec or text_tokens.read(path / text_tokens.FILE)
        dtype = np.min_scalar_type(codec.count - 1)
        tokens = {}
        for split in SPLITS:
            count = manifest["splits"][split]["tokens"]
            tokens[split] = np.empty(0, dtype)
            if count:  # an empty file cannot be mapped
                tokens[split] = np.asarray(np.memmap(path / f"{split}.bin", dtype, "r", shape=(count,)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Text: {path} is damaged ({error}); delete it, and it is made again") from None
    return Corpus(tokens, codec, manifest)


def _write(path: pathlib.Path, request: Request) -> None:
    """Tokenise the text into files in `path`."""
    _say(f"tokenising {request.data}")
    part = path.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of an interrupted process
    part.mkdir()
    (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    codec = request.codec
    if codec is None:
        codec = text_tokens.train(_sample(request), int(request.tokenizer.partition(":")[2]))
        (part / text_tokens.FILE).write_text(codec.to_json(), encoding="utf-8")
    dtype = np.min_scalar_type(codec.count - 1)
    separator = np.array([] if codec.end is None else [codec.end], dtype)
    counts = {split: {"tokens": len(separator), "bytes": 0} for split in SPLITS}
    sizes: dict[str, dict[str, int]] = {split: {} for split in SPLITS}  # of distinct pieces, by their hash
    fingerprint = ""  # a hash chain over the text and its splits, not the tokens
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((part / f"{split}.bin").open("wb")) for split in SPLITS}
        for file in files.values():
            file.write(separator.tobytes())
        for piece, tokens in _encode(codec, dtype, request):
            ending = separator[: int(piece.ends)]
            files[piece.split].write(tokens.tobytes() + ending.tobytes())
            counts[piece.split]["tokens"] += len(tokens) + len(ending)
            counts[piece.split]["bytes"] += len(piece.data) + len(ending)
            sizes[piece.split][_digest(piece.data)] = len(piece.data)
            fingerprint = _digest(f"{fingerprint}/{piece.split}/{piece.ends}/".encode() + piece.data)
    held_out = sizes["validation"] | sizes["iid"]
    copied = sum(held_out[piece] for piece in held_out.keys() & sizes["train"].keys())
    if copied > COPIED * sum(held_out.values()):
        share = copied / sum(held_out.values())
        _say(f"{share:.0%} of what is held out of {request.data} are copies of training text; scores are too good")
    write(part / "manifest.json", json.dumps({"fingerprint": fingerprint, "splits": counts}).encode())
    part.rename(path)


def _encode(codec: Codec, dtype: np.dtype, request: Request) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece of the text with its tokens."""
    pieces = request.pieces()
    if isinstance(codec, Bytes):
        for piece in pieces:
            yield piece, np.frombuffer(piece.data, dtype)
        return
    is_first = request.tokenizer.endswith(".json")  # the others restore every text
    for group in iter(lambda: list(itertools.islice(pieces, AT_ONCE)), []):
        texts = [_text_of(piece) for piece in group]
        if is_first and codec.decode(codec.encode(texts[0][:CHECKED])) != texts[0][:CHECKED]:
            reason = "what it changes or drops costs no bits, so bits per byte may be too low"
            _say(f"{request.tokenizer} does not give {request.data} back; {reason}")
        is_first = False
        for piece, tokens in zip(group, codec.encode_all(texts), strict=True):
            yield piece, np.array(tokens, dtype)


def _sample(request: Request) -> Iterator[str]:
    """The first `SAMPLE` bytes of the training text."""
    size = 0
    for piece in request.pieces():
        if piece.split == "train" and size < SAMPLE:
            yield _text_of(piece)
            size += len(piece.data)


def _text_of(piece: Piece) -> str:
    """The text of a piece.  Raises ValueError for invalid UTF-8."""
    try:
        return piece.data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"Text: {piece.name} is no UTF-8; tokenizer='bytes' takes any file") from None


def _say(line: str) -> None:
    print(f"text: {line}", file=sys.stderr, flush=True)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
