"""Sources of text (the standard library, files, a data set of the Hub) and the split of each of their pieces.

files       each file is a document.  In the order of a hash of their names, a file goes to `validation` if it fits
            into the rest of that split (`held_out` of all bytes), else to `iid` if it fits there, else to `train`
few files   are cut into blocks at line ends, and the blocks are assigned in the same way; so are files of which
            whole ones fill less than a quarter of a held-out split
hub         each document is assigned by a hash of its text, so a duplicate is in the same split
"""

import fnmatch
import hashlib
import itertools
import mmap
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from polyhead.spec.optional import optional

SPLITS = ("train", "validation", "iid")
CHUNK = 1 << 20  # bytes of text to tokenise at once
LONGEST_LINE = 4096  # bytes in which the end of a line is looked for
CONTINUING = bytes(range(0x80, 0xC0))  # the bytes of UTF-8 that continue a character
# The files taken from a folder.
SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".org", ".tex", ".bib", ".html", ".xml", ".toml", ".yaml", ".yml", ".sql"),
    *(".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cs", ".css", ".clj", ".go", ".hs", ".java", ".jl"),
    *(".js", ".kt", ".lua", ".ml", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".swift", ".ts", ".tsx", ".zig"),
)
IGNORED = (".*", "__pycache__")
# Excluded from the standard library: parts that differ between builds of one Python version, and its tests.
NOT_LIBRARY = ("test", "tests", "idlelib", "idle_test", "lib2to3", "*-packages", "config-*", "_sysconfig*")


class Piece(NamedTuple):
    """Text of one split.  `ends`: whether its document ends here.  `name` is for errors."""

    split: str
    data: bytes
    ends: bool
    name: str

    def text(self) -> str:
        """Raises ValueError for invalid UTF-8."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"Text: {self.name} is no UTF-8; tokenizer='bytes' takes any file") from None


class File(NamedTuple):
    """A file of text: its size in bytes, and when it was changed (ns)."""

    path: pathlib.Path
    name: str
    size: int
    changed: int


Pieces = Callable[[], Iterator[Piece]]  # reads a text


class Block(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: File
    start: int
    stop: int


def hash_fraction(name: str) -> float:
    """A hash of `name` in [0, 1)."""
    data = name.encode("utf-8", "surrogatepass")  # a file name of other bytes than UTF-8 has surrogates
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


# ---------------------------------------------------------------------------------------------------------------- files
def list_files(data: str, ignored_folder: pathlib.Path) -> tuple[File, ...]:
    """The files that `data` describes, by name, without empty ones and those in `ignored_folder`."""
    root = pathlib.Path(data).absolute()
    if data == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = _walk(root, {".py"}, NOT_LIBRARY)
    elif root.is_file():
        paths = [root]
        root = root.parent
    elif root.is_dir():
        paths = _walk(root, SUFFIXES)
    else:
        raise ValueError(f"Text: data must be 'stdlib', 'hub:NAME', a file or a folder; there is no {data}")
    files = []
    seen_files = set()
    for path in sorted(paths, key=lambda path: (path.is_symlink(), path)):
        status = path.stat()
        # A link to a file here would be one document more, perhaps of another split.
        identity = (status.st_dev, status.st_ino)
        if status.st_ino and identity in seen_files:
            continue
        seen_files.add(identity)
        if status.st_size and ignored_folder not in path.parents:
            files.append(File(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    if not files:
        raise ValueError(f"Text: {data} has no text; a folder's files need a usual suffix")
    return tuple(sorted(files, key=lambda file: file.name))


def _walk(root: pathlib.Path, suffixes: Collection[str], excluded: Sequence[str] = ()) -> list[pathlib.Path]:
    """The files below `root` with a suffix, without hidden ones, caches and what matches a pattern in `excluded`."""
    pattern = re.compile("|".join(map(fnmatch.translate, (*IGNORED, *excluded))))
    paths = []
    for folder, inner_folders, names in os.walk(root):
        inner_folders[:] = itertools.filterfalse(pattern.match, inner_folders)
        for name in itertools.filterfalse(pattern.match, names):
            path = pathlib.Path(folder, name)
            if path.suffix.lower() in suffixes and path.is_file():
                paths.append(path)
    return paths


def read_files(files: Sequence[File], held_out: float) -> Iterator[Piece]:
    """The text of the files, in order, in pieces of one split."""
    blocks = split_files(files, held_out)
    for (block, split), following in zip(blocks, [*blocks[1:], None], strict=True):
        with block.file.path.open("rb") as handle:
            handle.seek(block.start)
            data = handle.read(block.stop - block.start)
        if len(data) != block.stop - block.start:
            raise ValueError(f"Text: {block.file.path} became shorter while it was read")
        # A document ends where the file or the split changes.
        is_end = following is None or (following[0].file, following[1]) != (block.file, split)
        yield Piece(split, data, is_end, str(block.file.path))


def split_files(files: Sequence[File], held_out: float) -> list[tuple[Block, str]]:
    """The blocks of the files, each with its split."""
    quota = held_out * sum(file.size for file in files)
    splits = _assign({file.name: file.size for file in files}, quota)
    sizes = dict.fromkeys(SPLITS, 0)
    for file in files:
        sizes[splits[file.name]] += file.size
    # Files stay whole if a held-out split has two of them or more, and whole ones fill a quarter of it.
    are_whole = len(files) * held_out >= 2 and 4 * min(sizes.values()) >= quota
    size = CHUNK
    if not are_whole:
        size = max(1, min(int(quota / 4), CHUNK))  # so that a held-out split has four blocks or more
    blocks: list[Block] = []
    for file in files:
        blocks += _cut(file, size)
    if are_whole:
        return [(block, splits[block.file.name]) for block in blocks]
    splits = _assign({f"{file.name}/{start}": stop - start for file, start, stop in blocks}, quota)
    return list(zip(blocks, splits.values(), strict=True))


def _assign(sizes: Mapping[str, int], quota: float) -> dict[str, str]:
    """The split of each name, in the order of `sizes`, which are in bytes."""
    room = {"validation": quota, "iid": quota, "train": float("inf")}
    splits = dict.fromkeys(sizes, "")
    for name in sorted(sizes, key=hash_fraction):
        for split in room:  # the first one with room for it
            if sizes[name] <= room[split]:
                splits[name] = split
                room[split] -= sizes[name]
                break
    return splits


def _cut(file: File, size: int) -> list[Block]:
    """Blocks of about `size` bytes that end at a line end if there are lines, and never inside a character."""
    borders = [0]
    with file.path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while borders[-1] + size < file.size:
            stop = borders[-1] + size
            line_end = data.find(b"\n", stop, stop + min(size, LONGEST_LINE))
            if line_end >= 0:
                stop = line_end + 1
            else:
                following = data[stop : stop + 4]
                num_continuing = len(following) - len(following.lstrip(CONTINUING))
                stop += num_continuing % 4  # no character has four of them: such a file is no UTF-8
            borders.append(stop)
    if borders[-1] >= file.size:  # the last line end is the end of the file
        borders.pop()
    borders.append(file.size)
    return [Block(file, start, stop) for start, stop in itertools.pairwise(borders)]


# ------------------------------------------------------------------------------------------------------------------ hub
def read_hub(data: str, held_out: float, limit: int, column: str) -> Iterator[Piece]:
    """The first documents of a data set of the Hub, up to `limit` bytes; `data` is hub:OWNER/NAME[/CONFIG]."""
    with optional(f"Text: data='{data}'", "polyhead[text]"):
        import datasets  # type: ignore[import-not-found,unused-ignore]
    owner, data_set, *config = data.removeprefix("hub:").split("/", 2)
    num_bytes = 0
    try:
        rows = datasets.load_dataset(f"{owner}/{data_set}", *config, split="train", streaming=True)
        for i, row in enumerate(rows):
            text = row.get(column)
            if not isinstance(text, str):
                kind = type(text).__name__ if column in row else "absent"
                raise ValueError(f"row {i + 1}: {column!r} is {kind}, not text (of {', '.join(row)})")
            split = {0: "validation", 1: "iid"}.get(int(hash_fraction(text) / held_out), "train")
            encoded = text.encode("utf-8", "replace")
            yield Piece(split, encoded, True, f"{data}, row {i + 1}")
            num_bytes += len(encoded)
            if num_bytes >= limit:
                return
    except Exception as error:  # any library that `datasets` uses may raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise ValueError(f"Text: {data} cannot be read ({reason})") from None
