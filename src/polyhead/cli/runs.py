"""The commands eval, probe, report and explore: for runs that exist."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyhead.cli.options import Device, RunFolder, RunFolders
from polyhead.cli.output import emit, write, write_table
from polyhead.cli.train import write_scores
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run

PROBES_LEGEND = """\
f1: on unseen combinations. chance: the same probe on permuted labels. Between sequences vary the query and the rest
(query "varies"), the query "alone", or the rest alone ("fixed"). pairs "self": the last token attending to itself."""

Model = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


def evaluate(
    run: RunFolder,
    splits: tuple[str, ...] = (),
    batches: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    device: Device = "auto",
    checkpoint: str = "newest",
) -> int:
    """Score a trained run on the splits of its task, with the task's baselines and ceiling.

    By default on the same sequences and in the same precision as in training, so the scores are those of the run.

    examples:
      polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f
      polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --splits compositional novel --batches 64
      polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f --checkpoint 500

    Args:
        splits: The splits to score; without any, all except train and validation.
        batches: Batches per split; None takes the run's.
        batch_size: Sequences per batch; None takes the run's.
        seed: Seed of the sequences; None takes the run's.
        checkpoint: newest, or the step of an earlier checkpoint that is kept.
    """
    from polyhead import train
    from polyhead.train.device import pick_device

    device_of_run = pick_device(device)
    config, model = train.load_model(run, device_of_run, checkpoint)
    compare_data(config, run)
    settings = config.train
    if batches is None:
        batches = settings.eval_batches
    if batch_size is None:
        batch_size = settings.batch_size
    if seed is None:
        seed = config.seed
    check_number("eval", "batches", batches, 1)
    check_number("eval", "batch_size", batch_size, 1)
    # Training has used these two, one to fit and one to select, so they say least about the model.
    if not splits:
        splits = tuple(split for split in config.task.splits if split not in ("train", "validation"))
    scores = {}
    # Products as in training, or the scores would differ from those of the run in their last digits.
    with train.fast_products(config.fast_products and device_of_run.type == "cpu"):
        for split in splits:
            scores[split] = train.evaluate(
                model, config.task, split, batches=batches, batch_size=batch_size, seed=seed, device=device_of_run,
                precision=settings.precision, accumulate=settings.accumulate,
            )  # fmt: skip
    emit({"run": config.name, "scores": scores}, write_scores, config, {config.name: scores}, seed=seed)
    return 0


def compare_data(config: "Run", run: Path) -> None:
    """Print a line if a text is not that of the training.  Raises ValueError for another tokenizer."""
    from polyhead.tasks.record import RECORD, OtherData
    from polyhead.train.messages import print_notice
    from polyhead.train.store.folder import run_path

    folder = run_path(run)
    # Other tasks would read their training data for this.
    if not hasattr(config.task, "codec") or not (folder / RECORD).exists():
        return
    try:
        config.task.keep(folder)
    except OtherData as error:
        print_notice(f"polyhead: {error}; the scores are on the present data")
    except OSError:  # the folder cannot be written
        pass


def probe(run: RunFolder, sequences: int = 4096, seed: int = 0, device: Device = "auto") -> int:
    """Predict the parts of a task from the latent code of each layer by linear probes, on unseen tasks.

    examples:
      polyhead probe runs/fuzzy-hyla-1a2b3c4d5e6f

    Args:
        sequences: Sequences to fit a probe, and equally many to score it.
        seed: Seed of the sequences.
    """
    from polyhead import analysis, train
    from polyhead.train.device import pick_device

    device_of_run = pick_device(device)
    config, model = train.load_model(run, device_of_run)
    compare_data(config, run)
    with train.fast_products(config.fast_products and device_of_run.type == "cpu"):
        rows = analysis.probe_model(model, config.task, sequences=sequences, seed=seed, device=device_of_run)
    # Layers count from 0 in Python but from 1 for readers.
    for row in rows:
        row["layer"] += 1
    emit(rows, write_table, f"Probes of the latent code: {config.name}", rows, PROBES_LEGEND)
    return 0


def report(
    runs: RunFolders, out: Path = Path("report.html"), title: str | None = None, static: Path | None = None
) -> int:
    """Write one self-contained HTML page about runs: scores, baselines, curves, attention, code maps, probes.

    examples:
      polyhead report runs/grid/* --out report.html
      polyhead report runs/grid/* --static figures

    Args:
        runs: Run folders.
        out: The page.
        title: Title of the page; None: its headline.
        static: A folder for all figures as PNG and SVG files; None: only the page.
    """
    from polyhead import train
    from polyhead.pages import report as pages

    folders = [path for path in runs if path.is_dir() or not path.exists()]  # runs/* also matches report.html
    if not folders:
        raise ValueError("report: give at least one run folder")
    # One page has one setting for all its runs, so faster products need the consent of each run.
    is_fast = all(train.read_config(folder).fast_products for folder in folders)
    with train.fast_products(is_fast):
        path = pages.write(folders, out, title=title, static=static)
    emit({"report": path}, write, f"report: {path}")
    return 0


def explore(model: Model, text: str, out: Path = Path("explore.html"), device: Device = "auto") -> int:
    """Write one self-contained HTML page on a text: point at a token to see its latent codes and the tokens it reads.

    MODEL is a run folder of a language model, or a model of text of `polyhead list models`.  A folder with a causal
    model of Hugging Face and its tokenizer will do, too.  The first 512 tokens of the text are shown.

    examples:
      polyhead explore lm-bytes-softmax --text "def add(a, b):"
      polyhead explore models/gpt2 --text "To be, or not to be" --out gpt2.html

    Args:
        model: A run folder, a trained model, or a folder of a Hugging Face model.
        text: The text to explore.
        out: The page.
    """
    from polyhead.pages.explore import explore_folder
    from polyhead.train.device import pick_device

    path = explore_folder(model, text, out, device=pick_device(device))
    emit({"explore": path}, write, f"explore: {path}")
    return 0
