"""Malicious files run no code and are refused in one line, under any name."""

import contextlib
import io
import json
import pathlib
import struct

import pytest
from dual_arguments import PLAIN
from run_folders import copied
from safetensors.torch import save_file
from texts import write_documents
from traps import guises, spring

import polyhead as ph
from polyhead.cli.dispatch import main
from polyhead.papers import reproduce as reproduce_module
from polyhead.tasks.images import data as images_data
from polyhead.tasks.maths import text as maths_text
from polyhead.tasks.relational_games import original as games_original
from polyhead.tasks.text import tokens as text_tokens
from polyhead.train import load_model, read_config
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.folder import read_metrics, read_result


# ---------------------------------------------------------------------------------------------- files and their readers
@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """A run on text that was trained, with all that a run folder may hold; its tokens; models for other libraries."""
    from dual_attention.language_models import TransformerLM

    root = tmp_path_factory.mktemp("hostile")
    task = ph.tasks.Text(str(write_documents(root)), length=8, held_out=0.2, folder=str(root / "tokens"))
    small = {"dim": 8, "layers": 1, "heads": ph.Softmax(2), "positions": ph.Rotary(), "causal": True}
    model = ph.TransformerConfig(*task.ends, max_length=8, norm="rms", **small)
    train = ph.Train(steps=4, batch_size=2, warmup=1, save_every=2, eval_every=2, evaluate=("iid",), eval_batches=1)
    run = ph.Run(name="mine", task=task, model=model, train=train, device="cpu", folder=str(root / "run"))
    ph.train.run(run, progress=False)
    (root / "package").mkdir()
    state = TransformerLM(**PLAIN).state_dict()
    del state["layers.final_out.weight"]  # the same tensor as that of the tokens
    save_file(state, root / "package" / "model.safetensors")
    (root / "package" / "config.json").write_text(json.dumps(PLAIN))
    return root


@pytest.fixture
def folder(model_files, tmp_path):
    """A copy of `model_files`, which a test may spoil."""
    return copied(model_files, tmp_path)


def command(*arguments):
    """A command of `polyhead` for files in the folder F; an error of one line is raised as a ValueError."""

    def call(root):
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            code = main([argument.replace("F/", f"{root}/") for argument in arguments])
        printed = output.getvalue()
        assert "Traceback" not in printed
        if code:
            assert code == 2, printed
            raise ValueError(printed.strip().splitlines()[-1])

    return call


PAIRS, BATCH = "same_pentos.npz", "cifar-10-batches-bin/test_batch.bin"
QUESTIONS = "questions/train-easy/arithmetic__add_or_sub.txt"
READERS = [
    ("run/config.json", "read_config", lambda root: read_config(root / "run")),
    ("mine.yaml", "train", command("train", "F/mine.yaml")),
    ("mine.json", "train", command("train", "F/mine.json")),
    ("grid.yaml", "sweep", command("sweep", "F/grid.yaml", "--status")),
    ("run/checkpoint.safetensors", "load_model", lambda root: load_model(root / "run")),
    ("run/result.json", "read_result", lambda root: read_result(root / "run")),
    ("run/tokenizer.json", "read", lambda root: text_tokens.read(root / "run" / "tokenizer.json")),
    ("run/data.json", "codec_of", lambda root: text_tokens.codec_of(read_config(root / "run"), root / "run")),
    ("package/config.json", "from_folder", lambda root: ph.compat.dual_attention.from_folder(root / "package")),
    ("package/model.safetensors", "from_folder", lambda root: ph.compat.dual_attention.from_folder(root / "package")),
    (PAIRS, "original", lambda root: games_original.load(str(root), "same", "pentominoes")),
    (BATCH, "cifar", lambda root: images_data.cifar("cifar10", str(root), is_test=True)),
    (QUESTIONS, "questions", lambda root: list(maths_text._file(root / QUESTIONS, (160, 30)))),
    ("results.json", "reproduce", lambda root: reproduce_module.check_format(root / "results.json")),
]


# ------------------------------------------------------------------------------------------------------------- pickles
LINE = r"\A[^\n]+\Z"


@pytest.mark.parametrize("name", guises(pathlib.Path("unused")))
def test_the_traps_are_traps(name, tmp_path):
    marker = tmp_path / "sprung"
    spring(name, guises(marker)[name])
    assert marker.exists()


@pytest.mark.parametrize(("name", "read"), [pytest.param(n, read, id=f"{n} {reader}") for n, reader, read in READERS])
def test_a_pickle_by_any_name_is_refused(name, read, folder):
    marker, path = folder / "sprung", folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for guise, data in guises(marker).items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        if name.endswith(".txt") and guise.startswith(("yaml", "pickle 0")):
            continue  # these are plain text, as it should be
        with pytest.raises(ValueError, match=LINE):
            read(folder)
        assert not marker.exists(), guise


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_a_model_of_hugging_face_is_not_unpickled(name, folder):
    pytest.importorskip("transformers")
    from polyhead.compat.huggingface import model as huggingface_model

    exported, marker = folder / "exported", folder / "sprung"
    huggingface_model.to_folder(folder / "run", exported)
    (exported / name).unlink(missing_ok=True)
    if name == "pytorch_model.bin":
        (exported / "model.safetensors").unlink()
    for guise in ("torch", "pickle", "zip", "yaml"):
        (exported / name).write_bytes(guises(marker)[guise])
        with pytest.raises(ValueError, match=LINE):
            command("explore", "F/exported", "--text", "x", "--out", "F/x.html", "--device", "cpu")(folder)
        assert not marker.exists(), guise


# ------------------------------------------------------------------------------------------ odd JSON, YAML, safetensors
ODD = {
    "nested": "[" * 1200,
    "nested objects": '{"model":' * 5000 + "1" + "}" * 5000,
    "NaN": '{"train": {"lr": NaN}}',
    "1e400": '{"train": {"lr": 1e400, "steps": 1e400}}',
    "10^5000": '{"seed": 1' + "0" * 5000 + "}",
    "surrogate": '{"name": "\\ud800", "model": "\\udfff"}',
    "twice": '{"seed": 1, "seed": 2}',
    "bytes": "\udcff\udcfe",
    "null": "null",
    "10^12 layers": '{"model": {"inputs": {"kind": "Vectors", "size": 5}, "outputs": {"kind": "Values"}, '
    '"layers": 1000000000000}}',
    "long kind": '{"kind": "' + "x" * 100_000 + '"}',
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_are_one_line(odd, tmp_path):
    data = ODD[odd].encode("utf-8", "surrogateescape")
    for name in ("config.json", "mine.yaml"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=LINE) as error_info:
            read_config(tmp_path / name)
        assert len(str(error_info.value)) < (120_000 if odd == "long kind" else 2000)
    (tmp_path / "result.json").write_bytes(data)
    with pytest.raises(ValueError, match=LINE):
        read_result(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(data)
    assert read_metrics(tmp_path) == []


def test_aliases_that_stand_for_many_values_are_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("heads: &h [*h]\n")
    for read in (read_config, lambda path: command("sweep", "F/mine.yaml", "--status")(path.parent)):
        with pytest.raises(ValueError, match=r"\A[^\n]*aliases are not read[^\n]*\Z"):
            read(tmp_path / "mine.yaml")


def test_a_model_that_no_memory_holds_is_one_line(tmp_path):
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(*task.ends, dim=10**12, heads=(ph.Softmax(1),), max_length=6)
    run = ph.Run(task=task, model=model, folder=str(tmp_path / "run"), device="cpu")
    with pytest.raises(ValueError, match=r"\Abuild: this TransformerConfig is too large[^\n]+\Z"):
        ph.train.run(run, progress=False)


METADATA = ([], {"polyhead": [1]}, {"polyhead": "[" * 100_000}, {"polyhead": "[]"}, {"polyhead": '{"format": 1}'})


@pytest.mark.parametrize("header", [{}, *({"__metadata__": metadata} for metadata in METADATA)])
def test_odd_metadata_of_safetensors(header, tmp_path):
    text = json.dumps(header).encode()
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=LINE):
        read_checkpoint(path, "x")
