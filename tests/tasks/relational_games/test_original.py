"""The published images of relational games, in files of their layout."""

import itertools

import numpy as np
import pytest
import torch
from refusals import refusing

from polyhead.tasks import RelationalGames


@pytest.fixture
def folder(tmp_path):
    """Files of 40 images in which the first pixels count the image and name the set."""
    names = itertools.product(("same", "1task_between", "1task_match_patt"), enumerate(("pentos", "hexos", "stripes")))
    for name, (i, shapes) in names:
        images = np.zeros((40, 36, 36, 3), dtype=np.uint8)
        images[:, 0, 0, 0], images[:, 0, 1, 1], images[:, 35, 0, 2] = np.arange(40), i, 255
        labels = (np.arange(40) % 3 == 0).astype(np.int64)
        np.savez(tmp_path / f"{name}_{shapes}.npz", images=images, labels=labels[:, None] if i else labels)
    return str(tmp_path)


def numbers(batch):
    return (batch.inputs[:, 0, 0, 0] * 255).round().long()


@pytest.mark.parametrize("game", ["same", "between", "match_pattern"])
def test_pixels_and_labels_are_those_of_the_file(folder, game):
    task = RelationalGames(game, examples=10, data="original", folder=folder)
    for split, shapes in (("train", [0]), ("novel", [1, 2]), ("novel_hexominoes", [1]), ("novel_stripes", [2])):
        batch = task.batch(split, 30, seed=0, step=0)
        assert batch.inputs.shape == (30, 3, 36, 36)
        assert (batch.inputs[:, 2, 35, 0] == 1).all()
        assert (batch.inputs[:, 1, 0, 1] * 255).round().tolist() == [shapes[i % len(shapes)] for i in range(30)]
        torch.testing.assert_close(batch.targets[:, 0], (numbers(batch) % 3 == 0).long())
        assert batch.latents == {}


def test_splits_of_the_file_share_nothing_and_repeat(folder):
    def numbers_of(task, split):
        return set(numbers(task.batch(split, 400, seed=0, step=0)).tolist())

    task = RelationalGames(examples=10, data="original", folder=folder)
    train, validation, iid = (numbers_of(task, split) for split in ("train", "validation", "iid"))
    assert (len(train), len(validation), len(iid)) == (10, 10, 20)
    assert len(train | validation | iid) == 40
    assert numbers_of(RelationalGames(examples=10, split_seed=1, data="original", folder=folder), "train") != train
    assert numbers_of(task, "novel_stripes") == set(range(40))
    first, repeated, next_batch = (numbers(task.batch("iid", 30, seed=0, step=step)).tolist() for step in (0, 0, 1))
    assert first == repeated != next_batch


def test_copies_of_an_image_are_in_one_split(folder):
    path = f"{folder}/same_pentos.npz"
    with np.load(path) as arrays:
        images, labels = (np.concatenate([arrays[name]] * 3) for name in ("images", "labels"))
    np.savez(path, images=images, labels=labels)
    task = RelationalGames(examples=10, data="original", folder=folder)
    train, iid = (set(numbers(task.batch(split, 400, seed=0, step=0)).tolist()) for split in ("train", "iid"))
    assert (len(train), len(iid), len(train & iid)) == (10, 20, 0)


def test_files_that_cannot_be_used(folder, tmp_path):
    def refused(message, game="xoccurs", examples=10):
        with refusing(message):
            RelationalGames(game, examples=examples, data="original", folder=folder).batch("train", 2, seed=0, step=0)

    refused("must leave 3 or more of the 40 distinct images in same_pentos.npz but is 38", "same", examples=38)
    refused("occurs_pentos.npz does not exist", "occurs")
    path = tmp_path / "xoccurs_pentos.npz"
    path.write_bytes(b"not a zip file")
    refused("cannot be read")
    images, labels = np.zeros((20, 36, 36, 3), dtype=np.uint8), np.zeros(20, dtype=np.int64)
    for arrays, message in (
        ({"images": images}, "cannot be read"),
        ({"images": images, "labels": labels[:9]}, "must hold images"),
        ({"images": images[:, :, :35], "labels": labels}, "must hold images"),
        ({"images": images, "labels": labels + 2}, "must hold labels 0 or 1"),
        ({"images": images.astype(int) - 1, "labels": labels}, "pixels of 0 to 255"),
        ({"images": images + 0.5, "labels": labels}, "whole numbers"),
        ({"images": images > 100, "labels": labels}, "pixels of 0 to 255"),
        ({"images": images, "labels": np.array([{}] * 20)}, "cannot be read"),
    ):
        np.savez(path, **arrays, allow_pickle=True)
        refused(message)
