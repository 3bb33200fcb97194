"""Tables and lines that the command line prints."""

import dataclasses
import inspect
import json
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from polyhead.spec.shapes import check_number
from polyhead.train.messages import print_notice

if TYPE_CHECKING:
    from polyhead.config import Run, Task
    from polyhead.tasks import Score

WIDTH = 120  # if the output is not a terminal
NOVEL = ("compositional", "novel")  # the first of a model's splits that begins with one of them is its "unseen"
FIGURES = """\
polyhead reproduce NAME trains and draws a figure; polyhead train NAME --help says how its runs are made.
small, short, paper: runs at that --scale; core minutes: of all small runs, measured, and of short ones, by steps, in
brackets; figures that have short take it by default, tables small; GPU minutes a run: what the paper states (in all: 24
GPU hours for fuzzy logic, 10 GPU days for SRAVEN)."""
RECIPES = """\
polyhead train NAME trains one, --help after the name tells more; polyhead list figures has the costs of figures."""
LETTERS = """\
m: model width {dim}; h: heads {heads}; d, e: widths of queries and values {each}; s: keys a token looks at {length}
(a causal one sees half of them on average); r: relations {heads}, of width p = {each}."""
MODELS = """\
ph.load("NAME") gives the run and the model, polyhead eval NAME scores it again. A name without its seed is that of the
first seed. unseen: combinations that training did not show. What is not here is downloaded at its first use."""
LISTED = pathlib.Path(__file__).with_name("recipes.json")
Row = Mapping[str, Any]


def say(text: str, code: int) -> int:
    """Print one line on standard error; return the exit code."""
    line = " ".join(text.split())
    print_notice(line if line.startswith("polyhead") else f"polyhead: {line}")
    return code


def table(title: str, rows: Sequence[Row]) -> None:
    """Print `rows`, whose keys are the columns."""
    from rich.console import Console
    from rich.table import Table

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1

    shown = Table(
        title=title, title_justify="left", show_lines=any("\n" in str(v) for row in rows for v in row.values())
    )
    for name in rows[0] if rows else ():
        numbers = all(isinstance(row[name], (int, float)) for row in rows)
        shown.add_column(str(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row.values()))
    width = None if sys.stdout.isatty() else WIDTH
    Terminal(width=width, markup=False, highlight=False, emoji=False).print(shown)


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def scores(run: "Run", found: Mapping[str, Mapping[str, Row]], *, floors: bool = True, seed: int = 0) -> None:
    """Print the task's metric by run and split, with the task's floors and ceiling, or why there are none."""
    metric = run.task.metric
    splits = list(dict.fromkeys(split for by_split in found.values() for split in by_split))
    rows = [{"": name, **{s: _score(by_split.get(s), metric) for s in splits}} for name, by_split in found.items()]
    missing = ""
    if floors and (offered := getattr(run.task, "floors", None)):
        try:
            tables = {split: offered(split, seed=seed) for split in splits}
        except ValueError as error:  # the ceiling of a large family cannot be enumerated
            tables, missing = {}, f"No floors and ceiling: {error}\n"
        for name in next(iter(tables.values()), {}):
            cells = {s: _measured(tables[s][name]) for s in splits}
            rows.append({"": name.replace("_", " "), **cells})
    low = "; lower is better" if run.task.better == "lower" else ""
    table(f"{metric} (mean ± standard error over {run.task.items}{low}) on {run.task.name}", rows)
    print(missing, end="")


def _measured(score: "Score") -> str:
    """A floor or the ceiling as text; without an error if it is exact."""
    return f"{score.mean:.3f} ± {score.standard_error:.3f}" if score.count else f"{score.mean:.3f}"


def _score(row: Row | None, metric: str) -> str:
    return "" if row is None else f"{row[metric]:.3f} ± {row[f'{metric}_se']:.3f}"


def recipes() -> list[Row]:
    """Recipes of single runs, those of users first; `families` has the recipes of figures."""
    from polyhead.config.extensions import added

    ours = _listed()["recipes"]
    names = {row["recipe"] for row in ours}
    return [_recipe(name, made) for name, made in added("recipes").items() if name not in names] + ours


def families() -> list[Row]:
    """The recipes of figures, one row per paper or kind."""
    return _listed()["families"]


def _listed() -> dict[str, list[Row]]:
    """The stored list of our recipes and figures: making their runs, or importing torch, would take seconds."""
    found: dict[str, list[Row]] = json.loads(LISTED.read_text(encoding="utf-8"))
    return found


def listed_now(figures: Collection[str] = ()) -> dict[str, list[Row]]:
    """The contents of recipes.json: `python -c "from polyhead.cli import text; text.write_listed()"` writes it.

    `figures`: only these, because all figures have thousands of runs.
    """
    from polyhead.papers.recipes import FAMILIES, RECIPES, STUDIES

    own = [_recipe(name, function) for name, function in RECIPES.items() if name not in STUDIES]
    figures_of: list[Row] = [
        {"figures of": family, "recipes": len(names), "names": ", ".join(names)} for family, names in FAMILIES.items()
    ]
    return {"recipes": own, "families": figures_of, "figures": _figures(figures)}


def write_listed() -> None:
    LISTED.write_text(json.dumps(listed_now(), indent=1) + "\n", encoding="utf-8")


def _recipe(name: str, function: object) -> Row:
    assert callable(function)
    made = function()
    runs = made if isinstance(made, (list, tuple)) else (made,)
    row = {"recipe": name, "runs": len(runs), "steps": runs[0].train.steps, "core minutes": _minutes(name)}
    return {**row, "what": _what(function)}


def _what(thing: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def figures() -> list[Row]:
    """The figures of the papers, with their costs."""
    return _listed()["figures"]


def _figures(some: Collection[str]) -> list[Row]:
    from polyhead.papers.recipes import STUDIES
    from polyhead.papers.reproduce import FIGURES

    rows: list[Row] = []
    for name, figure in FIGURES.items():
        if some and name not in some:
            continue
        trained = name in STUDIES
        rows.append(
            {
                "figure": name,
                "what": figure.title,
                "small": len(STUDIES[name]("small")) if trained else 0,
                "core minutes": _minutes(name) if trained else "",
                "short": f"{len(STUDIES[name]('short'))} ({_estimate(name)})" if figure.short else "",
                "paper": len(STUDIES[name]("paper")) if trained else 0,
                "GPU minutes a run": figure.gpu,
            }
        )
    return rows


def _minutes(name: str) -> str:
    """The measured minutes of all runs of a recipe."""
    from polyhead.papers.recipes import MINUTES

    return f"{MINUTES[name]:.3g}" if name in MINUTES else _estimate(name)


def _estimate(name: str) -> str:
    """The minutes of the runs at scale `short`, estimated from their steps."""
    from polyhead.papers.recipes import short_minutes

    minutes = short_minutes(name)
    return "not measured" if minutes is None else f"{minutes:.3g}"


def tasks() -> list[Row]:
    from polyhead.config.extensions import added
    from polyhead.tasks import KINDS

    rows: list[Row] = []
    for kind in (*KINDS, *cast("dict[str, type[Task]]", added("tasks")).values()):
        fields = dataclasses.fields(kind)
        needy = any(f.init and f.default is f.default_factory for f in fields)  # both are MISSING
        task = None if needy else kind()
        row = {"task": kind.__name__, "what": _what(kind), "splits": ", ".join(task.splits) if task else "not known"}
        told = ", ".join(f"{f.name}={getattr(task, f.name)!r}" if task else f.name for f in fields)
        rows.append({**row, "metric": kind.metric, "fields": told})
    return rows


def mechanisms(dim: int, heads: int, length: int) -> tuple[list[Row], str]:
    """Equations, parameters and work of all mechanisms, and the meaning of the letters.

    The numbers are for a layer with `heads` heads of one kind, default widths and relations, and a sequence of `length`
    tokens.
    """
    from polyhead.config.extensions import added
    from polyhead.spec import MECHANISMS, SYMBOLS, amount

    for name, value in (("dim", dim), ("heads", heads), ("length", length)):
        check_number("polyhead list", f"--{name}", value, 1)
    if dim % heads:
        raise ValueError(f"polyhead list: --heads must divide --dim {dim} but is {heads}")
    sizes = {"m": dim, "h": heads, "s": length, "r": heads}
    sizes |= dict.fromkeys("dep", dim // heads)

    def cell(formula: str, symbols: str, how_often: str) -> str:
        value = amount(formula, sizes)
        lines = [formula, f"= {value:,}; {heads} heads: {heads * value:,}"]
        if symbols:
            lines.append(f"symbols, {how_often}:\n{symbols} = {amount(symbols, sizes):,}")
        return "\n".join(lines)

    rows: list[Row] = []
    for m in MECHANISMS:
        own = [f"{name}: {axes}" for name, axes in m.parameters.items()]
        text = "\n".join([m.equation, f"{m.summary} ({m.source})", *own])
        size, work = (SYMBOLS[name] if m.reads_symbols else "" for name in ("size", "work"))
        row = {
            "mechanism": m.config,
            "equation": text,
            "parameters per head": cell(m.size, size, "once for all layers"),
        }
        rows.append({**row, "multiply-adds per head and token": cell(m.work, work, "every layer")})
    for name, kind in added("mechanisms").items():
        rows.append({"mechanism": name, "equation": _what(kind)} | dict.fromkeys(list(rows[0])[2:], "not known"))
    return rows, LETTERS.format(dim=dim, heads=heads, length=length, each=dim // heads)


def impls() -> list[Row]:
    from polyhead.ops.native import library
    from polyhead.ops.registry import IMPLS

    told = "impls, in the order auto asks them"
    state = {op: library.status(op) if "native" in names else "" for op, names in IMPLS.items()}
    return [{"op": op, told: ", ".join(names), "native": state[op]} for op, names in IMPLS.items()]


def models() -> list[Row]:
    from polyhead.train.store import shipped

    def scored(model: shipped.Model, split: str) -> str:
        return f"{model['metric']} " + "{:.3f} ± {:.3f}".format(*model["scores"][split])

    return [
        {
            "model": name,
            "task": model["task"],
            "known": scored(model, "iid"),
            "unseen": next((scored(model, split) for split in model["scores"] if split.startswith(NOVEL)), "–"),
            "steps": f"{model['steps']:,}",
            "parameters": f"{model['parameters']:,}",
            "MB": f"{model['bytes'] / 1e6:.1f}",
            "here": "yes" if shipped.at_hand(name) else "no",
        }
        for name, model in shipped.models().items()
    ]
