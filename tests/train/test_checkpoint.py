"""A checkpoint is read completely or not at all, and a failed save loses nothing."""

import json

import pytest
import torch
from run_folders import copied, flip, full_disk
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import tiny

import polyhead as ph
from polyhead.train import load_model, run
from polyhead.train.optimiser import build
from polyhead.train.store.checkpoint import read_checkpoint, save_checkpoint
from polyhead.train.store.files import checksum, packed, unseal


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(tiny(folder, steps=5), progress=False)
    return folder


@pytest.fixture
def trained(five_steps, tmp_path):
    return copied(five_steps, tmp_path)


def rewrite(path, drop=None, **changes):
    """Write the checkpoint again without the tensor `drop`, or with other metadata; the checksum is made to fit."""
    with safe_open(path, "pt") as file:
        metadata = unseal(json.loads(file.metadata()["polyhead"]), path)
    tensors = {name: value for name, value in load_file(path).items() if name != drop}
    path.write_bytes(packed(tensors, metadata | changes))


def test_the_file_holds_parameters_and_optimiser_state_by_name(trained):
    names = set(load_file(trained / "checkpoint.safetensors"))
    config, model = load_model(trained)
    wanted = {f"model/{name}" for name in model.state_dict()}
    states = ("exp_avg", "exp_avg_sq", "step")
    wanted |= {f"optimiser/{name}/{key}" for name, _ in model.named_parameters() for key in states}
    assert names == wanted
    assert not model.training
    assert config.folder == str(trained)


def test_loading_leaves_the_random_state_alone(trained):
    before = torch.get_rng_state()
    load_model(trained)
    assert torch.equal(torch.get_rng_state(), before)


def truncate(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


DAMAGED = r"is damaged \([^\n]+\)$"
REFUSED = {
    **{f"truncated to {share}": (lambda path, s=share: truncate(path, s), DAMAGED) for share in (0, 0.001, 0.5, 0.999)},
    **{f"a bit of byte {place}": (lambda path, p=place: flip(path, p), DAMAGED) for place in (0, 9, 20_000, -1)},
    **{
        f"metadata {text}": (lambda path, t=text: save_file({"a": torch.ones(3)}, path, {"polyhead": t}), DAMAGED)
        for text in ("[]", "{", '{"format": 1}')
    },
    "a missing parameter": (
        lambda path: rewrite(path, drop="model/outputs.linear.weight"),
        "lacks 1 parameters of the model, first 'outputs.linear.weight'$",
    ),
    "another run": (
        lambda path: rewrite(path, digest="0" * 12),
        "belongs to run 000000000000 but the folder's run is [0-9a-f]{12}$",
    ),
    "another version": (lambda path: rewrite(path, format=99), "has format 99 but this version reads 1$"),
    "no file": (lambda path: path.unlink(), "does not exist: this run has not been trained yet$"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_other_files_are_refused_in_one_line(trained, how):
    change, text = REFUSED[how]
    change(trained / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=rf"^checkpoint: \S+checkpoint\.safetensors {text}"):
        load_model(trained)


def test_missing_optimiser_state_is_named_on_resume(trained):
    (trained / "result.json").unlink()
    rewrite(trained / "checkpoint.safetensors", drop="optimiser/outputs.linear.weight/exp_avg_sq")
    with pytest.raises(ValueError, match=r"lacks 'optimiser/outputs.linear.weight/exp_avg_sq'"):
        run(tiny(trained, steps=5), progress=False, resume=True)


def test_a_model_of_another_shape(trained):
    path = trained / "config.json"
    config = json.loads(path.read_text())
    del config["digest"]  # edited on purpose
    config["model"]["feedforward"]["hidden"] = 25
    path.write_text(json.dumps(config))
    rewrite(trained / "checkpoint.safetensors", digest=ph.digest(ph.train.read_config(trained)))
    with pytest.raises(ValueError, match=r"of shape \(24, 16\) but the model wants \(25, 16\)"):
        load_model(trained)


def test_tied_tables_survive(tmp_path):
    config = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5, tied=True), dim=8, heads=(ph.Softmax(2),))
    model = ph.Transformer(config)
    save_checkpoint(tmp_path, model, build(model, ph.Train()), {"digest": "x", "step": 1})
    tensors, metadata = read_checkpoint(tmp_path, "x")
    assert (metadata["step"], metadata["checksum"]) == (1, checksum(tensors))
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], value)


def test_a_save_that_fails_leaves_the_checkpoint_whole(trained):
    """How a run continues is tested in test_disk.py."""
    config, model = load_model(trained)
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    wanted = r"^[^\n]+checkpoint.safetensors: cannot be written \(File too large\)$"
    with full_disk(5_000), pytest.raises(OSError, match=wanted):
        save_checkpoint(trained, model, build(model, config.train), {"digest": ph.digest(config), "step": 9})
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    assert read_checkpoint(trained, ph.digest(config))[1]["step"] == 5
