"""The published images of relational games (Shanahan et al. 2020), read from a folder of their npz files.

    same_pentos.npz  occurs_hexos.npz  xoccurs_stripes.npz  1task_between_pentos.npz  1task_match_patt_pentos.npz ...

Each holds `images` (n 36 36 3), 0 to 255, and `labels` (n) or (n 1), 0 or 1.  Nothing in them is unpickled.
"""

import functools
import pathlib

import torch
from torch import Tensor

from polyhead.tasks.task import seeded

FILES = {
    "same": "same",
    "occurs": "occurs",
    "xoccurs": "xoccurs",
    "between": "1task_between",
    "match_pattern": "1task_match_patt",
}
LARGEST = 1 << 30
"""Bytes that a file may have when it is unpacked; a compressed file of a few MB can unpack to any size."""

SETS = {"pentominoes": "pentos", "hexominoes": "hexos", "stripes": "stripes"}


def file_of(game: str, shapes: str) -> str:
    """The name of the published file."""
    return f"{FILES[game]}_{SETS[shapes]}.npz"


@functools.lru_cache(maxsize=4)
def load(folder: str, game: str, shapes: str) -> tuple[Tensor, Tensor]:
    """All images of a file (n 3 36 36), bytes, and their labels (n)."""
    import numpy as np

    path = pathlib.Path(folder) / file_of(game, shapes)
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            size = sum(entry.file_size for entry in file.zip.infolist())
            if size > LARGEST:
                raise ValueError(
                    f"RelationalGames: {path} unpacks to {size >> 20} MB; at most {LARGEST >> 20} are read"
                )
            absent = [name for name in ("images", "labels") if name not in file]
            if absent:
                raise ValueError(f"RelationalGames: {path} has no array {absent[0]!r}")
            images, labels = file["images"], file["labels"]
            if not all(isinstance(array, np.ndarray) for array in (images, labels)):  # NumPy gives other files' bytes
                raise ValueError
    except (TypeError, AttributeError):  # a single array has no names
        raise ValueError(f"RelationalGames: {path} is no npz file of plain arrays") from None
    except FileNotFoundError:
        raise ValueError(f"RelationalGames: {path} does not exist; data='original' needs the published file") from None
    except ValueError as error:
        if str(error).startswith("RelationalGames"):
            raise
        raise ValueError(f"RelationalGames: {path} is no npz file of plain arrays") from None
    except Exception as error:  # NumPy, zipfile and zlib raise many different errors for damaged files
        raise ValueError(f"RelationalGames: {path} cannot be read ({' '.join(str(error).split())})") from None
    labels = labels[:, 0] if labels.shape[1:] == (1,) else labels
    if not images.size or images.shape[1:] != (36, 36, 3) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"RelationalGames: {path} must hold images (n 36 36 3) and labels (n) but has {images.shape} and "
            f"{labels.shape}"
        )
    known = all(a.dtype.kind in "biuf" for a in (images, labels)) and np.isin(labels, (0, 1)).all()
    in_range = known and images.min() >= 0 and 1 < images.max() <= 255  # False for NaN, and for whites of 1
    pixels = images.astype(np.uint8) if in_range else None
    if pixels is None or not np.array_equal(pixels, images):  # pixels divided by 255 would all become black
        raise ValueError(f"RelationalGames: {path} must hold labels 0 or 1 and pixels of 0 to 255, whole numbers")
    pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.from_numpy(labels.astype(np.int64))


@functools.lru_cache(maxsize=16)
def rows(folder: str, game: str, split: str, examples: int, seed: int) -> Tensor:
    """Indices of the pentomino images of `split`: `examples` for training, a third of the rest for validation."""
    total = len(load(folder, game, "pentominoes")[1])
    if total < examples + 3:
        name = file_of(game, "pentominoes")
        raise ValueError(
            f"RelationalGames: examples must leave at least 3 of the {total} images in {name} but is {examples}"
        )
    order = torch.randperm(total, generator=seeded(seed, f"relational_games/{game}/original"))
    train, rest = order[:examples], order[examples:]
    return {"train": train, "validation": rest[::3], "iid": torch.cat((rest[1::3], rest[2::3]))}[split]
