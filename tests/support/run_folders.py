"""Run folders in tests: their contents, whether two have the same run, damage, and full disks."""

import contextlib
import json
import re
import resource
import shutil

import torch
from safetensors.torch import load

from polyhead.train.store.checkpoint import read_metadata
from polyhead.train.store.folder import checkpoints, read_metrics

CLOCK = ("seconds", "steps_per_second", "tokens_per_second")
"""Numbers in a row that differ between equal runs."""


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def rows(folder, kind=None):
    """metrics.jsonl without the clock."""
    chosen = [row for row in read_metrics(folder) if kind in (None, row["kind"])]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in chosen]


def steps(folder):
    """The steps of the checkpoints, newest first."""
    return [read_metadata(path)["step"] for path in checkpoints(folder)]


def copied(source, folder):
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def same(folder, other_folder):
    """Two folders hold the same training, bit for bit: rows, checkpoint and scores."""
    assert rows(folder) == rows(other_folder)
    state = load((folder / "checkpoint.safetensors").read_bytes())
    other_state = load((other_folder / "checkpoint.safetensors").read_bytes())
    assert state.keys() == other_state.keys()
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    results = [json.loads((path / "result.json").read_text()) for path in (folder, other_folder)]
    assert results[0]["scores"] == results[1]["scores"]


def losses(folder):
    return [row["loss"] for row in rows(folder, "train")]


def damage(path, kind):
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind in ("empty", "truncated"):
        path.write_bytes(data[: len(data) // 2 if kind == "truncated" else 0])
    else:
        assert kind in ("flipped", "flipped digit"), kind
        position = -9
        if kind == "flipped digit":  # step 11 becomes 10
            position = re.search(rb'step\\": \d+', data).end() - 1
        flip(path, position)


def flip(path, position):
    """Flip the lowest bit of the byte at `position`."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@contextlib.contextmanager
def full_disk(after):
    """No file may grow beyond `after` bytes: the write fails half way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
