"""The study of dual attention: softmax beside relational heads (Altabaa and Lafferty 2024; Abstractors, Altabaa et al.
2024), as functions that return runs.

Each takes a scale, `small` (two CPU cores, minutes) or `paper`; `polyhead reproduce games --scale small` trains the
runs, or goes on with them, and writes figure, table and verdicts beside the papers' numbers.

All models of a study have as many parameters as dual attention, within 1 % (the width of the feed-forward layers makes
it so, of CoRelNet that of its first MLP, of PrediNet the number of relations), and as many optimiser steps; `split`
alone varies the number of heads.  `papers/sizes.py` has the sizes, `models.py` the models, `questions.py` the
studies of what to choose.

At small scale: gradients clipped at 1, a warm-up and a cosine to a tenth of the rate, one rate for all, and no dropout
but on images.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from polyhead.config import Classes, Input, Model, Patches, RelativeSymbols, Run, Task
from polyhead.papers import sizes as scales
from polyhead.papers.dual.models import BY_OFFSET, BY_PLACE, ROWS, Relations, classifier, writer
from polyhead.papers.sizes import Scale, Setting
from polyhead.tasks import Images, Maths, ObjectSorting, PairwiseOrder, RelationalGames, SetCards
from polyhead.tasks.maths.modules import MODULES
from polyhead.tasks.relational_games.task import GAMES

GAME_SPLITS = ("validation", "iid", "novel_hexominoes", "novel_stripes")
EXAMPLES: dict[str, dict[str, tuple[int, ...]]] = {
    "paper": {
        **dict.fromkeys(GAMES, (250, 500, 1000, 1500, 2000, 2500)),
        "match_pattern": (5000, 10_000, 15_000, 20_000, 25_000),
    },
    "small": dict.fromkeys(GAMES, (250, 1000)),
    "smoke": dict.fromkeys(GAMES, (16, 32)),
}
"""Sizes of the training sets of games."""

SORTED = {"paper": (100, 500, 1000, 1500, 2000, 2500, 3000), "small": (600, 2000), "smoke": (16, 32)}
"""Sizes of those of sorting."""

EASY = {
    "algebra__linear_1d": (40, 6),
    "algebra__sequence_next_term": (60, 8),
    "calculus__differentiate": (75, 30),
    "polynomials__add": (96, 20),
    "polynomials__expand": (40, 30),
}
"""Most characters of an easy question and of its answer, those of extrapolation included."""

WRITERS = ("dual", "softmax", "softmax-rope", "abstractor")
COMPARED = ("dual", "relational", "softmax", "corelnet", "predinet", "abstractor")
VISION = ("dual", "dual-package", "softmax", "softmax-rope", "softmax-t5")
ASYMMETRIC = Relations(symmetric=False)
BY_OFFSET_ALIKE = Relations(RelativeSymbols())


def games(scale: str = "small") -> tuple[Run, ...]:
    """Relational games, learning curves over the number of training images, nine models, five games.

    polyhead reproduce games.  Paper: 2 layers of width 128, 2 heads (dual attention: 1 + 1, or 2 relational ones), one
    relation per head, symmetric, symbols and learned positions by place, SwiGLU, dropout 0.1, Adam, rate 1e-3 without a
    schedule, 50 epochs of batches of 512, so that steps grow with the images; five trials, pentominoes in training.
    Small: width 64, 600 steps of 64 whatever the number of images, so that data are not confounded with steps; rate
    2e-3; 250 and 1000 images, which are too few for xoccurs and match pattern; three seeds, each with its own images.

    Where the papers are silent (the alternative in brackets): relation weights start balanced with symbols [as in the
    released package: its own row]; dropout on the code and on what each layer adds [once]; a final norm [none]; the
    mean over the nine patches, without a class token [with].
    """
    shape = scales.size(scale, "games")
    runs = []
    for seed, game in itertools.product(range(shape.seeds), GAMES):
        for n in EXAMPLES[scale][game]:
            own = replace(shape, steps=50 * -(-n // shape.batch_size)) if scale == "paper" else shape
            task = RelationalGames(game, examples=n, split_seed=seed)
            runs += [game_run(task, row, own, setting, seed) for row in ROWS for setting in own.grid()]
    return tuple(runs)


def sorting(scale: str = "small") -> tuple[Run, ...]:
    """Object sorting, learning curves over the number of training sequences: an encoder reads objects, a decoder writes
    their order.

    polyhead reproduce sorting.  Paper (Abstractors): ten of 48 objects, width 64, 2 heads, Adam, 400 epochs of batches
    of 512, 100 to 3000 sequences, ten trials; no table is printed.  Small: six objects, 4 heads, 1200 steps of 64
    whatever the number of sequences, 600 and 2000 of them.

    Where the papers are silent, or the comparison wants another: all models have two layers [the transformer four, the
    Abstractor one or two] and feed-forward layers of twice the width [the width]; no early stopping [patience 50];
    learned positions [sinusoidal]; asymmetric relations, symbols by place.
    """
    shape = scales.size(scale, "objects")
    runs = []
    for seed, n in itertools.product(range(shape.seeds), SORTED[scale]):
        own = replace(shape, steps=400 * -(-n // shape.batch_size)) if scale == "paper" else shape
        task = ObjectSorting(length=10 if scale == "paper" else 6, examples=n, split_seed=seed)
        for row, setting in itertools.product(WRITERS, own.grid()):
            model = _writer(task, (task.source, task.length), row, own, ASYMMETRIC)
            runs.append(_run(f"sorting-{n}-{row}-{seed}", task, model, own, setting))
    return tuple(runs)


def order(scale: str = "small") -> tuple[Run, ...]:
    """Pairwise order: which of two objects comes first, on pairs that never occur in training.

    polyhead reproduce order.  Paper (Abstractors): 64 objects, half of the ordered pairs in training, 35 % in the test;
    it gives a plot.  Small: as many pairs, 600 steps of 64.
    """
    shape = _objects(scale)
    seeds = range(shape.seeds)
    return _classified("order", [PairwiseOrder(split_seed=seed) for seed in seeds], COMPARED, shape, ASYMMETRIC)


def set_cards(scale: str = "small") -> tuple[Run, ...]:
    """SET: do three cards make a set, on triples that never occur in training.

    polyhead reproduce set.  Paper (Abstractors): it gives a plot, of models trained on embeddings of card images; here
    a card is its attributes.  Small: all 1080 training triples, 600 steps of 64.
    """
    shape = _objects(scale)
    return _classified("set", [SetCards(split_seed=seed) for seed in range(shape.seeds)], COMPARED, shape, BY_PLACE)


def maths(scale: str = "small") -> tuple[Run, ...]:
    """Five modules of school mathematics, character by character; interpolation and real extrapolation.

    polyhead reproduce maths.  Paper: 2 layers each of encoder and decoder, width 128, 8 heads (dual attention: 4 + 4 in
    both, softmax across), symbols by offset, sinusoidal positions, post-norm, ReLU, dropout 0.1, Adam, rate 6e-4
    without a schedule, 390,600 steps of 512 questions of all difficulties.  Small: width 64, 4 heads, pre-norm, 800
    steps of 32 easy questions, fresh in every batch, rate 3e-3.

    The papers score characters and print no extrapolation (their log has the interpolation set twice).  Where they are
    silent: the Abstractor is the encoder, its decoder a transformer that sees abstract states alone [objects, too].
    """
    shape = scales.size(scale, "maths")
    runs = []
    for seed, module in itertools.product(range(shape.seeds), MODULES):
        task = Maths(module, "mixed") if scale == "paper" else Maths(module, "easy", *EASY[module])
        for row, setting in itertools.product(WRITERS, shape.grid()):
            model = _writer(task, (task.source, task.question), row, shape, BY_OFFSET)
            runs.append(_run(f"maths-{module}-{row}-{seed}", task, model, shape, setting))
    return tuple(runs)


def images(scale: str = "small") -> tuple[Run, ...]:
    """Images into classes: scikit-learn's digits; at paper scale CIFAR-10 and CIFAR-100, which must lie in `images`.

    polyhead reproduce images.  Paper: 8 layers of width 384, 12 heads (6 + 6), patches of 4 x 4, symbols by offset,
    symmetric, GELU, rate 1e-3 with 5 epochs of warm-up and a cosine, 100 epochs of batches of 128, ten trials.  Small:
    two layers of width 64, 4 heads, patches of 2 x 2, 3000 steps of 64, rate 3e-3, dropout and decay 0.1, one-pixel
    shifts.

    Where the papers differ: they augment with CutMix or AutoAugment too [shifts and mirroring alone here], decay in the
    loss [AdamW], and group keys and values in most of their dual models [never here].
    """
    shape = scales.size(scale, "images")
    data = ("cifar10", "cifar100") if scale == "paper" else ("digits",)
    tasks = [Images(name, split_seed=seed) for seed in range(shape.seeds) for name in data]
    return _classified("images", tasks, VISION, shape, BY_OFFSET_ALIKE)


def _single(name: str, runs: tuple[Run, ...], like: str) -> Run:
    """The run called `like` as one of its own."""
    (found,) = (run for run in runs if run.name == like)
    return replace(found, name=name, threads=None)


def games_dual() -> Run:
    """Dual attention on a relational game: the object above is among the three below; 1000 images.

    polyhead train games-dual.  600 steps of 64, about 15 seconds of one core.  Expect an accuracy of 0.93 ± 0.03 on
    pentominoes and 0.92 on stripes, which training never shows (softmax heads: 0.65); `--task.game same` is another.
    """
    return _single("games-dual", games("small"), "occurs-1000-dual-0")


def sorting_dual() -> Run:
    """Dual attention sorts six objects by an order that 2000 examples tell: an encoder, and a decoder that writes it.

    polyhead train sorting-dual.  1200 steps of 64, about half a minute of one core.
    """
    return _single("sorting-dual", sorting("small"), "sorting-2000-dual-0")


def maths_dual() -> Run:
    """Dual attention differentiates polynomials, character by character.

    polyhead train maths-dual.  2500 steps of 32, about six minutes of one core.  Expect 0.99 of the answers exact on
    questions like those of training, half of them on longer ones, none on larger numbers.
    """
    run = _single("maths-dual", maths("small"), "maths-calculus__differentiate-dual-0")
    return replace(run, train=replace(run.train, steps=2500))


def digits_dual() -> Run:
    """Dual attention reads scikit-learn's digits: 16 patches of 2 x 2, one-pixel shifts in training.

    polyhead train digits-dual.  6000 steps of 64, about three minutes of one core.  Expect an accuracy of 0.98 on the
    test images.
    """
    run = _single("digits-dual", images("small"), "digits-dual-0")
    return replace(run, train=replace(run.train, steps=6000))


def game_run(
    task: RelationalGames,
    row: str,
    shape: Scale,
    setting: Setting,
    seed: int,
    relations: Relations = BY_PLACE,
) -> Run:
    """The run that trains the model `row` on a game; all models have as many parameters as with symbols by place."""
    model = classifier(_ends(task), task.length, row, replace(shape, steps=0), relations, BY_PLACE)
    return _run(f"{task.game}-{task.examples}-{row}-{seed}", task, model, shape, setting)


def _objects(scale: str) -> Scale:
    """The size of models that classify objects."""
    shape = scales.size(scale, "objects")
    return (
        shape if scale == "paper" else replace(shape, steps=max(shape.steps // 2, 1), heads=2, head_dim=shape.dim // 2)
    )


def _classified(
    name: str,
    tasks: Sequence[Images | PairwiseOrder | SetCards],
    rows: tuple[str, ...],
    shape: Scale,
    relations: Relations,
) -> tuple[Run, ...]:
    runs = []
    for task, row, setting in itertools.product(tasks, rows, shape.grid()):
        model = classifier(_ends(task), task.length, row, replace(shape, steps=0), relations)
        what = task.data if isinstance(task, Images) else name
        runs.append(_run(f"{what}-{row}-{task.split_seed}", task, model, shape, setting))
    return tuple(runs)


def _ends(task: RelationalGames | Images | PairwiseOrder | SetCards) -> tuple[Input, Classes]:
    """The papers normalise patches before and after the map; of digits, four pixels each, little would be left."""
    inputs, outputs = task.ends
    if not isinstance(inputs, Patches) or (isinstance(task, Images) and task.data == "digits"):
        return inputs, outputs
    return replace(inputs, norm=True), outputs


def _writer(
    task: ObjectSorting | Maths, source: tuple[Input, int], row: str, shape: Scale, relations: Relations
) -> Model:
    return writer(source, (*task.ends, task.length), row, replace(shape, steps=0), relations)


def _run(name: str, task: Task, model: Model, shape: Scale, setting: Setting) -> Run:
    """`name` ends with the seed.  Scored on all splits but training's; of games, on each set of unseen shapes."""
    splits = GAME_SPLITS if isinstance(task, RelationalGames) else tuple(s for s in task.splits if s != "train")
    train = scales.training(shape, setting, splits)
    return Run(name=name, task=task, model=model, train=train, seed=int(name.rpartition("-")[2]), threads=1)
