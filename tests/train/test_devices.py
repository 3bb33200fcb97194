"""Runs on several devices have the same losses as on one, and can be resumed on any number; nothing hangs.

Two processes over gloo on the CPU, each launch with all that it is to do (tests/support/devices.py).
"""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from run_folders import CLOCK
from safetensors.torch import load_file
from tests.support import devices

from polyhead.train import load_model, read_result, run
from polyhead.train.store.folder import read_metrics
from polyhead.train.world import World

ACROSS = 1e-5
"""Losses of sixteen steps; other figures by ten times as much: they are larger or, as r2, divide by something small."""


STARTED = """
import sys
from polyhead.train import launch
count, *command = sys.argv[1:]
sys.exit(launch.run_workers(int(count), [sys.executable, *command], "polyhead resume RUN"))
"""


def start(count, root, *cases):
    """Exit code and output of fresh processes."""
    command = [sys.executable, "-W", "ignore", "-c", STARTED, str(count), devices.__file__, str(root), *cases]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return process.returncode, process.stdout


def copy_at(root, source, target, name):
    """A run folder as it was when the checkpoint `name` was the last."""
    (root / target).mkdir()
    for file in ("config.json", "metrics.jsonl"):
        shutil.copy(root / source / file, root / target / file)
    if name.endswith(".sharded"):
        shutil.copytree(root / source / name, root / target / name)
    else:
        shutil.copy(root / source / name, root / target / "checkpoint.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("devices")


@pytest.fixture(scope="module")
def single_scores(root):
    """The scores of a single process."""
    importlib.import_module("torch.distributed.fsdp")  # once: the others are copies of this process
    run(devices.fuzzy(root / "fuzzy-one"), progress=False)
    run(devices.text(root / "text-one"), progress=False)
    return devices.evaluations("data", World.alone())


@pytest.fixture(scope="module")
def two_processes(root, single_scores):
    copy_at(root, "fuzzy-one", "stopped-sharded", "checkpoint-00000010.safetensors")
    return start(2, root, "fuzzy-data", "fuzzy-sharded", "text-sharded", "evaluate", "draw", "stop:stopped-sharded")


def same(root, name):
    """Every figure of every row is that of one process."""
    expected, actual = (read_metrics(root / folder) for folder in (f"{name.partition('-')[0]}-one", name))
    assert len(actual) == len(expected) > 8
    for row, expected_row in zip(actual, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for key in row.keys() - set(CLOCK):
            if isinstance(row[key], float):
                tolerance = ACROSS if key == "loss" else 10 * ACROSS
                assert row[key] == pytest.approx(expected_row[key], abs=tolerance)
            else:
                assert row[key] == expected_row[key]


@pytest.mark.parametrize("name", ["fuzzy-data", "fuzzy-sharded", "text-sharded"])
def test_two_processes_get_the_losses_of_one(root, two_processes, name):
    same(root, name)
    result = read_result(root / name)
    assert result is not None
    assert result.environment["devices"] == 2
    assert result.command.startswith("torchrun --standalone --nproc-per-node 2 -m polyhead.train ")


def test_one_resumes_where_two_stopped(root, two_processes):
    copy_at(root, "fuzzy-sharded", "fuzzy-alone", "checkpoint-00000010.sharded")
    run(devices.fuzzy(root / "fuzzy-alone"), progress=False, resume=True)
    same(root, "fuzzy-alone")


def test_shards_resume_where_one_stopped(root, two_processes):
    """From a checkpoint of one file; until a signal stops them."""
    loss_by_step, expected = loss_by_step_of(root / "stopped-sharded"), loss_by_step_of(root / "fuzzy-one")
    assert list(loss_by_step) == [1, 2, 4, 6, 8, 10, 12, 14]
    assert loss_by_step == pytest.approx({step: expected[step] for step in loss_by_step}, abs=ACROSS)


def loss_by_step_of(folder):
    return {row["step"]: row["loss"] for row in read_metrics(folder) if row["kind"] == "train"}


def test_a_sharded_run_ends_as_any_other(root, two_processes):
    names = [load_file(root / f"fuzzy-{name}" / "checkpoint.safetensors").keys() for name in ("one", "sharded")]
    assert names[0] == names[1]
    _, model = load_model(root / "text-sharded")
    assert model.outputs.weight is model.inputs.table.weight
    saved = sorted(path.name for path in (root / "fuzzy-sharded").glob("checkpoint*"))
    assert saved[-2:] == ["checkpoint-00000016.sharded", "checkpoint.safetensors"]


def test_evaluation_is_that_of_one(root, single_scores, two_processes):
    """Rows that do not divide, in parts, and fewer of them than processes; a whole model and a sharded one."""
    unsharded, sharded = json.loads((root / "evaluated-2.json").read_text())
    for actual in (unsharded, sharded):
        assert actual.keys() == single_scores.keys()
        for name, scores in single_scores.items():
            assert actual[name] == pytest.approx(scores, rel=1e-5), name


def test_every_parameter_of_a_sharded_model_is_drawn(root, two_processes):
    assert [json.loads((root / f"not-drawn-{rank}.json").read_text()) for rank in (0, 1)] == [[], []]


def test_a_signal_to_one_stops_all_at_the_same_step(root, two_processes):
    (folder,) = (root / "stopped-sharded").glob("checkpoint-*.sharded")
    step = int(folder.stem.removeprefix("checkpoint-"))
    assert step in (14, 15)  # told in the 14th step, heard by all a step later
    assert len(list(folder.glob("shard-*"))) == 2
    messages = [line for line in two_processes[1].splitlines() if line.startswith("polyhead: ")]
    command = f"polyhead resume {root / 'stopped-sharded'} --devices 2"
    assert messages == [f"polyhead: stopped and saved at step {step}; resume with: {command}"]
    assert two_processes[0] == 130
