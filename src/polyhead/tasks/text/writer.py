"""Writes the files of a corpus so that the process may be killed at any moment: see data.py."""

import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polyhead.tasks.record import sync, write
from polyhead.tasks.text.sources import SPLITS, Piece
from polyhead.tasks.text.tokens import Bytes, Codec

VERSION = 1
MANIFEST, LOCK = "manifest.json", "lock"
QUIET_SECONDS = 30.0  # between two lines of progress without a terminal


class CorpusWriter:
    """Writes the files of one corpus, starting at the end of the journal."""

    def __init__(self, place: pathlib.Path, stem: str, codec: Codec) -> None:
        self.place, self.stem, self.codec = place, stem, codec
        count = codec.count
        self.dtype = np.dtype("<u1" if count <= 1 << 8 else "<u2" if count <= 1 << 16 else "<u4")
        self.paths = {split: place / f"{stem}.{split}.bin" for split in SPLITS}
        self.journal = place / f"{stem}.journal"
        self.handles: dict[str, Any] = {}
        self._nothing()

    def _nothing(self) -> None:
        """Reset to the state before the first write."""
        self.pieces = self.read = 0
        self.tokens, self.bytes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        self.fingerprint = ""  # a hash chain over the text and its splits, not the tokens
        self.sums = {split: hasher() for split in SPLITS}

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles.values():
            handle.close()

    def begin(self) -> None:
        """Open the files, at the end of the journal or empty."""
        if self._restore():
            return
        self._nothing()
        for path in (*self.paths.values(), self.journal):
            path.unlink(missing_ok=True)  # not truncated: another process may have it memory-mapped
        self.handles = {split: path.open("wb") for split, path in self.paths.items()}
        write(self.journal, as_json({"version": VERSION, "codec": self.codec.digest}) + b"\n")
        if self.codec.end is not None:
            for split in SPLITS:
                self._put(split, np.array([self.codec.end], self.dtype))
        self.commit()

    def _restore(self) -> bool:
        """Restore the state of the journal's last line; False if there is none."""
        try:
            lines = self.journal.read_bytes().split(b"\n")[:-1]  # an incomplete last line has no line end
            header, last = json.loads(lines[0]), json.loads(lines[-1])
            if header != {"version": VERSION, "codec": self.codec.digest} or len(lines) < 2:
                return False
            for split, path in self.paths.items():
                size = last["tokens"][split] * self.dtype.itemsize
                _hash_head(path, size, self.sums[split])
                if self.sums[split].hexdigest() != last["sums"][split]:
                    say(f"text: {path} does not match its journal; beginning anew")
                    return False
        except (FileNotFoundError, ValueError, RecursionError, IndexError, KeyError, TypeError):
            return False
        for split, path in self.paths.items():
            self.handles[split] = path.open("r+b")
            self.handles[split].truncate(last["tokens"][split] * self.dtype.itemsize)
            self.handles[split].seek(0, os.SEEK_END)
        self.pieces, self.read, self.fingerprint = last["pieces"], last["read"], last["fingerprint"]
        self.tokens, self.bytes = last["tokens"], last["bytes"]
        write(self.journal, as_json(header) + b"\n" + as_json(last) + b"\n")
        return True

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append the tokens of pieces, with separators between documents."""
        for piece, tokens in zip(pieces, self._encoded(pieces), strict=True):
            ends = piece.end and self.codec.end is not None
            self._put(piece.split, tokens)
            if ends:
                self._put(piece.split, np.array([self.codec.end], self.dtype))
            self.bytes[piece.split] += len(piece.data) + ends
            self.pieces += 1
            self.read += len(piece.data)
            self.fingerprint = digest(f"{self.fingerprint}/{piece.split}/{piece.end}/".encode() + piece.data)

    def _encoded(self, pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
        if isinstance(self.codec, Bytes):
            return (np.frombuffer(piece.data, self.dtype) for piece in pieces)
        return (np.array(tokens, self.dtype) for tokens in self.codec.encode_all([text_of(piece) for piece in pieces]))

    def _put(self, split: str, tokens: np.ndarray) -> None:
        data = tokens.tobytes()
        self.handles[split].write(data)
        self.sums[split].update(data)
        self.tokens[split] += len(tokens)

    def commit(self) -> None:
        """Flush everything to disk, then append a line to the journal."""
        for handle in self.handles.values():
            sync(handle)
        state = {"pieces": self.pieces, "read": self.read, "fingerprint": self.fingerprint, "tokens": self.tokens}
        state |= {"bytes": self.bytes, "sums": {split: total.hexdigest() for split, total in self.sums.items()}}
        with self.journal.open("ab") as handle:
            handle.write(as_json(state) + b"\n")
            sync(handle)

    def finish(self, about: dict[str, Any], listing: object) -> None:
        """Write the manifest, then delete the files that it does not name."""
        files = {
            path.name: {"size": self.tokens[split] * self.dtype.itemsize, "checksum": self.sums[split].hexdigest()}
            for split, path in self.paths.items()
        }
        if trained := about["tokenizer"].get("file"):
            data = (self.place / trained).read_bytes()
            files[trained] = {"size": len(data), "checksum": digest(data)}
        splits = {
            split: {"file": self.paths[split].name, "tokens": self.tokens[split], "bytes": self.bytes[split]}
            for split in SPLITS
        }
        parts = {"version": VERSION, "stem": self.stem, "fingerprint": self.fingerprint, "dtype": self.dtype.str}
        parts |= {**about, "splits": splits, "files": files, "listing": listing}
        write(self.place / MANIFEST, as_json({**parts, "checksum": digest(as_json(parts))}))
        for path in self.place.iterdir():
            if path.name not in (MANIFEST, LOCK, *files):
                path.unlink()


def text_of(piece: Piece) -> str:
    """The text of a piece.  Raises ValueError for invalid UTF-8."""
    try:
        return piece.data.decode()
    except UnicodeDecodeError as error:
        where = f"{piece.name}: byte {piece.start + error.start + 1} is no UTF-8"
        raise ValueError(f"Text: {where}; tokenizer='bytes' takes any file") from None


def hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _hash_head(path: pathlib.Path, size: int, total: hashlib.blake2b) -> None:
    with path.open("rb") as handle:
        while size and (data := handle.read(min(size, 1 << 20))):
            total.update(data)
            size -= len(data)


def say(line: str) -> None:
    """Print one line on standard error, above the progress bar."""
    print(line, file=sys.stderr, flush=True)


class TokenisingProgress:
    """A progress bar on a terminal, an occasional line elsewhere."""

    def __init__(self, name: str, read: int, total: int) -> None:
        self.name, self.total, self.spoken = name, total, time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            begin = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(24))
            end = (progress.DownloadColumn(), progress.TimeRemainingColumn(compact=True))
            self.bar = progress.Progress(*begin, *end, console=Console(stderr=True), redirect_stdout=False)
            self.bar.add_task(name, completed=read, total=total)
            self.bar.start()

    def __enter__(self) -> "TokenisingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, read: int) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=read)
        elif time.monotonic() - self.spoken > QUIET_SECONDS:
            self.spoken = time.monotonic()
            say(f"text: {self.name}: {read / 1e6:.0f} of {self.total / 1e6:.0f} MB")
