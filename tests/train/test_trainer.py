"""One run: its arithmetic, rows and folder; it can be stopped at any moment."""

import dataclasses
import json
import math
import re
import signal
from unittest import mock

import pytest
import torch
from run_folders import copied, losses, rows, same
from safetensors.torch import load_file
from tiny_runs import interrupted

import polyhead as ph
from polyhead.train import read_config, run
from polyhead.train.optimiser import AdamW


def parameters(folder):
    return load_file(folder / "checkpoint.safetensors")


# ----------------------------------------------------------------------------------------------------------- arithmetic
def test_the_loop_is_the_plain_loop(tiny, tmp_path):
    """The same steps spelled out: batches, dropout, loss, clipping, schedule, the decay of matrices."""
    config = tiny(tmp_path, steps=4, warmup=1, weight_decay=0.3, lr=1e-2, clip=20.0)
    run(config, progress=False)
    torch.manual_seed(ph.stream(7, "init"))
    model = ph.Transformer(config.model)
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = p.ndim == 2 and "relative" not in name
        (matrices if is_matrix else others).append(p)
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    expected_losses, norms = [], []
    for t, rate in enumerate([0.0, 1e-2, 5.5e-3, 1e-3]):
        torch.manual_seed(ph.stream(7, "dropout", t))
        batch = config.task.batch("train", 4, seed=7, step=t)
        loss = (model(batch.inputs, tail=1)[:, -1] - batch.targets[:, -1]).square().mean()
        expected_losses.append(loss.item())
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 20.0).item())
        optimiser.step()
    assert losses(tmp_path) == pytest.approx(expected_losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows(tmp_path, "train")] == pytest.approx(norms, rel=1e-4)
    assert min(norms) < 20 < max(norms)
    stored = parameters(tmp_path)
    for name, p in model.named_parameters():
        if name.endswith("qkv.bias"):
            continue  # softmax does not see a key bias: its gradient is rounding noise, which Adam blows up
        torch.testing.assert_close(stored[f"model/{name}"], p.detach(), rtol=1e-4, atol=1e-6)


def test_a_run_without_evaluations_is_done_without_scores(tiny, tmp_path, uninterrupted):
    assert run(tiny(tmp_path, evaluate=()), progress=False).scores == {}
    assert rows(tmp_path) == rows(uninterrupted, "train")
    assert ph.records(tmp_path).cells(states=True) == [{"run": "tiny", "state": "done", "step": "12/12"}]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(tiny, tmp_path, uninterrupted, precision):
    run(tiny(tmp_path, precision=precision, clip=100.0), progress=False)
    assert losses(tmp_path) != losses(uninterrupted)
    assert losses(tmp_path)[0] == pytest.approx(losses(uninterrupted)[0], rel=0.05)
    norms = [row["grad_norm"] for row in rows(tmp_path, "train")]  # fp16 skips the first updates, until the scale fits
    first = next(i for i, norm in enumerate(norms) if math.isfinite(norm))
    assert first < 6
    full_precision_norm = rows(uninterrupted, "train")[0]["grad_norm"]
    assert norms[first] == pytest.approx(full_precision_norm, rel=0.9)  # and not 65536 times that
    stored = parameters(tmp_path)
    assert {value.dtype for name, value in stored.items() if name.startswith("model/")} == {torch.float32}


def test_parameters_that_are_not_finite_are_not_saved(tiny, tmp_path, at_step, monkeypatch):
    """The loss of step 10 is still fine, its update is not, and step 10 is saved."""
    plain = AdamW.step

    def step(self, *args):
        plain(self, *args)
        self.param_groups[0]["params"][0].data.fill_(float("inf"))

    at_step(9, lambda: monkeypatch.setattr(AdamW, "step", step))
    with pytest.raises(ValueError, match=r"parameters of tiny are not finite at step 10; the checkpoint of step 5 is"):
        run(tiny(tmp_path), progress=False)
    assert "not finite at step 10" in (tmp_path / "failure.txt").read_text()


# ---------------------------------------------------------------------------------------------------------- the folder
def test_rows_and_result(uninterrupted):
    train, evals = rows(uninterrupted, "train"), rows(uninterrupted, "eval")
    assert [row["step"] for row in train] == list(range(1, 13))
    assert train[0]["lr"] == 0.0
    assert train[11]["lr"] == pytest.approx(1e-4)
    assert train[0].keys() == {"kind", "step", "loss", "r2", "mse", "lr", "grad_norm"}
    assert [(row["step"], row["split"]) for row in evals] == [(s, p) for s in (6, 12) for p in ("iid", "compositional")]
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["digest"] == ph.digest(read_config(uninterrupted))
    assert result["steps"] == 12
    stored = parameters(uninterrupted).items()
    assert result["parameters"] == sum(value.numel() for name, value in stored if name.startswith("model/"))
    assert result["command"] == f"python -m polyhead.train {uninterrupted / 'config.json'}"
    expected = {"python", "torch", "polyhead", "platform", "cpu", "threads", "device", "date"}
    assert expected <= result["environment"].keys()
    assert "folder" not in result


def test_a_finished_run_is_not_trained_again_unless_asked(tiny, tmp_path):
    """It may lie in a read-only folder."""
    config, path = tiny(tmp_path, steps=3), tmp_path / "config.json"
    first = run(config, progress=False)
    written = (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns
    with mock.patch("polyhead.train.store.folder.write", side_effect=PermissionError(13, "Permission denied")):
        assert run(config, progress=False) == first
        path.write_text(path.read_text().replace('"save_every": 5,', ""))  # of a version that had no such field
        assert run(config, progress=False, resume=True) == first
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns == written
    again = run(config, progress=False, again=True)
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns > written
    assert again.scores == first.scores


def test_a_folder_belongs_to_one_run(tiny, tmp_path):
    run(tiny(tmp_path, steps=1), progress=False)
    with pytest.raises(ValueError, match=r"already holds another run \(.{12}, not .{12}\); choose another"):
        run(tiny(tmp_path, steps=1, seed=1), progress=False)
    assert read_config(tmp_path).seed == 7


def test_a_folder_where_nothing_was_trained_is_free(tiny, tmp_path):
    with pytest.raises(ValueError, match="do not divide"):
        run(tiny(tmp_path, steps=1, dim=5, heads=(ph.Softmax(2),)), progress=False)
    assert run(tiny(tmp_path, steps=1), progress=False).steps == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"evaluate": ("ood",)}, "FuzzyLogic: unknown split 'ood'"),
        ({"evaluate": ("iid", "novel")}, "FuzzyLogic: split 'novel' has no sequences"),
        ({"device": "gpu"}, "device: unknown device 'gpu'"),
    ],
)
def test_mistakes_are_found_before_training(tiny, tmp_path, monkeypatch, change, text):
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "count", lambda task, split: 0 if split == "novel" else None)
    with pytest.raises(ValueError, match=text):
        run(tiny(tmp_path, **change), progress=False)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (None, "sample must return a Batch but returned a tuple"),
        ({"scored": None}, "scored of a batch must be a tensor (b ...) but is NoneType at b = 1"),
        ({"latents": None}, "latents of a batch must be a dict of tensors but is a NoneType"),
        ({"latents": {"ones": [1]}}, "latents['ones'] of a batch must be a tensor (b ...) but is list at b = 1"),
        ({"targets": torch.zeros(3, 8)}, "targets of a batch must be a tensor (b ...) but is torch.Size([3, 8])"),
    ],
)
def test_a_batch_of_a_task_of_ones_own_is_checked_before_training(tiny, tmp_path, monkeypatch, change, text):
    sample = ph.tasks.FuzzyLogic.sample

    def changed(*arguments):
        return (1, 2) if change is None else dataclasses.replace(sample(*arguments), **change)

    monkeypatch.setattr(ph.tasks.FuzzyLogic, "sample", changed)
    with pytest.raises(ValueError, match=re.escape(f"FuzzyLogic: {text}")):
        run(tiny(tmp_path, evaluate=()), progress=False)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("loss", [0.3, torch.zeros(2), torch.zeros(1), torch.ones(())])
def test_a_loss_of_a_task_of_ones_own_is_checked(tiny, tmp_path, monkeypatch, loss):
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "loss", lambda *_: loss)
    with pytest.raises(ValueError, match=r"^FuzzyLogic: loss must be one number (\(\) but is [0t]|with a gradient)"):
        run(tiny(tmp_path), progress=False)


# ----------------------------------------------------------------------------------------------- stopping and resuming
@pytest.mark.parametrize(("step", "number"), [(0, signal.SIGINT), (7, signal.SIGTERM), (7, signal.SIGHUP)])
def test_a_signal_saves_and_the_resumed_run_is_the_same(tiny, tmp_path, uninterrupted, number, step):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    message = interrupted(tiny(tmp_path), step + 1, number)
    assert message == f"stopped and saved at step {step + 1}; resume with: polyhead resume {tmp_path}"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert rows(tmp_path, "train")[-1]["step"] == step + 1
    with pytest.raises(ValueError, match=r"holds an unfinished run; resume it with .*` \(resume=True\), or"):
        run(tiny(tmp_path), progress=False)
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, uninterrupted)


def test_the_last_evaluation_is_not_there_twice(tiny, tmp_path, uninterrupted):
    """Killed before the result was written, a run has its last rows already and evaluates again."""
    copied(uninterrupted, tmp_path)
    (tmp_path / "result.json").unlink()
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, uninterrupted)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_resumes_exactly(precision, tiny, tmp_path):
    """With the loss scale of fp16; and no cast of a weight outlives its update, as a new process has none."""
    run(tiny(tmp_path / "whole", precision=precision), progress=False)
    interrupted(tiny(tmp_path / "cut", precision=precision), 8)
    run(tiny(tmp_path / "cut", precision=precision), progress=False, resume=True)
    same(tmp_path / "whole", tmp_path / "cut")
