"""Checkpoints: the last two are kept, and a damaged one is left for the one before."""

import json
import math
import os
import shutil
import zlib

import pytest
import torch
from run_folders import copied, damage, flip, full_disk, names, same, steps
from safetensors.torch import load, save

import polyhead as ph
from polyhead.train import load_model, run
from polyhead.train.network import Network
from polyhead.train.store.checkpoint import checksum_of, read_checkpoint, read_metadata, restore, save_sharded
from polyhead.train.store.files import Damaged
from polyhead.train.store.folder import checkpoints
from polyhead.train.world import World


# ------------------------------------------------------------------------------------------------------------- keeping
def test_the_last_ones_are_kept(tiny, tmp_path):
    config = tiny(tmp_path, save_every=2, keep=3)
    run(config, progress=False)
    assert steps(tmp_path) == [12, 10, 8]
    assert names(tmp_path) == [
        *(".lock", "checkpoint-00000008.safetensors", "checkpoint-00000010.safetensors"),
        *("checkpoint.safetensors", "config.json", "metrics.jsonl", "result.json"),
    ]
    for selection, name in ((10, "checkpoint-00000010"), ("newest", "checkpoint")):
        weights = load_model(tmp_path, which=selection)[1].state_dict()
        stored = read_checkpoint(tmp_path / f"{name}.safetensors", ph.digest(config))[0]
        assert all(torch.equal(value, stored[f"model/{key}"]) for key, value in weights.items())
    with pytest.raises(ValueError, match=r"has none of 3, but .*checkpoint-00000010.safetensors, "):
        load_model(tmp_path, which=3)


def test_a_later_checkpoint_that_was_damaged_takes_no_place(tiny, tmp_path):
    """With `keep=1` it would be kept in place of each new one."""
    (tmp_path / "checkpoint-00000900.sharded").mkdir()
    run(tiny(tmp_path, save_every=2, keep=1), progress=False, resume=True)
    assert steps(tmp_path) == [12]


def test_an_undamaged_checkpoint_exists_at_any_moment(tiny, tmp_path, monkeypatch):
    """Looked at before every rename and removal once there is one."""
    config = tiny(tmp_path, save_every=2, eval_every=4)
    newest_steps = []

    def watched(plain):
        def change(*arguments, **options):
            if checkpoints(tmp_path):
                stored = [read_checkpoint(path, ph.digest(config)) for path in checkpoints(tmp_path)]
                newest_steps.append(max(metadata["step"] for _, metadata in stored))
            return plain(*arguments, **options)

        return change

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    run(config, progress=False)
    assert newest_steps == sorted(newest_steps)
    assert set(newest_steps) == {2, 4, 6, 8, 10, 12}


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(tiny, tmp_path, stopped_run, uninterrupted):
    copied(stopped_run, tmp_path)
    with full_disk(5000), pytest.raises(OSError, match=r": cannot be written \(File too large\)"):
        run(tiny(tmp_path), progress=False, resume=True)
    assert steps(tmp_path) == [11, 10]
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, uninterrupted)


# -------------------------------------------------------------------------------------------------------------- damage
@pytest.mark.parametrize("fault", ["truncated", "empty", "flipped", "flipped digit", "missing"])
def test_a_damaged_last_checkpoint_is_left_for_an_older_one(tiny, tmp_path, stopped_run, uninterrupted, capsys, fault):
    copied(stopped_run, tmp_path)
    damage(tmp_path / "checkpoint.safetensors", fault)
    run(tiny(tmp_path), progress=False, resume=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (fault != "missing")
    if lines:
        assert "checkpoint.safetensors is damaged" in lines[0]
        assert lines[0].endswith("; the one before is used")
    same(tmp_path, uninterrupted)


def test_without_an_undamaged_checkpoint_a_run_starts_over(tiny, tmp_path, stopped_run, uninterrupted, capsys):
    copied(stopped_run, tmp_path)
    for path in checkpoints(tmp_path):
        damage(path, "flipped")
    run(tiny(tmp_path), progress=False, resume=True)
    assert capsys.readouterr().err.endswith("no undamaged checkpoint is left, so the run starts at step 0\n")
    same(tmp_path, uninterrupted)


def rewrite(path, drop=None, put=None, **changes):
    """Write a checkpoint again with other tensors or metadata; its checksums fit."""
    tensors = load(path.read_bytes()) | (put or {})
    tensors.pop(drop, None)
    values = read_metadata(path) | {"checksum": checksum_of(tensors)} | changes
    values["seal"] = zlib.crc32(json.dumps(values).encode())
    path.write_bytes(save(tensors, {"polyhead": json.dumps(values)}))


WEIGHT = "outputs.linear.weight"
REFUSED = {
    "no bytes": (lambda path: path.write_bytes(b""), "is damaged"),
    "half of its bytes": (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "is damaged"),
    "a flipped bit in its header": (lambda path: flip(path, 9), "is damaged"),
    "a flipped bit in a tensor": (lambda path: flip(path, -1), "do not match their checksum"),
    "a lost parameter": (lambda p: rewrite(p, drop=f"model/{WEIGHT}"), f"does not fit .*{WEIGHT}: missing, expected"),
    "another parameter": (lambda p: rewrite(p, put={"model/x": torch.zeros(1)}), "float32, expected nothing"),
    "a shape": (lambda p: rewrite(p, put={f"model/{WEIGHT}": torch.zeros(3)}), r"fit .*: \(3,\) of .*, expected"),
    "a dtype": (lambda p: rewrite(p, put={f"model/{WEIGHT}": torch.zeros(1, dtype=torch.int8)}), "int8, expected"),
    "an infinite step": (lambda path: rewrite(path, step=math.inf), "is damaged"),
    "a step below 0": (lambda path: rewrite(path, step=-1), r"is damaged.*step -1"),
    "no seconds": (lambda path: rewrite(path, seconds=None), "is damaged"),
    "another run": (lambda path: rewrite(path, digest="0" * 12), "belongs to run 000000000000 but the folder's run is"),
    "another version": (lambda path: rewrite(path, format=99), "has format 99, expected 1"),
    "no file": (lambda path: path.unlink(), "has none of 'newest', but none at all: train it first$"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_wrong_checkpoint_is_refused_in_one_line(tmp_path, uninterrupted, fault):
    copied(uninterrupted, tmp_path)
    (tmp_path / "checkpoint-00000010.safetensors").unlink()
    change, text = REFUSED[fault]
    change(tmp_path / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=text) as error:
        load_model(tmp_path)
    assert str(error.value).startswith("checkpoint: ")
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------- sharded
@pytest.fixture
def sharded(tiny, tmp_path):
    """A sharded checkpoint, here of one process; ../test_devices.py has several."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        config = tiny(tmp_path / "run", parallel="sharded")
        network = Network(config, torch.device("cpu"), World.alone())
        network.step(0, needs_metrics=False)
        metadata = {"digest": ph.digest(config), "step": 1, "seconds": 1.0, "scaler": {}}
        (tmp_path / "run").mkdir()
        save_sharded(tmp_path / "run", network, metadata, num_kept=2)
    finally:
        torch.distributed.destroy_process_group()
    return config, network, tmp_path / "run" / "checkpoint-00000001.sharded"


def test_a_sharded_checkpoint_restores_all_tensors(sharded):
    config, network, path = sharded
    restored = Network(config, torch.device("cpu"), World.alone())
    assert restore(path, ph.digest(config), restored)["step"] == 1
    for parameter, restored_parameter in zip(network.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(parameter, restored_parameter)
        for key, value in network.optimiser.state[parameter].items():
            assert torch.equal(value, restored.optimiser.state[restored_parameter][key])


def test_a_damaged_or_foreign_sharded_checkpoint_is_refused(sharded, tiny, tmp_path):
    config, _, path = sharded
    network = Network(config, torch.device("cpu"), World.alone())
    with pytest.raises(ValueError, match="belongs to run"):
        restore(path, "other", network)
    deeper = Network(tiny(tmp_path, layers=3), torch.device("cpu"), World.alone())
    with pytest.raises(Damaged, match="does not fit the model"):
        restore(path, ph.digest(config), deeper)
    for file in sorted(path.iterdir()):
        copy = shutil.copytree(path, tmp_path / f"copy-{file.name}")
        flip(copy / file.name, -9)
        with pytest.raises(Damaged, match=r"is damaged"):
            restore(copy, ph.digest(config), network)
