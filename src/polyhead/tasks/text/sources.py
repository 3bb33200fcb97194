"""Sources of text (the standard library; a file, folder or glob; a data set of the Hub) and their held-out splits.

A source gives pieces in a fixed order.  A piece is part of a document and belongs to one split:

    files       each file is a document.  In the order of a hash of their paths, a file goes to `validation` if it fits
                into the rest of that split (`held_out` of all bytes), else to `iid` if it fits there, else to `train`
    few files   (an average one would fill more than half of a held-out split), and files of which whole ones fill less
                than a quarter of one, are cut into blocks at line ends, and the blocks are assigned in the same way
    hub         each document is assigned by a hash of its text, so a duplicate is in the same split
"""

import contextlib
import dataclasses
import fnmatch
import functools
import glob
import hashlib
import logging
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.spec.optional import optional

SPLITS = ("train", "validation", "iid")
CHUNK = 1 << 20  # bytes of text to tokenise at once
SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".org", ".tex", ".bib", ".html", ".xml", ".toml", ".yaml", ".yml", ".sql"),
    *(".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cs", ".css", ".clj", ".go", ".hs", ".java", ".jl"),
    *(".js", ".kt", ".lua", ".ml", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".swift", ".ts", ".tsx", ".zig"),
)
"""The files taken from a folder; a glob takes all that it matches."""

NOT_LIBRARY = (
    *("test", "tests", "idlelib", "idle_test", "lib2to3"),
    *("*-packages", "config-*", "_sysconfig*"),
)
"""Excluded from the standard library: parts that differ between builds of one Python version, and its tests."""


@dataclass(frozen=True)
class Piece:
    """Text of one split; `end`: whether its document ends here; `name`: for errors."""

    split: str
    data: bytes
    end: bool
    name: str
    start: int = 0  # offset in its document


def share(name: str) -> float:
    """A hash of `name` in [0, 1)."""
    data = name.encode("utf-8", "surrogatepass")  # a file name of other bytes than UTF-8 has surrogates
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


# ---------------------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class File:
    """`size`: bytes used, from the beginning; `whole`: bytes of the file; `changed`: modification time in ns."""

    path: pathlib.Path
    name: str
    size: int
    whole: int
    changed: int


@dataclass(frozen=True)
class FilePart:
    """Bytes `start` to `stop` of a file, in one split."""

    file: File
    start: int
    stop: int
    split: str
    end: bool


class Files:
    """Files on this machine.  `known`: an earlier listing; its hashes are reused for files that did not change.

    As for every source, `listing` describes what is read, and `total` is its size in bytes.
    """

    def __init__(self, files: Sequence[File], held_out: float, known: Any = None) -> None:
        self.files, self.held_out = files, held_out
        self.total = sum(file.size for file in files)
        known = {entry[0]: entry for entry in known or []}
        self.listing = [self._entry(file, known.get(file.name)) for file in files]

    @staticmethod
    def _entry(file: File, known: Any) -> list[Any]:
        stamp = [file.name, file.whole, file.changed]
        return [*stamp, known[3] if known and known[:3] == stamp else _hash(file.path), file.size]

    def stem(self) -> str:
        """A name that changes with the text, as far as this is known before reading."""
        known = [(name, content, size) for name, _, _, content, size in self.listing]
        cut = ["blocks"] if not self._few and self._whole is None else []  # in earlier versions, into whole files
        return hashlib.blake2b(repr((known, self.held_out, *cut)).encode(), digest_size=8).hexdigest()

    def copied(self) -> float:
        """The share of the bytes held out that are in copies of training files."""
        content = {entry[0]: entry[3] for entry in self.listing}
        trained: dict[str, set[str]] = {}
        for part in self.parts:
            if part.split == "train":
                trained.setdefault(content[part.file.name], set()).add(part.file.name)
        held = [part for part in self.parts if part.split != "train"]
        twice = [part for part in held if trained.get(content[part.file.name], set()) - {part.file.name}]
        return sum(part.stop - part.start for part in twice) / max(1, sum(part.stop - part.start for part in held))

    def pieces(self, first: int = 0, read: int = 0) -> Iterator[Piece]:
        """All pieces from number `first` on; the earlier ones have `read` bytes."""
        for part in self.parts[first:]:
            try:
                with part.file.path.open("rb") as handle:
                    handle.seek(part.start)
                    data = handle.read(part.stop - part.start)
            except OSError as error:
                raise ValueError(f"Text: {part.file.path} cannot be read ({error.strerror})") from None
            if len(data) != part.stop - part.start:
                raise ValueError(f"Text: {part.file.path} became shorter while it was read")
            yield Piece(part.split, data, part.end, str(part.file.path), part.start)

    @property
    def _few(self) -> bool:
        return len(self.files) * self.held_out < 2

    @functools.cached_property
    def _whole(self) -> list[str] | None:
        """The split of each whole file; None if a split had less than a quarter of its bytes."""
        quota = self.held_out * self.total
        splits = _deal([(file.name, file.size) for file in self.files], quota)
        sizes = dict.fromkeys(SPLITS, 0)
        for file, split in zip(self.files, splits, strict=True):
            sizes[split] += file.size
        return splits if 4 * min(sizes.values()) >= quota else None

    @functools.cached_property
    def parts(self) -> list[FilePart]:
        quota = self.held_out * self.total
        if not self._few and self._whole is not None:
            return [
                FilePart(file, start, stop, split, stop == file.size)
                for file, split in zip(self.files, self._whole, strict=True)
                for start, stop in _cuts(file, CHUNK)
            ]
        block = max(1, min(int(quota / 4), CHUNK))
        blocks = [(file, start, stop) for file in self.files for start, stop in _cuts(file, block)]
        splits = _deal([(f"{file.name}/{start}", stop - start) for file, start, stop in blocks], quota)
        following = [*zip([file for file, _, _ in blocks[1:]], splits[1:], strict=True), None]
        return [
            FilePart(*block, split, (block[0], split) != after)
            for block, split, after in zip(blocks, splits, following, strict=True)
        ]


def _deal(named: Sequence[tuple[str, int]], quota: float) -> list[str]:
    """The split of each pair of a name and a size."""
    room = {"validation": quota, "iid": quota}
    splits = ["train"] * len(named)
    for number in sorted(range(len(named)), key=lambda i: share(named[i][0])):
        size = named[number][1]
        split = next((split for split, left in room.items() if size <= left), None)
        if split is not None:
            room[split] -= size
            splits[number] = split
    return splits


def _cuts(file: File, size: int) -> list[tuple[int, int]]:
    """Blocks of about `size` bytes that end at a line end if there are lines, and never inside a character."""
    if file.size <= size:
        return [(0, file.size)] if file.size else []
    with file.path.open("rb") as handle:
        bounds = [0]
        while (at := bounds[-1] + size) < file.size:
            handle.seek(at)
            ahead = handle.read(max(4, min(size, 4096)))  # 4: the longest character
            line = ahead.find(b"\n", 0, size) + 1
            at += line or _inside(ahead)
            if at >= file.size:
                break
            bounds.append(at)
    return list(zip(bounds, [*bounds[1:], file.size], strict=True))


def _inside(data: bytes) -> int:
    """How many bytes at the beginning, four or all up to the end of a file, continue a character."""
    return next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), len(data) if len(data) < 4 else 0)


def _head(file: File, size: int) -> int:
    """The length of a prefix of about `size` bytes that does not end inside a character."""
    if size >= file.size:
        return file.size
    with file.path.open("rb") as handle:
        handle.seek(size)
        return size + _inside(handle.read(4))


def _hash(path: pathlib.Path) -> str:
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise ValueError(f"Text: {path} cannot be read ({error.strerror})") from None


def files(data: str, limit: int | None, skip: pathlib.Path) -> list[File]:
    """The files that `data` describes, by name, without empty files and without the folder `skip`.

    `limit`: bytes of text; files are taken in the order of a hash of their name, the last one only in part.
    """
    root, found = _library() if data == "stdlib" else _named(data)
    stats = [(path, path.relative_to(root).as_posix(), path.stat()) for path in found if skip not in path.parents]
    listed = [File(path, name, stat.st_size, stat.st_size, stat.st_mtime_ns) for path, name, stat in stats]
    listed = [file for file in listed if file.size]
    if not listed:
        raise ValueError(f"Text: {data} is empty" if stats else f"Text: {data} has no {_wanted(data)}")
    if limit is not None:
        kept, left = [], limit
        for file in sorted(listed, key=lambda file: share(file.name)):
            kept.append(dataclasses.replace(file, size=_head(file, left)))
            left -= kept[-1].size
            if left <= 0:
                break
        listed = kept
    return sorted(listed, key=lambda file: file.name)


def _wanted(data: str) -> str:
    if data == "stdlib" or glob.has_magic(data):
        return "file"
    return f"text file ({', '.join(SUFFIXES)}); a glob such as '{data}/**/*.log' takes what it matches"


def _library() -> tuple[pathlib.Path, list[pathlib.Path]]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    return root, [path for path in _tree(root, NOT_LIBRARY) if path.suffix == ".py"]


def _named(data: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """The folder that names are relative to, and the paths of the files."""
    path = pathlib.Path(data).absolute()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, [found for found in _tree(path, ()) if found.suffix.lower() in SUFFIXES]
    if not glob.has_magic(data):
        raise ValueError(f"Text: data must be 'stdlib', 'hub:NAME', a file, a folder or a glob; there is no {data}")
    names = dict.fromkeys(glob.glob(data, recursive=True))  # two `**` find a file more than once
    matched = [pathlib.Path(name).absolute() for name in names]
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    root = pathlib.Path(*path.parts[:fixed])
    return root, [found for found in matched if found.is_file()]


def _tree(root: pathlib.Path, without: tuple[str, ...]) -> Iterator[pathlib.Path]:
    """The files below `root`, without hidden files, caches and those that match one of `without`."""

    def kept(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in (".*", "__pycache__", *without))

    for folder, inner, names in os.walk(root):
        inner[:] = sorted(filter(kept, inner))
        yield from (path for name in names if kept(name) and (path := pathlib.Path(folder, name)).is_file())


# ------------------------------------------------------------------------------------------------------------------ hub
class Hub:
    """A data set of the Hugging Face Hub, streamed: the first documents, up to `limit` bytes of their `column`."""

    def __init__(self, name: str, held_out: float, limit: int, column: str) -> None:
        self.name, self.held_out, self.total, self.column = name, held_out, limit, column
        self.listing = None

    def stem(self) -> str:
        return "hub"

    def pieces(self, first: int = 0, read: int = 0) -> Iterator[Piece]:
        rows = self._rows(first)
        while read < self.total:
            try:
                row = next(rows, None)
            except Exception as error:  # any library that `datasets` uses may raise
                raise self._away(error) from None
            if row is None:
                return
            if not isinstance(row.get(self.column), str):
                raise ValueError(f"Text: hub:{self.name} has no text in {self.column!r} (it has {', '.join(row)})")
            data = row[self.column].encode("utf-8", "replace")
            part = int(share(row[self.column]) / self.held_out)
            yield Piece({0: "validation", 1: "iid"}.get(part, "train"), data, True, f"hub:{self.name}, row {first + 1}")
            first, read = first + 1, read + len(data)

    def _rows(self, first: int) -> Iterator[Any]:
        with optional(f"Text: data='hub:{self.name}'", "polyhead[text]"):
            import datasets  # type: ignore[import-not-found,unused-ignore]
        owner, _, rest = self.name.partition("/")
        name, _, config = rest.partition("/")
        try:
            with _quiet("huggingface_hub"):
                rows = datasets.load_dataset(f"{owner}/{name}", config or None, split="train", streaming=True)
            return iter(rows.skip(first))
        except Exception as error:
            raise self._away(error) from None

    def _away(self, error: Exception) -> ValueError:
        lines = str(error).splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:200]}"
        return ValueError(f"Text: hub:{self.name} cannot be had ({reason}); data='stdlib' needs no network")


@contextlib.contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Suppress the library's warning for each failed attempt; if all fail, our error says so in one line."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


Source = Files | Hub
