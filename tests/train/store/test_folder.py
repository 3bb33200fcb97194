"""A run folder: its configuration, result and rows, and whom it belongs to."""

import json
import math
import os
from unittest import mock

import pytest
from refusals import refusing
from run_folders import copied, damage, rows, same
from tiny_runs import tiny

import polyhead as ph
from polyhead.tasks import record
from polyhead.train import read_config, read_result, run
from polyhead.train.network import Network
from polyhead.train.store import folder
from polyhead.train.store.files import write
from polyhead.train.store.folder import FolderInUse, claim, is_claimed


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "file"
    write(path, b"one")
    full = mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match=r"file: cannot be written \(No space left"):
        write(path, b"two")
    assert path.read_bytes() == b"one"


@pytest.mark.parametrize("fault", ["truncated", "empty"])
def test_a_damaged_result_is_computed_again_without_training(tmp_path, uninterrupted, monkeypatch, capsys, fault):
    copied(uninterrupted, tmp_path)
    damage(tmp_path / "result.json", fault)
    with pytest.raises(ph.train.Damaged, match=r"^\S+result.json: not a result"):
        read_result(tmp_path)
    monkeypatch.setattr(Network, "step", lambda *_, **__: pytest.fail("it trains"))
    run(tiny(tmp_path), progress=False)
    assert capsys.readouterr().err.endswith("; it is computed again\n")
    same(tmp_path, uninterrupted)


def test_a_score_that_is_no_number_is_null_in_json_and_nan_when_read(tmp_path):
    """One sequence has no standard error."""
    result = run(tiny(tmp_path, batch_size=1, eval_batches=1), progress=False)
    assert math.isnan(result.scores["iid"]["r2_se"])
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["scores"]["iid"]["r2_se"] is None
    assert math.isnan(read_result(tmp_path).scores["iid"]["r2_se"])
    assert math.isnan(rows(tmp_path, "eval")[-1]["r2_se"])


def test_a_missing_config_is_written_again_by_the_same_recipe(tmp_path, stopped_run, uninterrupted):
    copied(stopped_run, tmp_path)
    (tmp_path / "config.json").unlink()
    with refusing("holds no config.json, so it is not a run"):
        read_config(tmp_path)
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, uninterrupted)


def test_a_missing_config_is_not_written_by_another_recipe(tmp_path, stopped_run):
    copied(stopped_run, tmp_path)
    (tmp_path / "config.json").unlink()
    with refusing("already holds another run ("):
        run(tiny(tmp_path, seed=9), progress=False)
    assert not (tmp_path / "config.json").exists()


def test_an_edited_config_without_its_digest_does_not_take_over_a_checkpoint(tmp_path, stopped_run):
    copied(stopped_run, tmp_path)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    del values["digest"]
    config.write_text(json.dumps({**values, "seed": 9}))
    before = config.read_bytes()
    with refusing("already holds another run ("):
        run(read_config(tmp_path), progress=False, resume=True)
    assert config.read_bytes() == before


def test_the_config_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with refusing("config.json is not that of a run; choose another folder"):
        run(tiny(tmp_path), progress=False)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "gpt2"}'


def test_training_that_was_half_deleted_keeps_the_record_of_its_data(tmp_path, stopped_run, monkeypatch):
    """Else what is left could go on with other data."""
    copied(stopped_run, tmp_path)
    (tmp_path / "data.json").write_text("{}")
    monkeypatch.setattr(folder, "checkpoints", lambda path: [path / "none" / "checkpoint-1.safetensors"])
    monkeypatch.setattr(folder, "delete", mock.Mock(side_effect=[None, OSError("busy")]))
    with pytest.raises(OSError, match="busy"):
        folder.clear(tmp_path)
    assert (tmp_path / "data.json").exists()


def test_nothing_is_written_through_a_link_of_a_stranger(tmp_path, stopped_run):
    copied(stopped_run, tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("metrics.jsonl", "config.json", "result.json", "data.json"):
        (tmp_path / "run" / f"{name}.partial").symlink_to(precious)
    run(tiny(tmp_path / "run"), progress=False, resume=True)
    record.write(tmp_path / "run" / "data.json", b"{}")
    assert precious.read_text() == "mine"


WRONG = [("seconds", None), ("parameters", None), ("command", None), ("seconds", 10**400), ("parameters", 10**400)]
WRONG += [("scores", {"iid": {"r2": "x"}}), ("scores", {"iid": {"r2": 10**400}})]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_result_of_another_type_or_with_a_huge_integer_is_damaged(tmp_path, uninterrupted, name, value):
    copied(uninterrupted, tmp_path)
    values = json.loads((tmp_path / "result.json").read_text())
    values[name] = value
    (tmp_path / "result.json").write_text(json.dumps(values))
    with pytest.raises(ph.train.Damaged, match=r"result.json: not a result"):
        read_result(tmp_path)


def test_a_changed_config_is_one_line(tmp_path, stopped_run):
    copied(stopped_run, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "train": {**values["train"], "lr": 0.5}}))
    with refusing('undo that, or train it in another folder without its line "digest"'):
        read_config(tmp_path)
    with refusing("is damaged or edited"):
        run(tiny(tmp_path), progress=False, resume=True)
    path.write_text(json.dumps({**values, "train": {**values["train"], "momentum": 0.5}}))
    with refusing("unknown field 'momentum'"):
        read_config(tmp_path)


def test_a_lock_holds_as_long_as_its_process(tmp_path):
    config = tiny(tmp_path)
    assert not is_claimed(tmp_path)
    with claim(config, tmp_path):
        assert is_claimed(tmp_path)
        with pytest.raises(FolderInUse, match="another process is training in"):
            run(config, progress=False)
    if os.fork() == 0:
        claim(config, tmp_path).__enter__()
        os._exit(0)
    os.wait()
    assert not is_claimed(tmp_path)


def test_a_row_that_was_cut_off_is_left_out(tmp_path, uninterrupted):
    copied(uninterrupted, tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert rows(tmp_path) == rows(uninterrupted)[:-1]
