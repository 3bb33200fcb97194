"""Malicious files run no code and are refused in one line, under any name."""

import contextlib
import io
import json
import pathlib
import shutil
import struct

import pytest
import torch
from traps import guises, spring

import polyhead as ph
from polyhead import config as configs
from polyhead.cli.verbs import main
from polyhead.papers import reproduce as reproduce_module
from polyhead.tasks.images import data as images_data
from polyhead.tasks.maths import text as maths_text
from polyhead.tasks.relational_games import original as games_original
from polyhead.tasks.text import data as text_data, tokens as text_tokens
from polyhead.train import load_model, read_config
from polyhead.train.store.bad_batch import read_batch, write_batch
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.files import Damaged, packed
from polyhead.train.store.folder import read_metrics, read_result

SOURCE = pathlib.Path(ph.__file__).parent


# ---------------------------------------------------------------------------------------------- files and their readers
@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """A run on text that was trained, with all that a run folder may hold; its tokens; models for other libraries."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "documents").mkdir()
    for i in range(12):
        (root / "documents" / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    task = ph.tasks.Text(str(root / "documents"), length=8, held_out=0.2, folder=str(root / "tokens"))
    small = {"dim": 8, "layers": 1, "heads": ph.Softmax(2), "positions": ph.Rotary(), "causal": True}
    model = ph.TransformerConfig(*task.ends, max_length=8, norm="rms", **small)
    train = ph.Train(steps=4, batch_size=2, warmup=1, save_every=2, eval_every=2, evaluate=("iid",), eval_batches=1)
    run = ph.Run(name="mine", task=task, model=model, train=train, device="cpu", folder=str(root / "run"))
    ph.train.run(run, progress=False)
    batch = task.batch("train", 2, seed=0, step=0)
    write_batch(root / "run" / "bad_batch.safetensors", batch, {"step": 1})
    package = ph.TransformerConfig(ph.Tokens(9), ph.Logits(9, tied=True), feedforward=ph.Swiglu(), **small)
    ph.compat.dual_attention.to_folder(ph.Transformer(package), root / "package")
    return root


@pytest.fixture
def folder(model_files, tmp_path):
    """A copy of it, which a test may spoil."""
    shutil.copytree(model_files, tmp_path / "files")
    path = tmp_path / "files" / "run" / "config.json"
    values = json.loads(path.read_text())
    values.pop("digest")
    values["task"]["folder"] = str(tmp_path / "files" / "tokens")
    path.write_text(json.dumps(values))
    return tmp_path / "files"


@pytest.fixture(autouse=True)
def _nothing_remembered():
    text_data._open.cache_clear()
    text_data._CHECKED.clear()
    yield
    text_data._open.cache_clear()


def verb(*words):
    """A command of `polyhead` for files in the folder F; an error of one line is raised as a ValueError."""

    def call(root):
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
            code = main([word.replace("F/", f"{root}/") for word in words])
        said = error.getvalue()
        assert "Traceback" not in said
        if code:
            assert code == 2, said
            raise ValueError(said.strip().splitlines()[-1])

    return call


VERBS = {
    words[0]: verb(*words)
    for words in (
        ("resume", "F/run"),
        ("eval", "F/run", "--batches", "1", "--batch-size", "2", "--device", "cpu"),
        ("probe", "F/run", "--sequences", "2", "--device", "cpu"),
        ("report", "F/run", "--out", "F/report.html"),
        ("explore", "F/run", "--text", "x", "--out", "F/explore.html", "--device", "cpu"),
        ("generate", "F/run", "--prompt", "x", "--steps", "1", "--device", "cpu"),
    )
}
CONFIG, NEWEST, RESULT = "run/config.json", "run/checkpoint.safetensors", "run/result.json"
PAIRS, PICTURE = "same_pentos.npz", "pictures/train/a/1.png"
QUESTIONS = "questions/train-easy/arithmetic__add_or_sub.txt"
READERS = [
    (CONFIG, "read_config", lambda root: read_config(root / "run")),
    (CONFIG, "load_model", lambda root: load_model(root / "run")),
    *[(CONFIG, name, call) for name, call in VERBS.items()],
    ("mine.yaml", "train", verb("train", "F/mine.yaml")),
    ("mine.json", "train", verb("train", "F/mine.json")),
    ("mine.yaml", "plan", verb("plan", "F/mine.yaml")),
    ("grid.yaml", "sweep", verb("sweep", "F/grid.yaml", "--status")),
    (NEWEST, "load_model", lambda root: load_model(root / "run")),
    *[(NEWEST, name, VERBS[name]) for name in ("eval", "explore", "generate")],
    ("run/checkpoint-00000002.safetensors", "load_model", lambda root: load_model(root / "run", which=2)),
    ("run/best.safetensors", "load_model", lambda root: load_model(root / "run", which="best")),
    ("run/bad_batch.safetensors", "read_batch", lambda root: read_batch(root / "run")),
    (RESULT, "read_result", lambda root: read_result(root / "run")),
    (RESULT, "report", VERBS["report"]),
    ("run/tokenizer.json", "read", lambda root: text_tokens.read(root / "run" / "tokenizer.json")),
    ("mine.model", "read", lambda root: text_tokens.read(root / "mine.model")),
    ("run/data.json", "codec_of", lambda root: text_tokens.codec_of(read_config(root / "run"), root / "run")),
    ("package/config.json", "from_folder", lambda root: ph.compat.dual_attention.from_folder(root / "package")),
    ("package/model.safetensors", "from_folder", lambda root: ph.compat.dual_attention.from_folder(root / "package")),
    (PAIRS, "original", lambda root: games_original.load(str(root), "same", "pentominoes")),
    (PICTURE, "pictures", lambda root: images_data._decode(root / PICTURE, 8)),
    (QUESTIONS, "questions", lambda root: list(maths_text._file(root / QUESTIONS, (160, 30)))),
    ("results.json", "reproduce", lambda root: reproduce_module.check(root / "results.json")),
    ("prompt.txt", "generate", verb("generate", "F/run", "--prompt-file", "F/prompt.txt", "--device", "cpu")),
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


HEALED = [NEWEST, RESULT, "run/checkpoint-00000002.safetensors", "run/best.safetensors", "run/metrics.jsonl"]
HEALED += ["run/tokenizer.json", "tokens"]


@pytest.mark.parametrize("name", HEALED)
def test_files_that_a_run_writes_again_are_not_unpickled(name, folder):
    """A trap in place of each; the run resumes, or starts again, without it."""
    marker = folder / "sprung"
    spoiled = [path for path in (folder / name).rglob("*") if path.is_file()] if name == "tokens" else [folder / name]
    for guise in ("torch", "npy", "pickle"):
        for path in spoiled:
            path.unlink(missing_ok=True)
            path.write_bytes(guises(marker)[guise])
        text_data._open.cache_clear()
        VERBS["resume"](folder)
        assert not marker.exists(), guise
        assert load_model(folder / "run")
    assert all(row["step"] <= 4 for row in read_metrics(folder / "run"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_a_model_of_hugging_face_is_not_unpickled(name, folder):
    pytest.importorskip("transformers")
    from polyhead.compat.huggingface import model as huggingface_model

    place, marker = folder / "exported", folder / "sprung"
    huggingface_model.to_folder(folder / "run", place)
    (place / name).unlink(missing_ok=True)
    if name == "pytorch_model.bin":
        (place / "model.safetensors").unlink()
    for guise in ("torch", "pickle", "zip", "yaml"):
        (place / name).write_bytes(guises(marker)[guise])
        with pytest.raises(ValueError, match=LINE):
            verb("explore", "F/exported", "--text", "x", "--out", "F/x.html", "--device", "cpu")(folder)
        assert not marker.exists(), guise


# ------------------------------------------------------------------------------------------ odd JSON, YAML, safetensors
ODD = {
    "nested": "[" * 1200,
    "nested objects": '{"model":' * 5000 + "1" + "}" * 5000,
    "NaN": '{"train": {"lr": NaN}}',
    "1e400": '{"train": {"lr": 1e400, "steps": 1e400}}',
    "10^400": '{"train": {"lr": 1' + "0" * 400 + "}}",
    "10^5000": '{"seed": 1' + "0" * 5000 + "}",
    "surrogate": '{"name": "\\ud800", "model": "\\udfff"}',
    "surrogate key": '{"\\ud800": 1}',
    "twice": '{"seed": 1, "seed": 2}',
    "bytes": "\udcff\udcfe",
    "nothing": "",
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
        with pytest.raises(ValueError, match=LINE) as caught:
            read_config(tmp_path / name)
        assert len(str(caught.value)) < 120_000 if odd == "long kind" else len(str(caught.value)) < 2000
    for name, read in (("result.json", read_result), ("metrics.jsonl", read_metrics)):
        (tmp_path / name).write_bytes(data)
        with contextlib.suppress(ValueError):
            assert not read(tmp_path)


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize("text", ["a0: &a0 [1]\n" + BOMB, "heads: &h [*h]\n", "model: &m {encoder: *m}\n"])
def test_aliases_that_stand_for_billions_of_values(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for read in (read_config, lambda path: verb("sweep", "F/mine.yaml", "--status")(path.parent)):
        with pytest.raises(ValueError, match=r"\A[^\n]*(more than|unhashable|recursive)[^\n]*\Z"):
            read(path)


def test_a_model_that_no_memory_holds_is_one_line(tmp_path):
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(*task.ends, dim=10**12, heads=(ph.Softmax(1),), max_length=6)
    run = ph.Run(task=task, model=model, folder=str(tmp_path / "run"), device="cpu")
    with pytest.raises(ValueError, match=r"\Abuild: this TransformerConfig is too large[^\n]+\Z"):
        ph.train.run(run, progress=False)


def header(tensors, data=b"", size=None):
    text = (tensors if isinstance(tensors, str) else json.dumps(tensors)).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS = {
    "2^60 bytes of header": header({}, size=2**60),
    "2^64 - 1": header({}, size=2**64 - 1),
    "a header of 99 MB that is not there": header("{", size=99_000_000),
    "2^60 bytes of data": header({"a": tensor("F32", [2**58], 0, 2**60)}),
    "sizes that overflow": header({"a": tensor("F32", [2**40, 2**40], 0, 0)}),
    "no size below 0": header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234"),
    "overlapping": header({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12)),
    "backwards": header({"a": tensor("F32", [2], 8, 0)}, bytes(8)),
    "unknown numbers": header({"a": tensor("F99", [2], 0, 8)}, bytes(8)),
    "numbers by number": header({"a": tensor(3, [2], 0, 8)}, bytes(8)),
    "twice": header('{"a": %s, "a": %s}' % ((json.dumps(tensor("F32", [1], 0, 4)),) * 2), bytes(4)),
    "nested": header("[" * 50_000),
    "no object": header([1, 2]),
    "metadata of another kind": header({"__metadata__": {"polyhead": [1]}}),
    "metadata that is nested": header({"__metadata__": {"polyhead": "[" * 100_000}}),
    "metadata of a list": header({"__metadata__": {"polyhead": "[]"}}),
    "names that climb": header(
        {"../../x": tensor("F32", [1], 0, 4), "__metadata__": {"polyhead": '{"format": 1}'}}, bytes(4)
    ),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_odd_headers_of_safetensors(name, tmp_path):
    for file, read in (
        ("checkpoint.safetensors", lambda: read_checkpoint(tmp_path, "x")),
        ("bad_batch.safetensors", lambda: read_batch(tmp_path)),
    ):
        (tmp_path / file).write_bytes(SAFETENSORS[name])
        with pytest.raises(ValueError, match=LINE):
            read()


def test_parameters_of_another_kind_or_shape_are_refused(folder):
    """With checksums that fit."""
    place = folder / "run"
    tensors, metadata = read_checkpoint(place, configs.digest(read_config(place)))
    name = "model/outputs.linear.weight"
    for changed in (
        {name: tensors[name].reshape(-1)},
        {name: tensors[name][:0]},
        {"model/../../x": torch.zeros(1)},
        {name.replace("model", "optimiser") + "/exp_avg": torch.zeros(3)},
    ):
        mine = tensors | {key: value.contiguous() for key, value in changed.items()}
        (place / "checkpoint.safetensors").unlink()
        (place / "checkpoint.safetensors").write_bytes(packed(mine, metadata))
        (place / "result.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=LINE):
            VERBS["resume"](folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "2"), ("step", -1), ("step", 10**400), ("rows", 2.5), ("seconds", None), ("scaler", [])],
)
def test_metadata_that_no_training_has_written(name, value, folder):
    """With checksums that fit: it is damage, and the run resumes without this file."""
    path = folder / "run" / "checkpoint.safetensors"
    tensors, metadata = read_checkpoint(path.parent, configs.digest(read_config(path.parent)))
    path.unlink()
    path.write_bytes(packed(tensors, metadata | {name: value}))
    with pytest.raises(Damaged, match=rf"is damaged \(its metadata have {name} "):
        load_model(path.parent)
