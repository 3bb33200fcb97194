"""Text is tokenised once, into files that NumPy maps into memory.

    FOLDER/stdlib-1a2b3c4d/        one folder for each choice of data, tokenizer, held_out, limit, and state of files
        manifest.json              counts of tokens and bytes of each split
        train.bin                  tokens of 1, 2 or 4 bytes; the same for validation and iid
        tokenizer.json             if the tokenizer was trained on this text

A corpus is written beside its place and then renamed.  One process writes; the others wait for it.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from filelock import FileLock

from polyhead.tasks.record import write
from polyhead.tasks.text import tokens as text_tokens
from polyhead.tasks.text.sources import SPLITS, Piece, Pieces
from polyhead.tasks.text.tokens import Bytes, Codec

AT_ONCE = 64  # pieces that are encoded at once, on all cores
SAMPLE = 1 << 14  # most pieces to train a tokenizer on
CHECKED = 1 << 16  # characters by which a tokenizer from a file is checked


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


def open_corpus(path: pathlib.Path, name: str, pieces: Pieces, tokenizer: str, codec: Codec | None) -> Corpus:
    """The corpus in `path`, made of the text `pieces()` if it is not there.

    Args:
        codec: How text becomes tokens; None if it is to be trained.

    Raises:
        ValueError: For a corpus that is damaged.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():  # another process may have written it meanwhile
                    _write(path, name, pieces, tokenizer, codec)
    except OSError as error:
        raise ValueError(f"Text: {error.filename or path}: {error.strerror or error}") from None
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        codec = codec or text_tokens.read(path / text_tokens.FILE)
        dtype = np.min_scalar_type(codec.count - 1)
        tokens = {}
        for split in SPLITS:
            count = manifest["splits"][split]["tokens"]
            tokens[split] = np.empty(0, dtype)  # an empty file cannot be mapped
            if count:
                tokens[split] = np.asarray(np.memmap(path / f"{split}.bin", dtype, "r", shape=(count,)))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"Text: {path} is damaged ({error}); delete it, and it is made again") from None
    return Corpus(tokens, codec, manifest)


def _write(path: pathlib.Path, name: str, pieces: Pieces, tokenizer: str, codec: Codec | None) -> None:
    """Tokenise the text into files in `path`."""
    if not os.environ.get("POLYHEAD_QUIET"):
        print(f"text: tokenising {name!r}", file=sys.stderr, flush=True)
    part = path.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of an interrupted process
    part.mkdir()
    (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    if codec is None:
        texts = (piece.text() for piece in pieces() if piece.split == "train")
        codec = text_tokens.train(itertools.islice(texts, SAMPLE), int(tokenizer.partition(":")[2]))
        (part / text_tokens.FILE).write_text(codec.text, encoding="utf-8")
    elif not isinstance(codec, Bytes):  # one that was not trained here may lose text
        start = next(pieces()).text()[:CHECKED]
        if codec.decode(codec.encode(start)) != start:
            reason = "what it changes or drops costs no bits, so bits per byte may be too low"
            print(f"text: {tokenizer!r} does not give {name!r} back; {reason}", file=sys.stderr, flush=True)
    dtype = np.min_scalar_type(codec.count - 1)
    separator = np.array([] if codec.end is None else [codec.end], dtype)
    counts = {split: {"tokens": len(separator), "bytes": 0} for split in SPLITS}
    fingerprint = ""  # a hash chain over the text and its splits, not the tokens
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((part / f"{split}.bin").open("wb")) for split in SPLITS}
        for file in files.values():
            file.write(separator.tobytes())
        for piece, tokens in _encode(codec, pieces()):
            ending = separator[: int(piece.ends)]
            files[piece.split].write(np.array(tokens, dtype).tobytes() + ending.tobytes())
            counts[piece.split]["tokens"] += len(tokens) + len(ending)
            counts[piece.split]["bytes"] += len(piece.data) + len(ending)
            link = f"{fingerprint}/{piece.split}/{piece.ends}/".encode() + piece.data
            fingerprint = hashlib.blake2b(link, digest_size=16).hexdigest()
    write(part / "manifest.json", json.dumps({"fingerprint": fingerprint, "splits": counts}).encode())
    part.rename(path)


def _encode(codec: Codec, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Any]]:
    """Each piece of the text with its tokens."""
    group = list(itertools.islice(pieces, AT_ONCE))
    while group:
        if isinstance(codec, Bytes):
            yield from ((piece, np.frombuffer(piece.data, np.uint8)) for piece in group)
        else:
            yield from zip(group, codec.encode_all([piece.text() for piece in group]), strict=True)
        group = list(itertools.islice(pieces, AT_ONCE))
