"""The command line.  Every mistake is one line on standard error and exit code 2; Ctrl-C saves, says so, and is 130.

Verbs import what they need when they run, so that `polyhead --help` is quick.  This is the only file that knows tyro.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from polyhead.cli_text import one_line
from polyhead.shapes import one_of

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.train import Failure, Result

Parsed = TypeVar("Parsed")
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
EXAMPLES = """\
examples:
  polyhead demo                                      train softmax, linear and HYLA heads, compare them, write a report
  polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3
  polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f"""


# ---------------------------------------------------------------------------------------------------------------- verbs
@dataclass(frozen=True)
class Demo:
    """Train and compare attention mechanisms on fuzzy logic, look at their latent code, write the report.

    Takes minutes on a laptop.  Interrupted, the same command goes on where it stopped.

    >>> polyhead demo
    >>> polyhead demo --seed 1 --folder runs/second --workers 1
    """

    folder: Path = Path("runs/demo")
    """Where the runs and report.html go."""
    seed: int = 0
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    deterministic: bool = False
    """Deterministic algorithms only."""
    workers: int | None = None
    """Runs at a time (default: one per core)."""

    def __call__(self) -> int:
        from polyhead import recipes, report
        from polyhead.cli_text import scores
        from polyhead.train import Result
        from polyhead.train.sweep import sweep

        runs = recipes.RECIPES["demo"]()
        where: Any = {"device": self.device, "deterministic": self.deterministic}
        runs = tuple(
            replace(recipes.reseeded(run, self.seed), **where) for run in (runs if isinstance(runs, tuple) else (runs,))
        )
        outcomes = sweep(runs, self.folder, workers=self.workers)
        if done := [outcome for outcome in outcomes if isinstance(outcome, Result)]:
            path = report.write([result.folder for result in done], self.folder / "report.html")
            scores(runs[0], {result.name: result.scores for result in done})
            print(f"report: {path}")
        return _failed(outcomes)


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed; a finished run is only reported.

    >>> polyhead resume runs/fuzzy-hyla-1a2b3c4d5e6f
    """

    run: Folder
    """The run folder."""
    device: str | None = None
    """auto, cpu, cuda or mps (default: the run's own)."""
    seed: int | None = None
    """Only the run's own seed is possible: another seed is another run."""
    deterministic: bool = False
    """Deterministic algorithms only."""

    def __call__(self) -> int:
        from polyhead.train import read_config

        run = read_config(self.run)
        if self.seed not in (None, run.seed):
            raise ValueError(f"resume: {self.run} has seed {run.seed}; another seed is another run: use polyhead train")
        strict = self.deterministic or run.deterministic
        return _train([replace(run, device=self.device or run.device, deterministic=strict)], resume=True)


@dataclass(frozen=True)
class Eval:
    """Score a trained run on the splits of its task, beside the floors and the ceiling of the task.

    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f
    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --splits compositional novel --batches 64
    """

    run: Folder
    """The run folder."""
    splits: tuple[str, ...] = ()
    """Default: all but train and validation."""
    batches: int = 16
    batch_size: int = 128
    seed: int | None = None
    """Of the sequences (default: the run's own, as in training)."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    deterministic: bool = False
    """Deterministic algorithms only."""

    def __call__(self) -> int:
        from polyhead.cli_text import scores
        from polyhead.train import evaluate, load_model

        device = _device(self.device, self.deterministic)
        run, model = load_model(self.run, device)
        for name in ("batches", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"eval: {name} must be at least 1 but is {getattr(self, name)}")
        seed = run.seed if self.seed is None else self.seed
        splits = self.splits or tuple(split for split in run.task.splits if split not in ("train", "validation"))
        size: Any = {"batches": self.batches, "batch_size": self.batch_size}
        found = {s: evaluate(model, run.task, s, seed=seed, device=device, **size) for s in splits}
        scores(run, {run.name: found}, seed=seed)
        return 0


@dataclass(frozen=True)
class Probe:
    """Read the parts of a task off the latent code, layer by layer, on tasks the model has not seen.

    >>> polyhead probe runs/fuzzy-hyla-1a2b3c4d5e6f
    """

    run: Folder
    """The run folder."""
    sequences: int = 4096
    """To fit on, and as many to score on."""
    seed: int = 0
    """Of the sequences."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    deterministic: bool = False
    """Deterministic algorithms only."""

    def __call__(self) -> int:
        from polyhead import analysis
        from polyhead.cli_text import table
        from polyhead.train import read_config

        run = read_config(self.run)
        device = _device(self.device, self.deterministic)
        rows = analysis.probe_run(self.run, sequences=self.sequences, seed=self.seed, device=device)
        table(f"Probes of the latent code: {run.name}", [{**row, "layer": row["layer"] + 1} for row in rows])
        return 0


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about runs: scores with floors, curves, code maps, probes, configurations.

    >>> polyhead report runs/demo/* --out report.html
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders."""
    out: Path = Path("report.html")
    title: str | None = None

    def __call__(self) -> int:
        from polyhead import report
        from polyhead.train import read_config

        folders = [path for path in self.runs if path.is_dir() or not path.exists()]  # runs/* matches report.html too
        if not folders:
            raise ValueError("report: no run folder was given")
        for folder in folders:
            read_config(folder)
        titled: Any = {} if self.title is None else {"title": self.title}
        print(f"report: {report.write(folders, self.out, **titled)}")
        return 0


@dataclass(frozen=True)
class List:
    """Show what there is: recipes, tasks, mechanisms or impls.

    >>> polyhead list recipes
    >>> polyhead list mechanisms
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """recipes, tasks, mechanisms or impls."""

    def __call__(self) -> int:
        from polyhead import cli_text

        what = one_of("polyhead list", "kind", self.what, ("recipes", "tasks", "mechanisms", "impls"))
        cli_text.table(what.capitalize(), getattr(cli_text, what)())
        return 0


class Train:
    """Train a recipe, or a configuration file, with fields changed.  A recipe of several runs trains all of them.

    RECIPE is a name from `polyhead list recipes` or the path of a .json or .yaml file.  Its fields are listed by
    `polyhead train RECIPE --help`.

    >>> polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3
    >>> polyhead train fuzzy-softmax --model.dim 64 --model.heads.0.heads 4 --device cpu --deterministic
    >>> polyhead train mine.yaml --folder runs/mine
    """


VERBS: dict[str, Any] = {
    "demo": Demo,
    "train": Train,
    "resume": Resume,
    "eval": Eval,
    "probe": Probe,
    "report": Report,
    "list": List,
}


# ----------------------------------------------------------------------------------------------------------------- main
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt as stop:
        return _say(str(stop) or "interrupted", 130)
    except ValueError as error:
        return _say(str(error), 2)
    except BrokenPipeError:  # polyhead list recipes | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _say(error.strerror or str(error), 1)
    except SystemExit as leave:  # --help
        return int(leave.code or 0)


def _say(text: str, code: int) -> int:
    line = " ".join(text.split())
    print(line if line.startswith("polyhead") else f"polyhead: {line}", file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from polyhead import __version__

        print(__version__)
        return 0
    verb = one_of("polyhead", "command", arguments[0], VERBS)
    if verb == "train":
        return _train_verb(arguments[1:])
    return _parse(VERBS[verb], arguments[1:], f"polyhead {verb}", _help(VERBS[verb]))()


def _overview() -> str:
    verbs = [f"  {name:<8} {kind.__doc__.splitlines()[0]}" for name, kind in VERBS.items()]
    head = "usage: polyhead COMMAND ...      polyhead COMMAND --help explains one"
    return "\n".join([head, "", "Multi-head attention: train it, compare it, look inside.", "", *verbs, "", EXAMPLES])


def _help(kind: Any) -> str:
    """The docstring of a verb as help text: `>>>` lines are examples."""
    lines = [line.strip() for line in kind.__doc__.strip().splitlines()]
    text = [line for line in lines if not line.startswith(">>>")]
    examples = ["  " + line.removeprefix(">>> ") for line in lines if line.startswith(">>>")]
    return "\n".join([*text, "examples:", *examples])


def _parse(kind: Callable[..., Parsed], arguments: list[str], prog: str, text: str, default: Any = None) -> Parsed:
    """tyro, with its boxed errors turned into one line."""
    options: dict[str, Any] = {"prog": prog, "description": text, "args": arguments}
    options |= {"config": (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)}
    options |= {} if default is None else {"default": default}
    if {"-h", "--help"} & set(arguments):
        return tyro.cli(kind, **options)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, **options)
    except SystemExit:
        raise ValueError(one_line(said.getvalue(), prog)) from None


# ------------------------------------------------------------------------------------------------------------- training
def _train_verb(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        text = f"usage: polyhead train RECIPE [--field value ...]\n\n{_help(Train)}"
        if not arguments:
            raise ValueError("polyhead train: RECIPE is missing; see polyhead list recipes")
        print(text)
        return 0
    from polyhead.recipes import reseeded

    recipe, rest = arguments[0], arguments[1:]
    if recipe.startswith("-"):
        raise ValueError(f"polyhead train: RECIPE comes first but {recipe} came; see polyhead train --help")
    defaults, text = _resolve(recipe)
    kind = _training()
    asked = [_parse(kind, rest, f"polyhead train {recipe}", text, kind(run)) for run in defaults]
    runs = [_fitted(one.run, default) for one, default in zip(asked, defaults, strict=True)]
    if len({default.seed for default in defaults}) > 1 and any(
        run.seed != default.seed for run, default in zip(runs, defaults, strict=True)
    ):  # one seed for all of them would train the same run twice
        runs = [reseeded(replace(run, seed=base.seed), run.seed) for run, base in zip(runs, defaults, strict=True)]
    return _train(runs, again=asked[0].again, workers=asked[0].workers)


def _training() -> Any:
    """The options of `train`: the fields of a Run, and these.  Made on use, as a Run takes torch to import."""
    from polyhead.config import Run

    @dataclass(frozen=True)
    class Training:
        run: Annotated[Run, tyro.conf.arg(name="")]
        again: Annotated[bool, tyro.conf.arg(help="forget what the run folder holds and start over")] = False
        workers: Annotated[int | None, tyro.conf.arg(help="runs at a time (default: one per core)")] = None

    return Training


def _resolve(recipe: str) -> tuple[list["Run"], str]:
    """The runs of a recipe or a file, and the help text."""
    from polyhead.recipes import RECIPES
    from polyhead.train import read_config

    if recipe.endswith((".json", ".yaml", ".yml")):
        return [read_config(recipe)], f"Train the run in {recipe}."
    function = RECIPES[one_of("polyhead train", "recipe", recipe, RECIPES)]
    runs = function()
    return list(runs) if isinstance(runs, tuple) else [runs], function.__doc__ or ""


def _fitted(run: "Run", default: "Run") -> "Run":
    """A changed task changes what the model takes and gives, unless the recipe or the user chose that themselves."""
    model, before = run.model, default.model
    if (before.inputs, before.outputs) == default.task.ends and (model.inputs, model.outputs) == default.task.ends:
        model = replace(model, inputs=run.task.ends[0], outputs=run.task.ends[1])
    if before.max_length == default.task.length and model.max_length == before.max_length:
        model = replace(model, max_length=run.task.length)
    return replace(run, model=model)


def _train(runs: Sequence["Run"], *, resume: bool = False, again: bool = False, workers: int | None = None) -> int:
    from polyhead import train
    from polyhead.cli_text import scores
    from polyhead.train.sweep import sweep

    if len(runs) > 1:
        outcomes = sweep(runs, runs[0].folder or "runs", workers=workers, again=again)
    else:
        outcomes = [train.run(runs[0], resume=resume, again=again)]
    if done := [outcome for outcome in outcomes if isinstance(outcome, train.Result)]:
        scores(runs[0], {result.name: result.scores for result in done}, floors=False)
    for result in done:
        size = f"{result.parameters} parameters"
        print(f"{result.name}: {result.steps} steps, {result.seconds:.0f} s, {size}, {result.folder}")
    return _failed(outcomes)


def _failed(outcomes: Iterable["Result | Failure"]) -> int:
    from polyhead.train import Failure

    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for failure in failures:
        _say(f"{failure.name} failed: {failure.error} (log in {failure.folder})", 1)
    return 1 if failures else 0


def _device(name: str, deterministic: bool = False) -> Any:
    from polyhead.train.trainer import be_deterministic, pick_device

    device = pick_device(name)
    if deterministic:
        be_deterministic()
    return device
