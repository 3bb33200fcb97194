"""The verb sweep: many runs in parallel, here or on a cluster."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli.files import SUFFIXES
from polyhead.cli.mistakes import opposite
from polyhead.cli.output import emit
from polyhead.cli.train import configured, failed, first_word, option, training
from polyhead.spec.shapes import one_of

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.scale.sweep import Failure
    from polyhead.train import Result


FIELDS = ("recipe", "parameters", "method", "name", "description", "project", "entity", "program", "command", "metric")
"""The fields of a grid file: ours, and those of a W&B grid that say nothing about what is trained."""


WHOLE = {"--folder", "--partition"}
"""Options whose value is one, commas and all: Slurm takes a list of partitions."""


def verb(arguments: list[str]) -> int:
    """Train many runs in parallel, on this machine or a cluster; show which are done, running, failed and waiting.

    RECIPE is as for train, or a grid file: {recipe: NAME, parameters: {FIELD: {values: [...]}}}.  A field with several
    values, separated by commas, is a grid (also --model.causal True,False).  After an interruption, run it again to
    resume.  Several machines with the same folder share the work.  A worker that dies is started again.
    Runs are in --folder (default: runs, or runs/reproduce/SCALE for a figure); --scale is for figures;
    --status only shows the table.

    >>> polyhead sweep fuzzy-hyla --seed 0,1,2 --train.lr 1e-3,3e-3 --workers 2
    >>> polyhead sweep table-a1 --scale small --status
    >>> polyhead sweep grid.yaml --folder runs/grid --ray 10.0.0.1:6379 --gpus 0.5
    >>> polyhead sweep grid.yaml --folder runs/grid --slurm --partition gpu --gpus 1 --minutes 240 --workers 8
    """
    recipe, rest = first_word("sweep", arguments)
    rest, status = _flag(rest, "--status")
    rest, scale = option("sweep", rest, "--scale")
    if recipe.endswith(SUFFIXES):
        recipe, given = grid_file(recipe)
        rest = [*given, *rest]
    words = grid(rest)
    if any("True" in word or "False" in word for word in rest):
        run = configured("sweep", recipe, [[]], scale, sweeping())[0][0]
        words = [as_flags(run, one) for one in words]
    runs, options = configured("sweep", recipe, words, scale, sweeping())
    folder = runs[0].folder or _folder(recipe, scale)
    code = 0
    if not status:
        code = failed(side_by_side(runs, folder, options))
    from polyhead.cli.listing import show
    from polyhead.scale.records import of_sweep

    found = of_sweep(runs, folder)
    with contextlib.suppress(BrokenPipeError):  # a closed pipe does not decide the exit code
        emit(found.rows, lambda: show(found, f"Runs in {folder}"))
    return code


@dataclass(frozen=True)
class Cluster:
    """The cluster that trains the runs of a sweep, and the resources of each run."""

    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Train on a Ray cluster: HOST:PORT, auto (the one this machine is in) or local (started here)."""
    slurm: bool = False
    """Train as jobs of Slurm, in one array."""
    cpus: int | None = None
    """Cores of a run on a cluster (default: 1)."""
    gpus: float | None = None
    """GPUs of a run on a cluster (default: 0); a fraction with --ray."""
    memory: float | None = None
    """Memory of a run on a cluster, in GiB (default: the cluster's)."""
    partition: str | None = None
    """Slurm partition of the jobs (default: Slurm's)."""
    account: str | None = None
    """Slurm account that pays for the jobs (default: Slurm's)."""
    minutes: int | None = None
    """Time limit of a Slurm job; a longer run resumes in another job (default: 60)."""

    def engine(self) -> Any:
        """The engine that starts workers; None for this machine.  Raises ValueError."""
        if self.ray is not None and self.slurm:
            raise ValueError("polyhead sweep: --ray and --slurm exclude each other but both were given")
        slurm, shared = self._given("partition", "account", "minutes"), self._given("cpus", "gpus", "memory")
        if not self.slurm and slurm:
            raise ValueError(f"polyhead sweep: --{next(iter(slurm))} is for --slurm")
        if self.ray is None and not self.slurm:
            if shared:
                raise ValueError(f"polyhead sweep: --{next(iter(shared))} is for --ray and --slurm")
            return None
        from polyhead.scale.sweep.engines import Resources
        from polyhead.scale.sweep.engines.ray import Ray
        from polyhead.scale.sweep.engines.slurm import Slurm

        resources = Resources(**shared)
        return Slurm(resources, **slurm) if self.ray is None else Ray(self.ray, resources)

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def sweeping() -> Any:
    """The options of `train`, and these."""
    base: Any = training()

    @dataclass(frozen=True)
    class SweepOptions(base):
        retries: Annotated[int, tyro.conf.arg(help="most restarts of a worker that dies")] = 2
        cluster: Annotated[Cluster, tyro.conf.arg(name="")] = Cluster()

    return SweepOptions


def side_by_side(runs: Sequence["Run"], folder: str, options: Any) -> "Sequence[Result | Failure]":
    """Train in worker processes, here or on a cluster."""
    engine = options.cluster.engine()
    from polyhead.scale.sweep.jobs import sweep

    workers, again, retries = options.workers, options.again, options.retries
    return sweep(runs, folder, engine=engine, workers=workers, again=again, retries=retries)


def _flag(arguments: list[str], name: str) -> tuple[list[str], bool]:
    return [word for word in arguments if word != name], name in arguments


def grid(arguments: list[str]) -> list[list[str]]:
    """All combinations of arguments that have several values, separated by commas; a value of `WHOLE` is one.

    >>> grid(["--seed", "0,1", "--train.lr=1e-3,3e-3", "--again"])[1]
    ['--seed', '0', '--train.lr=3e-3', '--again']
    """
    choices, before = [], ""
    for word in arguments:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        values = [value] if WHOLE & {name, before} else value.split(",")
        choices.append([f"{name}{equals}{one}" for one in values] if value else [word])
        before = word
    return [list(words) for words in itertools.product(*choices)]


def as_flags(run: "Run", words: Sequence[str]) -> list[str]:
    """`--model.causal False` of a grid as the flag `--model.no-causal`, which takes no value."""
    from polyhead.config import to_dict
    from polyhead.config.serial import flat

    fields = flat(to_dict(run))
    found: list[str] = []
    ends = "=True", "=False"
    parts = (one.split("=", 1) if one.startswith("--") and one.endswith(ends) else [one] for one in words)
    for word in itertools.chain.from_iterable(parts):
        name = found[-1].removeprefix("--").replace("-", "_") if found else ""
        if word in ("True", "False") and isinstance(fields.get(name), bool):
            found[-1] = found[-1] if word == "True" else opposite(found[-1])
            continue
        found.append(word)
    return found


def grid_file(path: str) -> tuple[str, list[str]]:
    """The recipe of a grid file, and its parameters as arguments; any other file is a configuration itself.

    The parameters have the shape of a W&B grid: {train.lr: {values: [1e-3, 3e-3]}, seed: {value: 0}}.
    """
    from polyhead.config import serial

    found = serial.read(path)
    if not isinstance(found, dict) or "parameters" not in found:
        return path, []
    for name in found:
        one_of(path, "field", name, FIELDS)
    recipe, parameters = found.get("recipe"), found["parameters"]
    if not isinstance(recipe, str):
        raise ValueError(f"{path}: a grid needs `recipe`, the name of a recipe or a file, but it is {recipe!r}")
    if not isinstance(parameters, dict) or found.get("method", "grid") != "grid":
        raise ValueError(f"{path}: a grid is `method: grid` and a mapping `parameters`")
    words: list[str] = []
    for name, entry in parameters.items():
        values = (
            entry.get("values", [entry["value"]] if "value" in entry else None) if isinstance(entry, dict) else None
        )
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: {name} must be {{values: [...]}} or {{value: ...}} but is {entry!r}")
        texts = [str(value) for value in values]
        if parted := [text for text in texts if "," in text]:
            raise ValueError(f"{path}: {name}: a comma separates values but {parted[0]!r} has one (join heads by +)")
        words += [f"--{name}", ",".join(texts)]
    return recipe, words


def _folder(recipe: str, scale: str | None) -> str:
    """The default folder of runs; runs of a figure share the folder of `polyhead reproduce`."""
    from polyhead.papers.recipes import STUDIES, default_scale

    return f"runs/reproduce/{scale or default_scale(recipe)}" if recipe in STUDIES else "runs"
