"""The verb tune: a search over settings."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli.output import emit
from polyhead.cli.text import say, table
from polyhead.cli.train import configured, first_word, option

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.scale.tune.search import Outcome


def verb(arguments: list[str]) -> int:
    """Search for the best fields of a recipe: Optuna proposes settings, workers train them.

    Give a field a range, LOW:HIGH or LOW:HIGH:log, or a list of values, A,B,C; other fields are fixed.  The score is
    the main metric on split validation if train.evaluate has it, else on its first split.  Trials are ordinary runs
    in --folder (default: runs/tune/NAME), which also has the study.  After an interruption, run it again to resume,
    also on another machine; a larger --trials adds trials.  --sampler: tpe or random.  --prune stops trials that are
    worse than the median (--prune hyperband: by hyperband).  --status only shows the trials.

    >>> polyhead tune fuzzy-hyla --train.lr 1e-4:1e-2:log --train.weight_decay 0:0.3 --trials 40 --workers 2
    >>> polyhead tune fuzzy-hyla --train.lr 1e-4:1e-2:log --model.dim 32,64,128 --train.steps 500 --prune
    """
    recipe, rest = first_word("tune", arguments)
    rest, heads = option("tune", rest, "--model.heads")  # one word with commas, but no list of values
    chosen = [] if heads is None else ["--model.heads", heads]
    kind = tuning()
    helped = bool({"-h", "--help"} & set(rest))
    space, fixed = ({}, rest) if helped else split(_one("tune", recipe, chosen, kind)[0], rest)
    run, options = _one("tune", recipe, [*chosen, *fixed], kind)
    return answer(run, space, options, ["polyhead", "train", recipe, *chosen, *_of_the_run(fixed)])


def answer(run: "Run", space: dict[str, str], options: Any, train: Sequence[str]) -> int:
    """Search, or only read the study; show it and return the exit code."""
    from polyhead.scale.tune import search as tune
    from polyhead.scale.tune.space import words

    folder = run.folder or f"runs/tune/{run.name}"
    if options.status:
        told(tune.status(folder))
        return 0
    trials, workers, sampler, prune = options.trials, options.workers, options.sampler, options.prune
    outcome = tune.tune(run, space, folder=folder, trials=trials, workers=workers, sampler=sampler, prune=prune)
    told(outcome, [*train, *words(run, outcome.best.values)] if outcome.best is not None else ())
    return 0 if outcome.best is not None else say("no trial has a score", 1)


OPTIONS = ("trials", "workers", "sampler", "prune", "status")


def tuning() -> Any:
    """The options of `tune`: the fields of a Run, and these.  Made when used, so that other commands need no Run."""
    from polyhead.config import Run

    @dataclass(frozen=True)
    class Tuning:
        run: Annotated[Run, tyro.conf.arg(name="")]
        trials: Annotated[int, tyro.conf.arg(help="in total, including earlier calls")] = 20
        workers: Annotated[int, tyro.conf.arg(help="trials at a time")] = 1
        sampler: Annotated[str, tyro.conf.arg(help="tpe or random")] = "tpe"
        prune: Annotated[str | None, tyro.conf.arg(help="median or hyperband: stop worse trials early")] = None
        status: Annotated[bool, tyro.conf.arg(help="only show the trials")] = False

    return Tuning


def _one(verb: str, recipe: str, words: list[str], kind: Any) -> tuple["Run", Any]:
    """The one run of a recipe."""
    runs, options = configured(verb, recipe, [words], kind=kind)
    if len(runs) != 1:
        raise ValueError(f"polyhead {verb}: {recipe} has {len(runs)} runs but a search is for one")
    return runs[0], options


def split(run: "Run", arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The fields with a range or a list, by dotted name, and all other arguments.

    Raises ValueError for an unknown field, and for a field that is given twice.  --prune alone means the median.
    """
    from polyhead.scale.tune.space import is_space, kinds_of

    space: dict[str, str] = {}
    fixed: list[str] = []
    given: list[str] = []
    for word, *values in _by_option(arguments):
        name = word.removeprefix("--").replace("-", "_")
        value = values[0] if values else ""
        if ("," in value or ":" in value) and name not in (*OPTIONS, "folder") and is_space(value, kinds_of(run, name)):
            if name in space:
                raise ValueError(f"tune: {name} is given twice")
            space[name] = value
            fixed += values[1:]
        else:
            given.append(name)
            fixed += ["--prune", "median"] if [word, *values] == ["--prune"] else [word, *values]
    if both := [name for name in given if name in space]:
        raise ValueError(f"tune: {both[0]} is given a value and a range")
    return space, fixed


def _by_option(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments by option: its name, then its values."""
    found: list[list[str]] = []
    for word in arguments:
        if word.startswith("--"):
            found.append(word.split("=", 1))
        elif found:
            found[-1].append(word)
        else:
            found.append([word])
    return found


def _of_the_run(fixed: Sequence[str]) -> list[str]:
    """The arguments that `train` also accepts."""
    ours = {f"--{name}" for name in (*OPTIONS, "folder")}
    return [word for words in _by_option(fixed) if words[0] not in ours for word in words]


def told(outcome: "Outcome", train: Sequence[str] = ()) -> None:
    """The outcome as JSON values."""
    emit(lambda: asdict(outcome), lambda: show(outcome, train))


def show(outcome: "Outcome", train: Sequence[str] = ()) -> None:
    """Print all trials, the best one, and commands for it.  `train`: the command that trains the best, if known."""
    from polyhead.scale.tune.screen import rows

    if outcome.trials:
        table(f"Trials in {outcome.folder}", rows(outcome, outcome.trials))
    if outcome.importance:
        print("importance: " + ", ".join(f"{name} {share:.2f}" for name, share in outcome.importance.items()))
    if (best := outcome.best) is not None:
        print(f"best: trial {best.number}, {outcome.split} {outcome.metric} {best.score:.4f}")
        itself = ["polyhead", "train", f"{best.folder}/config.json", "--folder", f"{best.folder}-anew"]
        print(f"train it again: {shlex.join(train or itself)}")
        print(f"look at it: polyhead report {best.folder}")
