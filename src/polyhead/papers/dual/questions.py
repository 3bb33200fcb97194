"""Two questions about dual attention.  Which symbols, positions and relations work best?  Does the gain from more
softmax heads saturate, while more heads of both kinds keep helping?

Both use the relational games `occurs` and `between` with 1000 training images: dual attention learns them within
minutes, and softmax heads do not.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Estimate, Verdict, above, mean
from polyhead.config import Learned, Position, Rotary, Run, Swiglu, TransformerConfig
from polyhead.papers import outcome
from polyhead.papers.dual.games import SHAPES
from polyhead.papers.dual.models import BY_PLACE, DUAL, SYMBOLS, Relations
from polyhead.papers.dual.shared import model_of, run_of, size as size_of
from polyhead.papers.outcome import (
    SEED_CAPTION,
    Cells,
    Curves,
    Figure,
    FigureOutcome,
    Panel,
    Picture,
    differences,
    scores_of,
)
from polyhead.papers.sizes import Scale, size
from polyhead.papers.study import Study
from polyhead.tasks import RelationalGames

# ---------------------------------------------------------------------------------------------------------------- runs
GAMES = ("occurs", "between")
IMAGES = {"paper": 1000, "small": 1000, "smoke": 32}
RELATIONS = {"paper": (1, 2, 4, 8), "small": (1, 4, 16), "smoke": (1, 4)}
# Numbers of heads; all heads have the same width.
TOTALS = {"paper": (2, 4, 8, 16), "small": (2, 4, 8), "smoke": (2, 4)}


def symbols(scale: str = "small") -> tuple[Run, ...]:
    """Dual attention on two games, by symbols, positions, symmetry and number of relations.

    polyhead reproduce symbols.  Each symbol source with several numbers of symmetric or asymmetric relations and
    learned positions; and with one symmetric relation and RoPE.  All have as many parameters.  In the papers' plots
    symmetric relations learn faster on games; the symbols differ from study to study.
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
            model = model_of(task, "dual", replace(shape, positions=positions), relations)
            row = _name(name, relations, positions)
            if (relations, positions) == (BY_PLACE, Learned()):  # runs of `games` keep their name
                row = "dual"
            runs.append(run_of(f"{game}-{task.examples}-{row}", seed, task, model, shape, shape.grid()[0]))
    return tuple(runs)


def split(scale: str = "small") -> tuple[Run, ...]:
    """More softmax heads, or softmax and relational heads, at equal widths of heads and model; two games.

    polyhead reproduce split.  Small: 2, 4 and 8 heads of width 16, all softmax or half of them relational; and all
    splits of 4 heads.  The numbers of parameters differ, because more heads have more parameters.
    """
    shape = _shape(scale)
    dim = shape.dim // 4
    head_counts = [(total, 0) for total in TOTALS[scale]]
    head_counts += [(total // 2, total // 2) for total in TOTALS[scale]]
    head_counts += [(4 - relational, relational) for relational in range(5)]
    runs = []
    for seed, game in itertools.product(range(shape.seeds), GAMES):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        base = model_of(task, "softmax", shape, BY_PLACE)
        assert isinstance(base, TransformerConfig)
        for softmax, relational in dict.fromkeys(head_counts):
            heads = BY_PLACE.heads(softmax, relational, dim)
            model = replace(base, heads=heads, feedforward=Swiglu(shape.hidden))
            name = f"{game}-{task.examples}-{softmax}+{relational}x{dim}"
            runs.append(run_of(name, seed, task, model, shape, shape.grid()[0]))
    return tuple(runs)


def _shape(scale: str) -> Scale:
    shape = size(SHAPES, scale)
    if scale == "paper":
        return replace(shape, steps=100, seeds=3)
    return shape


def _name(symbol_source: str, relations: Relations, positions: Position) -> str:
    parts = [symbol_source.replace(" ", "-")]
    if not relations.symmetric:
        parts.append("asymmetric")
    return "-".join((*parts, str(relations.relations or 1), type(positions).__name__.lower()))


# -------------------------------------------------------------------------------------------------------------- claims
def choices(scores: Cells) -> list[Verdict]:
    """Return claims about symmetry, number of relations and symbols.

    `scores[symbols, positions, symmetric, relations]`: the mean over the games.  Each part is the effect of one change
    to a setting with learned positions, averaged over all that were trained with and without it.
    """
    learned = scores[scores.index.get_level_values("positions") == "learned"].droplevel("positions")
    claims: dict[str, dict[str, Cells]] = {}

    symmetry = differences(learned.unstack("symmetric", sort=False), True, False)
    claims["symmetric relations learn faster"] = {"symmetric over not, mean of symbols and relations": symmetry}

    counts = sorted(learned.index.unique("relations"))
    by_count = learned.unstack("relations", sort=False)
    parts = {}
    if len(counts) > 1:
        part = f"{counts[-1]} over {counts[0]}, mean of symbols, symmetric or not"
        parts[part] = differences(by_count, counts[-1], counts[0])
    claims["more relations than one per head help"] = parts

    by_symbols = learned.unstack("symbols", sort=False)
    parts = {}
    for kind in by_symbols.columns.drop("by place", errors="ignore"):
        parts[f"over symbols {kind}"] = differences(by_symbols, "by place", kind)
    claims["symbols by place are the best on games"] = parts

    verdicts = []
    for claim, effects in claims.items():
        estimates = {part: mean(effect) for part, effect in effects.items() if len(effect)}
        if estimates:
            verdicts.append(above(claim, estimates))
    return verdicts


def splits(scores: Cells) -> list[Verdict]:
    """Return claims about numbers of heads.  `scores[softmax, relational]`: the mean score over the games."""
    softmax = sorted(total for total, relational in scores.index if not relational)
    halves = sorted(half for half, relational in scores.index if half == relational)
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


# ------------------------------------------------------------------------------------------------------------- drawing
CHOICE = ["symbols", "positions", "symmetric", "relations"]


def draw_symbols(study: Study) -> FigureOutcome:
    """Draw accuracy by number of relations: a panel per game and symmetry, a line per symbol source."""
    cells = study.cells("game", *CHOICE)
    accuracy = scores_of(cells, "iid")
    panels: list[Panel] = []
    for (game, is_symmetric), in_panel in accuracy.groupby(level=["game", "symmetric"], sort=False):
        curves: Curves = {}
        for (_, kind, positions, _, count), estimate in in_panel.items():
            if positions == "learned":
                curves.setdefault(f"symbols {kind}", {})[count] = estimate.by_seed
        panels.append((f"{game}, {symmetry_words(is_symmetric)}", curves, levels_of(cells, game)))
    figure = figures.lines(panels, x_label="relations", y_label="accuracy", log_x=True, limits=(0.4, 1.02), columns=2)

    validation = over_games(scores_of(cells, "validation"))
    best_first = sorted(validation.index, key=lambda choice: -validation[choice].mean)
    rows = []
    for choice in best_first:
        kind, positions, is_symmetric, count = choice
        row = {
            "symbols": kind,
            "positions": positions,
            "symmetric": "yes" if is_symmetric else "no",
            "relations": str(count),
        }
        of_choice = cells.xs(choice, level=CHOICE)
        row |= {f"{game}: pentominoes": str(cell.score("iid")) for game, cell in of_choice.items()}
        rows.append({**row, "validation, mean": str(validation[choice]), **size_of(of_choice.iloc[0])})
    notes = list(notes_of(cells))
    if best_first:
        kind, positions, is_symmetric, count = best_first[0]
        setting = f"symbols {kind}, {positions} positions, {symmetry_words(is_symmetric)}, {count} relations"
        notes.insert(0, f"The best on validation data: {setting}.")
    numbers = accuracy.map(Estimate.as_json).set_axis(map(outcome.condition_text, accuracy.index)).to_dict()
    caption = f"Accuracy by number of relations, learned positions; {SEED_CAPTION}."
    return FigureOutcome([Picture("symbols", caption, figure)], rows, choices(over_games(accuracy)), notes, numbers)


def draw_split(study: Study) -> FigureOutcome:
    """Draw accuracy by number of heads, all softmax or half relational; and by number of relational heads of four."""
    cells = study.cells("game", "softmax heads", "relational heads")
    accuracy = scores_of(cells, "iid")
    panels: list[Panel] = []
    for game, in_panel in accuracy.groupby(level="game", sort=False):
        curves: Curves = {}
        for (_, softmax, relational), estimate in in_panel.items():
            if relational == 0:
                curves.setdefault("Softmax heads alone", {})[softmax] = estimate.by_seed
            if relational == softmax:
                curves.setdefault("Half of them relational", {})[softmax + relational] = estimate.by_seed
        panels.append((game, curves, levels_of(cells, game)))
    figure = figures.lines(panels, x_label="heads", y_label="accuracy", log_x=True, limits=(0.4, 1.02))

    rows: dict[tuple[int, int], dict[str, str]] = {}
    numbers = {}
    for (game, softmax, relational), cell in cells.items():
        row = rows.setdefault(
            (softmax, relational), {"softmax heads": str(softmax), "relational heads": str(relational)}
        )
        row[f"{game}: pentominoes"] = str(cell.score("iid"))
        numbers[f"{game}, {softmax} + {relational}"] = cell.score("iid").as_json()
    for (_, softmax, relational), cell in cells.items():
        rows[softmax, relational] |= size_of(cell)
    fewest_heads_first = sorted(rows, key=lambda heads: (sum(heads), heads[1]))
    caption = f"Accuracy by number of heads, every one as wide; {SEED_CAPTION}."
    return FigureOutcome(
        pictures=[Picture("split", caption, figure)],
        table=list(map(rows.__getitem__, fewest_heads_first)),
        verdicts=splits(over_games(accuracy)),
        notes=list(notes_of(cells)),
        numbers=numbers,
    )


def symmetry_words(is_symmetric: bool) -> str:
    """Return how a figure names symmetric and other relations."""
    return "symmetric" if is_symmetric else "not symmetric"


def over_games(scores: Cells) -> Cells:
    """Return the mean over the games, for each condition that was trained on all games."""
    return scores.unstack("game", sort=False).dropna().apply(mean, axis=1)


def levels_of(cells: Cells, game: str) -> dict[str, Any]:
    """Return chance and the baselines without relations, on pentominoes."""
    return {"chance": 0.5, **outcome.baseline_means(outcome.runs_of(cells[game]), "iid")}


def notes_of(cells: Cells) -> Iterator[str]:
    """Return the baselines, for a table whose rows are not models, and the settings."""
    texts = []
    for game in cells.index.unique("game"):
        for name, value in outcome.baseline_means(outcome.runs_of(cells[game]), "iid").items():
            texts.append(f"{game}, {name.lower()}: {value:.3f}")
    if texts:
        yield f"Baselines without a network: {'; '.join(texts)}."
    yield outcome.settings_note(cells)


FIGURES = {
    "symbols": Figure("Which symbols, positions and relations", DUAL, draw_symbols, symbols, minutes=43.3),
    "split": Figure("Softmax heads, relational heads", DUAL, draw_split, split, minutes=14.8),
}
