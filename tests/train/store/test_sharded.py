"""Sharded checkpoints: the files, and that they are read back or refused, and never unpickled.

Here one process has the only shard; ../test_devices.py has two and three processes.
"""

import contextlib
import errno
import json
import pathlib
import shutil
from unittest import mock

import pytest
import tiny_runs
import torch
from run_folders import damage
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from traps import guises

import polyhead as ph
from polyhead.models.build import build
from polyhead.train import optimiser
from polyhead.train.evaluation import answers
from polyhead.train.member import Member
from polyhead.train.network import Single, initial
from polyhead.train.parallel import is_part
from polyhead.train.stop import StopSignals
from polyhead.train.store.checkpoint import candidates, read_checkpoint, read_metadata, save_checkpoint, step_of
from polyhead.train.store.claims import claim
from polyhead.train.store.disk import DiskRetry
from polyhead.train.store.files import Damaged, seal
from polyhead.train.store.folder import BEST
from polyhead.train.store.sharded import INDEX, restore_sharded, save_sharded

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # see parallel.placed
METADATA = {"digest": "d" * 12, "step": 5, "seconds": 1.5, "scaler": {}, "score": None}


@contextlib.contextmanager
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def group():
    with alone():
        yield


def trained(config, steps=2, sharded=False):
    torch.manual_seed(steps)
    model = build(config.model)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found = optimiser.build(model, config.train)
    for i in range(steps):
        batch = config.task.batch("train", 4, seed=0, step=i)
        config.task.loss(answers(model, config.task, batch), batch).backward()
        found.param_groups[0]["lr"] = 1e-3
        found.step()
        found.zero_grad()
    return model, found


def values(model, found):
    kept = {name: value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        kept |= {f"{name}/{key}": value for key, value in found.state[parameter].items()}
    return {name: value.full_tensor() if is_part(value) else value for name, value in kept.items()}


PLAIN = {"dropout": 0.0, "residual_dropout": 0.0}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A sharded checkpoint and its tensors, for all tests to copy."""
    folder = tmp_path_factory.mktemp("sharded")
    with alone():
        model, found = trained(tiny_runs.tiny(folder, **PLAIN), sharded=True)
        assert all(is_part(p) for p in model.parameters())
        save_sharded(folder, model, found, METADATA, keep=2)
        return folder / "checkpoint-00000005.sharded", values(model, found)


@pytest.fixture
def saved(tiny, tmp_path, kept, group):
    path = pathlib.Path(shutil.copytree(kept[0], tmp_path / kept[0].name))
    return path, tiny(tmp_path, **PLAIN), kept[1]


def test_another_run_version_or_model_is_refused(saved, tiny):
    path, config, _ = saved
    plain, wide, deep = (trained(one, steps=0) for one in (config, tiny("x", dim=32), tiny("x", layers=3)))
    for digest, model, said in (
        ("other", plain, f"belongs to run {'d' * 12} but the folder's run is other"),
        ("d" * 12, wide, r"of shape \[.*\] but \[.*\] is wanted"),
        ("d" * 12, deep, r"do not have the same parameters, first 'model/blocks\.2"),
    ):
        with pytest.raises(ValueError, match=said):
            restore_sharded(path, digest, *model)
    rewrite(path, lambda index: index.update(format=2))
    with pytest.raises(ValueError, match="has format 2 but this version reads 1"):
        restore_sharded(path, "d" * 12, *plain)


def rewrite(path, change):
    """Change the index; its checksum is made to fit."""
    index = json.loads((path / INDEX).read_text())
    index.pop("seal")
    change(index)
    (path / INDEX).write_text(json.dumps(seal(index)))


def entry(index):
    return index["tensors"]["model/blocks.0.norm1.weight"]


CHANGES = {
    "no step": lambda index: index.pop("step"),
    "tensors are a list": lambda index: index.update(tensors=[]),
    "no such type": lambda index: entry(index).update(dtype="object"),
    "a piece is missing": lambda index: entry(index).update(chunks=[]),
    "out of bounds": lambda index: entry(index)["chunks"][0].update(offset=[8]),
    "below 0": lambda index: entry(index)["chunks"][0].update(offset=[-1]),
    "no numbers": lambda index: entry(index)["chunks"][0].update(shape=["x"]),
    "elsewhere": lambda index: entry(index)["chunks"][0].update(file="../config.json"),
    "not there": lambda index: entry(index)["chunks"][0].update(file="shard-00009.safetensors"),
    "another checksum": lambda index: entry(index)["chunks"][0].update(checksum=1),
    "no checksum": lambda index: entry(index)["chunks"][0].update(checksum="one"),
}


FAULTS = {name: lambda path, change=change: rewrite(path, change) for name, change in CHANGES.items()} | {
    f"{file} {how}": lambda path, file=file, how=how: damage(path / file, how)
    for file in (INDEX, "shard-00000.safetensors")
    for how in ("truncated", "flipped", "missing", "empty")
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_noticed(saved, fault):
    path, config, _ = saved
    FAULTS[fault](path)
    with pytest.raises(Damaged, match=r"^checkpoint: [^\n]* is damaged \([^\n]+$"):
        restore_sharded(path, "d" * 12, *trained(config, steps=0))


def test_a_damaged_checkpoint_leaves_nothing_of_itself_in_a_run_that_starts_anew(saved, capsys):
    """Its undamaged pieces were read into the parameters before the damage was noticed."""
    path, config, _ = saved
    member, networks = Member(config, path.parent, DiskRetry(StopSignals())), Single(config, torch.device("cpu"))
    member.digest = "d" * 12
    rewrite(path, lambda index: list(index["tensors"].values())[-1]["chunks"][0].update(checksum=0))
    assert member.load(networks.alone(0, 0)) == 0
    assert capsys.readouterr().err.endswith("so it starts at step 0; the result will be the same\n")
    assert all(
        torch.equal(value, networks.model.state_dict()[name]) for name, value in initial(config).state_dict().items()
    )
    assert not networks.optimiser.state


def test_nothing_is_unpickled(saved, tmp_path):
    """Neither its index, nor a shard, nor the `.metadata` that torch's own reader would unpickle."""
    path, config, _ = saved
    model, found = trained(config, steps=0)
    marker = tmp_path / "sprung"
    (path / ".metadata").write_bytes(guises(marker)["pickle"])
    restore_sharded(path, "d" * 12, model, found)
    for file in (INDEX, "shard-00000.safetensors"):
        whole = (path / file).read_bytes()
        for data in guises(marker).values():
            (path / file).write_bytes(data)
            with pytest.raises(Damaged, match=r"^[^\n]+$"):
                restore_sharded(path, "d" * 12, model, found)
        (path / file).write_bytes(whole)
    assert not marker.exists()


def test_an_unfinished_folder_is_no_checkpoint(saved):
    """Of a full disk, or of a process that was killed: the one before is whole, and saving goes on."""
    path, config, wanted = saved
    full = mock.patch("polyhead.train.store.sharded.write", side_effect=OSError(28, "No space left on device"))
    model, found = trained(config, steps=1, sharded=True)
    with full, pytest.raises(OSError, match="No space left") as error:
        save_sharded(path.parent, model, found, METADATA)
    assert error.value.errno == 28
    assert path.with_name(path.name + ".partial").is_dir()
    assert candidates(path.parent) == [path]
    assert restore_sharded(path, "d" * 12, model, found) == {"format": 1, **METADATA}
    assert all(torch.equal(values(model, found)[name], wanted[name]) for name in wanted)
    for step in (5, 9):
        save_sharded(path.parent, model, found, {**METADATA, "step": step}, keep=2)
    assert sorted(path.parent.iterdir()) == [path, path.with_name("checkpoint-00000009.sharded")]


def test_only_one_process_deletes_so_only_it_tries_that_again(saved):
    """Saving again would wait for the others, which have gone on."""
    path, config, _ = saved
    model, found = trained(config, steps=1, sharded=True)
    slow = mock.patch("polyhead.train.store.sharded.rotate", side_effect=[OSError(errno.EIO, "I/O error"), None])
    once = mock.patch("polyhead.train.store.sharded.dcp.save", wraps=dcp.save)
    with slow as deleted, once as written, mock.patch("polyhead.train.store.disk.sleep"):
        save_sharded(path.parent, model, found, {**METADATA, "step": 9}, retry=DiskRetry(StopSignals(), speaks=False))
    assert (deleted.call_count, written.call_count) == (2, 1)


def test_the_best_is_kept_whole_and_the_newest_is_not_taken_for_an_older_one(tiny, tmp_path, group):
    config = tiny(tmp_path, dropout=0.0, residual_dropout=0.0, evaluate=("iid",))
    with claim(config, tmp_path):
        model, found = trained(config, sharded=True)
    save_checkpoint(tmp_path, model, found, {**METADATA, "digest": ph.digest(config), "step": 1})  # of one device
    member = Member(config, tmp_path, DiskRetry(StopSignals()))
    member.sharded = True
    state = model, found, None
    assert (member.load(state), member.seconds) == (1, 1.5)
    for step, score, best in ((2, 0.5, 2), (3, 0.25, 2), (4, 0.75, 4), (5, None, 4)):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        if score is not None:
            member.rating.evaluated(step, {"iid": {"r2": score}})
        member.save(step, state)
        if best == step:
            kept = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
        tensors, about = read_checkpoint(tmp_path, ph.digest(config), BEST)
        assert about["step"] == best
        assert all(torch.equal(tensors[f"model/{name}"], value) for name, value in kept.items())
        assert any(name.startswith("optimiser/") for name in tensors)
    assert [step_of(path) for path in candidates(tmp_path)] == [5, 4, 4]  # two, and the best
    with pytest.raises(ValueError, match=r"checkpoint-00000005.sharded is in parts: `polyhead resume \S+` until the"):
        ph.train.load_model(tmp_path)
    member.finish(state, parameters=1, environment={})
    assert read_metadata(tmp_path / "checkpoint.safetensors")["step"] == 5
    ph.train.load_model(tmp_path)
