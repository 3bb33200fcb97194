"""Relational games: scores of eleven models by number of training images (Altabaa and Lafferty 2024)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polyhead.analysis.claims import Scores, Verdict, above, mean
from polyhead.config import Learned, Run
from polyhead.papers import outcome
from polyhead.papers.dual.models import BY_PLACE, DUAL, ROWS, label
from polyhead.papers.dual.shared import RunPlan, by_examples, compared, learns, notes, operators, single, table
from polyhead.papers.outcome import Cells, Figure, FigureOutcome, Picture, Table
from polyhead.papers.sizes import SMOKE, Scale, size
from polyhead.papers.study import Study
from polyhead.tasks import RelationalGames
from polyhead.tasks.relational_games.task import GAMES

# ---------------------------------------------------------------------------------------------------------------- runs
# fmt: off
SHAPES: dict[str, Scale] = {
    "paper": Scale(
        dim=128, hidden=256, layers=2, heads=2, head_dim=64, positions=Learned(), dropout=0.1,
        steps=250, batch_size=512, clip=None, betas=(0.9, 0.99), final=1.0,
        lrs=(1e-3,), decays=(0.0,), warmups=(0,), seeds=5, eval_batches=20,
    ),
    "small": Scale(
        dim=64, hidden=128, layers=2, heads=2, head_dim=32, positions=Learned(),
        steps=600, batch_size=64, clip=1.0,
        lrs=(2e-3,), decays=(0.0,), warmups=(50,), seeds=3, eval_batches=16,
    ),
    "smoke": replace(SMOKE, hidden=96, positions=Learned()),
}
# fmt: on

# Sizes of the games' training sets.
EXAMPLES: dict[str, dict[str, tuple[int, ...]]] = {
    "paper": {
        **dict.fromkeys(GAMES, (250, 500, 1000, 1500, 2000, 2500)),
        "match_pattern": (5000, 10_000, 15_000, 20_000, 25_000),
    },
    "small": dict.fromkeys(GAMES, (250, 1000)),
    "smoke": {**dict.fromkeys(GAMES, (32,)), "between": (16, 32)},
}


def games(scale: str = "small") -> tuple[Run, ...]:
    """Relational games: accuracy of eleven models on five games by number of training images.

    polyhead reproduce games.  Paper: 50 epochs, so the number of steps grows with the number of images.  Small: as many
    steps for any number, so that data are not confounded with steps; too few images for xoccurs and match_pattern.
    """
    shape = size(SHAPES, scale)
    plans: list[RunPlan] = []
    for seed, game in itertools.product(range(shape.seeds), GAMES):
        for n in EXAMPLES[scale][game]:
            sized = shape
            if scale == "paper":  # 50 epochs
                sized = replace(shape, steps=50 * math.ceil(n / shape.batch_size))
            plans.append((RelationalGames(game, examples=n, split_seed=seed), sized, f"{game}-{n}", seed))
    return compared(plans, ROWS, BY_PLACE)


def games_dual() -> Run:
    """Dual attention on the relational game `occurs`, with 1000 images.

    polyhead train games-dual.  600 steps with batches of 64, about 15 seconds of one core.  Pentominoes are
    the shapes of training, stripes and hexominoes new ones.  Other games: --task.game.
    """
    return single("games-dual", games("small"), "occurs-1000-dual-0")


# -------------------------------------------------------------------------------------------------------------- claims
_SIZES, _LARGE = (250, 500, 1000, 1500, 2000, 2500), (5000, 10_000, 15_000, 20_000, 25_000)


def _curve(sizes: Sequence[int], values: str) -> dict[int, float]:
    return dict(zip(sizes, map(float, values.split()), strict=True))


# Game -> model -> number of images -> accuracy on pentominoes: the authors' page and logs, of models with 421,474
# parameters (CoRelNet: 215,522).
PRINTED: dict[str, dict[str, dict[int, float]]] = {
    "same": {
        "dual": _curve(_SIZES, ".639 .744 .880 .902 .929 .940"),
        "relational": _curve(_SIZES, ".652 .744 .863 .898 .914 .926"),
        "softmax": _curve(_SIZES, ".671 .750 .898 .924 .938 .946"),
        "corelnet": {2500: 0.969},
        "predinet": {2500: 0.981},
        "abstractor": {2500: 0.979},
    },
    "occurs": {
        "dual": _curve(_SIZES, ".619 .775 .895 .913 .928 .929"),
        "relational": _curve(_SIZES, ".632 .787 .886 .910 .916 .931"),
        "softmax": _curve(_SIZES, ".533 .525 .646 .752 .825 .885"),
        "corelnet": {2500: 0.957},
        "predinet": {2500: 0.948},
        "abstractor": {2500: 0.962},
    },
    "xoccurs": {
        "dual": _curve(_SIZES, ".522 .543 .634 .723 .852 .873"),
        "relational": _curve(_SIZES, ".520 .556 .666 .772 .860 .886"),
        "softmax": _curve(_SIZES, ".508 .504 .546 .584 .598 .653"),
        "corelnet": {2500: 0.931},
        "predinet": {2500: 0.680},
        "abstractor": {2500: 0.861},
    },
    "between": {
        "dual": _curve(_SIZES, ".640 .711 .869 .911 .929 .938"),
        "relational": _curve(_SIZES, ".614 .750 .881 .908 .929 .931"),
        "softmax": _curve(_SIZES, ".596 .618 .774 .845 .886 .911"),
        "corelnet": {250: 0.742, 2500: 0.967},
        "predinet": {2500: 0.909},
        "abstractor": {2500: 0.815},
    },
    "match_pattern": {
        "dual": _curve(_LARGE, ".546 .639 .740 .832 .855"),
        "relational": _curve(_LARGE, ".528 .773 .888 .930 .928"),
        "softmax": _curve(_LARGE, ".511 .521 .534 .564 .565"),
        "corelnet": {25_000: 0.983},
        "predinet": {25_000: 0.667},
        "abstractor": {25_000: 0.973},
    },
}


def claims(cells: Cells) -> list[Verdict]:
    """Return verdicts on the complete games only."""
    curves: dict[str, Table] = {}
    novel: dict[str, dict[str, Scores]] = {"novel_hexominoes": {}, "novel_stripes": {}}
    verdicts: list[Verdict] = []
    for game, rows in cells.groupby(level="game", sort=False):
        of_game = rows.droplevel("game")
        # Missing runs would change the comparison.
        if not outcome.is_complete_grid(of_game):
            continue
        curves[game] = outcome.score_table(of_game, "iid")
        for split, by_game in novel.items():
            by_game[game] = outcome.score_table(of_game, split).loc[max(curves[game].index)]
        verdicts += learns(game.replace("_", " "), curves[game])
    if not curves:
        return verdicts
    return verdicts + all_games(curves, novel)


def all_games(curves: Mapping[str, Table], novel: Mapping[str, Mapping[str, Scores]]) -> list[Verdict]:
    """Return claims about means over games.

    Args:
        curves: Game -> scores by number of images.
        novel: Split -> game -> scores on unseen shapes with the most images.
    """
    import pandas

    verdicts = []
    games, words = games_with(curves, "dual-package")
    if games:
        claim = "relation weights that start balanced learn more from as many examples than with the package's start"
        lead = mean(mean(outcome.differences(curves[game], "dual", "dual-package")) for game in games)
        verdicts.append(above(claim, {words: lead}))
    for rival in ("corelnet", "predinet", "abstractor"):
        games, words = games_with(curves, rival)
        if games:
            claim = f"{label(rival)}, a model made for relations alone, is better than dual attention"
            leads = []
            for game in games:
                scores = curves[game].loc[max(curves[game].index)]
                leads.append(scores[rival] - scores["dual"])
            verdicts.append(above(claim, {f"at the most images, {words}": mean(leads)}))
    games, words = games_with(curves, "softmax")
    if games:
        parts = {}
        for split, by_game in novel.items():
            lead = mean(by_game[game]["dual"] - by_game[game]["softmax"] for game in games)
            parts[f"{split.removeprefix('novel_')}, {words}"] = lead
        verdicts.append(above("on unseen shapes, too, dual attention is better than softmax heads", parts))
    # Over the numbers of images: a row per game, a column per model.
    means = pandas.DataFrame({game: scores.apply(mean) for game, scores in curves.items()}).T
    return verdicts + operators("relational games", means)


def games_with(curves: Mapping[str, Table], other: str) -> tuple[list[str], str]:
    """Return the games in which dual attention and the `other` model were run, and their names."""
    games = [game for game, scores in curves.items() if {"dual", other} <= set(scores)]
    return games, f"mean of {', '.join(games).replace('_', ' ')}"


# ------------------------------------------------------------------------------------------------------------- drawing
# Title, split and metric of each column.
SHOWN = (("pentominoes", "iid", None), ("hexominoes", "novel_hexominoes", None), ("stripes", "novel_stripes", None))


def draw(study: Study) -> FigureOutcome:
    """Draw accuracy by number of training images, a panel per game: pentominoes, and the two unseen sets of shapes."""
    cells = study.cells("game", "examples", "model")
    pictures = []
    for words, split, _ in SHOWN:
        figure = by_examples(cells, split, "training images", 0.5)
        if split == "iid":
            pictures.append(Picture("games", f"Accuracy on {words}; {outcome.SEED_CAPTION}.", figure))
        else:
            caption = f"Accuracy on {words}, never seen in training; {outcome.SEED_CAPTION}."
            pictures.append(Picture(f"games-{words}", caption, figure))
    named = cells.rename_axis(["game", "images", "model"])
    rows, numbers = table(named, SHOWN, lambda condition, model: paper(PRINTED[condition[0]].get(model, {})))
    return FigureOutcome(pictures, rows, claims(cells), notes(cells), numbers)


def paper(values: Mapping[int, float]) -> str:
    """The paper's numbers, by size of the training set."""
    return ", ".join(f"{value:.3f} ({n})" for n, value in values.items()) or "–"


FIGURES = {"games": Figure("Relational games: learning curves", DUAL, draw, games, minutes=69.7)}
