"""Images and their labels: scikit-learn's digits, CIFAR's binary files.

CIFAR's Python version is not read, because its pickles could run code.
"""

import functools
import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyhead.spec.optional import optional


@dataclass(frozen=True)
class Source:
    """Facts and defaults of one kind of data, known before any image is read.

    Attributes:
        image: Channels, height and width.
        classes: How many classes there are.
        patch: The default side of a patch.
        shift: By how many pixels training shifts images, by default.
        flip: Whether training mirrors images, by default.
        white: The pixel value of white.
    """

    image: tuple[int, int, int]
    classes: int
    patch: int
    shift: int
    flip: bool
    white: int = 255


SOURCES = {
    "digits": Source((1, 8, 8), 10, 2, 1, False, white=16),
    "cifar10": Source((3, 32, 32), 10, 4, 4, True),
    "cifar100": Source((3, 32, 32), 100, 4, 4, True),
}

# For each data: the folder in the archive, training files, test files, labels per record (the last is the finest).
CIFAR = {
    "cifar10": ("cifar-10-batches-bin", [*map("data_batch_{}.bin".format, range(1, 6))], ["test_batch.bin"], 1),
    "cifar100": ("cifar-100-binary", ["train.bin"], ["test.bin"], 2),
}


@functools.lru_cache(maxsize=4)
def digits() -> tuple[Tensor, Tensor]:
    """The 1797 handwritten digits that come with scikit-learn (n 1 8 8), values 0 to 16, and their labels (n)."""
    with optional("Images: data='digits'", "polyhead[report]"):
        from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.from_numpy(data.images.astype(np.uint8))[:, None]
    return pixels, torch.from_numpy(data.target.astype(np.int64))


@functools.lru_cache(maxsize=4)
def cifar(data: str, folder: str, *, is_test: bool) -> tuple[Tensor, Tensor]:
    """The training or test images (n 3 32 32) of CIFAR's binary version, in bytes, and their labels (n).

    They are in `folder`, or in the archive's own folder inside it.  A record is its labels, then 3072 bytes, red first.
    """
    inner, train, test, labels = CIFAR[data]
    root = pathlib.Path(folder)
    if (root / inner).is_dir():
        root = root / inner
    records = []
    for name in test if is_test else train:
        try:
            raw = np.fromfile(root / name, dtype=np.uint8)
        except OSError as error:
            raise ValueError(
                f"Images: {root / name} cannot be read ({error.strerror}); the folder must hold the binary version of "
                f"{data}, {inner}, unpacked"
            ) from None
        if not len(raw) or len(raw) % (labels + 3072):
            raise ValueError(f"Images: {root / name} has {len(raw)} bytes, no multiple of {labels + 3072}, a record")
        records.append(raw.reshape(-1, labels + 3072))
    all_records = np.concatenate(records)
    finest_labels = all_records[:, labels - 1].astype(np.int64)
    if finest_labels.max() >= SOURCES[data].classes:
        raise ValueError(
            f"Images: {root} has the label {finest_labels.max()}, but {data} has {SOURCES[data].classes} classes"
        )
    pixels = all_records[:, labels:].reshape(-1, 3, 32, 32)
    return torch.from_numpy(pixels), torch.from_numpy(finest_labels)
