"""Run folders in tests: what is in them, whether two hold the same run, damage."""

import pathlib
import shutil
from typing import Any

import torch

import polyhead as ph
from polyhead.train.checkpoint import candidates, read_checkpoint
from polyhead.train.folder import read_metrics, read_result

ABOUT = ("seconds", "steps_per_second", "tokens_per_second", "mfu")


def names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ABOUT} for row in read_metrics(folder)]


def steps(folder: pathlib.Path) -> list[int]:
    """Of the checkpoints that are kept, newest first."""
    found = [read_checkpoint(folder, ph.digest(ph.train.read_config(folder)), path.name) for path in candidates(folder)]
    return [metadata["step"] for _, metadata in found]


def copied(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def same(one: pathlib.Path, two: pathlib.Path) -> None:
    assert rows(one) == rows(two)
    results = [read_result(folder) for folder in (one, two)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].scores == results[1].scores
    a, b = (read_checkpoint(folder, results[0].digest)[0] for folder in (one, two))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def damage(path: pathlib.Path, how: str) -> None:
    data = path.read_bytes()
    place = data.index(b'"step') + 8 if how == "flipped digit" else len(data) - 9
    flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    kinds = {"truncated": data[: len(data) // 2], "empty": b"", "flipped": flipped, "zeroed": bytes(len(data))}
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(kinds.get(how, flipped))
