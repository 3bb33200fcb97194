"""The command sweep: many runs in parallel, here or on a cluster."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli.output import emit
from polyhead.cli.train import RecipeName, configure, split_options, training_options, write_failures

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.scale.sweep import Failure
    from polyhead.train import Result

# ---------------------------------------------------------------------------------------------------- the command sweep
SINGLE_VALUES = ("--folder", "--partition")
"""Options whose value may contain commas: Slurm takes a list of partitions."""


def sweep(recipe: RecipeName, *, scale: str | None = None, status: bool = False) -> int:
    """Train many runs in parallel, on this machine or a cluster; show which are done, running, failed and waiting.

    A field with several values, separated by commas, makes a grid; in a sweep a Boolean field takes True or False.
    After an interruption, run the same command again.

    examples:
      polyhead sweep fuzzy-hyla --seed 0,1,2 --train.lr 1e-3,3e-3 --workers 2
      polyhead sweep table-a1 --scale small --status
      polyhead sweep mine.yaml --seed 0,1,2 --ray 10.0.0.1:6379 --gpus 0.5
      polyhead sweep mine.yaml --seed 0,1,2 --slurm --partition gpu --gpus 1 --minutes 240 --workers 8

    Args:
        scale: For figures: small, short, paper or smoke.
        status: Only show the table of runs.
    """
    raise AssertionError("`main` runs this command: its further options are the fields of the recipe")


def main(recipe: str, words: list[str]) -> int:
    """`polyhead sweep RECIPE ...`."""
    options, words = split_options("sweep", words, "status")
    # Commas separate the choices of the grid here, so the groups within one choice are joined by +.
    head_words = [None]
    if options.heads is not None:
        head_words = options.heads.split(",")
    runs, training = configure("sweep", recipe, grid(words), options.scale, head_words, sweep_options())
    if training.devices != 1:
        raise ValueError("polyhead sweep: --devices is for one run: polyhead train")
    folder = runs[0].folder or default_folder(recipe, options.scale)
    code = 0
    if not options.status:
        from polyhead.ops.native.library import lacks_compiler, warn_without_compiler

        if lacks_compiler():  # the workers' own lines are in their logs
            warn_without_compiler()
        code = write_failures(train_side_by_side(runs, folder, training))
    from polyhead.cli.listing import write_records
    from polyhead.scale.records import of_sweep

    records = of_sweep(runs, folder)
    emit(records.rows(), write_records, records, f"Runs in {folder}")
    return code


# ------------------------------------------------------------------------------------------------------------- clusters
@dataclass(frozen=True)
class Cluster:
    """The cluster that trains the runs of a sweep, and the resources of each run."""

    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Train on a Ray cluster: HOST:PORT, auto (the one this machine is in) or local (started here)."""
    slurm: bool = False
    """Train as jobs of Slurm, in one array."""
    cpus: int | None = None
    """Cores of a run on a cluster; None: 1."""
    gpus: float | None = None
    """GPUs of a run on a cluster, also a fraction with --ray; None: 0."""
    memory: float | None = None
    """Memory of a run on a cluster, in GiB; None: the cluster's."""
    partition: str | None = None
    """Slurm partition of the jobs; None: Slurm's."""
    account: str | None = None
    """Slurm account that pays for the jobs; None: Slurm's."""
    minutes: int | None = None
    """Time limit of a Slurm job; a longer run resumes in another job.  None: 60."""

    def engine(self) -> Any:
        """Return what starts workers; None for this machine.  Raises ValueError for options of another engine."""
        if self.ray is not None and self.slurm:
            raise ValueError("polyhead sweep: give --ray or --slurm, not both")
        slurm = self._options("partition", "account", "minutes")
        resources = self._options("cpus", "gpus", "memory")
        if slurm and not self.slurm:
            raise ValueError(f"polyhead sweep: --{next(iter(slurm))} is for --slurm")
        if self.ray is None and not self.slurm:
            if resources:
                raise ValueError(f"polyhead sweep: --{next(iter(resources))} is for --ray and --slurm")
            return None
        from polyhead.scale.sweep.engines import Resources
        from polyhead.scale.sweep.engines.ray import Ray
        from polyhead.scale.sweep.engines.slurm import Slurm

        if self.ray is None:
            return Slurm(Resources(**resources), **slurm)
        return Ray(self.ray, Resources(**resources))

    def _options(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def sweep_options() -> Any:
    """The options of `train`, and those of a cluster."""
    from polyhead.config import Run

    base: Any = training_options()

    @dataclass(frozen=True)
    class SweepOptions(base):
        run: Annotated[Run, tyro.conf.FlagConversionOff, tyro.conf.arg(name="")]
        cluster: Annotated[Cluster, tyro.conf.arg(name="")] = Cluster()

    return SweepOptions


def train_side_by_side(runs: Sequence["Run"], folder: str, options: Any) -> "Sequence[Result | Failure]":
    """Train in worker processes, here or on a cluster."""
    from polyhead.scale.sweep.jobs import sweep

    return sweep(runs, folder, engine=options.cluster.engine(), workers=options.workers, again=options.again)


# ---------------------------------------------------------------------------------------------------------------- grids
def grid(words: Sequence[str]) -> list[list[str]]:
    """The combinations of the values that are separated by commas.

    >>> grid(["--seed", "0,1", "--train.lr=1e-3"])
    [['--seed', '0', '--train.lr=1e-3'], ['--seed', '1', '--train.lr=1e-3']]
    """
    choices = []
    option = ""
    for word in words:
        # A value stands behind an equals sign, or is a word of its own that belongs to the option before.
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, equals, value = "", "", word
        else:
            option = name
        values = [value]
        if option not in SINGLE_VALUES:
            values = value.split(",")
        choices.append([name + equals + choice for choice in values])
    return list(map(list, itertools.product(*choices)))


def default_folder(recipe: str, scale: str | None) -> str:
    """The default folder of runs; runs of a figure share the folder of `polyhead reproduce`."""
    from polyhead.papers.recipes import STUDIES, default_scale

    if recipe not in STUDIES:
        return "runs"
    return f"runs/reproduce/{scale or default_scale(recipe)}"
