"""Text is tokenised once, into files that are memory-mapped.

    FOLDER/stdlib-1a2b3c4d/        one folder for each choice of data, tokenizer, held_out, limit
        manifest.json              names, sizes and checksums of the other files, and the source files of the text
        STEM.train.bin             tokens of 1, 2 or 4 bytes; the same for validation and iid
        STEM.tokenizer.json        if the tokenizer was trained on this text
        STEM.journal               during writing: one line for each chunk of tokens that was flushed to disk

The manifest is written last; files that it does not name are ignored.  If a process is killed, its journal remains.
The next process checks the chunks in the journal, removes anything after them, and continues there.  Files that do not
match their checksums are made again.  Only one process writes at a time.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhead.tasks.record import write
from polyhead.tasks.text import sources as text_sources, tokens as text_tokens
from polyhead.tasks.text.sources import Files, Hub, Piece, Source
from polyhead.tasks.text.tokens import Codec
from polyhead.tasks.text.writer import (
    LOCK,
    MANIFEST,
    VERSION,
    CorpusWriter,
    TokenisingProgress,
    as_json,
    digest,
    hasher,
    say,
    text_of,
)

STRETCH = 4 << 20  # bytes of text per line of the journal
SAMPLE = 64 << 20  # most bytes of text to train a tokenizer on
COPIED = 0.01  # if copies are a larger share of the held-out bytes, a line says so
TRIED = 1 << 16  # characters of each stretch by which a tokenizer from a file is checked

_CHECKED: dict[pathlib.Path, tuple[int, int, int]] = {}
"""Files whose checksums this process has verified, with their state at that time."""


@dataclass(frozen=True)
class Request:
    """Which text to tokenise, and how: the fields of `Text` that matter, with an absolute `folder`.

    `seen`: what a task saw of the text at its first use, see `seen`; the process keeps one corpus for each.
    """

    data: str
    tokenizer: str
    held_out: float
    limit: int | None
    column: str
    folder: pathlib.Path
    seen: str = ""

    @property
    def place(self) -> pathlib.Path:
        """The folder of the corpus."""
        data = sysconfig.get_path("stdlib") if self.data == "stdlib" else self.data
        data = data if data.startswith("hub:") else str(pathlib.Path(data).absolute())
        codec = text_tokens.existing(self.tokenizer)
        parts = [data, self.tokenizer if codec is None else codec.digest, self.held_out, self.limit, self.column]
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.data)[-40:].strip("-")
        return self.folder / f"{name}-{digest(json.dumps([VERSION, *parts]).encode())[:12]}"

    def source(self, known: Any) -> Source:
        if not self.data.startswith("hub:"):
            return Files(text_sources.files(self.data, self.limit, self.folder), self.held_out, known)
        assert self.limit is not None
        return Hub(self.data.removeprefix("hub:"), self.held_out, self.limit, self.column)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The memory-mapped tokens of each split, the codec, and the manifest."""

    tokens: dict[str, np.ndarray]
    codec: Codec
    manifest: dict[str, Any]

    def rate(self, split: str) -> float:
        """Mean bytes of text per token of `split`.  A separator between documents counts as one byte."""
        found = self.manifest["splits"][split]
        return float(found["bytes"] / max(1, found["tokens"] - (self.codec.end is not None)))


def corpus(request: Request) -> Corpus:
    """The corpus for `request`, tokenised if it does not exist yet.

    Raises ValueError if the data or the tokenizer is not available, or if the folder is not writable.
    """
    return _open(request, os.getcwd())


def seen(request: Request) -> str:
    """A hash of the tokenizer and of the names, sizes and times of the files of text: others are another corpus."""
    try:
        hub = request.data.startswith("hub:")
        files = [] if hub else text_sources.files(request.data, request.limit, request.folder)
    except OSError as error:
        raise ValueError(f"Text: {error.filename}: {error.strerror}") from None
    return digest(repr([request.place.name, *((file.name, file.whole, file.changed) for file in files)]).encode())


@functools.lru_cache(maxsize=8)
def _open(request: Request, here: str) -> Corpus:
    place = request.place
    try:
        known = _manifest(place, tell=False)
        source = request.source(known and known["listing"])
        if (found := _ready(place, request, source, tell=False)) is not None:
            return found
        _prepare(place, request.folder)
        with _locked(place):
            found = _ready(place, request, source)  # another process may have finished it meanwhile
            if found is None:
                _build(place, request, source)
                found = _ready(place, request, source)
            assert found is not None, place
            return found
    except OSError as error:
        raise ValueError(f"Text: {error.filename or place}: {error.strerror or error}") from None


def _prepare(place: pathlib.Path, folder: pathlib.Path) -> None:
    with contextlib.suppress(FileExistsError):  # another process may make it at the same moment
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    place.mkdir(exist_ok=True)


@contextlib.contextmanager
def _locked(place: pathlib.Path) -> Iterator[None]:
    """Hold the folder's lock; wait while another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        yield
        return
    with (place / LOCK).open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"text: another process is filling {place}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# -------------------------------------------------------------------------------------------------------------- reading
def _manifest(place: pathlib.Path, *, tell: bool) -> dict[str, Any] | None:
    """The manifest, or None if it is missing or damaged.  `tell`: report damage."""
    try:
        found = json.loads((place / MANIFEST).read_bytes())
        if found["version"] == VERSION and found.pop("checksum") == digest(as_json(found)):
            return dict(found)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    if tell:
        say(f"text: {place / MANIFEST} is damaged or of another version; tokenising again")
    return None


def _ready(place: pathlib.Path, request: Request, source: Source, *, tell: bool = True) -> Corpus | None:
    """The corpus in `place`, if it was made from `source` and its files are intact."""
    manifest = _manifest(place, tell=tell)
    if manifest is None or manifest["stem"] != source.stem():
        return None
    dtype, tokens = np.dtype(manifest["dtype"]), {}
    for name, wanted in manifest["files"].items():
        if not _whole(place / name, wanted):
            if tell:
                say(f"text: {place / name} does not match its checksum; tokenising again")
            return None
    codec = text_tokens.existing(request.tokenizer) or text_tokens.read(place / manifest["tokenizer"]["file"])
    for split, found in manifest["splits"].items():
        path = place / found["file"]
        tokens[split] = np.asarray(np.memmap(path, dtype, "r")) if found["tokens"] else np.empty(0, dtype)
    return Corpus(tokens, codec, manifest)


def _whole(path: pathlib.Path, wanted: dict[str, Any]) -> bool:
    """Whether a file has the wanted size and checksum; the checksum is read once per process and after each change."""
    try:
        stat = path.stat()
        if stat.st_size != wanted["size"]:
            return False
        stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if _CHECKED.get(path) != stamp:
            with path.open("rb") as handle:
                if hashlib.file_digest(handle, hasher).hexdigest() != wanted["checksum"]:
                    return False
            _CHECKED[path] = stamp
    except FileNotFoundError:
        return False
    return True


# -------------------------------------------------------------------------------------------------------------- writing
def _build(place: pathlib.Path, request: Request, source: Source) -> None:
    codec = text_tokens.existing(request.tokenizer) or _trained(place, request, source)
    checked = not request.tokenizer.endswith((".json", ".model"))  # the others restore every text
    if isinstance(source, Files) and (share := source.copied()) > COPIED:
        say(
            f"text: {share:.0%} of what is held out of {request.data} are copies of training files; scores are too good"
        )
    with CorpusWriter(place, source.stem(), codec) as writer:
        writer.begin()
        with TokenisingProgress(f"tokenising {request.data}", writer.read, source.total) as progress:
            for stretch in _stretches(source.pieces(writer.pieces, writer.read)):
                checked = checked or _loses_text(request, codec, stretch)
                writer.add(stretch)
                writer.commit()
                progress.show(writer.read)
        writer.finish({"data": request.data, "tokenizer": _named(request, codec, source.stem())}, source.listing)


def _loses_text(request: Request, codec: Codec, stretch: list[Piece]) -> bool:
    """Whether the codec does not restore a sample of the text; if so, a line says it."""
    text = text_of(stretch[0])[:TRIED]
    if codec.decode(codec.encode(text)) == text:
        return False
    lost = "what it changes or drops costs no bits, so bits per byte may be too low"
    say(f"text: {request.tokenizer} does not give {request.data} back; {lost}")
    return True


def _named(request: Request, codec: Codec, stem: str) -> dict[str, Any]:
    trained = {"file": f"{stem}.{text_tokens.FILE}"} if text_tokens.existing(request.tokenizer) is None else {}
    return {"name": request.tokenizer, "digest": codec.digest, "count": codec.count, **trained}


def _trained(place: pathlib.Path, request: Request, source: Source) -> Codec:
    """A tokenizer trained on the training text; from long text, on evenly spaced pieces, `SAMPLE` bytes in total."""
    path = place / f"{source.stem()}.{text_tokens.FILE}"
    with contextlib.suppress(OSError, ValueError, RecursionError, IndexError, KeyError, TypeError):
        journal = path.with_name(f"{source.stem()}.journal").read_bytes()
        if (found := text_tokens.read(path)).digest == json.loads(journal.splitlines()[0])["codec"]:
            return found
    stride = 1 if isinstance(source, Hub) else -(-source.total // SAMPLE)
    say(f"text: training {request.tokenizer} on {min(source.total, SAMPLE) / 1e6:.1f} MB of {request.data}")
    codec = text_tokens.train(_sample(source.pieces(), stride), int(request.tokenizer.partition(":")[2]))
    write(path, codec.to_json().encode())
    return codec


def _sample(pieces: Iterable[Piece], stride: int) -> Iterator[str]:
    seen = 0
    for piece in itertools.islice((piece for piece in pieces if piece.split == "train"), 0, None, stride):
        yield text_of(piece)
        seen += len(piece.data)
        if seen >= SAMPLE:
            return


def _stretches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of about `STRETCH` bytes."""
    gathered: list[Piece] = []
    for piece in pieces:
        gathered.append(piece)
        if sum(len(piece.data) for piece in gathered) >= STRETCH:
            yield gathered
            gathered = []
    if gathered:
        yield gathered
