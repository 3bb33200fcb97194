"""The batch at which a run diverged can be read again; other files are refused."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.train import read_batch, run


@pytest.mark.parametrize("log_every", [1, 5, 100])
def test_the_batch_of_the_first_bad_step_is_kept(tiny, tmp_path, at_step, monkeypatch, log_every):
    """Whenever somebody looks: at a row, or when the parameters are saved."""
    config, plain = tiny(tmp_path, log_every=log_every, steps=30), nn.Linear.forward
    at_step(6, lambda: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * float("nan")))
    path, seen = tmp_path / "bad_batch.safetensors", {1: 7, 5: 10, 100: 10}[log_every]
    what = "parameters of tiny are not finite" if log_every == 100 else "the loss of tiny is nan"
    told = (
        rf"^train: {what} at step {seen}; the checkpoint of step 5 is kept; .*; the batch of step 7, .* is in {path}$"
    )
    with pytest.raises(ValueError, match=told):
        run(config, progress=False)
    batch, about = read_batch(tmp_path)
    assert about == {"digest": ph.digest(config), "split": "train", "seed": 7, "step": 7, "seen": seen, "what": what}
    assert_close(vars(batch), vars(config.task.batch("train", 4, seed=7, step=6)), rtol=0, atol=0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^batch: \S+ is damaged \(its contents do not match their checksum\)$"):
        read_batch(path)


def test_it_is_drawn_on_the_device_of_the_run(tiny, tmp_path, monkeypatch):
    """Another device draws other numbers."""
    config, places = tiny(tmp_path, lr=1e38, warmup=0, evaluate=()), []
    draw = type(config.task).batch

    def drawn(task, split, size, **at):
        places.append(at.get("device"))
        return draw(task, split, size, **at)

    monkeypatch.setattr(type(config.task), "batch", drawn)
    with pytest.raises(ValueError, match="the batch of step 2"):
        run(config, progress=False)
    assert set(places) == {torch.device("cpu")}


def test_a_checkpoint_is_no_batch(whole):
    with pytest.raises(ValueError, match=r"^batch: \S+ is damaged or holds no batch \([^\n]+\)$"):
        read_batch(whole / "checkpoint.safetensors")


def test_a_full_disk_hides_no_divergence(tiny, tmp_path):
    (tmp_path / "bad_batch.safetensors.partial").mkdir()
    with pytest.raises(
        ValueError, match=r"lower train.lr or set train.clip; the batch of step 2, .* could not be saved \(.+\)$"
    ):
        run(tiny(tmp_path, lr=1e38, warmup=0), progress=False)


def test_the_first_bad_step_is_only_claimed_of_the_steps_that_are_known(tiny, tmp_path, at_step, monkeypatch):
    """Losses are read when a row is written, and that may be long after."""
    monkeypatch.setattr("polyhead.train.member.RECENT", 4)
    monkeypatch.setattr("polyhead.train.network.RECENT", 4)
    plain = nn.Linear.forward
    at_step(2, lambda: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * float("nan")))
    with pytest.raises(ValueError, match=r"the batch of step 7, the first bad one of the last 4, is in "):
        run(tiny(tmp_path, log_every=10, steps=30, save_every=100, eval_every=100, dropout=0.0), progress=False)
