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
    found = [row for row in read_metrics(folder) if kind in (None, row["kind"])]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in found]


def steps(folder):
    """The steps of the checkpoints, newest first."""
    return [read_metadata(path)["step"] for path in checkpoints(folder)]


def copied(source, folder):
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def same(one, two):
    """Two folders hold the same training, bit for bit: rows, checkpoint and scores."""
    assert rows(one) == rows(two)
    a, b = (load((folder / "checkpoint.safetensors").read_bytes()) for folder in (one, two))
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    first, second = (json.loads((folder / "result.json").read_text())["scores"] for folder in (one, two))
    assert first == second


def losses(folder):
    return [row["loss"] for row in rows(folder, "train")]


def damage(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how in ("empty", "truncated"):
        path.write_bytes(data[: len(data) // 2 if how == "truncated" else 0])
    else:
        assert how in ("flipped", "flipped digit"), how
        place = -9
        if how == "flipped digit":  # step 11 becomes 10
            place = re.search(rb'step\\": \d+', data).end() - 1
        flip(path, place)


def flip(path, place):
    """Flip the lowest bit of byte `place`."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
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
