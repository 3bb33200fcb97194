"""Run folders, made by hand or trained for a few steps, and the page of a report on them."""

import html
import json
import pathlib
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

import polyhead as ph
from polyhead.config import save
from polyhead.pages.report import codes, writer
from polyhead.tasks import FuzzyLogic
from polyhead.train.store.folder import Result, write_result

TASK = FuzzyLogic(variables=3, terms=2, length=8)
HEADS = {"softmax": ph.Softmax(4), "hyla": ph.Hyla(4), "linear": ph.Linear(4)}
LOSSES = [{"kind": "train", "step": step, "loss": 1.0 / step, "lr": 1e-3} for step in (20, 40, 60)]


def run_of(name: str, seed: int = 0, task: Any = TASK, heads: Any = None, lr: float = 1e-3) -> ph.Run:
    """A run of 100 steps; its heads are by default those of its name."""
    heads = heads or (HEADS[name],)
    model = ph.TransformerConfig(*task.ends, dim=16, layers=2, heads=heads, max_length=max(task.length, 8))
    return ph.Run(name=name, task=task, model=model, train=ph.Train(steps=100, lr=lr), seed=seed)


def scored(step: int, metric: str = "r2", **by_split: float) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl."""
    return [{"kind": "eval", "step": step, "split": split, "loss": 0.1, metric: x} for split, x in by_split.items()]


def fabricate(
    root: pathlib.Path,
    run: ph.Run,
    scores: dict[str, tuple[float, float]] | None,
    rows: list[dict[str, Any]] | None = None,
) -> pathlib.Path:
    """A run folder as the trainer writes it.  `scores`: mean and error by split; None leaves it unfinished."""
    folder, metric = root / f"{run.name}-{run.seed}", run.task.metric
    folder.mkdir(parents=True)
    save(run, folder / "config.json")
    if rows is None:
        rows = [*LOSSES, *scored(60, metric, **dict.fromkeys(scores or ("iid", "compositional"), 0.4))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if scores is not None:
        by_split = {s: {"loss": 0.1, metric: mean, f"{metric}_se": error} for s, (mean, error) in scores.items()}
        command, about = f"polyhead train {run.name} <fast>", {"torch": "2.0"}
        seconds = 60.0 + run.seed
        write_result(Result(run.name, ph.digest(run), 100, seconds, 1234, by_split, command, about, folder))
    return folder


def folders(root: pathlib.Path, scores: dict[str, list[float]]) -> list[pathlib.Path]:
    """Finished runs with these scores on unseen combinations, by mechanism and seed."""
    run_folders = []
    for name, values in scores.items():
        for seed, r2 in enumerate(values):
            by_split = {"iid": (0.9, 0.011), "compositional": (r2, 0.022)}
            run_folders.append(fabricate(root, run_of(name, seed), by_split))
    return run_folders


def trained(root: pathlib.Path, task: Any, name: str, heads: Any, seed: int = 0, **train: Any) -> pathlib.Path:
    """The folder of a run of a few steps."""
    defaults = {"steps": 3, "batch_size": 8, "warmup": 1, "eval_batches": 1, "eval_every": 2, "log_every": 1}
    folder = root / f"{name}-{seed}"
    run = run_of(name, seed, task, heads)
    run = replace(run, train=ph.Train(**{**defaults, **train}), device="cpu", threads=1, folder=str(folder))
    ph.train.run(run, progress=False)
    return folder


def small(patch: pytest.MonkeyPatch) -> None:
    """Little of everything that a report computes."""
    for name, value in {"POINTS": 40, "PROBED": 200, "ZEROED": 30, "PAIRS": 20}.items():
        patch.setattr(codes, name, value)
    patch.setattr(writer, "SEQUENCES", 300)


@dataclass
class Written:
    """The page of a report as HTML."""

    content: str

    @property
    def words(self) -> str:
        return plain(self.content[self.content.index("<body>") :])

    def cells(self, name: str) -> list[str]:
        """The cells of the first row of a table whose name is `name`."""
        rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', self.content, flags=re.DOTALL)
        row = next(cells for label, cells in rows if plain(label) == name)
        return [plain(cell) for cell in re.findall(r"<td.*?</td>", row, flags=re.DOTALL)]

    def figure(self, name: str) -> str:
        return re.search(rf'<figure id="{name}">.*?</figure>', self.content, flags=re.DOTALL)[0]


def written(run_folders: list[pathlib.Path], path: pathlib.Path, **options: Any) -> Written:
    return Written(writer.write(run_folders, path, progress=False, **options).read_text(encoding="utf-8"))


def plain(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("\xa0", " ").split())
