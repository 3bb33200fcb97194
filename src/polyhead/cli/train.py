"""The commands train and resume, and the runs of a recipe with changed fields."""

import argparse
import contextlib
import inspect
import io
import itertools
import math
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli import files
from polyhead.cli.options import RunFolder
from polyhead.cli.output import Row, emit, write, write_error, write_table
from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.scale.sweep import Failure
    from polyhead.train import Result

# ---------------------------------------------------------------------------------------------------- the command train
RECIPE_HELP = "A name of `polyhead list recipes`, or a .json or .yaml file."
RecipeName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help=RECIPE_HELP)]


def train(recipe: RecipeName, *, scale: str | None = None, print: bool = False) -> int:
    """Train a recipe or a configuration file, with changed fields.  A recipe of several runs trains all of them.

    `polyhead train RECIPE --help` lists the fields of the run.  --model.heads sets the heads of all layers in one word.

    examples:
      polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3
      polyhead train fuzzy-hyla --model.heads softmax:4,hyla:4
      polyhead train fuzzy-hyla --print > mine.yaml
      polyhead train mine.yaml --folder runs/mine
      polyhead train lm-softmax --devices 8 --parallel sharded

    Args:
        scale: For figures: small, short, paper or smoke.  For fuzzy-softmax, -linear, -hyla: short, paper or original.
        print: Print the run as a file, which you can edit and train, and train nothing.
    """
    # tyro documents this function; its fields are known only with the recipe.
    raise AssertionError("`main` runs this command: its further options are the fields of the recipe")


def main(recipe: str, words: list[str]) -> int:
    """`polyhead train RECIPE ...`."""
    import yaml

    from polyhead.config import to_dict

    options, words = split_options("train", words, "print")
    runs, training = configure("train", recipe, [words], options.scale, [options.heads])
    if options.print:
        if len(runs) != 1:
            raise ValueError(f"polyhead train: --print is for one run but {recipe} has {len(runs)}")
        settings = to_dict(runs[0])
        text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)
        emit(settings, write, text.rstrip("\n"))
        return 0
    return train_runs(runs, again=training.again, workers=training.workers, devices=training.devices)


# -------------------------------------------------------------------------------------------------------------- options
def split_options(verb: str, words: Sequence[str], flag: str) -> tuple[argparse.Namespace, list[str]]:
    """Take --scale, --model.heads and the switch `flag` from `words`; return their values and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--scale")
    parser.add_argument("--model.heads", dest="heads")
    parser.add_argument(f"--{flag}", action="store_true")
    try:
        return parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(f"polyhead {verb}: {error}") from None


def configure(
    verb: str,
    recipe: str,
    combinations: Sequence[list[str]],
    scale: str | None = None,
    heads: Sequence[str | None] = (None,),
    make_options: Any = None,
) -> tuple[list["Run"], Any]:
    """Return the runs of a recipe with each of the `combinations` of fields and of `heads`, and the other options."""
    from polyhead.papers.recipes import reseeded

    defaults, help_text = resolve(verb, recipe, scale)
    if make_options is None:
        make_options = training_options()
    runs: list[Run] = []
    options = make_options(defaults[0])  # their defaults, if no words change them
    for head_word in heads:
        bases = defaults
        if head_word is not None:
            bases = [_with_heads(verb, run, head_word) for run in defaults]
        for words in combinations:
            if not words:
                runs += bases
                continue
            changed, old_seeds, new_seeds = [], [], []
            for base in bases:
                options = parse_fields(make_options(base), words, f"polyhead {verb} {recipe}", help_text)
                run = options.run
                if run.task != base.task:
                    run = files.fit_model(run, base)
                changed.append(run)
                old_seeds.append(base.seed)
                new_seeds.append(run.seed)
            # `--seed 3` moves the seeds of a recipe that has several, 0 and 1 to 3 and 4: one seed would repeat runs.
            moves_seeds = len(set(old_seeds)) > 1 and new_seeds != old_seeds
            for run, old_seed in zip(changed, old_seeds, strict=True):
                if moves_seeds:
                    run = reseeded(replace(run, seed=old_seed), run.seed)
                runs.append(run)
    return runs, options


def parse_fields(default: Any, words: list[str], prog: str, description: str) -> Any:
    """Return `default` with the fields that `words` change; --help prints all fields and exits.

    A wrong option is explained by tyro, which exits with 2.

    Raises:
        ValueError: If a configuration refuses a value.
    """
    markers: Any = (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)
    errors = io.StringIO()
    try:
        # tyro prints its box before we know the cause; it is held back, because a refused value gets one line.
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                type(default), default=default, args=words, prog=prog, description=description, config=markers
            )
    except SystemExit as end:
        refusal = _refusal(end)
        if refusal is not None:
            raise ValueError(refusal) from None
        sys.stderr.write(errors.getvalue())
        raise


def _refusal(end: SystemExit) -> str | None:
    """The message of the configuration that refused a value, which tyro wraps in a box; None for tyro's own errors."""
    error = end.__context__
    while error is not None:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, ValueError) and "__post_init__" in functions:
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _with_heads(verb: str, run: "Run", words: str) -> "Run":
    """`run` with other heads in all layers: "softmax:4,hyla:4", or "softmax:4+hyla:4" if commas make a grid."""
    from polyhead.config import TransformerConfig

    if not isinstance(run.model, TransformerConfig):
        kind = type(run.model).__name__
        raise ValueError(f"polyhead {verb}: --model.heads is for a transformer but {run.name} is a {kind}")
    groups = files.read_heads(words, f"polyhead {verb}: --model.heads", like=files.heads_of(run))
    return replace(run, model=replace(run.model, heads=groups))


def training_options() -> Any:
    """The options of `train` beside the fields of a run.  Made when used: other commands need no Run."""
    from polyhead.config import Run

    @dataclass(frozen=True)
    class Training:
        run: Annotated[Run, tyro.conf.arg(name="")]
        again: Annotated[bool, tyro.conf.arg(help="delete the training in the run folder and start over")] = False
        workers: Annotated[int | None, tyro.conf.arg(help="runs at a time; None: one per core")] = None
        devices: Annotated[int, tyro.conf.arg(help="processes that train one run together, one per device")] = 1

    return Training


# ---------------------------------------------------------------------------------------------------- recipes and files
def resolve(verb: str, recipe: str, scale: str | None, outer: tuple[str, ...] = ()) -> tuple[list["Run"], str]:
    """Return the runs of a recipe or a file, and the help text.  `outer`: the files that start from it."""
    from polyhead.config import check_run
    from polyhead.extensions import with_added
    from polyhead.papers.recipes import RECIPES, SINGLE, STUDIES, default_scale

    if scale is not None and recipe not in STUDIES | SINGLE:
        names = ", ".join(SINGLE)
        raise ValueError(f"polyhead {verb}: --scale is for the recipes of figures and {names}, not for {recipe}")
    if recipe.endswith(files.SUFFIXES):

        def resolve_base(name: str) -> "list[Run]":
            return resolve(verb, name, None, (*outer, recipe))[0]

        return [files.read_run(recipe, resolve_base, outer)], f"Train the run in {recipe}."
    recipes = with_added("recipes", RECIPES, "recipes")
    name = one_of(f"polyhead {verb}", "recipe", recipe, recipes)
    if scale is None and name in STUDIES:
        scale = default_scale(name)
    runs = recipes[name]() if scale is None else recipes[name](scale)
    help_text = inspect.getdoc(recipes[name]) or ""
    runs = list(runs) if isinstance(runs, (list, tuple)) else [runs]
    if not runs:
        raise ValueError(f"polyhead {verb}: the recipe {name} has no runs")
    for run in runs:
        check_run(f"polyhead {verb}: the recipe {name}", run)
    return runs, help_text


# --------------------------------------------------------------------------------------------------- the command resume
def resume(run: RunFolder, device: str | None = None, devices: int = 1) -> int:
    """Resume a run that was stopped or killed; a finished run is only reported.

    examples:
      polyhead resume runs/fuzzy-hyla-1a2b3c4d5e6f

    Args:
        device: auto, cpu, cuda or mps; None takes the run's.
        devices: Processes that train the run together, one per device; the number may differ from before.
    """
    from polyhead.train import read_config

    config = read_config(run)
    config = replace(config, device=device or config.device)
    return train_runs([config], resume=True, devices=devices)


# ------------------------------------------------------------------------------------------------ training and printing
def train_runs(
    runs: Sequence["Run"], *, resume: bool = False, again: bool = False, workers: int | None = None, devices: int = 1
) -> int:
    """Train one run on one or several devices, or several runs in parallel; print scores, return the exit code."""
    from polyhead.scale.sweep.jobs import sweep
    from polyhead.scale.sweep.naming import labels
    from polyhead.train.store.folder import Result
    from polyhead.train.trainer import run

    if len(runs) > 1 and devices != 1:
        raise ValueError(f"polyhead train: --devices is for one run but there are {len(runs)}")
    if len(runs) == 1 and workers is not None:
        raise ValueError("polyhead train: --workers is for several runs but there is 1; its processes are --devices")
    outcomes: Sequence[Result | Failure]
    if devices != 1:
        from polyhead.train import launch

        outcomes = [launch.train(runs[0], devices, resume=resume, again=again)]
    elif len(runs) > 1:
        outcomes = sweep(runs, runs[0].folder or "runs", workers=workers, again=again)
    else:
        outcomes = [run(runs[0], resume=resume, again=again)]
    results: dict[str, Result] = {}
    tables: dict[str, tuple[Run, dict[str, Any]]] = {}  # one for each task, which has its own metric
    for name, config, outcome in zip(labels(runs), runs, outcomes, strict=True):
        if isinstance(outcome, Result):
            results[name] = outcome
            _, scores = tables.setdefault(config.task.name, (config, {}))
            scores[name] = outcome.scores

    def show() -> None:
        for config, scores in tables.values():
            write_scores(config, scores, seed=None)
        for name, result in results.items():
            size = f"{result.parameters:,} parameters"
            write(f"{name}: {result.steps} steps, {result.seconds:.0f} s, {size}, {result.folder}")

    emit(list(map(vars, results.values())), show)
    return write_failures(outcomes)


def write_failures(outcomes: Iterable["Result | Failure"]) -> int:
    """Print a line for each failure; return the exit code."""
    from polyhead.scale.sweep import Failure

    code = 0
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            code = write_error(f"{outcome.name} failed: {outcome.error} (log in {outcome.folder})", 1)
    return code


def write_scores(run: "Run", scores: Mapping[str, Mapping[str, Row]], *, seed: int | None = 0) -> None:
    """Print the task's metric by run and split; with a seed also its baselines and ceiling; below, what a split is."""
    metric = run.task.metric
    splits = list(dict.fromkeys(itertools.chain(*scores.values())))
    legend = "; ".join(f"{split}: {run.task.split_name(split)}" for split in splits)
    rows: list[Row] = []
    for name, by_split in scores.items():
        row = {"": name, **dict.fromkeys(splits, "")}
        for split, score in by_split.items():
            if metric in score:
                row[split] = f"{score[metric]:.3f} ± {score.get(f'{metric}_se', math.nan):.3f}"
        rows.append(row)
    if seed is not None and hasattr(run.task, "baselines"):
        try:
            rows += _baseline_rows(run.task, splits, seed)
        except ValueError as error:  # the ceiling of a large family cannot be enumerated
            legend += f"\nNo baselines and ceiling: {error}"
    low = "; lower is better" if run.task.better == "lower" else ""
    write_table(f"{metric} (mean ± standard error over {run.task.items}{low}) on {run.task.name}", rows, legend)


def _baseline_rows(task: Any, splits: Sequence[str], seed: int) -> list[Row]:
    """A row for each baseline of a task, by split."""
    from polyhead.tasks.scores import Score

    rows: dict[str, dict[str, str]] = {}
    for split in splits:
        for name, score in task.baselines(split, seed=seed).items():
            if not isinstance(score, Score):
                text = f"baselines must be a Score by name but {name} is {score!r:.60}"
                raise ValueError(f"{type(task).__name__}: {text}")
            row = rows.setdefault(name, {"": name.replace("_", " ")})
            row[split] = f"{score.mean:.3f}"
            if score.count:
                row[split] += f" ± {score.standard_error:.3f}"
    return list(rows.values())
