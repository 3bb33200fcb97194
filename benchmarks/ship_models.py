"""Trained models for `models/` and its index: publish finished runs, or check what is there against its cards.

    python benchmarks/ship_models.py fuzzy runs/long/main/hyla-1-* ...    publish as fuzzy-hyla-1, ...
    python benchmarks/ship_models.py --without-weights docs/results/sraven/runs runs/long/sraven/*    keep scores alone
    python benchmarks/ship_models.py --check                             score all again, beside their cards

Published are config, weights (float32, without the optimiser's state), result and metrics, these thinned: all scores,
every thousandth row of training, without weights every five thousandth.  `--check` scores each model in a process of
its own on the sequences of its card, and fails where a score is not the card's; with `--part 10` on the first tenth of
them, where it is more than two standard errors away.  A model of text is scored where its text is that of data.json.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import subprocess
import sys

from safetensors.torch import save

from polyhead.config import Run, TransformerConfig, digest
from polyhead.tasks import Text
from polyhead.tasks.record import RECORD, recorded
from polyhead.train import Result, evaluate, load_model, read_config, read_result, shipped
from polyhead.train.store.checkpoint import checkpoints, read_checkpoint, with_checksums

ROWS, FEWER = 1000, 5000  # a training row is kept every so many steps; without weights
COUNTED = ("accuracy", "exact_match")
LIMIT = 20_000_000  # bytes of all models
CARD = "README.md"


def publish(family: str, folder: pathlib.Path) -> str:
    """Copy a finished run into `models/`; its name there."""
    run = read_config(folder)
    name = run.name if run.name.startswith(f"{family}-") else f"{family}-{run.name}"
    into = shipped.REPOSITORY / name
    keep(folder, into, ROWS)
    tensors, metadata = read_checkpoint(checkpoints(folder)[0], digest(run))
    weights = {key: value for key, value in tensors.items() if key.startswith("model/")}
    text = json.dumps(with_checksums(metadata, weights))
    (into / "checkpoint.safetensors").write_bytes(save(weights, {"polyhead": text}))
    return name


def keep(folder: pathlib.Path, into: pathlib.Path, rows: int) -> None:
    """Copy what a finished run did, without its weights; of training one row in every `rows` steps."""
    if read_result(folder) is None:
        raise SystemExit(f"ship_models: {folder} is not finished")
    into.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "result.json"):
        shutil.copyfile(folder / file, into / file)
    if (folder / RECORD).exists():  # which text or images
        shutil.copyfile(folder / RECORD, into / RECORD)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    read = [(line, json.loads(line)) for line in lines]
    kept = [line for line, row in read if row["kind"] != "train" or row["step"] % rows == 0]
    (into / "metrics.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")


def card(name: str, into: pathlib.Path) -> str:
    """What a model is, for a reader of its folder."""
    run, result = read_config(into), read_result(into)
    words = run.task.words.splits
    counted = next(iter(result.scores.values()))["sequences"]
    scores = [
        f"| {split}{f': {words[split]}' if split in words else ''} | {mean:.3f} ± {error:.3f} |"
        for split, (mean, error) in rounded_scores(run, result).items()
    ]
    made, model, task = result.environment, run.model, run.task.name.replace("_", " ")
    heads = ", ".join(map(short, model.heads)) if isinstance(model, TransformerConfig) else "none"
    return f"""# {name}

Model: {type(model).__name__.removesuffix("Config")}; heads: {heads}. Task: {task}, seed {run.seed}.
{result.steps:,} steps, {result.parameters:,} parameters, float32. Run {result.digest}.

| split | {run.task.metric}, mean ± standard error over {counted:,} sequences |
|---|---|
{chr(10).join(scores)}

```python
run, model = ph.load("{name}")
```

Trained with `python -m polyhead.train config.json`, {made["date"][:10]}, torch {made["torch"]}, {made["cpu"]},
{duration(result.seconds)} on a core that other work shared. One seed is no evidence;
[the results](../../docs/results/index.md) say what several show. Licence: the repository's ([LICENSE](../../LICENSE)).
{DATA[isinstance(run.task, Text)]}
"""


def duration(seconds: float) -> str:
    """In the unit that a reader expects."""
    return f"{seconds / 3600:.1f} hours" if seconds >= 1800 else f"{seconds:.0f} seconds"


DATA = {
    False: "The data are drawn by a formula, so the weights hold nobody's data.",
    True: "The text is the source code of Python's standard library (licence: PSF, version 2) on the machine of the\n"
    "training. Another version of Python has other text, so scores differ there.",
}
"""Whether a task is of text -> what its data are."""


def short(group: object) -> str:
    """A group of heads by the settings that are not its defaults."""
    said = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(group)
        if field.default != (value := getattr(group, field.name))
    ]
    return f"`{type(group).__name__}({', '.join(said)})`"


def rounded_scores(run: Run, result: Result) -> dict[str, tuple[float, float]]:
    """Mean and standard error of the main metric by split."""
    metric = run.task.metric
    return {
        split: (round(scores[metric], 4), round(scores[f"{metric}_se"], 4)) for split, scores in result.scores.items()
    }


def write() -> None:
    """Index and cards of what lies in `models/`."""
    size = sum(path.stat().st_size for path in shipped.REPOSITORY.rglob("*") if path.name in shipped.FILES)
    if size > LIMIT:
        raise SystemExit(f"ship_models: {size / 1e6:.1f} MB, expected at most {LIMIT / 1e6:.0f} MB")
    folders = sorted(path.parent for path in shipped.REPOSITORY.glob("*/config.json"))
    for folder in folders:
        (folder / CARD).write_text(card(folder.name, folder), encoding="utf-8")
    names = [folder.name for folder in folders]
    shipped.INDEX.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    print(f"{len(names)} models, {size / 1e6:.1f} MB")


def check(name: str, part: int = 1) -> int:
    """Score a model anew on its card's splits; how many scores are not the card's."""
    run, model = load_model(name)
    metric, wrong = run.task.metric, 0
    if isinstance(run.task, Text) and run.task.fingerprint() != recorded("ship_models", run.folder, "fingerprint"):
        print(f"{name}: not scored, the text on this machine is another than that of its card")
        return 0
    for split, card in read_result(run.folder).scores.items():
        batches = max(1, -(-int(card["sequences"]) // run.train.batch_size) // part)  # the last one may be short
        size = {"batches": batches, "batch_size": run.train.batch_size}
        found = evaluate(model, run.task, split, seed=run.seed, **size)
        flips = 2 / found["sequences"] if metric in COUNTED else 1e-4  # a rounding can turn the answer of a sequence
        allowed = flips if part == 1 else 2 * math.hypot(card[f"{metric}_se"], found[f"{metric}_se"])
        wrong += (far := not abs(found[metric] - card[metric]) <= allowed)  # of nan, too
        says = f"{name} {split}: card {card[metric]:.4f} ± {card[f'{metric}_se']:.4f}, now {found[metric]:.4f}"
        print(says + " WRONG" * far, flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", default="", help="the first part of the names")
    parser.add_argument("runs", nargs="*", type=pathlib.Path)
    parser.add_argument("--without-weights", type=pathlib.Path, help="copy runs into this folder, not into models/")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--part", type=int, default=1, help="score so many times fewer sequences than the card")
    parser.add_argument("--only", help="check this model, in this process")
    given = parser.parse_args()
    if given.only:
        return int(check(given.only, given.part) > 0)
    if given.check:
        again = [sys.executable, __file__, "--part", str(given.part), "--only"]
        codes = [subprocess.run([*again, name], check=False).returncode for name in shipped.MODELS]
        return int(any(codes))  # below 0: killed
    if given.without_weights:
        for folder in (pathlib.Path(given.family), *given.runs):
            keep(folder, given.without_weights / read_config(folder).name, FEWER)
        return 0
    for folder in given.runs:
        print(publish(given.family, folder))
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
