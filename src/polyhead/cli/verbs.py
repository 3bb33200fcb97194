"""The command line.  An error is one line on standard error and exit code 2; Ctrl-C saves and gives exit code 130.

Verbs import modules when they run, so that `polyhead --help` is quick.  Only `cli` imports tyro.
"""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli import plan, sweep, train as cli_train, tune
from polyhead.cli.bench import Bench
from polyhead.cli.demo import Demo
from polyhead.cli.explore import Explore
from polyhead.cli.generate import Generate
from polyhead.cli.listing import Compare, List, Table
from polyhead.cli.output import asked, emit, short_warnings, taken
from polyhead.cli.parse import Deterministic, Device, RunFolder, help_text, parse
from polyhead.cli.text import say
from polyhead.cli.train import failed, train
from polyhead.spec.shapes import check_number, one_of
from polyhead.train.stop import INTERRUPTED, Interrupted, Preempted, leaving, requeue
from polyhead.train.store.disk import reason

if TYPE_CHECKING:
    import torch

    from polyhead.scale.sweep import Failure

EXAMPLES = """\
every command:
  --json             print the result as JSON
  --quiet            no progress
  --import MODULE    import MODULE first, with the tasks and recipes that it registers

examples:
  polyhead demo                                      train and compare heads on two tasks, write a report
  polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3
  polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f
  polyhead train my-recipe --import my_module        with tasks and recipes of your own"""


# ---------------------------------------------------------------------------------------------------------------- verbs
@dataclass(frozen=True)
class Resume:
    """Resume a run that was stopped or killed; a finished run is only reported.

    >>> polyhead resume runs/fuzzy-hyla-1a2b3c4d5e6f
    """

    run: RunFolder
    device: str | None = None
    """auto, cpu, cuda or mps (default: the run's own)."""
    seed: int | None = None
    """Only the run's own seed is allowed: another seed is another run."""
    deterministic: Deterministic = False
    devices: int = 1
    """Processes that train the run together, one per device; the number may differ from before."""

    def __call__(self) -> int:
        with leaving(again=True):
            from polyhead.train import read_config

        run = read_config(self.run)
        if self.seed not in (None, run.seed):
            raise ValueError(f"resume: {self.run} has seed {run.seed}; another seed is another run: use polyhead train")
        strict = self.deterministic or run.deterministic
        run = replace(run, device=self.device or run.device, deterministic=strict)
        return train([run], resume=True, devices=self.devices)


@dataclass(frozen=True)
class Eval:
    """Score a trained run on the splits of its task, with the task's floors and ceiling.

    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f
    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --splits compositional novel --batches 64
    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --checkpoint best
    """

    run: RunFolder
    splits: tuple[str, ...] = ()
    """Default: all except train and validation."""
    batches: int = 16
    batch_size: int = 128
    seed: int | None = None
    """Seed of the sequences (default: the run's own, as in training)."""
    device: Device = "auto"
    deterministic: Deterministic = False
    checkpoint: str = "newest"
    """newest, best (on the validation split, or the first evaluated split), or the step of a kept checkpoint."""

    def __call__(self) -> int:
        from polyhead.cli.text import scores
        from polyhead.train import evaluate, fast_products, load_model

        device = _device(self.device, self.deterministic)
        run, model = load_model(self.run, device, self.checkpoint)
        for name in ("batches", "batch_size"):
            check_number("eval", name, getattr(self, name), 1)
        seed = run.seed if self.seed is None else self.seed
        splits = self.splits or tuple(split for split in run.task.splits if split not in ("train", "validation"))
        with fast_products(run.fast_products and device.type == "cpu"):
            found = {
                split: evaluate(
                    model, run.task, split, batches=self.batches, batch_size=self.batch_size, seed=seed, device=device
                )
                for split in splits
            }
        emit(lambda: {"run": run.name, "scores": found}, lambda: scores(run, {run.name: found}, seed=seed))
        return 0


@dataclass(frozen=True)
class Probe:
    """Predict the parts of a task from the latent code of each layer by linear probes, on unseen tasks.

    >>> polyhead probe runs/fuzzy-hyla-1a2b3c4d5e6f
    """

    run: RunFolder
    sequences: int = 4096
    """Sequences to fit a probe, and equally many to score it."""
    seed: int = 0
    """Seed of the sequences."""
    device: Device = "auto"
    deterministic: Deterministic = False

    def __call__(self) -> int:
        from polyhead import analysis
        from polyhead.cli.text import table
        from polyhead.train import fast_products, read_config

        run = read_config(self.run)
        device = _device(self.device, self.deterministic)
        with fast_products(run.fast_products and device.type == "cpu"):
            rows = analysis.probe_run(self.run, sequences=self.sequences, seed=self.seed, device=device)
        title, counted = f"Probes of the latent code: {run.name}", [{**row, "layer": row["layer"] + 1} for row in rows]
        emit(lambda: counted, lambda: table(title, counted))
        return 0


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about runs: scores, floors, curves, attention, relations, code maps, probes.

    >>> polyhead report runs/demo/* --out report.html
    >>> polyhead report runs/demo/* --static figures
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders."""
    out: Path = Path("report.html")
    title: str | None = None
    static: Path | None = None
    """A folder for all figures as PNG and SVG files."""

    def __call__(self) -> int:
        from polyhead.pages import report
        from polyhead.train import fast_products, read_config

        folders = [path for path in self.runs if path.is_dir() or not path.exists()]  # runs/* also matches report.html
        if not folders:
            raise ValueError("report: no run folder was given")
        runs = [read_config(folder) for folder in folders]
        with fast_products(all(run.fast_products for run in runs)):
            path = report.write(folders, self.out, title=self.title, static=self.static)
        emit(lambda: {"report": str(path)}, lambda: print(f"report: {path}"))
        return 0


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of a paper: train its runs, draw it with the paper's numbers, judge its claims.

    After an interruption, run it again to resume; figures share runs.  --scale small takes minutes on two CPU cores.
    short (fuzzy logic only) has the paper's network and rate with 15,000 steps, and takes hours.  paper has the paper's
    settings.  smoke only tests that everything runs.  Costs: `polyhead list figures`.

    >>> polyhead reproduce table-a1 --scale small
    >>> polyhead reproduce fig-2c --workers 2
    >>> polyhead reproduce fig-2c --from docs/results/small/fig-2c --folder redrawn
    """

    figure: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FIGURE")]
    """A name from `polyhead list figures`."""
    scale: str | None = None
    """small, short, paper or smoke (default: short for the figures of fuzzy logic, small for the others)."""
    seeds: int | None = None
    """How many seeds, from 0 (default: those of the scale, mostly three).  A verdict takes five."""
    published: Path | None = None
    """The folder with the published files of relational games or mathematics, in place of generated data."""
    folder: Path | None = None
    """The folder for runs and results (default: runs/reproduce/SCALE)."""
    workers: int | None = None
    """Runs at a time (default: one per core)."""
    device: Device = "auto"
    population: bool | None = None
    """Train runs of one architecture together in one process (default: on a GPU)."""
    results: Annotated[Path | None, tyro.conf.arg(name="from", metavar="RESULTS")] = None
    """Train nothing: redraw and judge again from this results.json, or its folder."""

    def __call__(self) -> int:
        from polyhead.cli.text import table
        from polyhead.papers.redraw import redraw
        from polyhead.papers.reproduce import reproduce

        failures: Sequence[Failure] = ()
        if self.results is not None:
            given = [
                n for n in ("scale", "seeds", "published", "workers", "population") if getattr(self, n) is not None
            ]
            given += ["device"] * (self.device != "auto")
            if given:
                raise ValueError(f"polyhead reproduce: --from trains nothing, so --{given[0]} has no effect")
            page, outcome = redraw(self.results, self.folder, figure=self.figure)
        else:
            page, outcome, failures = reproduce(
                self.figure, self.scale, folder=self.folder, workers=self.workers, device=self.device,
                population=self.population, seeds=self.seeds, published=self.published,
            )  # fmt: skip
        rows = [dict(zip(outcome.head, row, strict=True)) for row in outcome.rows]

        def show() -> None:
            if rows:
                table(self.figure, rows)
            for verdict in outcome.verdicts:
                print(verdict)
            print(f"page: {page}")

        emit(lambda: {"page": page, "rows": rows, "verdicts": [str(one) for one in outcome.verdicts]}, show)
        return failed(failures)


@dataclass(frozen=True)
class Completion:
    """Print the script that completes commands, recipes, figures and options in a shell; or install it.

    >>> polyhead completion bash --install
    >>> polyhead completion fish
    """

    shell: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash, zsh or fish."""
    install: bool = False
    """Write the script to the path where the shell looks for it, and print the path."""

    def __call__(self) -> int:
        from polyhead.cli.completion import place, script
        from polyhead.train.store.files import check_place

        text = script(self.shell, VERBS)
        if not self.install:
            emit(lambda: {"script": text}, lambda: print(text, end=""))
            return 0
        path, then = place(self.shell)
        check_place("polyhead completion", path)
        path.write_text(text, encoding="utf-8")
        emit(lambda: {"completion": str(path)}, lambda: print(f"completion: {path}; {then}"))
        return 0


VERBS: dict[str, Any] = {
    "demo": Demo,
    "train": cli_train.verb,
    "sweep": sweep.verb,
    "tune": tune.verb,
    "plan": plan.verb,
    "reproduce": Reproduce,
    "resume": Resume,
    "eval": Eval,
    "probe": Probe,
    "report": Report,
    "compare": Compare,
    "table": Table,
    "explore": Explore,
    "generate": Generate,
    "bench": Bench,
    "list": List,
    "completion": Completion,
}


# ----------------------------------------------------------------------------------------------------------------- main
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console without "²" shows "?"; standard error escapes it
    try:
        if modules := _modules(arguments):
            from polyhead.config.extensions import bring

            bring(modules)
        with asked(taken(arguments)), short_warnings():
            return _answer(arguments)
    except Interrupted as stop:
        goes_on = arguments[0] in ("resume", "sweep") and "--again" not in arguments  # the same command resumes
        code = say(str(stop), stop.code)
        again = requeue() if isinstance(stop, Preempted) and goes_on else ""
        return say(again, code) if again else code
    except KeyboardInterrupt:
        return say("interrupted", INTERRUPTED)
    except ValueError as error:
        return say(str(error), 2)
    except BrokenPipeError:  # polyhead list recipes | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return say(reason(error), 1)


def _modules(arguments: list[str]) -> list[str]:
    """The modules of every `--import MODULE`, which is removed from `arguments`."""
    found = []
    while (at := next((i for i, x in enumerate(arguments) if x.partition("=")[0] == "--import"), None)) is not None:
        _, given, module = arguments.pop(at).partition("=")
        if not given and at == len(arguments):
            raise ValueError("polyhead: --import needs the name of a module")
        found.append(module if given else arguments.pop(at))
    return found


def _answer(arguments: list[str]) -> int:
    """Run one command and write all that it printed: a pipe that is closed is noticed here."""
    try:
        code = _dispatch(arguments)
    except SystemExit as leave:  # --help
        code = int(leave.code or 0)
    sys.stdout.flush()
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from polyhead import __version__

        print(__version__)
        return 0
    name, rest = one_of("polyhead", "command", arguments[0], VERBS), arguments[1:]
    verb, prog = VERBS[name], f"polyhead {name}"
    if isinstance(verb, type):
        return parse(verb, rest, prog, help_text(verb))()
    if not rest:
        raise ValueError(f"{prog}: RECIPE is missing; see polyhead list recipes")
    if rest[0] not in ("-h", "--help"):
        return verb(rest)
    print(f"usage: {prog} RECIPE [--field value ...]\n\n{help_text(verb)}")
    return 0


def _overview() -> str:
    verbs = [f"  {name:<10} {verb.__doc__.splitlines()[0]}" for name, verb in VERBS.items()]
    head = "usage: polyhead COMMAND ...      polyhead COMMAND --help explains one"
    return "\n".join([head, "", "Multi-head attention: train it, compare it, look inside.", "", *verbs, "", EXAMPLES])


def _device(name: str, deterministic: bool = False) -> "torch.device":
    from polyhead.train.device import be_deterministic, pick_device

    device = pick_device(name)
    if deterministic:
        be_deterministic()
    return device
