"""The published images of relational games (Shanahan et al. 2020), read from a folder of their npz files.

    same_pentos.npz  occurs_hexos.npz  xoccurs_stripes.npz  1task_between_pentos.npz  1task_match_patt_pentos.npz ...

Each holds `images` (n 36 36 3), 0 to 255, and `labels` (n) or (n 1), 0 or 1.  Nothing in them is unpickled.
"""

import functools
import hashlib
import pathlib

import numpy as np
import torch
from torch import Tensor

from polyhead.spec.values import one_line
from polyhead.tasks.base import seeded

FILES = {"between": "1task_between", "match_pattern": "1task_match_patt"}  # the other files are named as the games
LARGEST = 1 << 30  # bytes of an unpacked file: a compressed one of a few MB can unpack to any size
SETS = {"pentominoes": "pentos", "hexominoes": "hexos", "stripes": "stripes"}


def file_of(game: str, shapes: str) -> str:
    """The name of the published file."""
    return f"{FILES.get(game, game)}_{SETS[shapes]}.npz"


@functools.lru_cache(maxsize=4)
def load(folder: str, game: str, shapes: str) -> tuple[Tensor, Tensor]:
    """All images of a file (n 3 36 36), bytes, and their labels (n)."""
    path = pathlib.Path(folder) / file_of(game, shapes)
    try:
        with np.load(path, allow_pickle=False) as file:
            size = sum(entry.file_size for entry in file.zip.infolist())
            if size > LARGEST:
                raise OverflowError(f"unpacks to {size >> 20} MB; at most {LARGEST >> 20} are read")
            images, labels = file["images"], file["labels"]
    except FileNotFoundError:
        raise ValueError(f"RelationalGames: {path} does not exist; data='original' needs the published file") from None
    except OverflowError as error:
        raise ValueError(f"RelationalGames: {path} {error}") from None
    except Exception as error:  # NumPy, zipfile and zlib raise many different errors for damaged files
        raise ValueError(f"RelationalGames: {path} cannot be read ({one_line(error)})") from None
    labels = labels.reshape(-1)
    if not images.size or images.shape[1:] != (36, 36, 3) or len(labels) != len(images):
        raise ValueError(
            f"RelationalGames: {path} must hold images (n 36 36 3) and labels (n) but has {images.shape} and "
            f"{labels.shape}"
        )
    # Pixels divided by 255 would all become black.
    has_bytes = images.min() >= 0 and 1 < images.max() <= 255 and (images == images.astype(np.uint8)).all()
    if not has_bytes or not np.isin(labels, (0, 1)).all():
        raise ValueError(f"RelationalGames: {path} must hold labels 0 or 1 and pixels of 0 to 255, whole numbers")
    pixels = torch.from_numpy(images.astype(np.uint8)).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.from_numpy(labels.astype(np.int64))


@functools.lru_cache(maxsize=16)
def rows(folder: str, game: str, split: str, examples: int, seed: int) -> Tensor:
    """Indices of the pentomino images of `split`: `examples` for training, a third of the rest for validation.

    Copies of an image are left out, or a test image could be one of training.
    """
    images, _ = load(folder, game, "pentominoes")
    first_copies: dict[bytes, int] = {}
    for i, image in enumerate(images.numpy()):
        first_copies.setdefault(hashlib.blake2b(image.tobytes(), digest_size=16).digest(), i)
    total = len(first_copies)
    if total < examples + 3:
        name = file_of(game, "pentominoes")
        raise ValueError(
            f"RelationalGames: examples must leave 3 or more of the {total} distinct images in {name} but is {examples}"
        )
    order = torch.randperm(len(images), generator=seeded(seed, f"relational_games/{game}/original"), device="cpu")
    order = order[torch.isin(order, torch.tensor(list(first_copies.values()), device="cpu"))]
    train, others = order[:examples], order[examples:]
    return {"train": train, "validation": others[::3], "iid": torch.cat((others[1::3], others[2::3]))}[split]
