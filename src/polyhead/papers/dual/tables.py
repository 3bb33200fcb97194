"""The rest of the dual-attention study: objects, maths, images, and the draft's two questions."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from polyhead.analysis import figures
from polyhead.papers.dual import claims as claims_dual
from polyhead.papers.dual.curves import SEEN, Cells, Panel, course, means, size
from polyhead.papers.hyla.claims import Estimate, Verdict, mean
from polyhead.papers.outcome import Outcome, both, numbers, scores, setting_text
from polyhead.papers.study import Cell, Study

SPLIT = {"softmax": "softmax heads alone", "half": "half of them relational"}


def _objects(what: str) -> Callable[[Study, pathlib.Path], Outcome]:
    """A task that classifies objects: its one place is the task itself."""

    def claim(cells: Cells) -> list[Verdict]:
        ((_, by),) = cells.items()
        at = {what: scores(by, "compositional")}
        found = claims_dual.better(what, "dual", ("softmax",), at)
        found += claims_dual.better(what, "abstractor", ("softmax",), at)
        return found + claims_dual.better(what, "corelnet", ("dual",), at)

    columns = (("unseen", "compositional", None), ("validation", "validation", None))
    return course("task", columns, claim, lambda place, model: "a plot")


order = _objects("pairwise order")
set_cards = _objects("SET")


def _short(module: str) -> str:
    return module.partition("__")[2].replace("_", " ")


def _maths_claims(cells: Cells) -> list[Verdict]:
    splits = {"interpolation": "iid", "longer": "compositional", "larger": "novel"}
    at = {name: {_short(m): scores(by, split) for (m,), by in cells.items()} for name, split in splits.items()}
    found = []
    for module, by in at["interpolation"].items():
        found += claims_dual.better(module, "dual", ("softmax",), {module: by})
    found += claims_dual.better("the five modules", "dual", ("softmax-rope",), at["interpolation"])
    found += claims_dual.better("the five modules", "dual", ("abstractor",), at["interpolation"])
    found += claims_dual.better("questions of more parts than in training", "dual", ("softmax",), at["longer"])
    return found + claims_dual.better("larger numbers than in training", "dual", ("softmax",), at["larger"])


def _percent(values: Mapping[str, tuple[float, float]], model: str) -> str:
    if model not in values:
        return "–"
    value, error = values[model]
    return f"{value / 100:.3f}" + ("" if error != error else f" ± {error / 100:.3f}")


maths = course(
    "module",
    (
        ("exact, interpolation", "iid", None),
        ("exact, more parts", "compositional", None),
        ("exact, larger numbers", "novel", None),
        ("characters, interpolation", "iid", "character_accuracy"),
    ),
    _maths_claims,
    lambda place, model: _percent(claims_dual.MATHS[place[0]], model),
)
"""The paper's numbers are characters at interpolation."""


def _images_claims(cells: Cells) -> list[Verdict]:
    at = {str(data): scores(by, "iid") for (data,), by in cells.items()}
    found = claims_dual.better("images", "dual", ("softmax",), at)
    found += claims_dual.better("images", "dual", claims_dual.RELATIVE, at)
    return found + claims_dual.better("images", "dual", ("dual-package",), at)


images = course(
    "data",
    (("accuracy", "iid", None), ("validation", "validation", None)),
    _images_claims,
    lambda place, model: _percent(claims_dual.IMAGES.get(place[0], {}), model),
)


# ----------------------------------------------------------------------------------------------- the draft's questions
def symbols(study: Study, folder: pathlib.Path) -> Outcome:
    """Accuracy by symbols, positions, symmetric or not, and relations: a panel per game and symmetry over relations."""
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
        verdicts=tuple(claims_dual.choices(by_choice)),
        notes=(*notes_, *_floor_notes(cells, games), _settings(cells)),
        numbers={", ".join(map(str, place)): numbers(cell.score("iid")) for place, cell in cells.items()},
    )


def _choice(place: tuple[Any, ...]) -> str:
    kind, positions, symmetric, count = place
    return f"symbols {kind}, {positions} positions, {'symmetric' if symmetric else 'not symmetric'}, {count} relations"


def _over_games(cells: Mapping[tuple[Any, ...], Cell], games: list[str], split: str) -> dict[Any, Estimate]:
    """The mean over the games of every choice that all of them have."""
    places = dict.fromkeys(place[1:] for place in cells)
    whole = [place for place in places if all((game, *place) in cells for game in games)]
    return {place: mean([cells[game, *place].score(split) for game in games]) for place in whole}


def _choice_rows(
    cells: Mapping[tuple[Any, ...], Cell], games: list[str], order_: list[tuple[Any, ...]]
) -> list[tuple[str, ...]]:
    """The best on validation data first."""
    rows = []
    for place in order_:
        mine = [cells[game, *place] for game in games]
        kind, positions, symmetric, count = place
        values = [str(cell.score("iid")) for cell in mine]
        validation = str(mean([cell.score("validation") for cell in mine]))
        rows.append((kind, positions, "yes" if symmetric else "no", str(count), *values, validation, *size(mine[0])))
    return rows


def _floors(cells: Mapping[tuple[Any, ...], Cell], game: str) -> dict[str, float]:
    """What needs no relation, of pentominoes."""
    return means({place: cell for place, cell in cells.items() if place[0] == game}, "iid")


def _floor_notes(cells: Mapping[tuple[Any, ...], Cell], games: list[str]) -> tuple[str, ...]:
    """In words, where rows are of choices and columns of games."""
    each = [f"{game}, {name.lower()}: {value:.3f}" for game in games for name, value in _floors(cells, game).items()]
    return (f"Floors without a network: {'; '.join(each)}.",) if each else ()


def _settings(cells: Mapping[Any, Cell]) -> str:
    return f"Settings: {'; '.join(sorted({setting_text(cell) for cell in cells.values()}))}."


def split(study: Study, folder: pathlib.Path) -> Outcome:
    """Accuracy over the number of heads, all softmax or half relational; and over the relational ones of four."""
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
        verdicts=tuple(claims_dual.splits({place[0]: e for place, e in _over_games(cells, games, "iid").items()})),
        notes=(*_floor_notes(cells, games), _settings(cells)),
        numbers={f"{game}, {s} + {r}": numbers(cell.score("iid")) for (game, (s, r)), cell in cells.items()},
    )


def _split_rows(cells: Mapping[tuple[Any, ...], Cell], games: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for softmax, relational in sorted(dict.fromkeys(place[1] for place in cells), key=lambda at: (sum(at), at[1])):
        mine = [cells.get((game, (softmax, relational))) for game in games]
        values = ["–" if cell is None else str(cell.score("iid")) for cell in mine]
        sizes = size(next(cell for cell in mine if cell is not None))
        rows.append((str(softmax), str(relational), *values, *sizes))
    return rows
