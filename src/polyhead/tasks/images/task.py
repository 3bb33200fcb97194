"""Image classification from patches: scikit-learn's digits without a download, CIFAR's files.

Pixels lie between -1 (black) and 1.  In training, an image is shifted by up to `shift` pixels along both axes, and
filled with black.  With `flip`, half of the images are mirrored:

>>> image = torch.tensor([[[[1, 2], [3, 4]]]])
>>> moved(image, torch.tensor([[1, -1]]))  # one down, one to the left
tensor([[[[0, 0],
          [2, 0]]]])
"""

import functools
import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from polyhead.config import Classes, Patches
from polyhead.spec.checked import Count, Index, choice
from polyhead.spec.home import located
from polyhead.tasks import record
from polyhead.tasks.base import Batch, Words, advance, check_draw, fork, portion, shuffled, stream
from polyhead.tasks.classification import ACCURACY, CHANCE, Classification, batch_of
from polyhead.tasks.images import data as images_data
from polyhead.tasks.images.data import SOURCES

HELD_OUT = {"validation": 0.1, "iid": 0.2}  # for data without a test set; with one, a tenth is for validation


@dataclass(frozen=True)
class Images(Classification):
    """Classification of images.

        train        the training images, shifted and mirrored
        validation   a tenth of the images, to select hyper-parameters
        iid          the test images; for digits, a fifth of all images

    `split_seed` decides which images are held out.  The batches of one seed walk through a split; each pass has a new
    random order and shows every image once.  In a held-out split the last batch of a pass may be short.

    Latents, (b): `label`; `image`, its index in its file.

    >>> Images().batch("train", 16, seed=0, step=0).inputs.shape
    torch.Size([16, 1, 8, 8])

    Attributes:
        data: "digits" (1797 images of 8 x 8, part of scikit-learn); "cifar10" or "cifar100", the binary version in
            `folder`.
        patch: Height and width of a patch; None: 2 for digits, 4 for CIFAR.
        shift: Most pixels by which a training image is shifted; None: 1 for digits, 4 for CIFAR.
        flip: Whether half of the training images are mirrored; None: for CIFAR only.
        split_seed: Seed of the images that are held out.
        folder: Where CIFAR is.  It is a part of the run's digest, because another folder may hold other images.

    Raises:
        ValueError: For images that are missing when they are read.
    """

    data: Annotated[str, choice(SOURCES)] = "digits"
    patch: Count | None = None
    shift: Index | None = None
    flip: bool | None = None
    split_seed: Index = 0
    folder: str = "images"

    name: ClassVar[str] = "images"
    splits: ClassVar[tuple[str, ...]] = ("train", "validation", "iid")
    items: ClassVar[str] = "images"
    words: ClassVar[Words] = Words(metric=ACCURACY, baselines={"chance": CHANCE})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.patches  # noqa: B018 (raises if the patch does not fit)
        side = SOURCES[self.data].image[1]
        if self.shift is not None and self.shift >= side:
            raise ValueError(f"Images: shift must be below {side}, the image's side, but is {self.shift}")

    @property
    def patches(self) -> Patches:
        """How an image is cut into patches."""
        source = SOURCES[self.data]
        side = self.patch or source.patch
        return Patches(source.image, (side, side))

    @property
    def ends(self) -> tuple[Patches, Classes]:
        return self.patches, Classes(SOURCES[self.data].classes)

    @property
    def length(self) -> int:
        return self.patches.count

    def count(self, split: str) -> int | None:
        if split == "train":
            return None
        return len(_rows(self, split, torch.device("cpu"), located(self.folder)))

    def shared(self, split: str) -> bool:
        return split == "iid" and self.data != "digits"

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: inputs (b c height width), targets (b 1); drawn with replacement."""
        check_draw(self, split, batch_size)
        rows = _rows(self, split, generator.device, located(self.folder))
        image_draws = fork(generator, f"{self.name}/{split}/images")
        move_draws = fork(generator, f"{self.name}/{split}/moves")
        advance(generator)
        indices = torch.randint(len(rows), (batch_size,), generator=image_draws, device=generator.device)
        return self._batch(split, rows[indices], move_draws)

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step` of the walk through `split`: a pure function of (seed, split, step, batch size)."""
        check_draw(self, split, batch_size)
        generator = self.generator(split, seed=seed, step=step, device=device)
        rows = _rows(self, split, generator.device, located(self.folder))
        first = step * batch_size
        if split != "train":  # a pass has a whole number of batches; the last may be short
            number_of_pass, step_of_pass = divmod(step, math.ceil(len(rows) / batch_size))
            start = step_of_pass * batch_size
            first = number_of_pass * len(rows) + start
            batch_size = min(batch_size, len(rows) - start)
        indices = walk(len(rows), first, batch_size, seed=seed, name=f"{self.name}/{split}/order")
        return self._batch(split, rows[indices.to(rows.device)], fork(generator, "moves"))

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write data.json with a fingerprint of CIFAR's training images."""
        if self.data != "digits":
            images = images_data.cifar(self.data, located(self.folder), is_test=False)
            record.keep("Images", folder, self.data, record.fingerprint(images))

    def _batch(self, split: str, rows: Tensor, draws: torch.Generator) -> Batch:
        all_pixels, all_labels = _images(self, split, rows.device, located(self.folder))
        pixels, labels = all_pixels[rows], all_labels[rows]
        if split == "train":
            pixels = self._augmented(pixels, draws)
        white = SOURCES[self.data].white
        return batch_of(pixels.float() * (2 / white) - 1, labels, {"label": labels, "image": rows})

    def _augmented(self, pixels: Tensor, draws: torch.Generator) -> Tensor:
        """Images shifted and mirrored for training."""
        shift, flip = self.shift, self.flip
        if shift is None:
            shift = SOURCES[self.data].shift
        if flip is None:
            flip = SOURCES[self.data].flip
        if flip:
            mirrored = torch.randint(2, (len(pixels), 1, 1, 1), generator=draws, device=draws.device) == 1
            pixels = torch.where(mirrored, pixels.flip(-1), pixels)
        if shift:
            offsets = torch.randint(-shift, shift + 1, (len(pixels), 2), generator=draws, device=draws.device)
            pixels = moved(pixels, offsets)
        return pixels


def moved(images: Tensor, offsets: Int[Tensor, "b 2"]) -> Tensor:
    """Each image (c height width) shifted down and right by `offsets` (b 2) pixels, and filled with 0."""
    for axis in (2, 3):
        size = images.shape[axis]
        source = torch.arange(size, device=images.device) - offsets[:, axis - 2, None]  # (b size): row or column
        shape = [len(images), 1, 1, 1]  # broadcasts (b size) over the other axes
        shape[axis] = size
        shifted = images.gather(axis, source.clamp(0, size - 1).view(shape).expand_as(images))
        is_outside = (source < 0) | (source >= size)  # (b size)
        images = shifted.masked_fill(is_outside.view(shape), 0)
    return images


def walk(count: int, first: int, size: int, *, seed: int, name: str) -> Tensor:
    """Rows `first` to `first + size` of a walk over `count` rows; each pass is a permutation of all rows."""
    passes = range(first // count, (first + size - 1) // count + 1)
    order = torch.cat([_order(count, seed, name, number) for number in passes])
    start = first - passes[0] * count
    return order[start : start + size]


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: int, name: str, number: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(stream(seed, name, number)), device="cpu")


@functools.lru_cache(maxsize=16)
def _images(task: Images, split: str, device: torch.device, folder: str) -> tuple[Tensor, Tensor]:
    """The pixels (n c h w), in bytes, and the labels (n) of the file that contains `split`."""
    if task.data == "digits":
        pixels, labels = images_data.digits()
    else:
        pixels, labels = images_data.cifar(task.data, folder, is_test=split == "iid")
    return pixels.to(device), labels.to(device)


@functools.lru_cache(maxsize=16)
def _rows(task: Images, split: str, device: torch.device, folder: str) -> Tensor:
    """The indices of the images of `split` in its file."""
    count = len(_images(task, split, device, folder)[1])
    if task.shared(split):
        return torch.arange(count, device=device)
    order = shuffled(range(count), stream(task.split_seed, f"{task.name}/{task.data}/split"))
    first_iid = portion(HELD_OUT["validation"], count)
    first_train = first_iid
    if task.data == "digits":  # the others have test images of their own
        first_train += portion(HELD_OUT["iid"], count)
    rows = {"validation": order[:first_iid], "iid": order[first_iid:first_train], "train": order[first_train:]}[split]
    if not rows:
        raise ValueError(f"Images: {count} images of {task.data} are too few: none is left for {split!r}")
    return torch.tensor(rows, device=device)
