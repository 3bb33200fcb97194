"""One run: its arithmetic, rows and folder; it can be stopped at any moment."""

import dataclasses
import json
import pathlib
import signal

import forked
import pytest
import torch
from run_folders import copied, losses, rows, same
from safetensors.torch import load_file
from tiny_runs import interrupted
from torch import nn

import polyhead as ph
from polyhead.train import evaluate, load_model, read_config, run
from polyhead.train.store.checkpoint import read_metadata
from polyhead.train.store.claims import claim
from polyhead.train.store.folder import is_past


def parameters(folder):
    return load_file(folder / "checkpoint.safetensors")


# ----------------------------------------------------------------------------------------------------------- arithmetic
def test_the_loop_is_the_plain_loop(tiny, tmp_path):
    """The same steps spelled out: batches, dropout, loss, AdamW with the decay of the equations."""
    config = tiny(tmp_path, steps=4, warmup=1, weight_decay=0.3, lr=1e-2)
    run(config, progress=False)
    torch.manual_seed(ph.stream(7, "init"))
    model = ph.Transformer(config.model)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    wanted = []
    for t in range(4):
        torch.manual_seed(ph.stream(7, "dropout", t))
        batch = config.task.batch("train", 4, seed=7, step=t)
        loss = (model(batch.inputs, tail=1)[:, -1] - batch.targets[:, -1]).square().mean()
        model.zero_grad()
        loss.backward()
        wanted.append(loss.item())
        rate = [0.0, 1e-2, 5.5e-3, 1e-3][t]
        for name, p in model.named_parameters():
            m, v = moments[name]
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            decay = 0.3 if p.ndim == 2 and "relative" not in name else 0.0
            step = m / (1 - 0.9 ** (t + 1)) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
            p.data.copy_(p * (1 - rate * decay) - rate * step)
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-5)
    stored = parameters(tmp_path)
    for name, p in model.named_parameters():
        if name.endswith("qkv.bias"):
            continue  # softmax does not see a key bias: its gradient is rounding noise, which Adam blows up
        torch.testing.assert_close(stored[f"model/{name}"], p.detach(), rtol=1e-4, atol=1e-6)


def test_other_fields_change_neither_losses_nor_digest(tiny, tmp_path, whole):
    other = tiny(tmp_path, eval_every=1, save_every=100, name="another", deterministic=True)
    run(other, progress=False)
    assert rows(tmp_path, "train") == rows(whole, "train")
    for change in ({"parallel": "sharded"}, {"track": ("wandb",)}, {"fast_products": False}, {"compile": True}):
        assert ph.digest(tiny(tmp_path, **change)) == ph.digest(other)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("change", [{"seed": 8}, {"dropout": 0.0}, {"lr": 2e-3}, {"weight_decay": 0.9}])
def test_semantic_fields_change_the_losses(tiny, tmp_path, whole, change):
    run(tiny(tmp_path, **change), progress=False)
    assert rows(tmp_path, "train") != rows(whole, "train")


def test_the_caller_keeps_its_threads_and_random_state(tiny, tmp_path, at_step):
    torch.manual_seed(5)
    wanted, threads = torch.rand(2), torch.get_num_threads()
    torch.manual_seed(5)
    seen: list[object] = []
    at_step(0, lambda: seen.extend((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())))
    run(tiny(tmp_path, threads=2, steps=1, deterministic=True), progress=False)
    assert seen == [2, True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.rand(2), wanted)
    assert torch.get_num_threads() == threads


def test_clipping_clips_and_reports_the_norm_before(tiny, tmp_path, whole):
    run(tiny(tmp_path, clip=1e-3, steps=1, warmup=0), progress=False)
    first, wanted = rows(tmp_path, "train")[0], rows(whole, "train")[0]
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"])
    state = parameters(tmp_path)
    total = sum(value.square().sum() for name, value in state.items() if name.endswith("/exp_avg")) ** 0.5
    assert total.item() == pytest.approx(0.1 * 1e-3, rel=1e-3)  # one step of the first moment


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(tiny, tmp_path, whole, precision):
    run(tiny(tmp_path, precision=precision, clip=100.0), progress=False)
    assert losses(tmp_path) != losses(whole)
    assert losses(tmp_path)[0] == pytest.approx(losses(whole)[0], rel=0.05)
    norms = [row["grad_norm"] for row in rows(tmp_path, "train")]  # fp16 skips the first updates, until the scale fits
    first = next(i for i, norm in enumerate(norms) if norm is not None)
    assert first < 6
    assert norms[first] == pytest.approx(rows(whole, "train")[0]["grad_norm"], rel=0.9)  # and not 65536 times that
    stored = parameters(tmp_path)
    assert {value.dtype for name, value in stored.items() if name.startswith("model/")} == {torch.float32}


def test_balance_loss_is_trained(tiny, tmp_path):
    for weight in (0.0, 10.0):
        experts = ph.Experts(experts=3, top_k=1, hidden=8, balance=weight)
        run(tiny(tmp_path / str(weight), feedforward=experts, steps=2), progress=False)
    assert losses(tmp_path / "10.0")[0] > losses(tmp_path / "0.0")[0] + 1


def test_parameters_that_are_not_finite_are_not_saved(tiny, tmp_path, at_step):
    """The loss of step 10 is still fine, its update is not, and step 10 is saved."""
    plain = torch.optim.AdamW.step

    def step(self, *args):
        plain(self, *args)
        self.param_groups[0]["params"][0].data.fill_(float("inf"))

    with pytest.MonkeyPatch.context() as patch:
        at_step(9, lambda: patch.setattr(torch.optim.AdamW, "step", step))
        with pytest.raises(
            ValueError, match=r"parameters of tiny are not finite at step 10; the checkpoint of step 5 is"
        ):
            run(tiny(tmp_path), progress=False)


# ----------------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_is_the_mean_over_the_splits_own_stream(whole):
    config, model = load_model(whole)
    found = evaluate(model, config.task, "compositional", batches=3, batch_size=5, seed=7)
    values, means = [], []
    for i in range(3):
        batch = config.task.batch("compositional", 5, seed=7, step=i)
        with torch.no_grad():
            outputs = model(batch.inputs)
        means.append(config.task.loss(outputs, batch).item())
        values += config.task.metrics(outputs, batch)["r2"].tolist()
    mean = sum(values) / 15
    spread = (sum((v - mean) ** 2 for v in values) / 14 / 15) ** 0.5
    assert found["loss"] == pytest.approx(sum(means) / 3)
    assert found["r2"] == pytest.approx(mean)
    assert found["r2_se"] == pytest.approx(spread)
    assert found["sequences"] == 15


def test_the_last_row_is_the_result_and_can_be_had_again(whole):
    config, model = load_model(whole)
    result = ph.train.read_result(whole)
    assert result is not None
    for split in ("iid", "compositional"):
        row = [r for r in rows(whole, "eval") if r["split"] == split][-1]
        assert row["step"] == 12
        again = evaluate(model, config.task, split, batches=2, batch_size=4, seed=7)
        assert again == result.scores[split] == {k: v for k, v in row.items() if k not in ("kind", "step", "split")}


# ---------------------------------------------------------------------------------------------------------- the folder
def test_rows_and_result(whole):
    train, evals = rows(whole, "train"), rows(whole, "eval")
    stay = [row for row in (*train, *evals) if is_past(row, 12, 12)]
    assert read_metadata(whole / "checkpoint.safetensors")["rows"] == len(stay) > 12  # it vouches for them
    assert [row["step"] for row in train] == list(range(1, 13))
    assert train[0]["lr"] == 0.0
    assert train[11]["lr"] == pytest.approx(1e-4)
    assert train[0].keys() == {"kind", "step", "loss", "r2", "mse", "lr", "grad_norm"}
    assert [(row["step"], row["split"]) for row in evals] == [(s, p) for s in (6, 12) for p in ("iid", "compositional")]
    result = json.loads((whole / "result.json").read_text())
    assert result["digest"] == ph.digest(read_config(whole))
    assert result["steps"] == 12
    assert result["parameters"] == sum(v.numel() for n, v in parameters(whole).items() if n.startswith("model/"))
    assert result["command"] == f"python -m polyhead.train {whole / 'config.json'}"
    wanted = {"python", "torch", "polyhead", "platform", "cpu", "threads", "device", "date"}
    assert wanted <= result["environment"].keys()
    assert "folder" not in result


def test_a_finished_run_is_not_trained_again_unless_asked(tiny, tmp_path):
    first = run(tiny(tmp_path, steps=3), progress=False)
    written = (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns
    assert run(tiny(tmp_path, steps=3), progress=False) == first
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns == written
    again = run(tiny(tmp_path, steps=3), progress=False, again=True)
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns > written
    assert again.scores == first.scores


def test_a_finished_run_may_lie_in_a_read_only_folder(tiny, tmp_path, monkeypatch):
    first = run(tiny(tmp_path, steps=1), progress=False)

    def refused(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("polyhead.train.store.claims.write", refused)
    assert run(tiny(tmp_path, steps=1), progress=False, resume=True) == first
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"keep": 2,', ""))  # of a version that had no such field
    assert run(tiny(tmp_path, steps=1), progress=False, resume=True) == first


def test_another_runs_result_is_not_ours(tiny, tmp_path):
    for seed in (7, 8):
        run(tiny(tmp_path / str(seed), steps=1, seed=seed), progress=False)
    (tmp_path / "8" / "result.json").rename(tmp_path / "7" / "result.json")
    with pytest.raises(
        ValueError, match=r"result.json is that of run [0-9a-f]{12} but the folder's run is [0-9a-f]{12}$"
    ):
        run(tiny(tmp_path / "7", steps=1), progress=False)


def test_a_folder_belongs_to_one_run(tiny, tmp_path):
    run(tiny(tmp_path, steps=1), progress=False)
    said = r"already holds another run \([0-9a-f]{12}, not [0-9a-f]{12}\): seed is 7 there but 1 here; choose another"
    with pytest.raises(ValueError, match=said):
        run(tiny(tmp_path, steps=1, seed=1), progress=False)
    assert read_config(tmp_path).seed == 7


def test_a_folder_where_nothing_was_trained_is_free(tiny, tmp_path):
    with pytest.raises(ValueError, match="do not divide"):
        run(tiny(tmp_path, steps=1, dim=5, heads=(ph.Softmax(2),)), progress=False)
    assert run(tiny(tmp_path, steps=1), progress=False).steps == 1


def test_one_process_at_a_time(tiny, tmp_path):
    config = tiny(tmp_path)
    with claim(config, tmp_path), pytest.raises(ValueError, match="another process is training in"):
        run(config, progress=False)


def test_the_default_folder_is_the_runs_own(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(tiny(tmp_path, steps=1), folder=None)
    assert run(config, progress=False).folder == pathlib.Path(f"runs/tiny-{ph.digest(config)}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": ph.Vectors(6)}, r"the task's inputs are Vectors\(size=5, .*\) but the model's are Vectors\(size=6"),
        ({"evaluate": ("ood",)}, r"FuzzyLogic: unknown split 'ood'"),
        ({"device": "gpu"}, r"device: unknown device 'gpu'"),
    ],
)
def test_mistakes_are_found_before_training(tiny, tmp_path, change, text):
    with pytest.raises(ValueError, match=text):
        run(tiny(tmp_path, **change), progress=False)
    assert not (tmp_path / "config.json").exists()


# ----------------------------------------------------------------------------------------------- stopping and resuming
def test_data_that_are_missing_are_missed_before_training(tiny, tmp_path, monkeypatch):
    settings = tiny(folder=str(tmp_path))
    task, seen = type(settings.task), []
    draw = task.batch

    def batch(self, split, *args, **how):
        seen.append(split)
        if split == settings.train.evaluate[-1]:
            raise ValueError("no such file")
        return draw(self, split, *args, **how)

    monkeypatch.setattr(task, "batch", batch)
    with pytest.raises(ValueError, match="no such file"):
        run(settings, progress=False)
    assert "train" not in seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [0, 7])
def test_a_signal_saves_and_the_resumed_run_is_the_same(tiny, tmp_path, whole, number, step):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    said = interrupted(tiny(tmp_path), step + 1, number)
    assert said == f"stopped and saved at step {step + 1}; resume with: polyhead resume {tmp_path}"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert rows(tmp_path, "train")[-1]["step"] == step + 1
    with pytest.raises(ValueError, match=r"holds an unfinished run; resume it with `polyhead resume"):
        run(tiny(tmp_path), progress=False)
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, whole)


KILLED = """
import os, signal, sys
import polyhead.train.store.folder as folder
from polyhead.tasks import FuzzyLogic
from polyhead.train.__main__ import main
run, where, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if where == "replace":                       # the new checkpoint is written but not yet in place
    plain = os.replace
    def replace(one, two):
        global count
        count -= str(two).endswith("safetensors")
        die() if count == 0 else plain(one, two)
    folder.os.replace = replace
else:                                        # "train", "iid": while that split's batch is drawn
    plain = FuzzyLogic.batch
    def batch(task, split, size, **at):
        global count
        count -= split == where
        if count == 0:
            die()
        return plain(task, split, size, **at)
    FuzzyLogic.batch = batch
sys.exit(main([run, "--quiet"]))
"""


def test_killed_at_any_moment_the_run_is_the_same(tiny, tmp_path, whole):
    """SIGKILL before the first checkpoint, while one is being written, and between two splits of an evaluation."""
    with claim(tiny(tmp_path), tmp_path):
        pass
    seen = []
    for where, count in (("train", 4), ("replace", 2), ("iid", 4)):
        code, said = forked.run(KILLED, tmp_path, where, count)
        assert code == -signal.SIGKILL, said
        seen.append(rows(tmp_path)[-1]["step"])
    assert seen == [3, 10, 12]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 13, "lo')  # a row cut short
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, whole)


def test_the_last_evaluation_is_not_there_twice(tiny, tmp_path, whole):
    """Killed before the result was written, a run has its last rows already and evaluates again."""
    copied(whole, tmp_path)
    (tmp_path / "result.json").unlink()
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, whole)


def test_fp16_resumes_with_its_loss_scale(tiny, tmp_path):
    run(tiny(tmp_path / "whole", precision="fp16"), progress=False)
    interrupted(tiny(tmp_path / "cut", precision="fp16"), 8)
    run(tiny(tmp_path / "cut", precision="fp16"), progress=False, resume=True)
    same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.compile
def test_compiled_training_keeps_names_and_losses(tiny, tmp_path, monkeypatch):
    """By the eager backend: the test is only that training calls a compiled model."""
    seen: list[nn.Module] = []
    plain = nn.Module.compile

    def traced(self):
        seen.append(self)
        plain(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", traced)
    settings = {"heads": (ph.Softmax(2),), "layers": 1, "steps": 2, "dropout": 0.0, "residual_dropout": 0.0}
    for compiled in (True, False):
        run(tiny(tmp_path / str(compiled), compile=compiled, **settings), progress=False)
    assert len(seen) == 1
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)
    assert parameters(tmp_path / "True").keys() == parameters(tmp_path / "False").keys()
