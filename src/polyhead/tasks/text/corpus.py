"""Text is tokenised once, into files that NumPy maps into memory.

    FOLDER/stdlib-1a2b3c4d/        one folder for each choice of data, tokenizer, held_out, limit
        manifest.json              counts of tokens and bytes of each split, and the state of the text that was read
        train.bin                  tokens of 1, 2 or 4 bytes; the same for validation and iid
        tokenizer.json             if the tokenizer was trained on this text

A corpus is written beside its place and then renamed.  One process writes; the others wait for it.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from filelock import FileLock

from polyhead.tasks.record import write
from polyhead.tasks.text import sources, tokens as text_tokens
from polyhead.tasks.text.sources import SPLITS, Piece
from polyhead.tasks.text.tokens import Bytes, Codec

VERSION = 2
STRETCH = 4 << 20  # bytes of text that are encoded at once, on all cores
SAMPLE = 64 << 20  # most bytes of text to train a tokenizer on
COPIED = 0.01  # if copies are a larger share of the held-out bytes, a line says so
CHECKED = 1 << 16  # characters by which a tokenizer from a file is checked


@dataclass(frozen=True)
class Request:
    """Which text to tokenise, and how: fields of `Text`, an absolute `folder`, the text's `state` at its first use."""

    data: str
    tokenizer: str
    held_out: float
    limit: int | None
    column: str
    folder: pathlib.Path
    state: str = ""

    @property
    def is_on_hub(self) -> bool:
        return self.data.startswith("hub:")

    def path(self) -> pathlib.Path:
        """The folder of the corpus."""
        data = self.data
        if data == "stdlib":
            data = sysconfig.get_path("stdlib")
        elif not self.is_on_hub:
            data = str(pathlib.Path(data).absolute())
        codec = text_tokens.existing(self.tokenizer)
        tokenizer = self.tokenizer if codec is None else codec.digest
        parts = [data, tokenizer, self.held_out, self.limit, self.column]
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.data)[-40:].strip("-")
        return self.folder / f"{name}-{_digest(json.dumps([VERSION, *parts]).encode())[:12]}"

    def state_of_text(self) -> str:
        """A hash of the tokenizer and of the files' names, sizes and times; of the Hub, of its name alone."""
        states = []
        if not self.is_on_hub:
            for file in sources.list_files(self.data, self.limit, self.folder):
                states.append((file.name, file.state))
        return _digest(repr((self.path().name, states)).encode())

    def pieces(self) -> Iterator[Piece]:
        """The text.  Raises ValueError if it cannot be read."""
        if self.is_on_hub:
            assert self.limit is not None
            return sources.read_hub(self.data.removeprefix("hub:"), self.held_out, self.limit, self.column)
        return sources.read_files(sources.list_files(self.data, self.limit, self.folder), self.held_out)


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
def open_corpus(request: Request) -> Corpus:
    """The corpus for `request`, tokenised if it does not exist yet.

    Raises ValueError if the data or the tokenizer is not there, or the folder is not writable.
    """
    path = request.path()
    try:
        corpus = _read(path, request)
        if corpus is None:
            if not request.folder.exists():
                request.folder.mkdir(parents=True, exist_ok=True)
                (request.folder / ".gitignore").write_text("*\n", encoding="utf-8")
            with FileLock(path.with_suffix(".lock")):
                corpus = _read(path, request)  # another process may have written it meanwhile
                if corpus is None:
                    _say(f"tokenising {request.data}")
                    part = path.with_suffix(".part")
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir()
                    _write(part, request)
                    shutil.rmtree(path, ignore_errors=True)
                    part.rename(path)
                    corpus = _read(path, request)
    except OSError as error:
        raise ValueError(f"Text: {error.filename or path}: {error.strerror or error}") from None
    assert corpus is not None
    return corpus


def _read(path: pathlib.Path, request: Request) -> Corpus | None:
    """The corpus in `path`; None if it is absent, damaged, or of a text that was edited since."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["version"] != VERSION or manifest["state"] != request.state:
            return None
        dtype = np.dtype(manifest["dtype"])
        tokens = {}
        for split in SPLITS:
            count = manifest["splits"][split]["tokens"]
            file = path / f"{split}.bin"
            if file.stat().st_size != count * dtype.itemsize:
                raise ValueError(f"{file} has another size than when it was written")
            tokens[split] = np.empty(0, dtype)
            if count:  # an empty file cannot be mapped
                tokens[split] = np.asarray(np.memmap(file, dtype, "r"))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _say(f"{path} is damaged ({error}); tokenising again")
        return None
    codec = text_tokens.existing(request.tokenizer) or text_tokens.read(path / text_tokens.FILE)
    return Corpus(tokens, codec, manifest)


def _write(path: pathlib.Path, request: Request) -> None:
    """Tokenise the text into files in `path`."""
    codec = text_tokens.existing(request.tokenizer)
    if codec is None:
        codec = text_tokens.train(_sample(request), int(request.tokenizer.partition(":")[2]))
        (path / text_tokens.FILE).write_text(codec.to_json(), encoding="utf-8")
    dtype = np.min_scalar_type(codec.count - 1)
    separator = np.array([] if codec.end is None else [codec.end], dtype)
    counts = {split: {"tokens": 0, "bytes": 0} for split in SPLITS}
    fingerprint = ""  # a hash chain over the text and its splits, not the tokens
    training_pieces = set()  # hashes
    held_out_pieces = []  # hashes and sizes
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((path / f"{split}.bin").open("wb")) for split in SPLITS}

        def append(split: str, tokens: np.ndarray, size: int) -> None:
            files[split].write(tokens.tobytes())
            counts[split]["tokens"] += len(tokens)
            counts[split]["bytes"] += size

        for split in SPLITS:
            append(split, separator, 0)
        for i, stretch in enumerate(_stretches(request.pieces())):
            if i == 0 and request.tokenizer.endswith(".json"):  # the others restore every text
                text = _text_of(stretch[0])[:CHECKED]
                if codec.decode(codec.encode(text)) != text:
                    reason = "what it changes or drops costs no bits, so bits per byte may be too low"
                    _say(f"{request.tokenizer} does not give {request.data} back; {reason}")
            for piece, tokens in zip(stretch, _encode(codec, dtype, stretch), strict=True):
                append(piece.split, tokens, len(piece.data))
                if piece.ends:
                    append(piece.split, separator, len(separator))
                fingerprint = _digest(f"{fingerprint}/{piece.split}/{piece.ends}/".encode() + piece.data)
                if piece.split == "train":
                    training_pieces.add(_digest(piece.data))
                else:
                    held_out_pieces.append((_digest(piece.data), len(piece.data)))
    copied = total = 0
    for digest, size in held_out_pieces:
        total += size
        if digest in training_pieces:
            copied += size
    share = copied / max(1, total)
    if share > COPIED and not request.is_on_hub:  # there copies are in the same split
        _say(f"{share:.0%} of what is held out of {request.data} are copies of training text; scores are too good")
    manifest = {
        "version": VERSION,
        "state": request.state,
        "fingerprint": fingerprint,
        "dtype": dtype.str,
        "data": request.data,
        "tokenizer": {"name": request.tokenizer, "digest": codec.digest, "count": codec.count},
        "splits": counts,
    }
    write(path / "manifest.json", json.dumps(manifest, indent=2).encode())


def _encode(codec: Codec, dtype: np.dtype, pieces: list[Piece]) -> Iterator[np.ndarray]:
    """The tokens of each piece."""
    if isinstance(codec, Bytes):
        return (np.frombuffer(piece.data, dtype) for piece in pieces)
    return (np.array(tokens, dtype) for tokens in codec.encode_all([_text_of(piece) for piece in pieces]))


def _stretches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of about `STRETCH` bytes."""
    stretch: list[Piece] = []
    size = 0
    for piece in pieces:
        stretch.append(piece)
        size += len(piece.data)
        if size >= STRETCH:
            yield stretch
            stretch, size = [], 0
    if stretch:
        yield stretch


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
    except UnicodeDecodeError as error:
        location = f"{piece.name}: byte {piece.start + error.start + 1} is no UTF-8"
        raise ValueError(f"Text: {location}; tokenizer='bytes' takes any file") from None


def _say(line: str) -> None:
    print(f"text: {line}", file=sys.stderr, flush=True)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
