"""Relational games: classify images by a relation of their objects, not their looks (Shanahan et al. 2020).

An image has 3 x 3 cells.  A cell is empty or holds one object: a shape in a colour.  Two objects are the same if all
their pixels are.  With letters for objects and dots for empty cells, these images have class 1:

    same       occurs     xoccurs    between    match_pattern
    . A .      . A .      . A .      . . A      A B A
    . . .      . . .      . . .      . B .      . . .
    . . A      B A C      B A B      A . .      C D C

    same            the two objects are the same
    occurs          the object in the top row is among the three in the bottom row
    xoccurs         it is among them exactly once
    between         of three in a row, column or diagonal the outer two are the same and the middle one differs
    match_pattern   the top and bottom rows have the same pattern of equality: AAA, AAB, ABA, ABB or ABC

Training shows pentominoes; the `novel` shapes are hexominoes and stripes, which training never shows.

Half of all images have class 1.  Objects that the rule does not compare carry no information about the class.
"""

import functools
import itertools
import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from polyhead.config import Classes, Patches, non_semantic
from polyhead.spec.checked import Index, choice
from polyhead.spec.home import located
from polyhead.tasks import record
from polyhead.tasks.base import Batch, Words, advance, check_draw, fork, seeded
from polyhead.tasks.classification import ACCURACY, ANSWERS, CHANCE, Classification, batch_of
from polyhead.tasks.examples import Draw, distinct, picks, training_set, unseen
from polyhead.tasks.object_baselines import KNOWN_PAIRS, grid_pairs
from polyhead.tasks.relational_games import original
from polyhead.tasks.relational_games.shapes import COLOURS, count, draw
from polyhead.tasks.scores import Score

GAMES = ("same", "occurs", "xoccurs", "between", "match_pattern")
SHAPES_OF = {
    "train": ("pentominoes",),
    "validation": ("pentominoes",),
    "iid": ("pentominoes",),
    "novel": ("hexominoes", "stripes"),
    "novel_hexominoes": ("hexominoes",),
    "novel_stripes": ("stripes",),
}
LARGEST_EXAMPLES = 30_000  # `same` has only 30636 images of class 1, and half of the examples have class 1

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
PATTERNS = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2))
ORDERS = tuple(itertools.permutations(range(3)))


@dataclass(frozen=True)
class RelationalGames(Classification):
    """Classification of images by the relation of the objects in them, from a training set of a given size.

        train              `examples` images of pentominoes, drawn once from `split_seed`, half of them in each class;
                           a batch samples them with replacement
        validation, iid    fresh images of pentominoes, none of them in the training set
        novel              hexominoes and stripes in turn; `novel_hexominoes` and `novel_stripes` have one kind alone

    Latents are (b 9), one entry a cell: `shapes` and `colours`, -1 in an empty cell; `cells`, 1 where an object is.

    >>> RelationalGames("between").batch("novel", 8, seed=0, step=0).inputs.shape
    torch.Size([8, 3, 36, 36])

    Attributes:
        game: "same", "occurs", "xoccurs", "between" or "match_pattern".
        examples: How many training images there are.
        split_seed: Seed of the training images.
        data: "generated", or "original": the published npz files in `folder` (see original.py).  Their only ground
            truth is the class, so `latents` is empty; the images of pentominoes are divided among the splits.
        folder: Where the published files are.
    """

    game: Annotated[str, choice(GAMES)] = "same"
    examples: Annotated[int, Meta(ge=2)] = 1000
    split_seed: Index = 0
    data: Annotated[str, choice(("generated", "original"))] = "generated"
    folder: str = non_semantic("relational_games")

    name: ClassVar[str] = "relational_games"
    splits: ClassVar[tuple[str, ...]] = tuple(SHAPES_OF)
    ends: ClassVar[tuple[Patches, Classes]] = (Patches((3, 36, 36), (12, 12)), Classes(2))
    length: ClassVar[int] = 9
    items: ClassVar[str] = "images"
    words: ClassVar[Words] = Words(
        splits={
            "novel": "unseen shapes",
            "novel_hexominoes": "unseen shapes (hexominoes)",
            "novel_stripes": "unseen shapes (stripes)",
        },
        metric=ACCURACY,
        baselines={"chance": CHANCE, "known_pairs": KNOWN_PAIRS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data == "generated" and self.examples > LARGEST_EXAMPLES:
            raise ValueError(f"RelationalGames: examples must be at most {LARGEST_EXAMPLES} but is {self.examples}")

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: inputs (b 3 36 36) in [0, 1], targets (b 1)."""
        check_draw(self, split, batch_size)
        draws = fork(generator, f"{self.name}/{self.game}/{split}")
        start = self._start(split, batch_size, generator)
        advance(generator)
        sets = SHAPES_OF[split]
        if batch_size % len(sets) and start % 2:  # batches of an odd size begin with either set
            sets = sets[::-1]
        if self.data == "original":
            return self._original(split, sets, batch_size, draws)
        if split == "train":
            grids, labels = _pool(self, draws.device)
            rows = picks(len(labels), batch_size, draws)
            return _batch(sets, grids[rows], labels[rows])
        kinds = torch.arange(start, start + batch_size, device=draws.device)
        if len(sets) == 1:
            grids, labels = self._fresh(sets[0], kinds, draws)
            return _batch(sets, grids, labels)
        # The rows use the sets of shapes in turn; each set has all kinds.
        grids = torch.empty(batch_size, 9, dtype=torch.long, device=draws.device)
        labels = torch.empty(batch_size, dtype=torch.long, device=draws.device)
        for i, shapes in enumerate(sets):
            grids[i :: len(sets)], labels[i :: len(sets)] = self._fresh(shapes, kinds[i :: len(sets)] // 2, draws)
        return _batch(sets, grids, labels)

    def class_name(self, target: str, label: int) -> str:
        return ANSWERS[label]

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Scores of guessing, exact; for generated images also of a learner without relations (object_baselines.py)."""
        table = super().baselines(split, sequences=sequences)
        if self.data == "original":
            return table
        grids, labels = _pool(self, torch.device("cpu"))
        batch = self.batch(split, sequences, seed=seed, step=0)
        shapes = batch.latents["shapes"]
        objects = shapes * len(COLOURS) + batch.latents["colours"]
        if "pentominoes" not in SHAPES_OF[split]:
            objects = -2 - objects  # names below -1: no training image has them
        guesses = grid_pairs(grids, labels, torch.where(shapes < 0, -1, objects))
        table["known_pairs"] = Score.of(1 - (guesses - batch.targets[:, 0]).abs())
        return table

    def _start(self, split: str, batch_size: int, generator: torch.Generator) -> int:
        """Where a batch begins in the cycle of shape sets, classes and halves.

        A batch of whole cycles begins at 0, any other anywhere: from 0 on it would have too much of class 0.
        """
        cycle = 4 * len(SHAPES_OF[split])
        if split == "train" or batch_size % cycle == 0:
            return 0
        return int(picks(cycle, 1, fork(generator, f"{self.name}/{self.game}/{split}/start")))

    def _fresh(self, shapes: str, kinds: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Grids (n 9) that are not in the training set, and their labels (n)."""
        draw_grids = _drawer(self.game, shapes, generator)
        if shapes != "pentominoes":  # training shows none of these shapes
            return draw_grids(kinds), kinds % 2
        training_grids, _ = _pool(self, kinds.device)
        return unseen(draw_grids, kinds, training_grids), kinds % 2

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write data.json with a fingerprint of the published pentominoes, unless the images are generated."""
        if self.data == "original":
            fingerprint = record.fingerprint(original.load(located(self.folder), self.game, "pentominoes"))
            record.keep("RelationalGames", folder, original.file_of(self.game, "pentominoes"), fingerprint)

    def _original(self, split: str, sets: tuple[str, ...], batch_size: int, generator: torch.Generator) -> Batch:
        """A batch of the published images, on the generator's device."""
        device = generator.device
        folder = located(self.folder)
        images = torch.empty(batch_size, 3, 36, 36, dtype=torch.uint8, device=device)
        labels = torch.empty(batch_size, dtype=torch.long, device=device)
        for i, shapes in enumerate(sets):
            pixels, classes = original.load(folder, self.game, shapes)
            indices = torch.arange(len(classes), device="cpu")
            if shapes == "pentominoes":
                indices = original.rows(folder, self.game, split, self.examples, self.split_seed)
            count = len(labels[i :: len(sets)])
            rows = indices[picks(len(indices), count, generator).cpu()]
            images[i :: len(sets)] = pixels[rows].to(device)
            labels[i :: len(sets)] = classes[rows].to(device)
        return batch_of(images.float() / 255, labels, {})


def _drawer(game: str, shapes: str, generator: torch.Generator) -> Draw:
    """The function that draws grids (n 9) of given kinds (n): in each cell an object, or -1 if it is empty.

    An odd kind has class 1.  If a class has two halves, the next bit of the kind chooses the half: `half` is True in
    the second one.
    """
    objects = count(shapes) * len(COLOURS)

    def draw_grids(kinds: Tensor) -> Tensor:
        positive, half = kinds % 2 == 1, kinds // 2 % 2 == 1
        cells, content = _RULES[game](positive, half, objects, generator)
        grids = torch.full((len(kinds), 9), -1, device=kinds.device)
        return grids.scatter_(1, cells, content)

    return draw_grids


def _same(positive: Tensor, half: Tensor, objects: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    n = len(positive)
    a, b = distinct(n, 2, objects, generator).unbind(1)
    return distinct(n, 2, 9, generator), torch.stack((a, torch.where(positive, a, b)), 1)


def _occurs(positive: Tensor, half: Tensor, objects: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    a, b, c, d = distinct(len(positive), 4, objects, generator).unbind(1)
    return _above_three(a, torch.stack((torch.where(positive, a, d), b, c), 1), generator)


def _xoccurs(positive: Tensor, half: Tensor, objects: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bottom rows under A: ABC or ABB in class 1, DBC or ABA in class 0; two are equal in half of each class."""
    a, b, c, d = distinct(len(positive), 4, objects, generator).unbind(1)
    first = torch.where(positive | half, a, d)
    last = torch.where(half, torch.where(positive, b, a), c)
    return _above_three(a, torch.stack((first, b, last), 1), generator)


def _above_three(above: Tensor, three: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An object in a random cell of the top row, three in random order in the bottom row."""
    n, device = len(above), above.device
    column = torch.randint(3, (n, 1), generator=generator, device=device)
    order = _pick(ORDERS, n, generator)
    below = torch.arange(6, 9, device=device).expand(n, 3)
    return torch.cat((column, below), 1), torch.cat((above[:, None], three.gather(1, order)), 1)


def _between(positive: Tensor, half: Tensor, objects: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """ABA in class 1; in class 0 half are ABC, the other half AAC or ACC."""
    n = len(positive)
    a, b, c = distinct(n, 3, objects, generator).unbind(1)
    repeats_first = torch.randint(2, (n,), generator=generator, device=a.device) == 1
    middle = torch.where(~positive & half, torch.where(repeats_first, a, c), b)
    return _pick(LINES, n, generator), torch.stack((a, middle, torch.where(positive, a, c)), 1)


def _match_pattern(positive: Tensor, half: Tensor, objects: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    n, device = len(positive), positive.device
    patterns = torch.tensor(PATTERNS, device=device)
    first = torch.randint(5, (n,), generator=generator, device=device)
    step = torch.randint(1, 5, (n,), generator=generator, device=device)
    second = torch.where(positive, first, (first + step) % 5)
    above, below = distinct(n, 6, objects, generator).split(3, dim=1)
    content = torch.cat((above.gather(1, patterns[first]), below.gather(1, patterns[second])), 1)
    return torch.tensor((0, 1, 2, 6, 7, 8), device=device).expand(n, 6), content


_RULES = {"same": _same, "occurs": _occurs, "xoccurs": _xoccurs, "between": _between, "match_pattern": _match_pattern}


def _pick(table: tuple[tuple[int, ...], ...], n: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(table, device=generator.device)[picks(len(table), n, generator)]


def _batch(sets: tuple[str, ...], grids: Tensor, labels: Tensor) -> Batch:
    """A batch of images of `grids`; its rows use the sets of shapes in turn."""
    filled = grids >= 0
    shapes = torch.where(filled, grids // len(COLOURS), -1)
    colours = torch.where(filled, grids % len(COLOURS), -1)
    images = torch.empty(len(grids), 3, 36, 36, dtype=torch.float32, device=grids.device)
    for i, name in enumerate(sets):
        images[i :: len(sets)] = draw(name, shapes[i :: len(sets)], colours[i :: len(sets)])
    return batch_of(images, labels, {"shapes": shapes, "colours": colours, "cells": filled})


@functools.lru_cache(maxsize=32)
def _pool(task: RelationalGames, device: torch.device) -> tuple[Tensor, Tensor]:
    """The training set: distinct grids (n 9) and labels (n)."""
    generator = seeded(task.split_seed, f"{task.name}/{task.game}/examples")
    grids = training_set(_drawer(task.game, "pentominoes", generator), task.examples)
    return grids.to(device), (torch.arange(task.examples, device="cpu") % 2).to(device)
