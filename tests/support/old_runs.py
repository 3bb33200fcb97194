"""Writes tests/fixtures/made_by_3743f16: run folders, an exported model, configs and digests of that commit.

    git worktree add /tmp/old 3743f16
    PYTHONPATH=/tmp/old/src python tests/support/old_runs.py tests/fixtures/made_by_3743f16
    python tests/support/old_runs.py                        compares the digests of all recipes with those of today

Each run is stopped in the middle of its training; expected.json has the results of that commit after resuming.
"""

import inspect
import json
import os
import pathlib
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

import polyhead as ph
from polyhead.config import digest, to_dict

MADE = pathlib.Path(__file__).parents[1] / "fixtures" / "made_by_3743f16"
STEPS, SAVED, KILLED = 8, 4, 6
CLOCK = ("seconds", "steps_per_second", "tokens_per_second")
SCALES = ("paper", "small", "smoke")


def runs() -> dict[str, Any]:
    """By the name of its folder, every kind of parameter in one of them."""
    fuzzy, order = ph.tasks.FuzzyLogic(length=8), ph.tasks.PairwiseOrder(objects=12)
    sorting, text = ph.tasks.ObjectSorting(length=4, examples=16), ph.tasks.Text("text", length=16, folder="tokens")
    small: Any = {"dim": 8, "layers": 1, "max_length": 16}
    mixed = ph.TransformerConfig(
        *fuzzy.ends,
        **small | {"layers": 2},
        heads=(ph.Softmax(2), ph.Hyla(2)),
        feedforward=ph.Mlp(12),
        positions=ph.RelativeBias(),
        bias=True,
        dropout=0.2,
        residual_dropout=0.1,
        init="hyla",
    )
    encoder = ph.AbstractorConfig(sorting.source, dim=8, layers=1, heads=2, head_dim=4, hidden=8, max_length=4)
    seq2seq = ph.TransformerConfig(
        *sorting.ends,
        **small,
        heads=(ph.Softmax(2),),
        positions=ph.Learned(),
        causal=True,
        dropout=0.1,
        encoder=encoder,
    )
    language = ph.TransformerConfig(
        *(ph.Tokens(256), ph.Logits(256, tied=True, scaled=True)),
        **small | {"layers": 2},
        heads=((ph.Relational(1, symbols=ph.RelationalSymbols(count=4, heads=2)), ph.Linear(1)), (ph.Disentangled(2),)),
        feedforward=ph.Experts(2, top_k=1, hidden=8),
        positions=ph.Rotary(),
        causal=True,
        norm="rms",
        qk_norm=True,
        dropout=0.1,
    )
    plain = replace(mixed, residual_dropout=0.0, heads=(ph.Linear(2), ph.Softmax(2)))
    rival = ph.CoRelNetConfig(*order.ends, dim=8, length=2)
    seen = {
        "fuzzy": (fuzzy, mixed),
        "sorting": (sorting, seq2seq),
        "order": (order, rival),
        "language": (text, language),
    }
    seen |= {"sharded": (fuzzy, mixed), "member-0": (fuzzy, plain), "member-1": (fuzzy, plain)}
    return {name: _run(name, *made, seed) for seed, (name, made) in enumerate(seen.items())}


def _run(name: str, task: Any, model: Any, seed: int) -> Any:
    split = next(split for split in ("validation", "iid", "compositional") if split in task.splits)
    often: Any = {"log_every": 1, "eval_every": 3, "save_every": SAVED, "eval_batches": 2, "keep": 1}
    train = ph.Train(steps=STEPS, batch_size=4, warmup=2, clip=1.0, evaluate=(split,), **often)
    how: Any = {"device": "cpu", "threads": 1, "folder": name}
    parallel = "sharded" if name == "sharded" else "data"
    return ph.Run(name=name, task=task, model=model, train=train, seed=seed, parallel=parallel, **how)


def _keeping(run: Any) -> Any:
    return replace(run, train=replace(run.train, keep=3))


def killed(action: Any, kind: type) -> None:
    """Do it until a batch of step KILLED is drawn."""
    draw = kind.batch

    def batch(self: Any, split: str, size: int, **where: Any) -> Any:
        if split == "train" and where["step"] == KILLED:
            raise InterruptedError
        return draw(self, split, size, **where)

    kind.batch = batch
    try:
        action()
    except InterruptedError:
        pass
    finally:
        kind.batch = draw


def rows(folder: str) -> list[dict[str, Any]]:
    """metrics.jsonl without clock and checksums."""
    found = [json.loads(line) for line in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in (*CLOCK, "seal")} for row in found]


def recipes() -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """The digests of every recipe's runs by name and scale, and configurations with every value of a field."""
    from polyhead.recipes import RECIPES

    digests, kinds, seen, made = {}, [], set(), {}
    for name, recipe in RECIPES.items():
        scaled = "scale" in inspect.signature(recipe).parameters
        for scale in SCALES if scaled else ("",):
            if (recipe, scale) not in made:
                made[recipe, scale] = f"{name} {scale}".strip()
                found = recipe(scale) if scaled else recipe()
                found = found if isinstance(found, tuple) else (found,)
                digests[made[recipe, scale]] = [digest(run) for run in found]
                for run in found[:40]:
                    config = to_dict(run)
                    if not (new := set(_values(config, "")) - seen):
                        continue
                    seen |= new
                    kinds.append({"digest": digest(run), "config": config})
    return digests, kinds


def _values(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, path)
    elif not path.endswith(("/name", "seed", "dim", "hidden", "lr")):
        yield path, value if isinstance(value, str | bool | None) else type(value).__name__


def digests_now(key: str) -> list[str]:
    """Of the runs that a recipe makes today; those of one run had the scale `paper`, when they took none."""
    from polyhead.papers.recipes import RECIPES, SINGLE

    name, _, scale = key.partition(" ")
    scale = scale or ("paper" if name in SINGLE else "")
    made = RECIPES[name](*[scale] * bool(scale))
    return [digest(run) for run in (made if isinstance(made, tuple) else (made,))]


def compare() -> None:
    digests = json.loads((MADE / "digests.json").read_text())
    for key, wanted in digests.items():
        if key != "demo":  # which has other runs today
            assert [made for made in digests_now(key) if made in set(wanted)] == wanted, key  # recipes may gain runs
    print(f"{sum(map(len, digests.values()))} digests are there, unchanged")


def stopped(root: pathlib.Path, every: dict[str, Any], members: list[Any]) -> None:
    """Folders of runs that were stopped in the middle, and of one that is finished, in `root`."""
    from polyhead.train import population

    (root / "text").mkdir(parents=True)
    for i in range(12):
        text = "".join(f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(8))
        (root / "text" / f"{i:02}.txt").write_text(text)
    for name in ("fuzzy", "sorting", "order", "language"):
        killed(lambda name=name: ph.train.run(every[name], progress=False), type(every[name].task))
    for result in population.train([_keeping(member) for member in members], "population", progress=False):
        (result.folder / f"checkpoint-{SAVED:08}.safetensors").rename(result.folder / "checkpoint.safetensors")
        for name in ("result.json", "best.safetensors"):
            (result.folder / name).unlink()
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*script, __file__, str(root), "sharded"], check=True)
    for name in ("checkpoint.safetensors", "best.safetensors", "result.json", f"checkpoint-{STEPS:08}.sharded"):
        path = root / "sharded" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    paper = next(run for run in ph.recipes.RECIPES["table-a1"]("smoke") if "hyla" in run.name)
    ph.train.run(replace(paper, folder="finished"), progress=False)
    for path in root.rglob(".lock"):
        path.unlink()


def make(root: pathlib.Path) -> None:
    from polyhead.train import population

    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    os.chdir(root)
    every = runs()
    members = [replace(every.pop(name), folder=None) for name in ("member-0", "member-1")]
    stopped(root, every, members)
    kept = root.with_suffix(".kept")
    shutil.copytree(root, kept, ignore=shutil.ignore_patterns("tokens"))
    results = [ph.train.run(run, progress=False, resume=True) for run in every.values()]
    results += [*population.train(members, "population", progress=False), ph.train.read_result("finished")]
    expected: dict[str, Any] = {
        str(result.folder): {"rows": rows(str(result.folder)), "scores": result.scores, "parameters": result.parameters}
        for result in results
    }
    ph.compat.huggingface.to_folder("language", kept / "exported")
    with torch.no_grad():
        logits = ph.compat.huggingface.from_run("language").eval()(torch.arange(24).view(2, 12)).logits
    expected["exported"] = logits[:, -1, ::16].tolist()
    expected["made"] = {name: results[0].environment[name] for name in ("torch", "cpu")}
    shutil.rmtree(root)
    kept.rename(root)
    digests, configs = recipes()
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    (root / "digests.json").write_text(json.dumps(digests, separators=(",", ":")).replace("],", "],\n") + "\n")
    lines = ",\n".join(json.dumps(config, separators=(",", ":")) for config in configs)
    (root / "configs.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        compare()
    elif sys.argv[2:] == ["sharded"]:
        os.chdir(sys.argv[1])
        ph.train.run(_keeping(runs()["sharded"]), progress=False)
    else:
        make(pathlib.Path(sys.argv[1]).resolve())
