"""A checkpoint is read completely or not at all, and a failed save loses nothing."""

import contextlib
import json
import pathlib
import pickle
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import polyhead as ph
from polyhead.train import load_model, run
from polyhead.train.optimiser import build
from polyhead.train.store.checkpoint import read_checkpoint, save_checkpoint
from polyhead.train.store.files import checksum, seal, unseal


@pytest.fixture
def trained(tiny: Callable[..., Any], tmp_path: pathlib.Path) -> pathlib.Path:
    run(tiny(tmp_path, steps=5), progress=False)
    return tmp_path


def rewrite(folder: pathlib.Path, *, drop: str | None = None, **changes: Any) -> None:
    """Write the checkpoint again without the tensor `drop`, or with other metadata; the checksum is made to fit."""
    path = folder / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        metadata = unseal(json.loads(file.metadata()["polyhead"]), path)
    tensors = load_file(path)
    if drop is not None:
        del tensors[drop]
    metadata |= {"checksum": checksum(tensors), **changes}
    save_file(tensors, path, {"polyhead": json.dumps(seal(metadata))})


def test_the_file_holds_parameters_and_optimiser_state_by_name(trained: pathlib.Path):
    names = set(load_file(trained / "checkpoint.safetensors"))
    config, model = load_model(trained)
    wanted = {f"model/{name}" for name in model.state_dict()}
    states = ("exp_avg", "exp_avg_sq", "step")
    wanted |= {f"optimiser/{name}/{key}" for name, _ in model.named_parameters() for key in states}
    assert names == wanted
    assert not model.training
    assert config.folder == str(trained)


def test_loading_leaves_the_random_state_alone(trained: pathlib.Path):
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    load_model(trained)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_one_clear_line(trained: pathlib.Path, keep: float):
    path = trained / "checkpoint.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"^checkpoint: \S+checkpoint.safetensors is damaged \([^\n]+\)$"):
        load_model(trained)


@pytest.mark.parametrize("where", [0, 9, 0.5, 1.0])
def test_one_flipped_bit_is_noticed(trained: pathlib.Path, where: float):
    path = trained / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    place = where if isinstance(where, int) else round(where * (len(data) - 1))
    data[place] ^= 0x04
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^checkpoint: \S+ is damaged \([^\n]+\)$"):
        load_model(trained)


def test_a_pickle_is_not_opened(trained: pathlib.Path):
    class Trap:
        def __reduce__(self) -> Any:
            return pathlib.Path.touch, (trained / "sprung",)

    (trained / "checkpoint.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="is damaged"):
        load_model(trained)
    assert not (trained / "sprung").exists()


def test_what_is_missing_is_named(trained: pathlib.Path):
    rewrite(trained, drop="model/outputs.linear.weight")
    with pytest.raises(ValueError, match=r"lacks 1 parameters of the model, first 'outputs.linear.weight'"):
        load_model(trained)


def test_missing_optimiser_state_is_named_on_resume(trained: pathlib.Path, tiny: Callable[..., Any]):
    (trained / "result.json").unlink()
    rewrite(trained, drop="optimiser/outputs.linear.weight/exp_avg_sq")
    with pytest.raises(ValueError, match=r"lacks 'optimiser/outputs.linear.weight/exp_avg_sq'"):
        run(tiny(trained, steps=5), progress=False, resume=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"digest": "0" * 12}, r"belongs to run 000000000000 but the folder's run is [0-9a-f]{12}$"),
        ({"format": 99}, r"has format 99 but this version reads 1$"),
    ],
)
def test_another_runs_or_another_versions_file(trained: pathlib.Path, changes: dict[str, Any], text: str):
    rewrite(trained, **changes)
    with pytest.raises(ValueError, match=text):
        load_model(trained)


@pytest.mark.parametrize("text", ["[]", "{", '{"format": 1}'])
def test_metadata_of_a_stranger(trained: pathlib.Path, text: str):
    save_file({"a": torch.ones(3)}, trained / "checkpoint.safetensors", {"polyhead": text})
    with pytest.raises(ValueError, match=r"is damaged \((its metadata|a table was wanted)"):
        load_model(trained)


def test_a_model_of_another_shape(trained: pathlib.Path):
    path = trained / "config.json"
    config = json.loads(path.read_text())
    del config["digest"]  # edited on purpose
    config["model"]["feedforward"]["hidden"] = 25
    path.write_text(json.dumps(config))
    digest = ph.digest(ph.train.read_config(trained))
    rewrite(trained, digest=digest)
    with pytest.raises(ValueError, match=r"of shape \(24, 16\) but the model wants \(25, 16\)"):
        load_model(trained)


def test_an_untrained_folder(trained: pathlib.Path):
    (trained / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match="does not exist: this run has not been trained yet"):
        load_model(trained)


def test_tied_tables_survive(tmp_path: pathlib.Path):
    config = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5, tied=True), dim=8, heads=(ph.Softmax(2),))
    model = ph.Transformer(config)
    save_checkpoint(tmp_path, model, build(model, ph.Train()), {"digest": "x", "step": 1})
    tensors, metadata = read_checkpoint(tmp_path, "x")
    assert metadata["step"] == 1
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], value)


@contextlib.contextmanager
def full_disk(after: int) -> Iterator[None]:
    """No file may grow beyond `after` bytes: the write fails half way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_leaves_the_checkpoint_whole(trained: pathlib.Path):
    """What the run does then is tests/train/test_disk.py's."""
    config, model = load_model(trained)
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    wanted = r"checkpoint.safetensors: cannot be written \(File too large\)$"
    with full_disk(5_000), pytest.raises(OSError, match=wanted) as caught:
        save_checkpoint(trained, model, build(model, config.train), {"digest": ph.digest(config), "step": 9})
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    assert read_checkpoint(trained, ph.digest(config))[1]["step"] == 5
