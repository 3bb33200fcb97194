"""Two questions about dual attention.  Which symbols, positions and relations work best?  Does the gain from more
softmax heads saturate, while more heads of both kinds keep helping?

Both use the relational games `occurs` and `between` with 1000 training images: dual attention learns them within
minutes, and softmax heads do not.
"""

import itertools
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from polyhead.analysis import figures
from polyhead.config import Learned, Position, Rotary, Run, Swiglu
from polyhead.papers.claims import Verdict, above
from polyhead.papers.dual.games import SHAPES, game_run
from polyhead.papers.dual.models import BY_PLACE, DUAL, SYMBOLS, Relations
from polyhead.papers.dual.shared import means, size as size_of
from polyhead.papers.estimates import Estimate, mean
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import SEEN, Outcome, Panel, both, numbers, settings_note
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


class Place(NamedTuple):
    """A choice with learned positions."""

    symbols: str
    symmetric: bool
    relations: int


def choices(scores: Mapping[Choice, Estimate]) -> list[Verdict]:
    """Claims about symmetry, number of relations and symbols.  `scores`: the mean over the games for each choice.

    Each part is the effect of one change to a choice, averaged over all choices that were trained with and without it.
    """
    learned = {Place(kind, same, r): e for (kind, positions, same, r), e in scores.items() if positions == "learned"}
    fewest = min((place.relations for place in learned), default=0)
    most = max((place.relations for place in learned), default=0)

    def effects(pairs: Iterable[tuple[Place, Place]]) -> list[Estimate]:
        """The first score of each pair minus the second, for pairs of different choices that were both trained."""
        return [learned[one] - learned[other] for one, other in pairs if other != one and other in learned]

    symmetry = effects((place, place._replace(symmetric=False)) for place in learned if place.symmetric)
    relations = effects((place, place._replace(relations=fewest)) for place in learned if place.relations == most)
    by_place = [place for place in learned if place.symbols == "by place"]
    others = dict.fromkeys(place.symbols for place in learned if place.symbols != "by place")
    symbols = {kind: effects((place, place._replace(symbols=kind)) for place in by_place) for kind in others}
    claims = {
        "symmetric relations learn faster": {"symmetric over not, mean of symbols and relations": symmetry},
        "more relations than one per head help": {
            f"{most} over {fewest}, mean of symbols, symmetric or not": relations
        },
        "symbols by place are the best on games": {f"over symbols {kind}": found for kind, found in symbols.items()},
    }
    measured = {claim: {name: mean(found) for name, found in parts.items() if found} for claim, parts in claims.items()}
    return [above(claim, parts) for claim, parts in measured.items() if parts]


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


SPLIT = {"softmax": "Softmax heads alone", "half": "Half of them relational"}


def draw_symbols(study: Study, folder: pathlib.Path) -> Outcome:
    """Draw accuracy by number of relations: a panel per game and symmetry, a line per symbol source."""
    axes = ("symbols", "positions", "symmetric", "relations")
    cells = study.cells("game", *axes)
    games = list(dict.fromkeys(place[0] for place in cells))
    panels: list[Panel] = []
    for game in games:
        for symmetric in (True, False):
            lines: dict[str, dict[Any, list[float]]] = {}
            for (which, kind, positions, same, count), cell in cells.items():
                if (which, same, positions) == (game, symmetric, "learned"):
                    lines.setdefault(f"symbols {kind}", {})[count] = list(cell.score("iid").values.values())
            if lines:
                levels = {"chance": 0.5, **_floors(cells, game)}
                panels.append((f"{game}, {'symmetric' if symmetric else 'not symmetric'}", lines, levels))
    for path in both("symbols", folder):
        figures.lines(panels, path, x_label="relations", y_label="accuracy", log_x=True, limits=(0.4, 1.02), columns=2)
    by_choice = _over_games(cells, games, "iid")
    order_ = _over_games(cells, games, "validation")
    rows = _choice_rows(cells, games, sorted(order_, key=lambda place: -order_[place].mean))
    best = max(order_, key=lambda place: order_[place].mean, default=None)
    notes_ = [] if best is None else [f"The best on validation data: {_choice(best)}."]
    return Outcome(
        pictures=(("symbols", f"Accuracy by number of relations, learned positions; {SEEN}."),),
        head=(*axes, *(f"{game}: pentominoes" for game in games), "validation, mean", "parameters", "steps"),
        rows=tuple(rows),
        verdicts=tuple(choices(by_choice)),
        notes=(*notes_, *_floor_notes(cells, games), settings_note(cells.values())),
        numbers={", ".join(map(str, place)): numbers(cell.score("iid")) for place, cell in cells.items()},
    )


def _choice(place: Coordinates) -> str:
    kind, positions, symmetric, count = place
    return f"symbols {kind}, {positions} positions, {'symmetric' if symmetric else 'not symmetric'}, {count} relations"


def _over_games(cells: Mapping[Coordinates, Cell], games: list[str], split: str) -> dict[Any, Estimate]:
    """The mean over the games, for each choice that was trained on all games."""
    places = dict.fromkeys(place[1:] for place in cells)
    whole = [place for place in places if all((game, *place) in cells for game in games)]
    return {place: mean([cells[game, *place].score(split) for game in games]) for place in whole}


def _choice_rows(
    cells: Mapping[Coordinates, Cell], games: list[str], order_: list[Coordinates]
) -> list[tuple[str, ...]]:
    """Table rows, the best on validation data first."""
    rows = []
    for place in order_:
        mine = [cells[game, *place] for game in games]
        kind, positions, symmetric, count = place
        values = [str(cell.score("iid")) for cell in mine]
        validation = str(mean([cell.score("validation") for cell in mine]))
        rows.append((kind, positions, "yes" if symmetric else "no", str(count), *values, validation, *size_of(mine[0])))
    return rows


def _floors(cells: Mapping[Coordinates, Cell], game: str) -> dict[str, float]:
    """The floors without relations, on pentominoes."""
    return means({place: cell for place, cell in cells.items() if place[0] == game}, "iid")


def _floor_notes(cells: Mapping[Coordinates, Cell], games: list[str]) -> tuple[str, ...]:
    """The floors as a note, for tables whose rows are choices and whose columns are games."""
    each = [f"{game}, {name.lower()}: {value:.3f}" for game in games for name, value in _floors(cells, game).items()]
    return (f"Floors without a network: {'; '.join(each)}.",) if each else ()


def draw_split(study: Study, folder: pathlib.Path) -> Outcome:
    """Draw accuracy by number of heads, all softmax or half relational; and by number of relational heads of four."""
    cells = study.cells("game", "split")
    games = list(dict.fromkeys(place[0] for place in cells))
    panels: list[Panel] = []
    for game in games:
        mine = {place[1]: list(cell.score("iid").values.values()) for place, cell in cells.items() if place[0] == game}
        lines = {
            SPLIT["softmax"]: {s: values for (s, r), values in mine.items() if not r},
            SPLIT["half"]: {s + r: values for (s, r), values in mine.items() if s == r},
        }
        levels = {"chance": 0.5, **_floors(cells, game)}
        panels.append((game, {name: points for name, points in lines.items() if points}, levels))
    for path in both("split", folder):
        figures.lines(panels, path, x_label="heads", y_label="accuracy", log_x=True, limits=(0.4, 1.02))
    return Outcome(
        pictures=(("split", f"Accuracy by number of heads, every one as wide; {SEEN}."),),
        head=("softmax heads", "relational heads", *(f"{game}: pentominoes" for game in games), "parameters", "steps"),
        rows=tuple(_split_rows(cells, games)),
        verdicts=tuple(splits({place[0]: e for place, e in _over_games(cells, games, "iid").items()})),
        notes=(*_floor_notes(cells, games), settings_note(cells.values())),
        numbers={f"{game}, {s} + {r}": numbers(cell.score("iid")) for (game, (s, r)), cell in cells.items()},
    )


def _split_rows(cells: Mapping[Coordinates, Cell], games: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for softmax, relational in sorted(dict.fromkeys(place[1] for place in cells), key=lambda at: (sum(at), at[1])):
        mine = [cells.get((game, (softmax, relational))) for game in games]
        values = ["–" if cell is None else str(cell.score("iid")) for cell in mine]
        sizes = size_of(next(cell for cell in mine if cell is not None))
        rows.append((str(softmax), str(relational), *values, *sizes))
    return rows


FIGURES = {
    "symbols": Figure("Which symbols, positions and relations", DUAL, draw_symbols, symbols, minutes=43.3),
    "split": Figure("Softmax heads, relational heads", DUAL, draw_split, split, minutes=14.8),
}
