"""The training of a fault campaign: a run, a run on text, a sweep; all of them tiny."""

import pathlib
from typing import Any

import tiny_runs
from lives import Order, difference, facts

import polyhead as ph
from polyhead.config import digest, save

SPARED = ("worker.log", ".lock", ".gitignore", "lock")
"""Files that nothing rests on."""


def tiny(folder: pathlib.Path, name: str = "tiny", steps: int = 30, **fields: Any) -> ph.Run:
    """A run of a fraction of a second, with dropout, that saves every five steps."""
    small: dict[str, Any] = {"dim": 8, "layers": 1, "dropout": 0.1, "residual_dropout": 0.0, "batch_size": 2}
    often: dict[str, Any] = {"log_every": 2, "eval_every": 10, "save_every": 5, "eval_batches": 1}
    return tiny_runs.tiny(folder, name=name, steps=steps, lr=3e-3, **small, **often, **fields)


def corpus(root: pathlib.Path, count: int = 12) -> pathlib.Path:
    """A folder of documents, a few hundred bytes each."""
    place = root / "documents"
    place.mkdir(parents=True)
    for i in range(count):
        (place / f"{i:02}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(8)))
    return place


class Scenario:
    """A task for lives, and the facts by which its end is judged.

    `prepare` makes the files that it needs, `order` is the order for a life, `found` are the facts at its end by name,
    `files` those that may be damaged, `config_of` the run that lies in a folder; tokens have none.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.prepare()

    def mend(self, path: pathlib.Path) -> None:
        """Repair a file that an error names, as a user would: write the configuration again, or delete the file;
        without the checkpoint of a finished run it is trained again."""
        path.unlink(missing_ok=True)
        if path.name == "config.json":
            save(self.config_of(path.parent), path)
        if path.name == "checkpoint.safetensors":
            path.with_name("result.json").unlink(missing_ok=True)

    def user_of(self, path: pathlib.Path) -> pathlib.Path:
        """The run folder to which a file belongs."""
        return path.parent

    def differs(self, wanted: Order) -> str | None:
        for name, value in wanted.items():
            came = self.found()[name]
            if (what := difference(came, value) if isinstance(value, dict) else None) or came != value:
                return f"{name}: {what or 'contents differ'}"
        return None


class OneRun(Scenario):
    name = "train"

    def prepare(self) -> None:
        self.folder = self.root / "run"
        self.config = self.made()
        self.folder.mkdir()
        save(self.config, self.folder / "config.json")

    def made(self) -> ph.Run:
        return tiny(self.folder)

    def order(self) -> Order:
        return {"do": "train", "root": str(self.root), "folder": str(self.folder)}

    def found(self) -> Order:
        return {"run": facts(self.folder)}

    def files(self) -> list[pathlib.Path]:
        return files_in(self.folder)

    def user_of(self, path: pathlib.Path) -> pathlib.Path:
        return self.folder

    def config_of(self, folder: pathlib.Path) -> ph.Run:
        return self.config


class TextRun(OneRun):
    """A run that tokenises its text first, with a tokenizer that it trains."""

    name = "text run"

    def made(self) -> ph.Run:
        where = {"data": str(corpus(self.root)), "folder": str(self.root / "tokens")}
        task = ph.tasks.Text(length=8, tokenizer="bpe:270", held_out=0.2, **where)
        model = {"inputs": task.ends[0], "outputs": task.ends[1], "causal": True, "positions": ph.Rotary()}
        return tiny(self.folder, "text", 20, task=task, heads=(ph.Softmax(2),), evaluate=("validation",), **model)

    def found(self) -> Order:
        # The folder of the corpus is another for every case, and so are the digests that it enters.
        run = {name: value for name, value in facts(self.folder).items() if name != "digest"}
        return {"run": run, "tokens": tokens(self.root / "tokens")}

    def files(self) -> list[pathlib.Path]:
        return [*super().files(), *files_in(self.root / "tokens")]


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in SPARED)


class Sweep(Scenario):
    """Three runs in two workers."""

    name, verb = "sweep", "sweep"

    def prepare(self) -> None:
        self.folder = self.root / "runs"
        self.runs = [tiny(self.folder, f"seed{seed}", steps=20, seed=seed) for seed in range(3)]
        for run in self.runs:
            save(run, self.root / f"{run.name}.json")

    def order(self) -> Order:
        paths = [str(self.root / f"{run.name}.json") for run in self.runs]
        return {"do": self.verb, "root": str(self.folder), "folder": str(self.folder), "runs": paths}

    def places(self) -> dict[str, pathlib.Path]:
        return {run.name: self.folder / f"{run.name}-{digest(run)}" for run in self.runs}

    def config_of(self, folder: pathlib.Path) -> ph.Run:
        return next(run for run in self.runs if self.places()[run.name] == folder)

    def found(self) -> Order:
        return {name: facts(place) for name, place in self.places().items()}

    def files(self) -> list[pathlib.Path]:
        return files_in(next(iter(self.places().values())))  # of one run: the others are like it


KINDS = {kind.name: kind for kind in (OneRun, TextRun, Sweep)}
