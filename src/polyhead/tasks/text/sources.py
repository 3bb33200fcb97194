"""Sources of text (the standard library, files, a data set of the Hub) and the split of each of their pieces.

files       each file is a document.  In the order of a hash of their names, a file goes to `validation` if it fits
            into the rest of that split (`held_out` of all bytes), else to `iid` if it fits there, else to `train`
few files   are cut into blocks at line ends, and the blocks are assigned in the same way; so are files of which
            whole ones fill less than a quarter of a held-out split
hub         each document is assigned by a hash of its text, so a duplicate is in the same split
"""

import dataclasses
import fnmatch
import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyhead.spec.optional import optional

SPLITS = ("train", "validation", "iid")
CHUNK = 1 << 20  # bytes of text to tokenise at once
LONGEST_LINE = 4096  # bytes in which the end of a line is looked for
# The files taken from a folder; a glob takes all that it matches.
SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".org", ".tex", ".bib", ".html", ".xml", ".toml", ".yaml", ".yml", ".sql"),
    *(".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cs", ".css", ".clj", ".go", ".hs", ".java", ".jl"),
    *(".js", ".kt", ".lua", ".ml", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".swift", ".ts", ".tsx", ".zig"),
)

IGNORED = (".*", "__pycache__")
# Excluded from the standard library: parts that differ between builds of one Python version, and its tests.
NOT_LIBRARY = ("test", "tests", "idlelib", "idle_test", "lib2to3", "*-packages", "config-*", "_sysconfig*")


@dataclass(frozen=True)
class Piece:
    """Text of one split.  `ends`: whether its document ends here.  `name`, and `start` in bytes, are for errors."""

    split: str
    data: bytes
    ends: bool
    name: str
    start: int = 0


@dataclass(frozen=True)
class File:
    """A file of text.  `size`: bytes used, from its beginning.  `state`: its size on the disk and its time in ns."""

    path: pathlib.Path
    name: str
    size: int
    state: tuple[int, int]


def hash_fraction(name: str) -> float:
    """A hash of `name` in [0, 1)."""
    data = name.encode("utf-8", "surrogatepass")  # a file name of other bytes than UTF-8 has surrogates
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


# ------------------------------------------------------------------------------------------------------- lists of files
def list_files(data: str, limit: int | None, ignored_folder: pathlib.Path) -> list[File]:
    """The files that `data` describes, by name, without empty ones and those in `ignored_folder`.

    `limit`: bytes of text, from files in the order of a hash of their names.  Raises ValueError if there is no text.
    """
    if data == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = list(_walk(root, {".py"}, NOT_LIBRARY))
    else:
        root, paths = _find_files(data)
    files = []
    inodes = set()
    for path in paths:
        status = path.stat()
        # A glob may match a file several times, through links.
        linked_again = glob.has_magic(data) and (status.st_dev, status.st_ino) in inodes
        if status.st_size and not linked_again and ignored_folder not in path.parents:
            name = path.relative_to(root).as_posix()
            files.append(File(path, name, status.st_size, (status.st_size, status.st_mtime_ns)))
        inodes.add((status.st_dev, status.st_ino))
    if not files:
        raise ValueError(f"Text: {data} has no text; a folder's files need a usual suffix, a glob takes any file")
    if limit is not None:
        files = _first_bytes(files, limit)
    return sorted(files, key=lambda file: file.name)


def _find_files(data: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """The folder to which names are relative, and the files of a file, a folder or a glob.

    `**` does not follow links to folders: one may lead to a folder around it.
    """
    path = pathlib.Path(data).absolute()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, list(_walk(path, SUFFIXES))
    if not glob.has_magic(data):
        raise ValueError(f"Text: data must be 'stdlib', 'hub:NAME', a file, a folder or a glob; there is no {data}")
    root = path
    while glob.has_magic(str(root)):
        root = root.parent
    pattern = list(path.relative_to(root).parts)
    if pattern[-1] == "**":
        pattern.append("*")
    takes_hidden = _has_hidden(pattern)
    files = []
    for file in sorted(set(root.glob("/".join(pattern)))):
        if file.is_file() and (takes_hidden or not _has_hidden(file.relative_to(root).parts)):
            files.append(file)
    return root, files


def _has_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def _walk(root: pathlib.Path, suffixes: Collection[str], excluded: Sequence[str] = ()) -> Iterator[pathlib.Path]:
    """The files below `root` with a suffix, without hidden ones, caches and what matches a pattern in `excluded`."""

    def is_included(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in (*IGNORED, *excluded))

    for folder, inner_folders, names in os.walk(root):
        inner_folders[:] = sorted(filter(is_included, inner_folders))
        for name in filter(is_included, names):
            path = pathlib.Path(folder, name)
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def _first_bytes(files: Sequence[File], limit: int) -> list[File]:
    """Files of about `limit` bytes in total; the last one is cut, but not inside a character."""
    chosen = []
    left = limit
    for file in sorted(files, key=lambda file: hash_fraction(file.name)):
        if left < file.size:
            with file.path.open("rb") as handle:
                handle.seek(left)
                file = dataclasses.replace(file, size=left + _num_continuing(handle.read(4)))
        chosen.append(file)
        left -= file.size
        if left <= 0:
            break
    return chosen


# --------------------------------------------------------------------------------------------------------------- splits
# Bytes `start` to `stop` of a file.
Block = tuple[File, int, int]


def read_files(files: Sequence[File], held_out: float) -> Iterator[Piece]:
    """The text of the files, in order, in pieces of one split.  Raises ValueError for a file that cannot be read."""
    for (file, start, stop), split, ends in split_files(files, held_out):
        try:
            with file.path.open("rb") as handle:
                handle.seek(start)
                data = handle.read(stop - start)
        except OSError as error:
            raise ValueError(f"Text: {file.path} cannot be read ({error.strerror})") from None
        if len(data) != stop - start:
            raise ValueError(f"Text: {file.path} became shorter while it was read")
        yield Piece(split, data, ends, str(file.path), start)


def split_files(files: Sequence[File], held_out: float) -> list[tuple[Block, str, bool]]:
    """The blocks of the files, each with its split and whether its document ends with it."""
    quota = held_out * sum(file.size for file in files)
    split_of_file = _assign({file.name: file.size for file in files}, quota)
    sizes = dict.fromkeys(SPLITS, 0)
    for file in files:
        sizes[split_of_file[file.name]] += file.size
    keeps_files_whole = len(files) * held_out >= 2 and 4 * min(sizes.values()) >= quota
    block_size = CHUNK
    if not keeps_files_whole:
        block_size = max(1, min(int(quota / 4), CHUNK))
    blocks = []
    for file in files:
        blocks += _cut(file, block_size)
    if keeps_files_whole:
        splits = [split_of_file[file.name] for file, _, _ in blocks]
    else:
        size_of_block = {f"{file.name}/{start}": stop - start for file, start, stop in blocks}
        split_of_block = _assign(size_of_block, quota)
        splits = [split_of_block[name] for name in size_of_block]
    # A document ends where the file or the split changes.
    pieces = []
    for i, (block, split) in enumerate(zip(blocks, splits, strict=True)):
        ends = i + 1 == len(blocks) or (blocks[i + 1][0], splits[i + 1]) != (block[0], split)
        pieces.append((block, split, ends))
    return pieces


def _assign(sizes: Mapping[str, int], quota: float) -> dict[str, str]:
    """The split of each name, from sizes in bytes."""
    room = {"validation": quota, "iid": quota, "train": float("inf")}
    splits = {}
    for name in sorted(sizes, key=hash_fraction):
        for split in room:
            if sizes[name] <= room[split]:
                room[split] -= sizes[name]
                splits[name] = split
                break
    return splits


def _cut(file: File, size: int) -> list[Block]:
    """Blocks of about `size` bytes that end at a line end if there are lines, and never inside a character."""
    blocks = []
    start, stop = 0, size
    with file.path.open("rb") as handle:
        while stop < file.size:
            handle.seek(stop)
            following = handle.read(max(4, min(size, LONGEST_LINE)))
            # Behind the line end, if there is one.
            stop += following.find(b"\n", 0, size) + 1 or _num_continuing(following)
            if stop < file.size:
                blocks.append((file, start, stop))
                start = stop
                stop += size
    return [*blocks, (file, start, file.size)]


def _num_continuing(data: bytes) -> int:
    """How many bytes at the beginning, four or all up to the end of a file, continue a character."""
    for i, byte in enumerate(data[:4]):
        if byte & 0xC0 != 0x80:
            return i
    if len(data) < 4:
        return len(data)
    return 0  # no character is that long: the file is no UTF-8


# ------------------------------------------------------------------------------------------------------------------ hub
def read_hub(name: str, held_out: float, limit: int, column: str) -> Iterator[Piece]:
    """The first documents of a data set of the Hub, streamed, up to `limit` bytes; `name` is OWNER/NAME[/CONFIG].

    Raises ValueError without a network, and for a row whose `column` is no text.
    """
    with optional(f"Text: data='hub:{name}'", "polyhead[text]"):
        import datasets  # type: ignore[import-not-found,unused-ignore]
    owner, data_set, *config = name.split("/", 2)
    num_rows = num_bytes = 0
    try:
        rows = datasets.load_dataset(f"{owner}/{data_set}", *config, split="train", streaming=True)
        for row in rows:
            num_rows += 1
            text = row.get(column)
            if not isinstance(text, str):
                columns = ", ".join(row)
                kind = type(text).__name__ if column in row else "absent"
                raise ValueError(f"Text: hub:{name}, row {num_rows}: {column!r} is {kind}, not text (of {columns})")
            part = int(hash_fraction(text) / held_out)
            split = {0: "validation", 1: "iid"}.get(part, "train")
            data = text.encode("utf-8", "replace")
            yield Piece(split, data, True, f"hub:{name}, row {num_rows}")
            num_bytes += len(data)
            if num_bytes >= limit:
                return
    except Exception as error:  # any library that `datasets` uses may raise
        if isinstance(error, ValueError) and str(error).startswith("Text: "):
            raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise ValueError(f"Text: hub:{name} cannot be read ({reason}); data='stdlib' needs no network") from None
