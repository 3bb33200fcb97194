"""Ends of population members: done, diverged, disk errors, folders in use, damaged folders."""

import dataclasses
import errno
import os
import signal

import pytest
import torch
from run_folders import alone, rows, same
from some import some

import polyhead as ph
from polyhead.scale.population import training as population
from polyhead.scale.population.stacked import Stack
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.status import state_of
from polyhead.train import Interrupted
from polyhead.train.store import disk
from polyhead.train.store.claims import claim


@pytest.mark.parametrize("at_once", [1, pytest.param(4, marks=pytest.mark.campaign)])
def test_one_that_diverges_stays_alone(at_once, members, tmp_path, capsys):
    good, other, _ = members(dropout=0.1, steps=4)
    bad = dataclasses.replace(good, name="bad", train=dataclasses.replace(good.train, lr=1e38, clip=None))
    results = population.train([good, bad, other], tmp_path, at_once=at_once)
    failed = results[1]
    assert failed == Failure("bad", tmp_path / f"bad-{ph.digest(bad)}", 2, failed.error)
    assert failed.error.startswith(
        "train: the loss of bad is nan at step 2; there is no checkpoint yet; lower train.lr"
    )
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [
        f"m0 and 2 more: {results[0].parameters:,} parameters, 4 steps, {tmp_path}",
        f"m0 and 2 more: from step 0, {min(at_once, 3)} in a pass",
        f"bad: failed: {failed.error}",
    ]
    both = results[0].scores, results[2].scores
    mean = ", ".join(f"{split} {sum(of[split]['r2'] for of in both) / 2:.3f}" for split in both[0])
    ends = [f"{result.name}: done ({result.folder})" for result in (results[0], results[2])]
    assert said[3:] == [*ends, f"m0 and 2 more: step 4: r2 {mean}"]
    assert [row["step"] for row in rows(failed.folder)] == [1]
    assert state_of(bad, failed.folder) == ("failed", 1, failed.error)
    for config, result in zip((good, other), (results[0], results[2]), strict=True):
        (wanted,) = alone([config], tmp_path / "alone")
        same(wanted.folder, result.folder, rel=2e-3)


def test_parameters_that_are_not_finite_are_not_saved(members, tmp_path):
    runs = members(lr=1e38, log_every=100, warmup=0, clip=None)[:2]
    for config, failed in some(zip(runs, population.train(runs, tmp_path, progress=False), strict=True)):
        assert failed.error.startswith(
            f"train: parameters of {failed.name} are not finite at step 3; there is no checkp"
        )
        batch, about = ph.train.read_batch(failed.folder)
        assert (about["step"], about["seed"], about["digest"]) == (2, config.seed, ph.digest(config))
        assert torch.equal(batch.inputs, config.task.batch("train", 4, seed=config.seed, step=1).inputs)
        assert not (failed.folder / "checkpoint.safetensors").exists()


def test_scores_that_are_wrong_end_their_group_alone(members, tmp_path, monkeypatch):
    right, fine = ph.tasks.FuzzyLogic.metrics, members(steps=2)
    wrong = [dataclasses.replace(run, task=ph.tasks.FuzzyLogic(length=6)) for run in fine[:2]]

    def metrics(task, outputs, batch):
        found = right(task, outputs, batch)
        return found if task.length == 8 else {name: value.mean() for name, value in found.items()}

    monkeypatch.setattr(ph.tasks.FuzzyLogic, "metrics", metrics)
    *failed, done, _, _ = population.train([*wrong, *fine], tmp_path, progress=False)
    assert done.steps == 2
    for run, end in zip(wrong, failed, strict=True):
        assert end.error == "FuzzyLogic: metrics must be numbers (4,), one for each sequence, but r2 is ()"
        assert state_of(run, end.folder) == ("failed", 0, end.error)


def test_a_model_that_cannot_be_built_ends_its_group_alone(members, tmp_path):
    fine = members(steps=2)
    odd = {"heads": ph.Softmax(2, dim=5), "positions": ph.Rotary()}
    wrong = [dataclasses.replace(run, model=dataclasses.replace(run.model, **odd)) for run in fine[:2]]
    *failed, done, _, _ = population.train([*wrong, *fine], tmp_path, progress=False)
    assert done.steps == 2
    for run, end in zip(wrong, failed, strict=True):
        assert end.error == "RotaryEmbedding: the width must be even but is 5"
        assert state_of(run, end.folder) == ("failed", 0, end.error)


def test_a_busy_and_a_damaged_folder(members, tmp_path, capsys):
    """A run of another process is left alone.  A damaged one resumes from its last whole checkpoint."""
    runs = members()
    whole = population.train(runs, tmp_path / "whole", progress=False)
    folders = [tmp_path / f"{config.name}-{ph.digest(config)}" for config in runs]
    folders[0].mkdir()
    (folders[0] / "checkpoint.safetensors").write_bytes(b"x" * 100)
    (folders[0] / "result.json").write_bytes(b"{")
    with claim(runs[1], folders[1]):
        anew, busy, fine = population.train(runs, tmp_path, progress=False)
    assert busy.error == f"run folder: another process is training in {folders[1]}"
    assert busy.code == 2
    for wanted, mended in ((whole[0], anew), (whole[2], fine)):
        same(wanted.folder, mended.folder, rel=1e-5)  # two in a pass where three were: oneDNN then rounds otherwise
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("set aside as ")[2] for line in said] == [
        *("checkpoint.safetensors.damaged", "", "result.json.damaged")
    ]


def test_a_folder_that_cannot_be_written_fails_alone(members, tmp_path):
    runs = members(steps=2)
    place = tmp_path / f"m1-{ph.digest(runs[1])}"
    (place / "config.json.partial").mkdir(parents=True)
    first, failed, last = population.train(runs, tmp_path, progress=False)
    assert failed == Failure("m1", place, 1, f"{place}/config.json: cannot be written (Is a directory)")
    assert first.steps == last.steps == 2


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_a_full_disk_is_a_pause(at_once, members, tmp_path, at_update, monkeypatch, capsys):
    """Also for rows and results; a signal ends the pause, and those that were saved go on from there."""
    runs = members()
    whole = population.train(runs, tmp_path / "whole", progress=False, at_once=at_once)
    plain, full, rests, once = os.replace, [], [], set()

    def replace(one, two):
        if full or (str(two).endswith("result.json") and two not in once):
            once.add(two)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(one, two)

    def rest(seconds):
        rests.append(seconds)
        if len(rests) == 2 * disk.SECONDS:
            full.clear()
        if len(rests) == 3 * disk.SECONDS:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(disk, "sleep", rest)
    for step in (1, 4):
        at_update(step, lambda: full.append(1))
    with pytest.raises(Interrupted, match=r"^stopped, not saved: .+ is kept; 0 of 3 runs are done, the same command"):
        population.train(runs, tmp_path / "cut", progress=False, at_once=at_once)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["paused", "the disk works again", "paused"]
    full.clear()
    results = population.train(runs, tmp_path / "cut", progress=False, at_once=at_once)
    assert {path.parent for path in once if path.name == "result.json"} == {result.folder for result in results}
    for one, two in zip(whole, results, strict=True):
        same(one.folder, two.folder)


def test_bad_populations(members, tmp_path):
    one = members()[0]
    with pytest.raises(ValueError, match=r"^population: the run 'm0' occurs twice$"):
        population.train([one, one], tmp_path)
    with pytest.raises(ValueError, match=r"^population: at_once must be at least 1 but is 0$"):
        population.train([], tmp_path, at_once=0)
    assert population.train([], tmp_path) == []


def test_a_gradient_whose_norm_is_infinite_concerns_one_member(members, tmp_path, monkeypatch):
    """Its loss is finite.  The line on the screen shows a mean over members."""
    step = Stack.step

    def overflowing(stack, number, *, wanted=False):
        values = step(stack, number, wanted=wanted)
        if wanted:
            values["grad_norm"][1] = float("inf")
        return values

    monkeypatch.setattr(Stack, "step", overflowing)
    results = population.train(members()[:2], tmp_path, progress=True)
    assert all(isinstance(result, ph.train.Result) for result in results)
    norms = [[row["grad_norm"] for row in rows(result.folder, "train")] for result in results]
    assert None not in norms[0]
    assert set(norms[1]) == {None}
