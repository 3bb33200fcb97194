"""Two questions about dual attention.  Which symbols, positions and relations work best?  Does the gain from more
softmax heads saturate, while more heads of both kinds keep helping?

Both use the relational games `occurs` and `between` with 1000 training images: dual attention learns them within
minutes, and softmax heads do not.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from polyhead.analysis import figures
from polyhead.config import Learned, Position, Rotary, Run, Swiglu
from polyhead.papers.claims import Estimate, Verdict, above, mean
from polyhead.papers.dual.games import SHAPES, game_run
from polyhead.papers.dual.models import BY_PLACE, DUAL, SYMBOLS, Relations
from polyhead.papers.dual.shared import means, size as size_of
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import SEED_CAPTION, Cells, FigureOutcome, Panel, Picture, settings_of
from polyhead.papers.sizes import Scale, size
from polyhead.papers.study import Cell, Coordinates, Study
from polyhead.tasks import RelationalGames

GAMES = ("occurs", "between")
IMAGES = {"paper": 1000, "small": 1000, "smoke": 32}
RELATIONS = {"paper": (1, 2, 4, 8), "small": (1, 4, 16), "smoke": (1, 4)}
TOTALS = {"paper": (2, 4, 8, 16), "small": (2, 4, 8), "smoke": (2, 4)}
"""Numbers of heads; all heads have the same width."""


def symbols(scale: str = "small") -> tuple[Run, ...]:
    """Dual attention on two games, by symbols, positions, symmetry and number of relations.

    polyhead reproduce symbols.  All models have as many parameters as with position symbols and one symmetric relation.
    Small: each symbol source with 1, 4 or 16 symmetric or asymmetric relations and learned positions; and with one
    symmetric relation and RoPE.  Paper scale: width 128, 1, 2, 4 and 8 relations.

    In the papers' plots symmetric relations learn faster on games.  They use position symbols there, relative symbols
    on maths and images, and a symbol library in language.
    """
    shape = _shape(scale)
    settings: list[tuple[str, Relations, Position]] = []
    for name, is_symmetric, count in itertools.product(SYMBOLS, (True, False), RELATIONS[scale]):
        settings.append((name, Relations(SYMBOLS[name], is_symmetric, None if count == 1 else count), Learned()))
    for name in SYMBOLS:
        settings.append((name, Relations(SYMBOLS[name]), Rotary()))
    runs = []
    for seed, game in itertools.product(range(shape.seeds), GAMES):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        for name, relations, positions in settings:
            run = game_run(task, "dual", replace(shape, positions=positions), shape.grid()[0], seed, relations)
            if (relations, positions) != (BY_PLACE, Learned()):  # runs of `games` keep their name
                run = replace(run, name=f"{game}-{task.examples}-{_name(name, relations, positions)}-{seed}")
            runs.append(run)
    return tuple(runs)


def split(scale: str = "small") -> tuple[Run, ...]:
    """More softmax heads, or softmax and relational heads, at equal widths of heads and model; two games.

    polyhead reproduce split.  Small: 2, 4 and 8 heads of width 16, all softmax or half of them relational; and all
    splits of 4 heads.  The numbers of parameters differ, because more heads have more parameters.
    """
    shape = _shape(scale)
    dim = shape.dim // 4
    head_counts: dict[tuple[int, int], None] = {}
    for total in TOTALS[scale]:
        head_counts[total, 0] = None
    for total in TOTALS[scale]:
        head_counts[total // 2, total // 2] = None
    for relational in range(5):
        head_counts[4 - relational, relational] = None
    runs = []
    for seed, game in itertools.product(range(shape.seeds), GAMES):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        base = game_run(task, "softmax", shape, shape.grid()[0], seed)
        for softmax, relational in head_counts:
            heads = BY_PLACE.heads(softmax, relational, dim)
            model = replace(base.transformer, heads=heads, feedforward=Swiglu(shape.hidden))
            runs.append(replace(base, model=model, name=f"{game}-{task.examples}-{softmax}+{relational}x{dim}-{seed}"))
    return tuple(runs)


def _shape(scale: str) -> Scale:
    shape = size(SHAPES, scale)
    return replace(shape, steps=100, seeds=3) if scale == "paper" else shape


def _name(symbol_source: str, relations: Relations, positions: Position) -> str:
    symmetry = "" if relations.symmetric else "asymmetric"
    parts = (symbol_source.replace(" ", "-"), symmetry, str(relations.relations or 1), type(positions).__name__.lower())
    return "-".join(filter(None, parts))


# --------------------------------------------------------------------------------------------------------------- claims
Choice = tuple[str, str, bool, int]
"""Symbols, positions, symmetric, number of relations."""


class RelationSetting(NamedTuple):
    """A choice with learned positions."""

    symbols: str
    symmetric: bool
    relations: int


def choices(scores: Mapping[Choice, Estimate]) -> list[Verdict]:
    """Return claims about symmetry, number of relations and symbols.  `scores`: the mean over the games.

    Each part is the effect of one change to a setting, averaged over all that were trained with and without it.
    """
    learned: dict[RelationSetting, Estimate] = {}
    for (kind, positions, is_symmetric, count), score in scores.items():
        if positions == "learned":
            learned[RelationSetting(kind, is_symmetric, count)] = score
    counts = {setting.relations for setting in learned} or {0}
    fewest, most = min(counts), max(counts)

    # Differences of pairs of settings, by claim and part.
    differences: dict[str, dict[str, list[Estimate]]] = {claim: {} for claim in CHOICE_CLAIMS}
    symmetric, many, by_place = CHOICE_CLAIMS

    def compare(claim: str, part: str, setting: RelationSetting, other: RelationSetting) -> None:
        if other in learned:
            differences[claim].setdefault(part, []).append(learned[setting] - learned[other])

    for setting in learned:
        if setting.symmetric:
            part = "symmetric over not, mean of symbols and relations"
            compare(symmetric, part, setting, setting._replace(symmetric=False))
        if setting.relations == most > fewest:
            part = f"{most} over {fewest}, mean of symbols, symmetric or not"
            compare(many, part, setting, setting._replace(relations=fewest))
        if setting.symbols == "by place":
            for kind in dict.fromkeys(other.symbols for other in learned):
                if kind != "by place":
                    compare(by_place, f"over symbols {kind}", setting, setting._replace(symbols=kind))
    verdicts = []
    for claim, parts in differences.items():
        if parts:
            verdicts.append(above(claim, {part: mean(estimates) for part, estimates in parts.items()}))
    return verdicts


CHOICE_CLAIMS = (
    "symmetric relations learn faster",
    "more relations than one per head help",
    "symbols by place are the best on games",
)


def splits(scores: Mapping[tuple[int, int], Estimate]) -> list[Verdict]:
    """Return claims about numbers of heads.  `scores[softmax, relational]`: the mean score over the games."""
    softmax = sorted(total for total, relational in scores if not relational)
    halves = sorted(half for half, relational in scores if half == relational)
    verdicts = []
    if len(softmax) > 1:
        smallest, *_, largest = softmax
        parts = {f"{largest} softmax heads over {smallest}": scores[largest, 0] - scores[smallest, 0]}
        verdicts.append(above("more softmax heads help", parts))
    if softmax and halves:
        half, total = halves[0], softmax[-1]
        parts = {f"{half} + {half} heads over {total} softmax heads": scores[half, half] - scores[total, 0]}
        verdicts.append(above("a few heads of both kinds are better than the most softmax heads", parts))
    if len(halves) > 1:
        smallest, *_, largest = halves
        difference = scores[largest, largest] - scores[smallest, smallest]
        parts = {f"{largest} + {largest} heads over {smallest} + {smallest}": difference}
        verdicts.append(above("more heads of both kinds keep helping", parts))
    return verdicts


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_symbols(study: Study) -> FigureOutcome:
    """Draw accuracy by number of relations: a panel per game and symmetry, a line per symbol source."""
    axes = ("symbols", "positions", "symmetric", "relations")
    cells, games = cells_by_game(study, *axes)
    panels: list[Panel] = []
    for game, is_symmetric in itertools.product(games, (True, False)):
        curves: dict[str, dict[Any, list[float]]] = {}
        for (kind, positions, symmetry, count), by_game in cells.items():
            if game in by_game and (symmetry, positions) == (is_symmetric, "learned"):
                curves.setdefault(f"symbols {kind}", {})[count] = seed_scores(by_game[game])
        if curves:
            levels = {"chance": 0.5, **baselines_of(cells, game)}
            panels.append((f"{game}, {symmetry_words(is_symmetric)}", curves, levels))
    figure = figures.lines(panels, x_label="relations", y_label="accuracy", log_x=True, limits=(0.4, 1.02), columns=2)
    validation = over_games(cells, games, "validation")
    best_first = sorted(validation, key=lambda condition: -validation[condition].mean)
    rows = []
    for condition in best_first:
        kind, positions, is_symmetric, count = condition
        setting = (kind, positions, "yes" if is_symmetric else "no", str(count))
        sizes = size_of(cells[condition][games[0]])
        rows.append((*setting, *score_texts(cells[condition], games), str(validation[condition]), *sizes))
    notes = list(notes_of(cells, games))
    if best_first:
        kind, positions, is_symmetric, count = best_first[0]
        setting_text = f"symbols {kind}, {positions} positions, {symmetry_words(is_symmetric)}, {count} relations"
        notes.insert(0, f"The best on validation data: {setting_text}.")
    numbers = {}
    for game in games:
        for condition, by_game in cells.items():
            if game in by_game:
                numbers[", ".join(map(str, (game, *condition)))] = by_game[game].score("iid").as_json()
    caption = f"Accuracy by number of relations, learned positions; {SEED_CAPTION}."
    return FigureOutcome(
        pictures=(Picture("symbols", caption, figure),),
        head=(*axes, *(f"{game}: pentominoes" for game in games), "validation, mean", "parameters", "steps"),
        rows=tuple(rows),
        verdicts=tuple(choices(over_games(cells, games, "iid"))),
        notes=tuple(notes),
        numbers=numbers,
    )


def draw_split(study: Study) -> FigureOutcome:
    """Draw accuracy by number of heads, all softmax or half relational; and by number of relational heads of four."""
    by_place, games = cells_by_game(study, "split")
    cells = {heads: by_game for (heads,), by_game in by_place.items()}
    panels: list[Panel] = []
    numbers = {}
    for game in games:
        curves: dict[str, dict[Any, list[float]]] = {}
        for (softmax, relational), by_game in cells.items():
            if game not in by_game:
                continue
            scores = seed_scores(by_game[game])
            numbers[f"{game}, {softmax} + {relational}"] = by_game[game].score("iid").as_json()
            if relational == 0:
                curves.setdefault("Softmax heads alone", {})[softmax] = scores
            if relational == softmax:
                curves.setdefault("Half of them relational", {})[softmax + relational] = scores
        panels.append((game, curves, {"chance": 0.5, **baselines_of(cells, game)}))
    figure = figures.lines(panels, x_label="heads", y_label="accuracy", log_x=True, limits=(0.4, 1.02))
    rows = []
    for softmax, relational in sorted(cells, key=lambda heads: (sum(heads), heads[1])):
        by_game = cells[softmax, relational]
        sizes = size_of(next(iter(by_game.values())))
        rows.append((str(softmax), str(relational), *score_texts(by_game, games), *sizes))
    caption = f"Accuracy by number of heads, every one as wide; {SEED_CAPTION}."
    return FigureOutcome(
        pictures=(Picture("split", caption, figure),),
        head=("softmax heads", "relational heads", *(f"{game}: pentominoes" for game in games), "parameters", "steps"),
        rows=tuple(rows),
        verdicts=tuple(splits(over_games(cells, games, "iid"))),
        notes=notes_of(cells, games),
        numbers=numbers,
    )


def cells_by_game(study: Study, *axes: str) -> tuple[dict[Coordinates, dict[str, Cell]], list[str]]:
    """Return the cells by place on `axes`, then by game; and the games."""
    cells: dict[Coordinates, dict[str, Cell]] = {}
    games: dict[str, None] = {}
    for (game, *condition), cell in study.cells("game", *axes).items():
        cells.setdefault(tuple(condition), {})[game] = cell
        games[game] = None
    return cells, list(games)


def seed_scores(cell: Cell) -> list[float]:
    return list(cell.score("iid").values.values())


def symmetry_words(is_symmetric: bool) -> str:
    return "symmetric" if is_symmetric else "not symmetric"


def score_texts(by_game: Mapping[str, Cell], games: list[str]) -> list[str]:
    """Return the scores on the games as text."""
    return [str(by_game[game].score("iid")) if game in by_game else "–" for game in games]


def over_games(cells: Cells, games: list[str], split: str) -> dict[Any, Estimate]:
    """Return the mean over the games, for each place that was trained on all games."""
    means = {}
    for condition, by_game in cells.items():
        if len(by_game) == len(games):
            means[condition] = mean([by_game[game].score(split) for game in games])
    return means


def baselines_of(cells: Cells, game: str) -> dict[str, float]:
    """Return the baselines without relations, on pentominoes."""
    return means({condition: by_game[game] for condition, by_game in cells.items() if game in by_game}, "iid")


def notes_of(cells: Cells, games: list[str]) -> tuple[str, ...]:
    """Return the baselines, for a table whose rows are not models, and the settings."""
    texts = []
    for game in games:
        for name, value in baselines_of(cells, game).items():
            texts.append(f"{game}, {name.lower()}: {value:.3f}")
    notes = (settings_of(cells),)
    return (f"Baselines without a network: {'; '.join(texts)}.", *notes) if texts else notes


FIGURES = {
    "symbols": Figure("Which symbols, positions and relations", DUAL, draw_symbols, symbols, minutes=43.3),
    "split": Figure("Softmax heads, relational heads", DUAL, draw_split, split, minutes=14.8),
}
