"""The verb train, and functions for all verbs with a recipe and fields of its runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli import files
from polyhead.cli.output import emit
from polyhead.cli.parse import parse
from polyhead.cli.text import say
from polyhead.spec.shapes import one_of
from polyhead.train.stop import leaving

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.scale.sweep import Failure
    from polyhead.train import Result


def verb(arguments: list[str]) -> int:
    """Train a recipe or a configuration file, with changed fields.  A recipe of several runs trains all of them.

    RECIPE is a name from `polyhead list recipes` or the path of a .json or .yaml file.  `polyhead train RECIPE --help`
    lists its fields.  --model.heads sets the heads of all layers in one word; --print only prints the run as a file,
    which you can edit and train.  --scale is for figures and for fuzzy-softmax, -linear and -hyla: short, paper or
    original (the paper's, with the details of its code).

    >>> polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3
    >>> polyhead train fuzzy-softmax --model.dim 64 --model.heads.0.heads 4 --device cpu --deterministic
    >>> polyhead train fuzzy-hyla --model.heads softmax:4,hyla:4
    >>> polyhead train fuzzy-hyla --print
    >>> polyhead train mine.yaml --folder runs/mine
    >>> polyhead train lm-softmax --devices 8 --parallel sharded
    """
    from polyhead.config import to_dict

    recipe, rest = first_word("train", arguments)
    rest, scale = option("train", rest, "--scale")
    runs, options = configured("train", recipe, [[word for word in rest if word != "--print"]], scale)
    if "--print" in rest:
        if len(runs) != 1:
            raise ValueError(f"polyhead train: --print is for one run but {recipe} has {len(runs)}")
        emit(lambda: to_dict(runs[0]), lambda: files.write(runs[0]))
        return 0
    return train(runs, again=options.again, workers=options.workers, devices=options.devices)


def first_word(verb: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The recipe and the remaining arguments."""
    recipe = arguments[0]
    if recipe.startswith("-"):
        raise ValueError(f"polyhead {verb}: RECIPE comes first but {recipe} came; see polyhead {verb} --help")
    return recipe, arguments[1:]


def option(verb: str, arguments: list[str], name: str) -> tuple[list[str], str | None]:
    """The remaining arguments, and the value of option `name`."""
    words = [word for given in arguments for word in (given.split("=", 1) if given.startswith(f"{name}=") else [given])]
    if name not in words:
        return arguments, None
    place = words.index(name)
    if place + 1 == len(words):
        raise ValueError(f"polyhead {verb}: {name} needs a value")
    return words[:place] + words[place + 2 :], words[place + 1]


def configured(
    verb: str, recipe: str, combinations: list[list[str]], scale: str | None = None, kind: Any = None
) -> tuple[list["Run"], Any]:
    """The runs of a recipe with each of the `combinations` of fields, and the other options (of `kind`)."""
    with leaving():
        from polyhead.papers.recipes import reseeded

        defaults, text = _resolve(verb, recipe, scale)
    kind = training() if kind is None else kind
    runs: list[Run] = []
    options = kind(defaults[0])
    for given in combinations:
        words, heads = option(verb, given, "--model.heads")
        bases = defaults if heads is None else [_with_heads(verb, run, heads) for run in defaults]
        if not words:
            runs += bases
            continue
        asked = [parse(kind, words, f"polyhead {verb} {recipe}", text, kind(run)) for run in bases]
        mine = [files.fitted(one.run, base) for one, base in zip(asked, bases, strict=True)]
        if len({base.seed for base in bases}) > 1 and any(
            run.seed != base.seed for run, base in zip(mine, bases, strict=True)
        ):  # the same seed would train the same run twice
            mine = [reseeded(replace(run, seed=base.seed), run.seed) for run, base in zip(mine, bases, strict=True)]
        runs, options = runs + mine, asked[0]
    if verb == "sweep" and options.devices != 1:
        raise ValueError(f"polyhead {verb}: --devices is for one run: polyhead train")
    return runs, options


def _with_heads(verb: str, run: "Run", words: str) -> "Run":
    """`run` with other heads in all layers: "softmax:4,hyla:4", or "softmax:4+hyla:4" if commas make a grid."""
    from polyhead.config import TransformerConfig

    if not isinstance(run.model, TransformerConfig):
        kind = type(run.model).__name__
        raise ValueError(f"polyhead {verb}: --model.heads is for a transformer but {run.name} is a {kind}")
    return replace(run, model=replace(run.model, heads=files.heads(words, f"polyhead {verb}: --model.heads")))


def training() -> Any:
    """The options of `train`: the fields of a Run, and these.  Made when used, so that other commands need no Run."""
    from polyhead.config import Run

    @dataclass(frozen=True)
    class Training:
        run: Annotated[Run, tyro.conf.arg(name="")]
        again: Annotated[bool, tyro.conf.arg(help="delete the training in the run folder and start over")] = False
        workers: Annotated[int | None, tyro.conf.arg(help="runs at a time (default: one per core)")] = None
        devices: Annotated[int, tyro.conf.arg(help="processes that train one run together, one per device")] = 1

    return Training


def _resolve(verb: str, recipe: str, scale: str | None, within: tuple[str, ...] = ()) -> tuple[list["Run"], str]:
    """The runs of a recipe or a file, and the help text.  `within`: the files that start from it."""
    from polyhead.config.extensions import added, kind_of
    from polyhead.papers.recipes import RECIPES, SINGLE, STUDIES, default_scale, every

    if scale is not None and recipe not in STUDIES | SINGLE:
        raise ValueError(
            f"polyhead {verb}: --scale is for the recipes of figures and {', '.join(SINGLE)}, not for {recipe}"
        )
    if recipe.endswith(files.SUFFIXES):
        inner = (*within, recipe)
        return [files.read(recipe, lambda name: _resolve(verb, name, None, inner)[0], within)], (
            f"Train the run in {recipe}."
        )
    recipes = every()
    name = one_of(f"polyhead {verb}", "recipe", recipe, recipes)
    if name in RECIPES and (other := added("recipes").get(name)) is not None:
        raise ValueError(f"polyhead {verb}: {name!r} is a recipe of polyhead; give {kind_of(other)} another name")
    if scale is None and name in STUDIES:
        scale = default_scale(name)
    runs = recipes[name]() if scale is None else recipes[name](scale)
    return list(runs) if isinstance(runs, (list, tuple)) else [runs], recipes[name].__doc__ or ""


def train(
    runs: Sequence["Run"], *, resume: bool = False, again: bool = False, workers: int | None = None, devices: int = 1
) -> int:
    """Train one run on one or several devices, or several runs in parallel; print scores, return the exit code."""
    from polyhead.cli.text import scores
    from polyhead.scale.sweep.jobs import sweep
    from polyhead.scale.sweep.naming import labels
    from polyhead.train import Result, run
    from polyhead.train.device import keep_memory

    if len(runs) > 1 and devices != 1:
        raise ValueError(f"polyhead train: --devices is for one run but there are {len(runs)}")
    outcomes: Sequence[Result | Failure]
    if devices != 1:
        from polyhead.train import launch

        outcomes = [launch.train(runs[0], devices, resume=resume, again=again)]
    elif len(runs) > 1:
        outcomes = sweep(runs, runs[0].folder or "runs", workers=workers, again=again)
    else:
        keep_memory()
        outcomes = [run(runs[0], resume=resume, again=again)]
    names = labels(runs)
    done = {n: outcome for n, outcome in zip(names, outcomes, strict=False) if isinstance(outcome, Result)}

    def show() -> None:
        asked = {name: config for name, config in zip(names, runs, strict=True) if name in done}
        for task in dict.fromkeys(config.task.name for config in asked.values()):  # each has its own metric
            mine = {name: config for name, config in asked.items() if config.task.name == task}
            scores(next(iter(mine.values())), {name: done[name].scores for name in mine}, floors=False)
        for name, result in done.items():
            size = f"{result.parameters:,} parameters"
            print(f"{name}: {result.steps} steps, {result.seconds:.0f} s, {size}, {result.folder}")

    emit(lambda: [vars(result) for result in done.values()], show)
    return failed(outcomes)


def failed(outcomes: Iterable["Result | Failure"]) -> int:
    """Print the failures; return the exit code."""
    from polyhead.scale.sweep import Failure

    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for failure in failures:
        say(f"{failure.name} failed: {failure.error} (log in {failure.folder})", 1)
    return 1 if failures else 0
