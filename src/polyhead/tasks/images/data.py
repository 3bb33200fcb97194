"""Images and their labels: scikit-learn's digits, CIFAR's binary files, folders of classes.

No reader runs code from a file.  CIFAR's Python version is not read, because its pickles could run code.
"""

import contextlib
import functools
import pathlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyhead.spec.optional import optional
from polyhead.spec.shapes import one_of


@dataclass(frozen=True)
class Source:
    """Facts and defaults of one kind of data, known before any image is read.

    image: channels, height, width.  patch: the default side.  shift, flip: how training moves and mirrors images by
    default.  white: the pixel value of white.
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
    "folder": Source((3, 224, 224), 0, 16, 0, True),
}

# For each data: the folder in the archive, training files, test files, labels per record (the last is the finest).
CIFAR = {
    "cifar10": ("cifar-10-batches-bin", [*map("data_batch_{}.bin".format, range(1, 6))], ["test_batch.bin"], 1),
    "cifar100": ("cifar-100-binary", ["train.bin"], ["test.bin"], 2),
}

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")  # by content, not suffix: Pillow would run a program for PostScript


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Labels (n) and pixels (n c h w) in bytes, or the files to read these from, resized to `size`."""

    labels: Tensor
    pixels: Tensor | None = None
    paths: tuple[pathlib.Path, ...] = ()
    size: int = 0

    def read(self, rows: Tensor) -> Tensor:
        """Pixels (b c h w) in bytes."""
        if self.pixels is not None:
            return self.pixels[rows]
        images = [_decode(self.paths[row], self.size) for row in rows.tolist()]
        return torch.stack(images).to(rows.device)

    def identity(self) -> tuple[Tensor | str, ...]:
        """What makes other images of these: pixels and labels, or class and name of each file."""
        if self.pixels is not None:
            return self.pixels, self.labels
        return tuple(f"{path.parent.name}/{path.name}" for path in self.paths)

    def to(self, device: torch.device) -> "LabelledImages":
        """A copy on `device`."""
        pixels = self.pixels
        if pixels is not None:
            pixels = pixels.to(device)
        return replace(self, labels=self.labels.to(device), pixels=pixels)


@functools.lru_cache(maxsize=4)
def digits() -> LabelledImages:
    """The 1797 handwritten digits that come with scikit-learn, 8 x 8, values 0 to 16."""
    with optional("Images: data='digits'", "polyhead[report]"):
        from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.from_numpy(data.images.astype(np.uint8))[:, None]
    return LabelledImages(torch.from_numpy(data.target.astype(np.int64)), pixels)


@functools.lru_cache(maxsize=4)
def cifar(data: str, folder: str, *, is_test: bool) -> LabelledImages:
    """The training or test images of CIFAR's binary version, in `folder` or in the archive's own folder inside it.

    A record is its labels, then 3072 bytes, red first.
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
    return LabelledImages(torch.from_numpy(finest_labels), torch.from_numpy(pixels))


def classes(folder: str) -> list[str]:
    """The names of the classes: the folders in `folder/train`, sorted."""
    train = pathlib.Path(folder) / "train"
    try:
        names = [path.name for path in _inside(train) if path.is_dir()]
    except OSError as error:
        raise ValueError(
            f"Images: {train} cannot be read ({error.strerror}); wanted are folder/train/CLASS/IMAGE and folder/val/..."
        ) from None
    if len(names) < 2:
        raise ValueError(
            f"Images: {train} has {len(names)} folders, but at least two classes, a folder each, are wanted"
        )
    return names


def _inside(folder: pathlib.Path) -> list[pathlib.Path]:
    """What the folder holds, sorted, without hidden files and folders such as .ipynb_checkpoints."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


@functools.lru_cache(maxsize=4)
def tree(folder: str, part: str, size: int) -> LabelledImages:
    """The files of `folder`/`part`/CLASS, sorted by class and name; a file is read when it is used."""
    names = classes(folder)
    root = pathlib.Path(folder) / part
    labels = []
    paths = []
    try:
        for path in _inside(root):
            if path.is_dir():
                label = names.index(one_of(f"Images: {root}", "class", path.name, names))
                inside = [file for file in _inside(path) if file.suffix.lower() in SUFFIXES]
                if not inside:
                    raise ValueError(f"Images: {path} has no image ({', '.join(SUFFIXES)})")
                paths += inside
                labels += [label] * len(inside)
    except OSError as error:
        raise ValueError(f"Images: {root} cannot be read ({error.strerror})") from None
    if not paths:
        raise ValueError(f"Images: {root} has no folder of a class")
    return LabelledImages(torch.tensor(labels), paths=tuple(paths), size=size)


def _decode(path: pathlib.Path, size: int) -> Tensor:
    """An image as (3 size size): upright, on white where it is transparent, the largest central square, resized."""
    with optional("Images: data='folder'", "polyhead[report]"):
        from PIL import Image, ImageOps
    try:
        with Image.open(path, formats=FORMATS) as file:
            file.load()
            image: Image.Image = file
        with contextlib.suppress(Exception):  # of damaged EXIF data; the pixels are whole
            ImageOps.exif_transpose(image, in_place=True)  # cameras save turned pixels, and how to turn them
        if image.mode.startswith("I"):  # Pillow would cut grey values of 16 bits off at 255
            image = Image.fromarray((np.asarray(image) / 256).astype(np.uint8))
        if image.has_transparency_data:  # convert("RGB") shows the colours behind it: mostly black
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        square = ImageOps.fit(image.convert("RGB"), (size, size), method=Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"Images: {path} cannot be read as an image ({' '.join(str(error).split())})") from None
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
