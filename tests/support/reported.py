"""Run folders, made by hand or trained for a few steps, and the page of a report on them."""

import html
import json
import pathlib
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.config import save
from polyhead.models.build import build
from polyhead.pages.report import codes, runs, trained as in_full, writer
from polyhead.tasks import FuzzyLogic
from polyhead.train.store.checkpoint import save_checkpoint

TASK = FuzzyLogic(variables=3, terms=2, length=8)
HEADS = {"softmax": ph.Softmax(4), "hyla": ph.Hyla(4), "linear": ph.Linear(4)}
LOSSES = [{"kind": "train", "step": s, "loss": 1.0 / s, "lr": 1e-3} for s in (20, 40, 60)]


def run_of(name: str, seed: int = 0, task: Any = TASK, heads: Any = None, lr: float = 1e-3) -> ph.Run:
    """A run of 100 steps; its heads are by default those of its name."""
    heads = heads or (HEADS[name],)
    model = ph.TransformerConfig(*task.ends, dim=16, layers=2, heads=heads, max_length=max(task.length, 8))
    return ph.Run(name=name, task=task, model=model, train=ph.Train(steps=100, lr=lr), seed=seed)


def scored(step: int, metric: str = "r2", **by_split: float) -> list[dict[str, Any]]:
    return [{"kind": "eval", "step": step, "split": split, "loss": 0.1, metric: x} for split, x in by_split.items()]


def fabricate(
    root: pathlib.Path,
    run: ph.Run,
    scores: dict[str, tuple[float, float]] | None,
    rows: list[dict[str, Any]] | None = None,
    checkpoint: bool = False,
) -> pathlib.Path:
    """A run folder as the trainer writes it.  `scores`: mean and error by split; None leaves it unfinished."""
    folder, metric = root / f"{run.name}-{run.seed}", run.task.metric
    folder.mkdir(parents=True)
    save(run, folder / "config.json")
    if rows is None:
        rows = [*LOSSES, *scored(60, metric, **dict.fromkeys(scores or ("iid", "compositional"), 0.4))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if scores is not None:
        found = {split: {"loss": 0.1, metric: mean, f"{metric}_se": error} for split, (mean, error) in scores.items()}
        result = {"name": run.name, "digest": ph.digest(run), "steps": 100, "seconds": 60.0 + run.seed}
        result |= {"parameters": 1234, "command": f"polyhead train {run.name} <fast>", "environment": {"torch": "2.0"}}
        (folder / "result.json").write_text(json.dumps(result | {"scores": found}))
    if checkpoint:
        torch.manual_seed(run.seed)
        keep(folder, run, build(run.model))
    return folder


def keep(folder: pathlib.Path, run: ph.Run, model: torch.nn.Module) -> None:
    """Write the checkpoint of a finished run."""
    about = {"digest": ph.digest(run), "step": 100, "seconds": 1.0, "scale": None}
    save_checkpoint(folder, model, torch.optim.AdamW(model.parameters()), about)


def folders(root: pathlib.Path, scores: dict[str, list[float]], checkpoint: bool = False) -> list[pathlib.Path]:
    """Finished runs with these scores on unseen combinations, by mechanism and seed."""
    return [
        fabricate(root, run_of(name, seed), {"iid": (0.9, 0.011), "compositional": (r2, 0.022)}, checkpoint=checkpoint)
        for name, values in scores.items()
        for seed, r2 in enumerate(values)
    ]


def grouped(made: list[pathlib.Path]) -> list[runs.SeedGroup]:
    return runs.groups(runs.read(made))


def trained(root: pathlib.Path, task: Any, name: str, heads: Any, seed: int = 0, **train: Any) -> pathlib.Path:
    """The folder of a run of a few steps."""
    few = {"steps": 3, "batch_size": 8, "warmup": 1, "eval_batches": 1, "eval_every": 2, "log_every": 1}
    settings = ph.Train(**{**few, **train})
    folder = root / f"{name}-{seed}"
    run = replace(run_of(name, seed, task, heads), train=settings, device="cpu", threads=1, folder=str(folder))
    ph.train.run(run, progress=False)
    return folder


def small(patch: pytest.MonkeyPatch, **numbers: int) -> None:
    """Little of everything that a report computes."""
    sizes = {"POINTS": 40, "PROBED": 200, "ZEROED": 30, "SEQUENCES": 300, "PAIRS": 20, **numbers}
    for name, value in sizes.items():
        for module in (codes, writer, in_full):
            if hasattr(module, name):
                patch.setattr(module, name, value)


@dataclass
class Written:
    """A page: its whole text, its body, and the data of its scripts."""

    content: str
    body: str
    held: dict[str, Any]

    @property
    def words(self) -> str:
        return plain(self.body)

    @property
    def figures(self) -> list[dict[str, Any]]:
        """All figures, with their captions."""
        captions = dict(re.findall(r'id="(figure-\d+)".*?<figcaption>(.*?)</figcaption>', self.body))
        return [{**figure, "caption": html.unescape(captions[figure["id"]])} for figure in self.held["figures"]]

    def captioned(self, words: str) -> dict[str, Any]:
        """The first figure whose caption begins so."""
        return next(figure for figure in self.figures if figure["caption"].startswith(words))

    def axis(self, words: str) -> dict[str, Any]:
        """The first figure whose vertical axis says `words`."""
        return next(figure for figure in self.figures if words in str(figure["layout"]["yaxis"]))

    def cells(self, name: str) -> list[str]:
        """The cells of the table row that starts with `name`."""
        row = next(r for r in self.body.split("<tr")[1:] if name in plain("<" + r.split("</th>")[0]))
        return [plain("<td" + cell) for cell in row.split("</tr>")[0].split("<td")[1:]]


def written(made: list[pathlib.Path], path: pathlib.Path, **options: Any) -> Written:
    content = writer.write(made, path, progress=False, **options).read_text(encoding="utf-8")
    start = content.index('<script type="application/json" id="figures">') + 45
    held = json.loads(content[start : content.index("</script>", start)])
    return Written(content, content[content.index("<header>") : start], held)


def plain(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("\xa0", " ").split())
