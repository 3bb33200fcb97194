"""Images: held-out images, augmentation in training, and the readers of files."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusing
from sklearn.datasets import load_digits

from polyhead import config
from polyhead.tasks import Images
from polyhead.tasks.images import data as images_data, task as images
from polyhead.tasks.images.task import moved, walk

STILL = Images(shift=0)


# ------------------------------------------------------------------------------------------------------------- digits
def test_digits_are_those_of_scikit_learn_with_their_labels():
    known = load_digits()
    for split in STILL.splits:
        batch = STILL.batch(split, 150, seed=0, step=0)
        number = batch.latents["image"].numpy()
        wanted = torch.from_numpy(known.images[number]).float()[:, None] / 8 - 1
        torch.testing.assert_close(batch.inputs, wanted)
        assert batch.targets[:, 0].tolist() == known.target[number].tolist() == batch.latents["label"].tolist()
        assert batch.targets.shape == batch.scored.shape == (150, 1)
        assert batch.scored.all()
        assert batch.mask is None
    assert STILL.ends == (config.Patches((1, 8, 8), (2, 2)), config.Classes(10))


def shown(task, split, size):
    return task.batch(split, size, seed=0, step=0).latents["image"].tolist()


def test_splits_share_no_image_and_lose_none():
    found = {split: shown(STILL, split, n) for split, n in {"train": 1259, "validation": 179, "iid": 359}.items()}
    assert sorted(itertools.chain(*found.values())) == list(range(1797))
    sampled = STILL.sample("iid", 500, torch.Generator().manual_seed(0)).latents["image"].tolist()
    assert set(sampled) <= set(found["iid"])
    assert not STILL.shared("iid")


def test_a_walk_shows_each_image_once_before_any_again():
    def some(first, many, seed=0, name="x"):
        return walk(10, first, many, seed=seed, name=name).tolist()

    rows = [row for step in range(10) for row in some(4 * step, 4)]
    for turn in range(4):
        assert sorted(rows[10 * turn : 10 * turn + 10]) == list(range(10))
    assert rows[:10] != rows[10:20]
    assert some(15, 25) == rows[15:]
    assert some(0, 10, seed=1) != rows[:10]
    assert some(0, 10, name="y") != rows[:10]


def test_batches_of_a_held_out_split_end_with_it():
    parts = [STILL.batch("iid", 64, seed=0, step=step).latents["image"] for step in range(12)]
    assert [len(part) for part in parts] == [64, 64, 64, 64, 64, 39] * 2
    for turn in (parts[:6], parts[6:]):
        assert len(set(torch.cat(turn).tolist())) == 359
    assert len(STILL.batch("iid", 500, seed=0, step=3).inputs) == 359
    assert [len(STILL.batch("train", 1000, seed=0, step=step).inputs) for step in range(3)] == [1000] * 3


# ------------------------------------------------------------------------------------------------------- augmentation
def test_moved_by_hand():
    image = torch.arange(1, 7).view(1, 1, 2, 3)
    cases = {
        (0, 0): [[1, 2, 3], [4, 5, 6]],
        (1, 0): [[0, 0, 0], [1, 2, 3]],
        (-1, 0): [[4, 5, 6], [0, 0, 0]],
        (0, 1): [[0, 1, 2], [0, 4, 5]],
        (1, -2): [[0, 0, 0], [3, 0, 0]],
        (5, 0): [[0, 0, 0], [0, 0, 0]],
    }
    by = torch.tensor(list(cases))
    found = moved(image.expand(len(by), 2, -1, -1), by)
    for i, wanted in enumerate(cases.values()):
        assert found[i].tolist() == [wanted, wanted]


def in_bytes(batch, white=255):
    return ((batch.inputs + 1) * white / 2).round().to(torch.uint8)


def ways(image, original, most, flips=(False,)):
    """All (down, right, mirrored) that make `image` of `original`."""
    by = torch.cartesian_prod(*[torch.arange(-most, most + 1)] * 2)
    found = []
    for flip in flips:
        start = (original.flip(-1) if flip else original).expand(len(by), -1, -1, -1)
        equal = (moved(start, by) == image).flatten(1).all(1)
        found += [(y, x, flip) for y, x in by[equal].tolist()]
    return found


@pytest.mark.parametrize(
    ("task", "shift", "flips"), [(Images(), 1, (False,)), (Images(shift=2, flip=True), 2, (False, True))]
)
def test_training_moves_by_up_to_shift_and_mirrors_half_and_nothing_else_moves(task, shift, flips):
    known = images_data.digits().pixels
    batch = task.batch("train", 400, seed=0, step=0)
    pixels, plain = in_bytes(batch, 16), known[batch.latents["image"]]
    found = [ways(*pair, shift + 1, flips) for pair in zip(pixels, plain, strict=True)]
    assert all(found)
    clear = [way[0] for way in found if len(way) == 1]
    assert {way[:2] for way in clear} == {(y, x) for y in range(-shift, shift + 1) for x in range(-shift, shift + 1)}
    assert abs(sum(way[2] for way in clear) / len(clear) - (len(flips) - 1) / 2) < 0.15
    for split in ("validation", "iid"):
        batch = task.batch(split, 100, seed=0, step=0)
        assert torch.equal(in_bytes(batch, 16), known[batch.latents["image"]])


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
        assert sorted(shown(task, "iid", 30)) == list(range(30))
        rows = shown(task, "train", 27 * files) + shown(task, "validation", 3 * files)
        assert sorted(rows) == list(range(30 * files))
        other = Images(data, folder=str(folder), split_seed=1)
        for split, size in (("iid", 30), ("validation", 3 * files)):
            same = sorted(shown(task, split, size)) == sorted(shown(other, split, size))
            assert task.shared(split) == same == (split == "iid")
        for split in task.splits:
            batch = task.batch(split, 27, seed=0, step=0)
            file, number = batch.latents["image"] // 30 + files * (split == "iid"), batch.latents["image"] % 30
            assert (batch.targets[:, 0] == (number + file) % task.classes).all()
            pixels = in_bytes(batch).long()
            assert (pixels[:, 0, 0, 0] == 255).all()
            assert (pixels[:, :, 1:] == (number + 10 * file)[:, None, None, None]).all()
            assert (pixels[:, 1:, 0, 0] == (number + 10 * file)[:, None]).all()


def test_cifar_is_shifted_and_mirrored_in_training_as_the_paper_has_it(tmp_path):
    write_cifar(tmp_path, "cifar10")
    usual, same = (Images("cifar10", folder=str(tmp_path), **fields) for fields in ({}, {"shift": 4, "flip": True}))
    assert torch.equal(*(task.batch("train", 99, seed=0, step=0).inputs for task in (usual, same)))


def test_files_that_are_no_cifar_are_one_line(tmp_path):
    def refused(wanted):
        with refusing(wanted):
            Images("cifar10", folder=str(tmp_path)).batch("iid", 1, seed=0, step=0)

    refused("cannot be read (No such file or directory); the folder must hold the binary version of cifar10")
    for content, wanted in (
        (b"\0" * 3074, "test_batch.bin has 3074 bytes, no multiple of 3073, a record"),
        (b"", "has 0 bytes"),
        (b"\x0a" + b"\0" * 3072, "has the label 10, but cifar10 has 10 classes"),
    ):
        (tmp_path / "test_batch.bin").write_bytes(content)
        refused(wanted)


# ------------------------------------------------------------------------------------------------------------ folders
def write_tree(folder, names=("cat", "dog"), count=20):
    """Red cats, 30 x 20, and green dogs, 10 x 40, with a white frame that the middle square does not reach."""
    for part, many in (("train", count), ("val", 3)):
        for i, name in enumerate(names):
            (folder / part / name).mkdir(parents=True)
            for j in range(many):
                size = (30, 20) if i == 0 else (10, 40)
                pixels = np.full((size[1], size[0], 3), 255, np.uint8)
                middle = (slice(None), slice(5, 25)) if i == 0 else (slice(15, 25), slice(None))
                pixels[middle] = np.eye(3)[i % 3] * (100 + j)
                Image.fromarray(pixels).save(folder / part / name / f"{j:02}.png")
    (folder / "train" / names[0] / "readme.txt").write_text("no image")
    (folder / "val" / names[0] / "._00.png").write_text("no image")
    for part in ("train", "val"):
        (folder / part / ".ipynb_checkpoints").mkdir()
    return folder


def test_a_folder_of_classes(tmp_path):
    task = Images("folder", folder=str(write_tree(tmp_path)), size=8, patch=4, shift=0)
    assert task.ends == (config.Patches((3, 8, 8), (4, 4)), config.Classes(2))
    for split, count in (("train", 36), ("validation", 4), ("iid", 6)):
        batch = task.batch(split, count, seed=0, step=0)
        assert len(set(batch.latents["image"].tolist())) == count
        inside = 3 if split == "iid" else 20
        label, number = batch.latents["image"] // inside, batch.latents["image"] % inside
        assert batch.targets[:, 0].tolist() == label.tolist()
        for i, pixels in enumerate(in_bytes(batch).long()):
            colour = torch.eye(3, dtype=torch.long)[label[i]] * (100 + number[i])
            assert (colour == pixels[:, 2:6, 2:6].flatten(1).T).all()  # the outermost pixels look beyond the square


@pytest.mark.parametrize(("suffix", "dtype"), [(".png", np.uint16), (".ppm", np.int32)])
def test_grey_values_of_16_bits_are_scaled_and_not_cut_off(suffix, dtype, tmp_path):
    grey = np.linspace(0, 65535, 64).reshape(8, 8).astype(dtype)
    write_tree(tmp_path)
    (tmp_path / "train" / "cat" / "00.png").unlink()
    Image.fromarray(grey).save(tmp_path / "train" / "cat" / f"00{suffix}")
    (found,) = images_data.tree(str(tmp_path), "train", 8).read(torch.tensor([0]))
    assert found.shape == (3, 8, 8)
    np.testing.assert_allclose(found.numpy(), np.broadcast_to(grey / 256, (3, 8, 8)), atol=1.01)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_photos_are_turned_upright_whatever_else_their_exif_data_hold(suffix, tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    turned = Image.Exif()
    turned[0x0112] = 6  # shown after a quarter turn to the right: black above white
    paths = [tmp_path / f"{name}{suffix}" for name in ("turned", "damaged")]
    for path, exif in zip(paths, (turned.tobytes(), b"Exif\0\0no TIFF header"), strict=True):
        Image.fromarray(pixels).save(path, exif=exif)
    images = images_data.LabelledImages(torch.zeros(2), paths=tuple(paths), size=4)
    upright, damaged = images.read(torch.arange(2))
    assert upright[:, 0].max() < 9
    assert upright[:, -1].min() > 246
    assert damaged[:, :, 0].max() < 9
    assert damaged[:, :, -1].min() > 246


def test_a_black_drawing_on_nothing_is_black_on_white(tmp_path):
    drawing = np.zeros((8, 8, 4), np.uint8)
    drawing[2:6, 2:6, 3] = 255
    Image.fromarray(drawing).save(tmp_path / "a.png")
    (found,) = images_data.LabelledImages(torch.zeros(1), paths=(tmp_path / "a.png",), size=8).read(torch.arange(1))
    assert torch.equal(found, torch.from_numpy(255 - drawing[..., 3]).expand(3, 8, 8))


def test_folders_that_do_not_fit_are_one_line(tmp_path):
    def refused(folder, wanted, split="iid"):
        images_data.tree.cache_clear()
        images._images.cache_clear()
        with refusing(wanted):
            Images("folder", folder=str(folder), size=8, patch=4).batch(split, 50, seed=0, step=0)

    refused(tmp_path / "nowhere", "wanted are folder/train/CLASS/IMAGE")
    folder = write_tree(tmp_path)
    (folder / "val" / "doge").mkdir()
    refused(folder, "unknown class 'doge'; did you mean 'dog'?")
    (folder / "val" / "doge").rmdir()
    pictures = list((folder / "val").rglob("*.png"))
    for path in pictures:
        path.write_bytes(b"no png")
    refused(folder, ".png cannot be read as an image (cannot identify image file")
    for path in pictures:
        path.unlink()
    refused(folder, "has no image (.png, .jpg")
    shutil.rmtree(folder / "val" / "cat")
    shutil.rmtree(folder / "val" / "dog")
    refused(folder, "val has no folder of a class")
    for path in list((folder / "train" / "cat").iterdir()):
        path.rename(path.with_suffix(".tif"))
    refused(folder, "cat has no image (.png, .jpg", "train")  # the model would have a class that it never sees
    shutil.rmtree(folder / "train" / "dog")
    refused(folder, "train has 1 folders, but at least two classes", "train")


def test_scores_by_hand():
    batch = STILL.batch("iid", 4, seed=0, step=0)
    outputs = torch.zeros(4, 1, 10)
    outputs[torch.arange(4), 0, batch.targets[:, 0]] = torch.tensor([1.0, 1, 1, -1])
    assert STILL.metrics(outputs, batch)["accuracy"].tolist() == [1, 1, 1, 0]
    wanted = -outputs[:, 0].log_softmax(-1)[torch.arange(4), batch.targets[:, 0]].mean()
    torch.testing.assert_close(STILL.loss(outputs, batch), wanted)
