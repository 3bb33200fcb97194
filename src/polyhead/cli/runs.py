"""The verbs resume, eval, probe and report: for runs that exist."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyhead.cli.output import emit
from polyhead.cli.parse import Deterministic, Device, RunFolder
from polyhead.cli.train import train
from polyhead.spec.shapes import check_number
from polyhead.train.stop import leaving

if TYPE_CHECKING:
    import torch


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

    By default on the same sequences and in the same precision as in training, so the scores are those of the run.

    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f
    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --splits compositional novel --batches 64
    >>> polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --checkpoint best
    """

    run: RunFolder
    splits: tuple[str, ...] = ()
    """Default: all except train and validation."""
    batches: int | None = None
    """Batches per split (default: the run's own)."""
    batch_size: int | None = None
    """Sequences per batch (default: the run's own)."""
    seed: int | None = None
    """Seed of the sequences (default: the run's own)."""
    device: Device = "auto"
    deterministic: Deterministic = False
    checkpoint: str = "newest"
    """newest, best (on the validation split, or the first evaluated split), or the step of a kept checkpoint."""

    def __call__(self) -> int:
        from polyhead.cli.text import scores
        from polyhead.train import evaluate, fast_products, load_model

        device = _device(self.device, self.deterministic)
        run, model = load_model(self.run, device, self.checkpoint)
        train = run.train
        batches = train.eval_batches if self.batches is None else self.batches
        size = train.batch_size if self.batch_size is None else self.batch_size
        for name, number in (("batches", batches), ("batch_size", size)):
            check_number("eval", name, number, 1)
        seed = run.seed if self.seed is None else self.seed
        splits = self.splits or tuple(split for split in run.task.splits if split not in ("train", "validation"))
        how = partial(evaluate, device=device, precision=train.precision, accumulate=train.accumulate)
        with fast_products(run.fast_products and device.type == "cpu"):
            found = {s: how(model, run.task, s, batches=batches, batch_size=size, seed=seed) for s in splits}
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
    """The page."""
    title: str | None = None
    """Title of the page (default: its headline)."""
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


def _device(name: str, deterministic: bool = False) -> "torch.device":
    from polyhead.train.device import be_deterministic, pick_device

    device = pick_device(name)
    if deterministic:
        be_deterministic()
    return device
