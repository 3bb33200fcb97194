"""Checkpoints rotate, the best is kept, and damage costs only time."""

import errno
import json
import math
import os
from unittest import mock

import pytest
import tiny_runs
import torch
from refusals import refusing
from run_folders import copied, damage, names, rows, same, steps
from tiny_runs import interrupted

import polyhead as ph
from polyhead.train import load_model, run
from polyhead.train.store import checkpoint
from polyhead.train.store.checkpoint import candidates, read_checkpoint, read_metadata, step_of
from polyhead.train.store.files import seal
from polyhead.train.store.folder import read_result


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Stopped at step 11: checkpoints of steps 11 and 10, neither of an evaluated step, so there is no best one."""
    folder = tmp_path_factory.mktemp("begun")
    interrupted(tiny_runs.tiny(folder), 11)
    return folder


# ------------------------------------------------------------------------------------------------------------- rotation
@pytest.mark.parametrize("links", [True, False])
def test_the_last_ones_and_the_best_are_kept(tiny, tmp_path, monkeypatch, links):
    if not links:  # as on FAT
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    run(tiny(tmp_path, save_every=2, eval_every=4, keep=3), progress=False)
    assert steps(tmp_path)[:3] == [12, 10, 8]
    assert names(tmp_path) == [
        *(".lock", "best.safetensors", "checkpoint-00000008.safetensors", "checkpoint-00000010.safetensors"),
        *("checkpoint.safetensors", "config.json", "metrics.jsonl", "result.json"),
    ]
    scores = {row["step"]: row["r2"] for row in rows(tmp_path) if row.get("split") == "iid"}
    assert sorted(scores) == [4, 8, 12]
    best = read_metadata(tmp_path / "best.safetensors")
    assert (best["score"], best["step"]) == max((score, step) for step, score in scores.items())
    assert (tmp_path / "best.safetensors").stat().st_ino == (tmp_path / "checkpoint.safetensors").stat().st_ino or (
        not links or best["step"] != 12
    )
    for which in ("best", best["step"], 10):
        found = load_model(tmp_path, which=which)[1].state_dict()
        name = "best.safetensors" if which == "best" or which == best["step"] else "checkpoint-00000010.safetensors"
        wanted = read_checkpoint(tmp_path, ph.digest(tiny(tmp_path)), name)[0]
        assert all(torch.equal(value, wanted[f"model/{key}"]) for key, value in found.items())
    with pytest.raises(ValueError, match=r"has none of 3 \(choose from newest, best, (4, )?8, 10, 12\)$"):
        load_model(tmp_path, which=3)
    (tmp_path / "best.safetensors").unlink()  # as in a run that evaluates nothing
    with pytest.raises(ValueError, match=r"has none of 'best' \(choose from newest, 8, 10, 12\)$"):
        load_model(tmp_path, which="best")


@pytest.mark.parametrize(("better", "wanted"), [("higher", 4), ("lower", 2)])
def test_the_best_is_the_best_of_the_headline(tiny, tmp_path, monkeypatch, better, wanted):
    """Of validation if it is evaluated; also after a pause, and nan is no score."""
    config = tiny(tmp_path, steps=6, save_every=1, eval_every=1, keep=1, evaluate=("iid", "validation"))
    given = iter([{"validation": v, "iid": -v} for v in (0.1, -5.0, float("nan"), 0.7, 0.6, 0.5)])

    def evaluated(network, split):
        scores = dict(next(given)) if split == "iid" else now
        now.update(scores)
        return [{"r2": now[split]}]

    now: dict[str, float] = {}
    monkeypatch.setattr("polyhead.train.network.Single.evaluate", evaluated)
    monkeypatch.setattr(type(config.task), "better", better)
    monkeypatch.setattr(type(config.task), "splits", ("train", "validation", "iid"))
    draw = type(config.task).batch
    monkeypatch.setattr(type(config.task), "batch", lambda task, split, size, **at: draw(task, "train", size, **at))
    interrupted(config, 5)
    run(config, progress=False, resume=True)
    assert step_of(tmp_path / "best.safetensors") == wanted
    assert steps(tmp_path) == [6, wanted]


def test_a_save_that_is_tried_again_keeps_the_one_before(tiny, tmp_path, monkeypatch):
    """The disk may fail after the rename, so the newest is already that of this step."""
    failing, plain = iter([OSError(errno.EIO, "Input/output error")]), checkpoint.rotate

    def rotate(folder, keep):
        if step_of(folder / "checkpoint.safetensors") == 12 and (error := next(failing, None)):
            raise error
        plain(folder, keep)

    monkeypatch.setattr(checkpoint, "rotate", rotate)
    monkeypatch.setattr("polyhead.train.store.disk.sleep", lambda seconds: None)
    run(tiny(tmp_path, save_every=2, eval_every=100, keep=3, evaluate=()), progress=False)
    assert next(failing, None) is None
    assert steps(tmp_path) == [12, 10, 8]


def test_a_kill_before_the_best_is_linked_does_not_lose_it(tiny, tmp_path, monkeypatch):
    """Between the rename of a checkpoint and its link."""
    changes = {"steps": 8, "save_every": 2, "eval_every": 2, "lr": 3e-2}
    run(tiny(tmp_path / "whole", **changes), progress=False)
    best, plain = step_of(tmp_path / "whole" / "best.safetensors"), checkpoint.link
    assert best < 8

    def killed(source, target):
        if target.name == "best.safetensors" and step_of(source) == best:
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(checkpoint, "link", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(tmp_path / "killed", **changes), progress=False)
    monkeypatch.setattr(checkpoint, "link", plain)
    run(tiny(tmp_path / "killed", **changes), progress=False, resume=True)
    one, two = (load_model(tmp_path / name, which="best")[1].state_dict() for name in ("whole", "killed"))
    assert step_of(tmp_path / "killed" / "best.safetensors") == best
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_a_whole_checkpoint_exists_at_any_moment(tiny, tmp_path, monkeypatch):
    """Looked at before every rename, link and removal once there is one: no step is ever lost."""
    config, seen = tiny(tmp_path, save_every=2, eval_every=4), []

    def look(plain):
        def looked(*args, **how):
            newest = tmp_path / "checkpoint.safetensors"
            if seen or newest.exists():
                assert step_of(newest) == step_of(candidates(tmp_path)[0])
                whole = [read_checkpoint(tmp_path, ph.digest(config), p.name)[1]["step"] for p in candidates(tmp_path)]
                seen.append(whole[0])
            return plain(*args, **how)

        return looked

    for name in ("replace", "link", "unlink"):
        monkeypatch.setattr(os, name, look(getattr(os, name)))
    run(config, progress=False)
    assert seen == sorted(seen)
    assert set(seen) == {2, 4, 6, 8, 10, 12}


# --------------------------------------------------------------------------------------------------------------- damage
@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", ["truncated", "empty", "flipped digit", "missing"])
def test_a_damaged_newest_checkpoint_is_replaced_by_the_one_before(tiny, tmp_path, begun, whole, capsys, how):
    copied(begun, tmp_path)
    assert steps(tmp_path) == [11, 10]
    path = tmp_path / "checkpoint.safetensors"
    damage(path, how)
    left = path.read_bytes() if how != "missing" else None
    run(tiny(tmp_path), progress=False, resume=True)
    said = capsys.readouterr().err.splitlines()
    assert said.pop() == "tiny: resuming from checkpoint-00000010.safetensors"
    assert len(said) == (how != "missing")
    if said:
        assert "checkpoint.safetensors is damaged (" in said[0]
        assert said[0].endswith("; set aside as checkpoint.safetensors.damaged")
        assert path.with_name("checkpoint.safetensors.damaged").read_bytes() == left
    same(tmp_path, whole)
    run(tiny(tmp_path), progress=False, again=True)
    assert not [name for name in names(tmp_path) if name.endswith(".damaged")]


def test_a_run_resumes_from_the_best_which_shares_the_damage_of_its_links(tiny, tmp_path, capsys):
    config = tiny(tmp_path, save_every=6, keep=1)
    interrupted(config, 7)
    assert steps(tmp_path) == [7, 6]
    damage(tmp_path / "checkpoint.safetensors", "flipped")
    assert "at step 7;" in interrupted(config, 7)
    assert "tiny: resuming from best.safetensors" in capsys.readouterr().err
    os.unlink(tmp_path / "checkpoint.safetensors")
    os.link(tmp_path / "best.safetensors", tmp_path / "checkpoint.safetensors")
    damage(tmp_path / "checkpoint.safetensors", "flipped")
    assert "at step 1;" in interrupted(config, 1)
    said = ["tiny: no checkpoint is left, so it starts at step 0; the result will be the same"]
    assert capsys.readouterr().err.splitlines()[1:] == said
    assert not (tmp_path / "best.safetensors").exists()


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_result_is_made_again(tiny, tmp_path, whole, monkeypatch, capsys, how):
    """From the final checkpoint, without training."""
    copied(whole, tmp_path)
    damage(tmp_path / "result.json", how)
    with pytest.raises(ph.train.Damaged, match=r"^\S+result.json"):
        read_result(tmp_path)
    monkeypatch.setattr("polyhead.train.network.Single.step", lambda *_, **__: pytest.fail("it trains"))
    run(tiny(tmp_path), progress=False)
    assert capsys.readouterr().err.endswith("set aside as result.json.damaged\n")
    same(tmp_path, whole)


def test_results_and_configs_of_older_versions_are_read(tiny, tmp_path, whole):
    copied(whole, tmp_path)
    for name, key in (("result.json", "seal"), ("config.json", "digest")):
        values = json.loads((tmp_path / name).read_text())
        del values[key]
        (tmp_path / name).write_text(json.dumps(values))
    unsealed = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in unsealed:
        del row["seal"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unsealed))
    assert ph.digest(ph.train.read_config(tmp_path)) == ph.digest(tiny(tmp_path))
    same(tmp_path, whole)


@pytest.mark.parametrize("how", ["edited", "truncated", "missing"])
def test_a_damaged_config_is_one_line_and_the_same_recipe_writes_it_again(tiny, tmp_path, begun, whole, capsys, how):
    copied(begun, tmp_path)
    path = tmp_path / "config.json"
    if how == "edited":
        path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.003'))
    else:
        damage(path, how)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        ph.train.read_config(tmp_path)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):  # another recipe
        run(tiny(tmp_path, seed=8), progress=False, resume=True)
    assert not path.with_name("config.json.damaged").exists()
    run(tiny(tmp_path), progress=False, resume=True)
    said = capsys.readouterr().err
    assert said.endswith("set aside as config.json.damaged\n") or (how == "missing" and said == "")
    assert ph.digest(ph.train.read_config(tmp_path)) == ph.digest(tiny(tmp_path))
    same(tmp_path, whole)


def test_whoever_reads_a_damaged_checkpoint_hears_of_another(tmp_path, begun):
    copied(begun, tmp_path)
    damage(tmp_path / "checkpoint.safetensors", "truncated")
    with refusing("); that of step 10 is there, too: --checkpoint 10, which=10"):
        load_model(tmp_path)
    assert load_model(tmp_path, which=10)[0].name == load_model(begun)[0].name


def test_a_config_that_was_changed_or_lost_says_the_way_on(tiny, tmp_path, begun):
    copied(begun, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    changed = {**values, "train": {**values["train"], "lr": 0.5}}
    for wrong, line in (
        (changed, 'it is damaged or edited; undo that, or train it in another folder, without its line "digest"'),
        ({**values, "train": {**values["train"], "momentum": 0.5}}, "unknown field 'momentum' (choose from steps"),
        (
            {**values, "train": {**values["train"], "momentum": 0.5}},
            "edited, or written by another version of polyhead",
        ),
    ):
        path.write_text(json.dumps(wrong))
        with refusing(line):
            ph.train.read_config(tmp_path)
    changed.pop("digest")
    path.write_text(json.dumps(changed))
    with refusing("undo the change of its config.json, choose another folder, or start over with --again"):
        ph.load(tmp_path)
    again = f"; `polyhead train RECIPE --folder {tmp_path}` with the recipe and fields of the run writes it again"
    path.write_text("{")
    with refusing(again):
        ph.train.read_config(tmp_path)
    path.unlink()
    with refusing(again):
        ph.train.read_config(tmp_path)


def test_a_row_with_a_flipped_digit_is_left_out(tmp_path, whole):
    copied(whole, tmp_path)
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    assert len(rows(tmp_path)) == 16
    path.write_text(text.replace('"lr": 0.0,', '"lr": 0.1,', 1))
    assert rows(tmp_path) == rows(whole)[1:]


def test_a_score_that_is_no_number_is_null_in_json_and_nan_when_read(tiny, tmp_path):
    """One sequence has no standard error.  Files that hold NaN, as they did, are read as before."""
    result = run(tiny(tmp_path, batch_size=1, eval_batches=1), progress=False)
    assert math.isnan(result.scores["iid"]["r2_se"])
    lines = [*(tmp_path / "metrics.jsonl").read_text().splitlines(), (tmp_path / "result.json").read_text()]
    read = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert read[-1]["scores"]["iid"]["r2_se"] is None
    for found in (read_result(tmp_path).scores["iid"], rows(tmp_path, "eval")[-1]):
        assert math.isnan(found["r2_se"])
        assert found["sequences"] == 1
    earlier = seal({**{name: value for name, value in read[-1].items() if name != "seal"}, "scores": result.scores})
    (tmp_path / "result.json").write_text(json.dumps(earlier))
    assert read_result(tmp_path).scores["iid"] == pytest.approx(result.scores["iid"], abs=0, nan_ok=True)
