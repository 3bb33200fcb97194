"""Two questions about dual attention.  Which symbols, positions and relations work best?  Does the gain from more
softmax heads saturate, while more heads of both kinds keep helping?

Both use the relational games `occurs` and `between` with 1000 training images: dual attention learns them within
minutes, and softmax heads do not.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from polyhead.analysis import figures
from polyhead.config import Learned, Position, Rotary, Run, Swiglu
from polyhead.papers.claims import Estimate, Verdict, above, mean
from polyhead.papers.dual.games import SHAPES, game_run
from polyhead.papers.dual.models import BY_PLACE, DUAL, SYMBOLS, Relations
from polyhead.papers.dual.shared import means, size as size_of
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import SEED_CAPTION, Cells, FigureOutcome, Panel, Picture, settings_note
from polyhead.papers.sizes import Scale, size
from polyhead.papers.study import Cell, Coordinates, Study
from polyhead.tasks import RelationalGames

ASKED = ("occurs", "between")
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
    runs = []
    for seed, game in itertools.product(range(shape.seeds), ASKED):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        grid = itertools.product(SYMBOLS, (True, False), RELATIONS[scale])
        choices: list[tuple[str, Relations, Position]] = [
            (name, Relations(SYMBOLS[name], symmetric, None if count == 1 else count), Learned())
            for name, symmetric, count in grid
        ]
        choices += [(name, Relations(SYMBOLS[name]), Rotary()) for name in SYMBOLS]
        for name, relations, positions in choices:
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
    runs = []
    for seed, game in itertools.product(range(shape.seeds), ASKED):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        splits = [(total, 0) for total in TOTALS[scale]] + [(n // 2, n // 2) for n in TOTALS[scale]]
        splits += [(4 - relational, relational) for relational in range(5)]
        for softmax, relational in dict.fromkeys(splits):
            one = game_run(task, "softmax", shape, shape.grid()[0], seed)
            heads = BY_PLACE.heads(softmax, relational, dim)
            model = replace(one.transformer, heads=heads, feedforward=Swiglu(shape.hidden))
            runs.append(replace(one, model=model, name=f"{game}-{task.examples}-{softmax}+{relational}x{dim}-{seed}"))
    return tuple(runs)


def _shape(scale: str) -> Scale:
    shape = size(SHAPES, scale)
    return replace(shape, steps=100, seeds=3) if scale == "paper" else shape


def _name(what: str, relations: Relations, positions: Position) -> str:
    parts = [what.replace(" ", "-"), "" if relations.symmetric else "asymmetric", f"{relations.relations or 1}"]
    return "-".join(filter(None, [*parts, type(positions).__name__.lower()]))


# --------------------------------------------------------------------------------------------------------------- claims
Choice = tuple[str, str, bool, int]
"""Symbols, positions, symmetric, number of relations."""


class RelationSetting(NamedTuple):
    """A choice with learned positions."""

    symbols: str
    symmetric: bool
    relations: int


def choices(scores: Mapping[Choice, Estimate]) -> list[Verdict]:
    """Claims about symmetry, number of relations and symbols.  `scores`: the mean over the games for each choice.

    Each part is the effect of one change to a setting, averaged over all that were trained with and without it.
    """
    learned = {
        RelationSetting(kind, same, count): score
        for (kind, positions, same, count), score in scores.items()
        if positions == "learned"
    }
    counts = {setting.relations for setting in learned} or {0}
    fewest, most = min(counts), max(counts)
    by_place = [setting for setting in learned if setting.symbols == "by place"]
    others = dict.fromkeys(setting.symbols for setting in learned if setting.symbols != "by place")

    symmetric = [(setting, setting._replace(symmetric=False)) for setting in learned if setting.symmetric]
    many = [(setting, setting._replace(relations=fewest)) for setting in learned if setting.relations == most > fewest]
    symbols = {f"over symbols {kind}": [(s, s._replace(symbols=kind)) for s in by_place] for kind in others}
    claims = {
        "symmetric relations learn faster": {"symmetric over not, mean of symbols and relations": symmetric},
        "more relations than one per head help": {f"{most} over {fewest}, mean of symbols, symmetric or not": many},
        "symbols by place are the best on games": symbols,
    }
    measured = {claim: _differences(learned, parts) for claim, parts in claims.items()}
    return [above(claim, parts) for claim, parts in measured.items() if parts]


def _differences(
    scores: Mapping[RelationSetting, Estimate], parts: Mapping[str, Sequence[tuple[RelationSetting, RelationSetting]]]
) -> dict[str, Estimate]:
    """For each part, the mean of the first score of a pair minus the second, over pairs that were both trained."""
    found = {part: [scores[a] - scores[b] for a, b in pairs if b in scores] for part, pairs in parts.items()}
    return {part: mean(differences) for part, differences in found.items() if differences}


def splits(scores: Mapping[tuple[int, int], Estimate]) -> list[Verdict]:
    """Claims about numbers of heads.  `scores[softmax, relational]`: the mean score over the games."""
    softmax = sorted(n for n, relational in scores if not relational)
    halves = sorted(n for n, relational in scores if n == relational)
    verdicts = []
    if len(softmax) > 1:
        few, many = softmax[0], softmax[-1]
        parts = {f"{many} softmax heads over {few}": scores[many, 0] - scores[few, 0]}
        verdicts.append(above("more softmax heads help", parts))
    if softmax and halves:
        least, many = halves[0], softmax[-1]
        parts = {f"{least} + {least} heads over {many} softmax heads": scores[least, least] - scores[many, 0]}
        verdicts.append(above("a few heads of both kinds are better than the most softmax heads", parts))
    if len(halves) > 1:
        few, many = halves[0], halves[-1]
        parts = {f"{many} + {many} heads over {few} + {few}": scores[many, many] - scores[few, few]}
        verdicts.append(above("more heads of both kinds keep helping", parts))
    return verdicts


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_symbols(study: Study) -> FigureOutcome:
    """Draw accuracy by number of relations: a panel per game and symmetry, a line per symbol source."""
    axes = ("symbols", "positions", "symmetric", "relations")
    cells, games = _by_game(study, *axes)
    panels: list[Panel] = []
    for game, symmetric in itertools.product(games, (True, False)):
        lines: dict[str, dict[Any, list[float]]] = {}
        for (kind, positions, same, count), by in cells.items():
            if game in by and (same, positions) == (symmetric, "learned"):
                lines.setdefault(f"symbols {kind}", {})[count] = _seeds(by[game])
        if lines:
            levels = {"chance": 0.5, **_floors(cells, game)}
            panels.append((f"{game}, {_words(symmetric)}", lines, levels))
    figure = figures.lines(panels, x_label="relations", y_label="accuracy", log_x=True, limits=(0.4, 1.02), columns=2)
    validation = _over_games(cells, games, "validation")
    order = sorted(validation, key=lambda place: -validation[place].mean)  # the best first
    rows = []
    for place in order:
        kind, positions, symmetric, count = place
        choice = (kind, positions, "yes" if symmetric else "no", str(count))
        sizes = size_of(cells[place][games[0]])
        rows.append((*choice, *_texts(cells[place], games), str(validation[place]), *sizes))
    return FigureOutcome(
        pictures=(Picture("symbols", f"Accuracy by number of relations, learned positions; {SEED_CAPTION}.", figure),),
        head=(*axes, *(f"{game}: pentominoes" for game in games), "validation, mean", "parameters", "steps"),
        rows=tuple(rows),
        verdicts=tuple(choices(_over_games(cells, games, "iid"))),
        notes=(*(f"The best on validation data: {_choice(place)}." for place in order[:1]), *_notes(cells, games)),
        numbers={
            ", ".join(map(str, (game, *place))): by[game].score("iid").as_json()
            for game in games
            for place, by in cells.items()
            if game in by
        },
    )


def draw_split(study: Study) -> FigureOutcome:
    """Draw accuracy by number of heads, all softmax or half relational; and by number of relational heads of four."""
    placed, games = _by_game(study, "split")
    cells = {heads: by for (heads,), by in placed.items()}
    panels: list[Panel] = []
    for game in games:
        mine = {heads: _seeds(by[game]) for heads, by in cells.items() if game in by}
        lines = {
            "Softmax heads alone": {s: values for (s, r), values in mine.items() if not r},
            "Half of them relational": {s + r: values for (s, r), values in mine.items() if s == r},
        }
        levels = {"chance": 0.5, **_floors(cells, game)}
        panels.append((game, {name: points for name, points in lines.items() if points}, levels))
    figure = figures.lines(panels, x_label="heads", y_label="accuracy", log_x=True, limits=(0.4, 1.02))
    rows = [
        (str(softmax), str(relational), *_texts(by, games), *size_of(next(iter(by.values()))))
        for (softmax, relational), by in sorted(cells.items(), key=lambda one: (sum(one[0]), one[0][1]))
    ]
    return FigureOutcome(
        pictures=(Picture("split", f"Accuracy by number of heads, every one as wide; {SEED_CAPTION}.", figure),),
        head=("softmax heads", "relational heads", *(f"{game}: pentominoes" for game in games), "parameters", "steps"),
        rows=tuple(rows),
        verdicts=tuple(splits(_over_games(cells, games, "iid"))),
        notes=_notes(cells, games),
        numbers={
            f"{game}, {s} + {r}": by[game].score("iid").as_json()
            for game in games
            for (s, r), by in cells.items()
            if game in by
        },
    )


def _by_game(study: Study, *axes: str) -> tuple[dict[Coordinates, dict[str, Cell]], list[str]]:
    """The cells by place on `axes`, then by game; and the games."""
    found: dict[Coordinates, dict[str, Cell]] = {}
    for (game, *place), cell in study.cells("game", *axes).items():
        found.setdefault(tuple(place), {})[game] = cell
    return found, list(dict.fromkeys(game for by in found.values() for game in by))


def _seeds(cell: Cell) -> list[float]:
    return list(cell.score("iid").values.values())


def _words(symmetric: bool) -> str:
    return "symmetric" if symmetric else "not symmetric"


def _choice(place: Coordinates) -> str:
    kind, positions, symmetric, count = place
    return f"symbols {kind}, {positions} positions, {_words(symmetric)}, {count} relations"


def _texts(by: Mapping[str, Cell], games: list[str]) -> list[str]:
    """The scores on the games, as text."""
    return [str(by[game].score("iid")) if game in by else "–" for game in games]


def _over_games(cells: Cells, games: list[str], split: str) -> dict[Any, Estimate]:
    """The mean over the games, for each place that was trained on all games."""
    whole = {place: by for place, by in cells.items() if len(by) == len(games)}
    return {place: mean([by[game].score(split) for game in games]) for place, by in whole.items()}


def _floors(cells: Cells, game: str) -> dict[str, float]:
    """The floors without relations, on pentominoes."""
    return means({place: by[game] for place, by in cells.items() if game in by}, "iid")


def _notes(cells: Cells, games: list[str]) -> tuple[str, ...]:
    """The floors, for a table whose rows are not models, and the settings."""
    each = [f"{game}, {name.lower()}: {value:.3f}" for game in games for name, value in _floors(cells, game).items()]
    floors = (f"Baselines without a network: {'; '.join(each)}.",) if each else ()
    return (*floors, settings_note(cell for by in cells.values() for cell in by.values()))


FIGURES = {
    "symbols": Figure("Which symbols, positions and relations", DUAL, draw_symbols, symbols, minutes=43.3),
    "split": Figure("Softmax heads, relational heads", DUAL, draw_split, split, minutes=14.8),
}
