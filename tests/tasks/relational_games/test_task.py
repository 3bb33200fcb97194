"""Relational games: the rules checked on pixels, the sets of shapes, the splits."""

import itertools
from collections import Counter

import pytest
import torch

from polyhead.tasks import RelationalGames
from polyhead.tasks.relational_games import task as relational_games
from polyhead.tasks.relational_games.shapes import COLOURS, SHAPES, count, draw, masks
from polyhead.tasks.relational_games.task import GAMES

CPU = torch.device("cpu")
OCCUPIED = {"same": 2, "occurs": 4, "xoccurs": 4, "between": 3, "match_pattern": 6}
LINES = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {0, 3, 6}, {1, 4, 7}, {2, 5, 8}, {0, 4, 8}, {2, 4, 6}]
SHOWN = {
    "train": ["pentominoes"],
    "validation": ["pentominoes"],
    "iid": ["pentominoes"],
    "novel": ["hexominoes", "stripes"],
    "novel_hexominoes": ["hexominoes"],
    "novel_stripes": ["stripes"],
}


# ------------------------------------------------------------------------------------------ the rules, from pixels
def cells_of(image):
    """The pixels of the nine cells of an image (3 36 36); None where nothing is drawn."""
    cells = []
    for row, column in itertools.product(range(3), range(3)):
        pixels = image[:, 12 * row : 12 * row + 12, 12 * column : 12 * column + 12]
        cells.append(tuple(pixels.flatten().tolist()) if pixels.any() else None)
    return cells


SET_OF = {tuple(mask.flatten().tolist()): name for name in SHAPES for mask in masks(name, CPU)[:-1]}
"""By the pixels of a shape, the set that it belongs to."""


def set_of(cell):
    """The set of shapes that the pixels of a cell are from."""
    return SET_OF[tuple(torch.tensor(cell).unflatten(0, (3, 12, 12)).any(dim=0).flatten().tolist())]


def pattern(row):
    return tuple(row.index(item) for item in row)


def truth(game, cells):
    """The class of an image by the rule of its game, from its cells."""
    occupied = [i for i, cell in enumerate(cells) if cell is not None]
    objects = [cells[i] for i in occupied]
    if game == "same":
        return int(objects[0] == objects[1])
    if game in ("occurs", "xoccurs"):
        (above,) = [cell for cell in cells[:3] if cell is not None]
        count_below = cells[6:].count(above)
        return int(count_below >= 1 if game == "occurs" else count_below == 1)
    if game == "between":
        assert set(occupied) in LINES
        first, middle, last = objects
        return int(first == last != middle)
    return int(pattern(cells[:3]) == pattern(cells[6:]))


@pytest.mark.parametrize("split", ["train", "novel"])
@pytest.mark.parametrize("game", GAMES)
def test_every_label_follows_from_the_pixels_of_the_splits_sets_in_turn(game, split):
    task = RelationalGames(game, examples=60)
    batch = task.batch(split, 80, seed=3, step=1)
    assert batch.inputs.shape == (80, 3, 36, 36)
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.shape == batch.scored.shape == (80, 1)
    assert batch.scored.all()
    labels, sets = batch.targets[:, 0].tolist(), itertools.cycle(SHOWN[split])
    for image, label, occupied, shapes in zip(batch.inputs, labels, batch.latents["cells"], sets, strict=False):
        cells = cells_of(image)
        assert {set_of(cell) for cell in filter(None, cells)} == {shapes}
        assert [cell is not None for cell in cells] == occupied.tolist()
        assert sum(occupied.tolist()) == OCCUPIED[game]
        assert truth(game, cells) == label


@pytest.mark.parametrize("game", GAMES)
def test_half_of_the_images_of_every_split_are_of_class_1(game):
    task = RelationalGames(game, examples=100)
    for split in task.splits[1:]:
        sets = 2 if split == "novel" else 1  # in turn; what shapes there are must not tell the class
        for i in range(sets):
            assert task.batch(split, 64, seed=0, step=0).targets[i::sets].sum() == 32 / sets
    labels = task.batch("train", 4000, seed=0, step=0).targets.double()
    assert abs(labels.mean() - 0.5) < 0.04


@pytest.mark.parametrize(("split", "size"), [("iid", 2), ("novel", 1), ("novel", 3)])
def test_small_batches_have_no_class_half_or_set_of_their_own(split, size):
    """From the beginning of the cycle on a batch of one image was of class 0, of two had no twice-occurring object."""
    task = RelationalGames("xoccurs", examples=8)
    pairs, sets = Counter(), Counter()
    for step in range(400 // size):
        batch = task.batch(split, size, seed=0, step=step)
        for image, label in zip(batch.inputs, batch.targets, strict=True):
            cells = cells_of(image)
            pairs[label.item(), len(set(cells[6:]))] += 1
            sets[set_of(cells[6])] += 1
    assert min(pairs[kind] for kind in itertools.product((0, 1), (2, 3))) > 70
    assert sets.keys() == set(SHOWN[split])
    assert len(sets) * min(sets.values()) > 0.8 * sets.total()


def test_all_kinds_of_a_class_occur():
    batch = RelationalGames("match_pattern").batch("iid", 800, seed=0, step=0)
    rows = [(pattern(cells[:3]), pattern(cells[6:])) for cells in map(cells_of, batch.inputs)]
    assert {above == below for above, below in rows} == {True, False}
    assert len(set(rows)) == 25
    batch = RelationalGames("between").batch("iid", 800, seed=0, step=0)
    lines, negatives = Counter(), Counter()
    for cells, label in zip(map(cells_of, batch.inputs), batch.targets[:, 0].tolist(), strict=True):
        lines[tuple(i for i, cell in enumerate(cells) if cell is not None)] += 1
        negatives[pattern([cell for cell in cells if cell is not None])] += 1 - label
    assert len(lines) == 8
    assert min(lines.values()) > 60
    assert negatives[0, 1, 2] == 200
    assert min(negatives[0, 0, 2], negatives[0, 1, 1]) > 70
    assert negatives[0, 1, 0] == negatives[0, 0, 0] == 0


# ------------------------------------------------------------------------------------------ shapes
def blocks(mask):
    """The 3 x 3 blocks of a cell (12 12), each of one kind of pixel."""
    assert not mask[0].any()
    assert not mask[:, 0].any()
    assert not mask[10:].any()
    assert not mask[:, 10:].any()
    inside = mask[1:10, 1:10].unflatten(0, (3, 3)).unflatten(2, (3, 3)).transpose(1, 2).flatten(2)
    assert (inside.all(-1) | ~inside.any(-1)).all()
    return inside.all(-1)


@pytest.mark.parametrize(("shapes", "size", "number"), [("pentominoes", 5, 37), ("hexominoes", 6, 46)])
def test_polyominoes_are_all_that_fit(shapes, size, number):
    polyominoes = set()
    for mask in masks(shapes, CPU)[:-1]:
        squares = {(int(r), int(c)) for r, c in blocks(mask).nonzero()}
        assert len(squares) == size
        connected = {min(squares)}
        for _ in range(size):  # a neighbour more at every turn
            connected |= {s for s in squares for g in connected if abs(s[0] - g[0]) + abs(s[1] - g[1]) == 1}
        assert connected == squares
        assert min(r for r, _ in squares) == min(c for _, c in squares) == 0
        polyominoes.add(frozenset(squares))
    assert len(polyominoes) == count(shapes) == number


def test_sets_of_shapes_share_nothing_and_repeat_nothing():
    assert sum(map(count, SHAPES)) == len(SET_OF) == 37 + 46 + 24
    assert all(map(any, SET_OF))
    assert len(set(COLOURS)) == len(COLOURS) == 23


def test_an_image_is_its_cells_in_their_colours():
    shape, colour = torch.full((1, 9), -1), torch.full((1, 9), -1)
    shape[0, 5], colour[0, 5] = 3, COLOURS.index((0, 128, 255))
    (image,) = draw("hexominoes", shape, colour)
    expected = torch.zeros(3, 36, 36)
    for channel, value in enumerate((0.0, 128 / 255, 1.0)):
        expected[channel, 12:24, 24:36] = masks("hexominoes", CPU)[3] * value
    torch.testing.assert_close(image, expected, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ splits and streams
def test_training_is_a_set_of_so_many_images_and_no_other_split_shows_them():
    task = RelationalGames("same", examples=12_000)  # so many of class 1 that chance would repeat and show some
    drawn, labels = relational_games._pool(task, CPU)
    first, second = drawn[drawn >= 0].view(-1, 2).T
    assert ((first == second) == labels).all()  # those drawn again are of their class, too
    pool = {tuple(grid) for grid in drawn.tolist()}
    assert len(pool) == 12_000
    for split in ("validation", "iid"):
        batch = task.batch(split, 400, seed=0, step=0)
        latents = batch.latents
        grids = torch.where(latents["cells"], latents["shapes"] * len(COLOURS) + latents["colours"], -1)
        first, second = grids[grids >= 0].view(-1, 2).T
        assert ((first == second) == batch.targets[:, 0]).all()
        assert not pool & {tuple(grid) for grid in grids.tolist()}
