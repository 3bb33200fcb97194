"""A checkpoint is read completely or not at all."""

import json
import re

import pytest
import torch
from run_folders import copied, flip
from safetensors import safe_open
from safetensors.torch import load_file

from polyhead.train import load_model, run
from polyhead.train.store.files import packed, unseal


@pytest.fixture
def trained(whole, tmp_path):
    return copied(whole, tmp_path)


def test_a_loaded_model_is_in_eval_mode_and_the_random_state_as_it_was(whole):
    before = torch.get_rng_state()
    assert not load_model(whole)[1].training
    assert torch.equal(torch.get_rng_state(), before)


def truncate(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def rewrite(path, drop=None, put=None, **changes):
    """Write it again without the tensor `drop`, with those of `put`, and with other metadata; its checksums fit."""
    with safe_open(path, "pt") as file:
        metadata = unseal(json.loads(file.metadata()["polyhead"]), path)
    tensors = {name: value for name, value in load_file(path).items() if name != drop} | (put or {})
    path.write_bytes(packed(tensors, metadata | changes))


DAMAGED = r"is damaged \([^\n]+\)$"
WEIGHT = "outputs.linear.weight"
ODD = (("step", "2"), ("step", -1), ("step", 10**400), ("rows", 2.5), ("seconds", None), ("scaler", []))
REFUSED = {
    **{f"truncated to {share}": (lambda path, s=share: truncate(path, s), DAMAGED) for share in (0, 0.001, 0.5, 0.999)},
    **{f"a bit of byte {place}": (lambda path, p=place: flip(path, p), DAMAGED) for place in (0, 9, 20_000, -1)},
    **{
        f"{name} {str(odd)[:9]}": (
            lambda path, n=name, odd=odd: rewrite(path, **{n: odd}),
            rf"is damaged \(its metadata have {name} ",
        )
        for name, odd in ODD
    },
    "a missing parameter": (
        lambda path: rewrite(path, drop=f"model/{WEIGHT}"),
        f"lacks 1 parameters of the model, first '{WEIGHT}'$",
    ),
    "another parameter": (
        lambda path: rewrite(path, put={"model/../../x": torch.zeros(1)}),
        "has 1 parameters the model lacks, first '../../x'$",
    ),
    "a parameter of another shape": (
        lambda path: rewrite(path, put={f"model/{WEIGHT}": torch.zeros(3)}),
        rf"has '{WEIGHT}' of shape \(3,\) but the model wants \(1, 16\)$",
    ),
    "another run": (
        lambda path: rewrite(path, digest="0" * 12),
        r"belongs to run 000000000000 but the folder's run is [0-9a-f]{12}: undo the change of its config\.json, choose"
        " another folder, or start over with --again$",
    ),
    "another version": (lambda path: rewrite(path, format=99), "has format 99 but this version reads 1$"),
    "no file": (lambda path: path.unlink(), "does not exist: this run has not been trained yet$"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_other_files_are_refused_in_one_line(trained, how):
    change, text = REFUSED[how]
    change(trained / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=r"^checkpoint: ") as caught:
        load_model(trained)
    said = re.sub(r"; that of step (\d+) is there, too: --checkpoint \1, which=\1$", "", str(caught.value))
    assert re.search(rf"^checkpoint: \S+checkpoint\.safetensors {text}", said)


STATE = f"optimiser/{WEIGHT}/exp_avg_sq"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"drop": STATE}, f"lacks '{STATE}'$"),
        ({"put": {STATE: torch.zeros(3)}}, f"has optimiser state of another shape for '{WEIGHT}'$"),
    ],
)
def test_other_optimiser_state_is_refused_on_resume(tiny, trained, change, text):
    (trained / "result.json").unlink()
    rewrite(trained / "checkpoint.safetensors", **change)
    with pytest.raises(ValueError, match=text):
        run(tiny(trained), progress=False, resume=True)
