"""Images: held-out images, augmentation in training, and the readers of files."""

import itertools

import numpy as np
import pytest
import torch
from refusals import refusing
from sklearn.datasets import load_digits

from polyhead import config
from polyhead.tasks import Images
from polyhead.tasks.images import data as images_data
from polyhead.tasks.images.task import moved, walk

UNSHIFTED = Images(shift=0)


# ------------------------------------------------------------------------------------------------------------- digits
def test_digits_are_those_of_scikit_learn_with_their_labels():
    digits = load_digits()
    for split in UNSHIFTED.splits:
        batch = UNSHIFTED.batch(split, 150, seed=0, step=0)
        number = batch.latents["image"].numpy()
        expected = torch.from_numpy(digits.images[number]).float()[:, None] / 8 - 1
        torch.testing.assert_close(batch.inputs, expected)
        assert batch.targets[:, 0].tolist() == digits.target[number].tolist() == batch.latents["label"].tolist()
        assert batch.targets.shape == batch.scored.shape == (150, 1)
        assert batch.scored.all()
        assert batch.mask is None
    assert UNSHIFTED.ends == (config.Patches((1, 8, 8), (2, 2)), config.Classes(10))


def image_numbers(task, split, size):
    return task.batch(split, size, seed=0, step=0).latents["image"].tolist()


def test_splits_share_no_image_and_lose_none():
    sizes = {"train": 1259, "validation": 179, "iid": 359}
    by_split = {split: image_numbers(UNSHIFTED, split, size) for split, size in sizes.items()}
    assert sorted(itertools.chain(*by_split.values())) == list(range(1797))
    sampled = UNSHIFTED.sample("iid", 500, torch.Generator().manual_seed(0)).latents["image"].tolist()
    assert set(sampled) <= set(by_split["iid"])
    assert not UNSHIFTED.shared("iid")


def test_a_walk_shows_each_image_once_before_any_again():
    def walked(first, count, seed=0, name="x"):
        return walk(10, first, count, seed=seed, name=name).tolist()

    rows = [row for step in range(10) for row in walked(4 * step, 4)]
    for epoch in range(4):
        assert sorted(rows[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert rows[:10] != rows[10:20]
    assert walked(15, 25) == rows[15:]
    assert walked(0, 10, seed=1) != rows[:10]
    assert walked(0, 10, name="y") != rows[:10]


def test_batches_of_a_held_out_split_end_with_it():
    parts = [UNSHIFTED.batch("iid", 64, seed=0, step=step).latents["image"] for step in range(12)]
    assert [len(part) for part in parts] == [64, 64, 64, 64, 64, 39] * 2
    for epoch in (parts[:6], parts[6:]):
        assert len(set(torch.cat(epoch).tolist())) == 359
    assert len(UNSHIFTED.batch("iid", 500, seed=0, step=3).inputs) == 359
    assert [len(UNSHIFTED.batch("train", 1000, seed=0, step=step).inputs) for step in range(3)] == [1000] * 3


# ------------------------------------------------------------------------------------------------------- augmentation


def in_bytes(batch, white=255):
    return ((batch.inputs + 1) * white / 2).round().to(torch.uint8)


def movements(image, original, limit, flips=(False,)):
    """All (down, right, mirrored) that make `image` of `original`."""
    offsets = torch.cartesian_prod(*[torch.arange(-limit, limit + 1)] * 2)
    matches = []
    for flip in flips:
        start = (original.flip(-1) if flip else original).expand(len(offsets), -1, -1, -1)
        equal = (moved(start, offsets) == image).flatten(1).all(1)
        matches += [(y, x, flip) for y, x in offsets[equal].tolist()]
    return matches


@pytest.mark.parametrize(
    ("task", "shift", "flips"), [(Images(), 1, (False,)), (Images(shift=2, flip=True), 2, (False, True))]
)
def test_training_moves_by_up_to_shift_and_mirrors_half_and_nothing_else_moves(task, shift, flips):
    digits, _ = images_data.digits()
    batch = task.batch("train", 400, seed=0, step=0)
    pixels, originals = in_bytes(batch, 16), digits[batch.latents["image"]]
    matches = [movements(*images, shift + 1, flips) for images in zip(pixels, originals, strict=True)]
    assert all(matches)
    unambiguous = [match[0] for match in matches if len(match) == 1]
    assert {(y, x) for y, x, _ in unambiguous} == set(itertools.product(range(-shift, shift + 1), repeat=2))
    mirrored = sum(flip for _, _, flip in unambiguous) / len(unambiguous)
    assert abs(mirrored - (0.5 if True in flips else 0)) < 0.15
    for split in ("validation", "iid"):
        batch = task.batch(split, 100, seed=0, step=0)
        assert torch.equal(in_bytes(batch, 16), digits[batch.latents["image"]])


# -------------------------------------------------------------------------------------------------------------- CIFAR
def write_cifar(folder, data, per_file=30):
    """Files of the binary layout; the image of record i is filled with i, its first red pixel with 255."""
    inner, train, test, labels = images_data.CIFAR[data]
    (folder / inner).mkdir()
    classes = images_data.SOURCES[data].classes
    for number, name in enumerate((*train, *test)):
        records = np.zeros((per_file, labels + 3072), np.uint8)
        records[:, :labels] = 9 if labels == 2 else 0  # a coarse label, which is not to be read
        records[:, labels - 1] = (np.arange(per_file) + number) % classes
        records[:, labels:] = np.arange(per_file)[:, None] + 10 * number
        records[:, labels] = 255
        records.tofile(folder / inner / name)
    return folder / inner


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_cifar_is_read_from_its_binary_version(tmp_path, data):
    inner = write_cifar(tmp_path, data)
    files = 5 if data == "cifar10" else 1
    for folder in (tmp_path, inner):
        task = Images(data, folder=str(folder), shift=0, flip=False)
        assert task.ends == (config.Patches((3, 32, 32), (4, 4)), config.Classes(10 if data == "cifar10" else 100))
        assert sorted(image_numbers(task, "iid", 30)) == list(range(30))
        rows = image_numbers(task, "train", 27 * files) + image_numbers(task, "validation", 3 * files)
        assert sorted(rows) == list(range(30 * files))
        other = Images(data, folder=str(folder), split_seed=1)
        for split, size in (("iid", 30), ("validation", 3 * files)):
            same = sorted(image_numbers(task, split, size)) == sorted(image_numbers(other, split, size))
            assert task.shared(split) == same == (split == "iid")
        for split in task.splits:
            batch = task.batch(split, 27, seed=0, step=0)
            file, number = batch.latents["image"] // 30 + files * (split == "iid"), batch.latents["image"] % 30
            assert (batch.targets[:, 0] == (number + file) % task.ends[1].count).all()
            pixels = in_bytes(batch).long()
            assert (pixels[:, 0, 0, 0] == 255).all()
            assert (pixels[:, :, 1:] == (number + 10 * file)[:, None, None, None]).all()
            assert (pixels[:, 1:, 0, 0] == (number + 10 * file)[:, None]).all()


def test_files_that_are_no_cifar_are_one_line(tmp_path):
    def refused(message):
        with refusing(message):
            Images("cifar10", folder=str(tmp_path)).batch("iid", 1, seed=0, step=0)

    refused("cannot be read (No such file or directory); the folder must hold the binary version of cifar10")
    for content, message in (
        (b"\0" * 3074, "test_batch.bin has 3074 bytes, no multiple of 3073, a record"),
        (b"", "has 0 bytes"),
        (b"\x0a" + b"\0" * 3072, "has the label 10, but cifar10 has 10 classes"),
    ):
        (tmp_path / "test_batch.bin").write_bytes(content)
        refused(message)
