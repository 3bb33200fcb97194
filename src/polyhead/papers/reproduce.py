"""Every figure and table of Schug et al. 2024, and the dual-attention study, as one command: train or go on, draw,
compare with the paper, say what holds.

`reproduce("table-a1", "small")` is `polyhead reproduce table-a1 --scale small`.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyhead.config import Run, digest, to_dict
from polyhead.papers.dual import curves as dual_curves, tables as dual_tables
from polyhead.papers.hyla import claims, codes as code_figures, curves, tables
from polyhead.papers.language import curves as lm_curves
from polyhead.papers.outcome import Outcome
from polyhead.papers.recipes import STUDIES, default_scale
from polyhead.papers.sizes import SCALES
from polyhead.papers.study import AXES, Study
from polyhead.scale.population import training as together
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.jobs import sweep
from polyhead.spec.shapes import one_of
from polyhead.train import Result
from polyhead.train.device import pick_device
from polyhead.train.store.folder import environment, write

FORMAT = 1
"""Of results.json: another number is another layout."""
RESULTS, PAGE = "results.json", "index.html"


@dataclass(frozen=True)
class Figure:
    """What is reproduced: the runs it needs (None: it is a computation) and how it is drawn from them."""

    title: str
    runs: Callable[[str], tuple[Run, ...]] | None
    draw: Callable[..., Outcome]


def _rule(row: dict[str, Any]) -> bool:
    return row["target"] in ("rule", "target value")


def _term(row: dict[str, Any]) -> bool:
    return row["target"].startswith("term")


def _features(scores: Mapping[Any, Any]) -> list[claims.Verdict]:
    return claims.harder(scores, "the number of features")


def _held_out(scores: Mapping[Any, Any]) -> list[claims.Verdict]:
    return claims.harder(scores, "the fraction held out")


_VALUES = ("target value", "rule")


_TERMS = ("target", "function", "term 1", "term 2")

_LISTED = (
    ("fig-2b", "Fig. 2B: terms decoded from the latent code", code_figures.probes("terms", _term)),
    ("fig-2c", "Fig. 2C: compositional generalisation on fuzzy logic", curves.fig_2c),
    ("fig-2d", "Fig. 2D: latent codes on fuzzy logic", code_figures.maps(("target", "term 1"))),
    ("fig-4a", "Fig. 4A: data and width on SRAVEN", curves.scaling("width")),
    ("fig-4a-heads", "Fig. 4A, heads growing with width", curves.scaling("width")),
    ("fig-4b", "Fig. 4B: data and depth on SRAVEN", curves.scaling("depth")),
    ("fig-5a", "Fig. 5A: SRAVEN codes by the value to predict", code_figures.maps(("target value",))),
    ("fig-5b", "Fig. 5B: SRAVEN codes by rule", code_figures.maps(("rule",))),
    ("fig-5c", "Fig. 5C: number of heads", curves.over("heads", claims.heads)),
    ("fig-5d", "Fig. 5D: number of features", curves.over("features", _features)),
    ("fig-5e", "Fig. 5E: similarity of the rules' codes, HYLA", code_figures.similar("hyla")),
    ("fig-5f", "Fig. 5F: rules decoded from the latent code", code_figures.probes("rule", _rule)),
    ("fig-6", "Fig. 6: language modelling", lm_curves.curves(lm_curves.fig_6_claims)),
    ("fig-a2", "Fig. A2: latent codes on fuzzy logic, all layers", code_figures.maps(_TERMS, layers="all")),
    ("fig-a3", "Fig. A3: fuzzy logic, all scores", curves.fig_a3),
    ("fig-a4", "Fig. A4: training loss when scaling", curves.fig_a4),
    ("fig-a5", "Fig. A5: fraction held out on SRAVEN", curves.over("held out", _held_out)),
    ("fig-a6", "Fig. A6: SRAVEN codes, all layers", code_figures.maps(_VALUES, layers="all")),
    ("fig-a7", "Fig. A7: codes of a deep softmax model", code_figures.maps(_VALUES, layers="all")),
    ("fig-a8", "Fig. A8: SRAVEN codes, softmax", code_figures.similar("softmax", samples=True)),
    ("fig-a9", "Fig. A9: counts of tasks and instances", tables.fig_a9),
    ("games", "Relational games: learning curves", dual_curves.games),
    ("sorting", "Object sorting: learning curves", dual_curves.sorting),
    ("order", "Pairwise order", dual_tables.order),
    ("set", "SET", dual_tables.set_cards),
    ("maths", "Mathematics, character by character", dual_tables.maths),
    ("images", "Images", dual_tables.images),
    ("symbols", "Which symbols, positions and relations", dual_tables.symbols),
    ("split", "Softmax heads, relational heads", dual_tables.split),
    ("lm-bytes", "Language models of bytes", lm_curves.curves(lm_curves.bytes_claims)),
    ("lm-long", "A language model of bytes, longer", lm_curves.curves(lm_curves.long_claims)),
    ("dual-lm", "Dual attention in language", lm_curves.dual_lm),
    ("swiglu", "Feed-forward layers with and without a gate", lm_curves.swiglu),
    ("norms", "Norms before and after", lm_curves.norms),
    ("table-a1", "Table A1: model ablations", tables.table_a1),
    ("table-a2", "Table A2: ambiguous instances", tables.table_a2),
    ("table-a3", "Table A3: the grid of settings", tables.table_a3),
)

FIGURES: dict[str, Figure] = {name: Figure(title, STUDIES.get(name), draw) for name, title, draw in _LISTED}
"""Name on the command line -> figure."""


def reproduce(
    figure: str,
    scale: str | None = None,
    *,
    folder: str | pathlib.Path | None = None,
    workers: int | None = None,
    device: str = "auto",
    population: bool | None = None,
    progress: bool = True,
) -> tuple[pathlib.Path, Outcome, tuple[Failure, ...]]:
    """Train the runs of `figure` (those that are not finished), draw it, and write results.json and index.html.

    Everything lies in `folder` (default runs/reproduce/SCALE): the runs, which figures share, and a folder per figure.
    `scale`: by default `short` for figures of fuzzy logic, `small` for the others.
    `population`: train runs of one architecture together (default: on a GPU).  Returns the page, what is on it, and the
    runs that failed, which are left out.
    """
    known = FIGURES[one_of("polyhead reproduce", "figure", figure, FIGURES)]
    from polyhead.papers.page import write_page  # says before the training, not after, that the extra is missing

    scale = one_of("polyhead reproduce", "scale", scale or default_scale(figure), SCALES)
    runs = () if known.runs is None else tuple(replace(run, device=device) for run in known.runs(scale))
    base = pathlib.Path(folder or f"runs/reproduce/{scale}")
    place = base / figure
    check(place / RESULTS)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"reproduce: {place} cannot be made ({error.strerror})") from None
    outcomes: Sequence[Result | Failure] = ()
    if known.runs is not None:
        outcomes = train(runs, base, workers=workers, population=population, progress=progress)
    study = Study.of(figure, scale, base, runs, outcomes)
    if known.runs is None:
        outcome = known.draw(scale, place)
    elif study.points:
        outcome = known.draw(study, place)
    else:
        raise ValueError(f"reproduce: none of the {len(runs)} runs of {figure} finished; {study.failures[0].error}")
    about = _about(figure, known, scale, study, outcome)
    write(place / RESULTS, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())
    return write_page(place / PAGE, known.title, about, outcome), outcome, study.failures


def train(
    runs: Sequence[Run],
    folder: pathlib.Path,
    *,
    workers: int | None = None,
    population: bool | None = None,
    progress: bool = True,
) -> Sequence[Result | Failure]:
    """Side by side in workers, or, on a GPU, all seeds and settings of one architecture at once."""
    if population is None:
        population = bool(runs) and pick_device(runs[0].device).type != "cpu"
    if population:
        return together.train(runs, folder, progress=progress)
    return sweep(runs, folder, workers=workers, progress=progress)


def check(path: pathlib.Path) -> None:
    """Raise a ValueError unless `path` is absent or results of this format: another version's are not overwritten."""
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text())["format"]
    except (ValueError, RecursionError, TypeError, KeyError, OSError):
        found = "none that can be read"
    if found != FORMAT:
        raise ValueError(f"reproduce: {path} has format {found}, not {FORMAT}; choose another --folder or delete it")


def _about(figure: str, known: Figure, scale: str, study: Study, outcome: Outcome) -> dict[str, Any]:
    """results.json: how it was made, every run, and what came of it."""
    return {
        "format": FORMAT,
        "figure": figure,
        "title": known.title,
        "scale": scale,
        "command": f"polyhead reproduce {figure} --scale {scale}",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment(torch.device("cpu")),
        "training_seconds": round(sum(point.result.seconds for point in study.points), 1),
        "verdicts": [dataclasses.asdict(verdict) for verdict in outcome.verdicts],
        "notes": list(outcome.notes),
        "head": list(outcome.head),
        "rows": [list(row) for row in outcome.rows],
        "numbers": outcome.numbers,
        "pictures": [stem for stem, _ in outcome.pictures],
        "failures": [{"name": failure.name, "error": failure.error} for failure in study.failures],
        "runs": [_row(point.run, point.result) for point in study.points],
    }


def _row(run: Run, result: Result) -> dict[str, Any]:
    where = {
        axis: value
        for axis, read in AXES.items()
        if axis not in ("length", "held out") and (value := read(run)) is not None
    }
    train = run.train
    return {
        "name": run.name,
        "digest": digest(run),
        **where,
        "task": to_dict(run.task),
        "seed": run.seed,
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "warmup": train.warmup,
        "steps": train.steps,
        "seconds": round(result.seconds, 1),
        "parameters": result.parameters,
        "device": result.environment.get("device", ""),
        "date": result.environment.get("date", ""),
        "scores": result.scores,
    }
