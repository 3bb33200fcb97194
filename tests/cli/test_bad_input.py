"""Every invalid input gives one clear line and exit code 2, and no data are lost."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead import config as configs
from polyhead.cli.mistakes import one_line
from polyhead.cli.verbs import main
from polyhead.config import save


def small(folder: pathlib.Path, **changes: Any) -> Any:
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=(ph.Hyla(2),), max_length=6)
    train = ph.Train(steps=4, batch_size=2, warmup=1, eval_batches=1, log_every=1, save_every=2)
    return ph.Run(**{"name": "small", "task": task, "model": model, "train": train, "folder": str(folder)} | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    ph.train.run(small(folder), progress=False)
    return folder


def mistake(capsys: Any, arguments: list[str]) -> str:
    """The one line that a command says before it exits with 2."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("polyhead")
    assert not said.err.startswith("polyhead: polyhead")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err.strip().removeprefix("polyhead: ")


# ---------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "trian fuzzy-hyla",
            "unknown command 'trian'; did you mean 'train'? (choose from demo, train, sweep, ",
        ),
        ("train", "polyhead train: RECIPE is missing; see polyhead list recipes"),
        ("train fuzzy-hyla --threads 0", "Run: threads must be at least 1, or None, but is 0"),
        ("report RUN --out .", "report: . cannot be written (Is a directory)"),
        ("train fuzzy-hyla --model.heads softmax:4,hyla:3", "Softmax: 7 heads in all (4 of them here) do not divide"),
        ("train --seed 1", "polyhead train: RECIPE comes first but --seed came"),
        ("train fuzzy-hila", "polyhead train: unknown recipe 'fuzzy-hila'; did you mean 'fuzzy-hyla'? (choose from "),
        (
            "train fuzzy-hyla --model.dm 3",
            "polyhead train fuzzy-hyla: unknown option --model.dm; did you mean --model.dim?",
        ),
        (
            "train fuzzy-hyla --qqqq",
            "polyhead train fuzzy-hyla: unknown option --qqqq; see polyhead train fuzzy-hyla --help",
        ),
        (
            "train fuzzy-hyla --model.heads.heads 2",
            "unknown option --model.heads.heads; did you mean --model.heads.0.heads?",
        ),
        ("train fuzzy-hyla --learning_rate 2", "unknown option --learning_rate; did you mean --train.lr?"),
        ("train fuzzy-hyla --batch_size 2", "unknown option --batch_size; did you mean --train.batch-size?"),
        ("train fuzzy-hyla 3", "polyhead train fuzzy-hyla: unknown argument 3; see polyhead train fuzzy-hyla --help"),
        ("train fuzzy-hyla --train.lr fast", "polyhead train fuzzy-hyla: --train.lr must be a number but is 'fast'"),
        (
            "train fuzzy-hyla --train.steps 2.5",
            "polyhead train fuzzy-hyla: --train.steps must be an integer but is '2.5'",
        ),
        ("train fuzzy-hyla --threads x", "polyhead train fuzzy-hyla: --threads must be an integer or None but is 'x'"),
        ("train digits-dual --task.flip maybe", "--task.flip must be True or False or None but is 'maybe'"),
        (
            "train digits-dual --model.causal maybe",
            "--model.causal takes no value but 'maybe' came: give --model.causal or --model.no-causal alone",
        ),
        (
            "train digits-dual --model.heads.1.no-symmetric no",
            "give --model.heads.1.no-symmetric or --model.heads.1.sy",
        ),
        ("train fuzzy-hyla --seed", "polyhead train fuzzy-hyla: --seed needs a value"),
        ("train fuzzy-hyla --train.betas 0.9", "polyhead train fuzzy-hyla: --train.betas needs 2 values"),
        ("train fuzzy-hyla --train.steps 0", "Train: steps must be at least 1 but is 0"),
        ("train fuzzy-hyla --train.precision fp8", "Train: unknown precision 'fp8'; did you mean 'fp32'? (choose from"),
        ("train fuzzy-hyla --model.heads.0.act rellu", "Hyla: unknown act 'rellu'; did you mean 'relu'? (choose from"),
        ("train fuzzy-hyla --model.heads.0.dim None --model.dim 30", "do not divide"),
        ("train fuzzy-hyla --model.heads.0.impl flash", "unknown impl 'flash'"),
        ("train fuzzy-hyla --task.held-out 1.5", "FuzzyLogic: held_out must lie between 0 and 1 but is 1.5"),
        ("train fuzzy-hyla --train.evaluate ood", "FuzzyLogic: unknown split 'ood'"),
        (
            "train fuzzy-hyla --device gpu",
            "device: unknown device 'gpu'; did you mean 'cpu'? (choose from auto, cpu, cuda",
        ),
        ("train nowhere.yaml", "nowhere.yaml: cannot be read (No such file or directory)"),
        ("train nowhere/config.json", "nowhere/config.json: cannot be read (No such file or directory)"),
        ("resume", "polyhead resume: RUN is missing; see polyhead resume --help"),
        ("resume nowhere", "run folder: nowhere does not exist"),
        ("resume .", "run folder: . holds no config.json, so it is not a run"),
        ("eval nowhere", "run folder: nowhere does not exist"),
        ("eval RUN --splits ood", "FuzzyLogic: unknown split 'ood'"),
        ("eval RUN --batches 0", "eval: batches must be at least 1 but is 0"),
        ("eval RUN --sed 1", "polyhead eval: unknown option --sed; did you mean --seed?"),
        ("eval RUN --device mps:9", "device: this machine has no mps:9 (choose from auto, "),
        ("resume RUN --seed 9", "seed 0; another seed is another run"),
        ("probe RUN --sequences -1", "probe: sequences must be at least 2 but is -1"),
        ("probe nowhere", "run folder: nowhere does not exist"),
        ("report", "report: no run folder was given"),
        ("report nowhere", "run folder: nowhere does not exist"),
        ("report RUN/..", "holds no config.json, so it is not a run; of the 1 runs in it, name one, or "),
        ("demo --workers 0", "demo: workers must be at least 1 but is 0"),
        ("demo --steps 0", "demo: steps must be at least 1 but is 0"),
        ("list", "polyhead list: WHAT is missing; see polyhead list --help"),
        (
            "list mechanism",
            "polyhead list: unknown kind 'mechanism'; did you mean 'mechanisms'? (choose from recipes, figures, tasks",
        ),
    ],
)
def test_mistakes_on_the_command_line(
    trained: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any, capsys: Any, command: str, line: str
):
    monkeypatch.chdir(tmp_path)
    assert line in mistake(capsys, command.replace("RUN", str(trained)).split())
    assert not list(tmp_path.rglob("config.json"))  # no folder of a run
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".jsonl")]


def test_a_value_that_the_oldest_library_misses():
    """tyro 1.0.0 names an option as a tuple."""
    box = "Missing value for argument '('--seed',)'. Expected 1 values. For full helptext, see --help"
    assert one_line(box, "polyhead train x") == "polyhead train x: --seed needs a value"


@pytest.mark.parametrize(
    ("where", "name", "value", "line"),
    [
        ((), "modle", {}, "unknown field 'modle'; did you mean 'model'?"),
        (("model",), "dims", 3, "model: unknown field 'dims'; did you mean 'dim'?"),
        (("train",), "lr", "fast", "train: lr: float was wanted but 'fast' came"),
        (("train",), "steps", "1e3", "train: steps: int was wanted but '1e3' came"),
        (("task",), "kind", "FuzyLogic", "unknown kind 'FuzyLogic'; did you mean 'FuzzyLogic'?"),
        (("model",), "heads", [{"kind": "Hyla", "hads": 2}], "unknown field 'hads'; did you mean 'heads'?"),
        (("model",), "heads", [], "heads must be mechanisms"),
    ],
)
def test_mistakes_in_a_configuration_file(
    tmp_path: pathlib.Path, capsys: Any, where: tuple[str, ...], name: str, value: Any, line: str
):
    path = tmp_path / "mine.json"
    save(small(tmp_path / "run"), path)
    data = json.loads(path.read_text())
    part = data
    for step in where:
        part = part[step]
    part[name] = value
    path.write_text(json.dumps(data))
    said = mistake(capsys, ["train", str(path)])
    assert said.startswith(str(path))
    assert line in said


@pytest.mark.parametrize("text", ["{", "[1, 2]", "", "name: [", "3"])
def test_a_file_that_is_no_configuration(tmp_path: pathlib.Path, capsys: Any, text: str):
    for suffix in ("json", "yaml"):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(text)
        assert mistake(capsys, ["train", str(path)]).startswith(str(path))


@pytest.mark.parametrize(
    ("verb", "few"), [("eval", ["--batches", "1", "--splits", "iid"]), ("probe", ["--sequences", "256"])]
)
def test_a_damaged_checkpoint(tmp_path: pathlib.Path, capsys: Any, trained: pathlib.Path, verb: str, few: list[str]):
    for name in ("config.json", "checkpoint.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    path = tmp_path / "checkpoint.safetensors"
    data = path.read_bytes()[:-7]
    path.write_bytes(data)
    assert re.fullmatch(
        r"checkpoint: \S+checkpoint.safetensors is damaged \(.+\)", mistake(capsys, [verb, str(tmp_path)])
    )
    assert path.read_bytes() == data
    assert main(["resume", str(tmp_path)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("; set aside as checkpoint.safetensors.damaged")
    assert said[1] == "small: no checkpoint is left, so it starts at step 0; the result will be the same"
    assert main([verb, str(tmp_path), *few]) == 0


def test_the_best_checkpoint_can_be_evaluated(capsys: Any, trained: pathlib.Path):
    said = []
    for which in ("newest", "best", "2"):
        assert main(["eval", str(trained), "--checkpoint", which, "--batches", "1", "--splits", "iid"]) == 0
        said.append(capsys.readouterr().out)
    assert said[2] != said[0] == said[1]  # the last step is the one that was evaluated
    line = mistake(capsys, ["eval", str(trained), "--checkpoint", "3"])
    assert line == f"checkpoint: {trained} has none of '3' (choose from newest, best, 2, 4)"


def test_another_runs_folder(tmp_path: pathlib.Path, capsys: Any, trained: pathlib.Path):
    path = tmp_path / "mine.json"
    save(small(trained, seed=5), path)
    kept = [p for p in trained.iterdir() if p.name != ".lock"]  # which says who looked into it last
    before = {p.name: p.read_bytes() for p in kept}
    assert len(before) >= 4
    assert "already holds another run" in mistake(capsys, ["train", str(path)])
    assert {p.name: p.read_bytes() for p in kept} == before


def test_a_full_disk_is_a_pause_that_a_signal_ends(tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any):
    """The partial file is /dev/full, where every write fails as on a full disk."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    path, folder = tmp_path / "mine.json", tmp_path / "run"
    save(small(folder), path)
    folder.mkdir()
    full = folder / "checkpoint.safetensors.partial"

    def rest(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("polyhead.train.store.disk.sleep", rest)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *args, **how: None)  # the disk stays full
    full.symlink_to("/dev/full")
    assert main(["train", str(path)]) == 130
    said = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    reason = rf"{folder}/checkpoint.safetensors: cannot be written \(No space left on device\)"
    assert re.fullmatch(rf"paused: {reason}; tried again every 30 s until the disk works", said[0])
    assert re.fullmatch(rf"polyhead: stopped, not saved: {reason}; what was saved before is kept", said[1])


def test_a_full_disk_before_the_first_step_is_one_line_and_exit_1(tmp_path: pathlib.Path, capsys: Any):
    path, folder = tmp_path / "mine.json", tmp_path / "run"
    save(small(folder), path)
    folder.mkdir()
    (folder / "config.json.partial").mkdir()
    assert main(["train", str(path)]) == 1
    assert re.fullmatch(r"polyhead: \S+config.json: cannot be written \(.+\)\n", capsys.readouterr().err)


def test_ctrl_c_is_one_line_with_the_way_on_and_exit_130(tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any):
    path, folder = tmp_path / "mine.json", tmp_path / "run"
    save(small(folder), path)
    draw = ph.tasks.FuzzyLogic.batch

    def batch(task: Any, split: str, size: int, **where: Any) -> Any:
        if where["step"] == 1 and split == "train":
            os.kill(os.getpid(), signal.SIGINT)
        return draw(task, split, size, **where)

    with monkeypatch.context() as patch:
        patch.setattr(ph.tasks.FuzzyLogic, "batch", batch)
        assert main(["train", str(path)]) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"polyhead: stopped and saved at step 2; resume with: polyhead resume {folder}"
    assert "holds an unfinished run; resume it with `polyhead resume" in mistake(capsys, ["train", str(path)])
    assert main(["resume", str(folder)]) == 0
    assert "4 steps" in capsys.readouterr().out


def test_the_worker_says_one_line_and_knows_no_command_line_library(trained: pathlib.Path, tmp_path: pathlib.Path):
    code = (
        "import sys; from polyhead.train.__main__ import main; codes = [main([path]) for path in sys.argv[1:]]; "
        "print(codes, sorted({'tyro', 'plotly', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(trained), str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 2] []\n"
    assert done.stderr == f"polyhead: run folder: {tmp_path / 'nowhere'} does not exist\n"


# --------------------------------------------------------------------------------------------------------- the library
@pytest.mark.parametrize("op", ["softmax_attention", "linear_attention", "hyla"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"k": torch.randn(2, 5, 4, 7)}, "d = 8 in q but 7 in k"),
        ({"k": torch.randn(2, 5, 3, 8)}, "4 heads in q but 3 in k"),
        ({"v": torch.randn(2, 6, 4, 8)}, "s = 5 in k but 6 in v"),
        ({"mask": torch.ones(5, 5)}, "mask must be boolean"),
        ({"impl": "refrence"}, "unknown impl 'refrence'; did you mean 'reference'?"),
    ],
)
def test_ops_name_who_what_was_wanted_and_what_came(op: str, change: dict[str, Any], line: str):
    torch.manual_seed(0)
    arguments = {name: torch.randn(2, 5, 4, 8) for name in "qkv"} | change
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        getattr(ph.ops, op)(**arguments)
    assert str(caught.value).startswith(op)
    assert "\n" not in str(caught.value)


def test_layers_and_configurations():
    cases = [
        (lambda: ph.MultiHeadAttention(30, [ph.Softmax(8)]), "8 heads do not divide the model width 30"),
        (lambda: ph.Softmax(8, kv_heads=3), "Softmax: kv_heads must divide 8 heads but is 3"),
        (lambda: ph.Hyla(4, normalise="rms_head"), "Hyla: unknown normalise 'rms_head'; did you mean 'rms_heads'?"),
        (lambda: ph.MultiHeadAttention(8, [ph.Softmax(2)])(torch.randn(2, 3, 7)), "m = 8 but x (b t m) = (2, 3, 7)"),
        (lambda: configs.from_dict({"nam": "x"}), "unknown field 'nam'; did you mean 'name'?"),
        (lambda: ph.tasks.FuzzyLogic().batch("test", 2, seed=0, step=0), "FuzzyLogic: unknown split 'test'"),
    ]
    for make, line in cases:
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.compile  # run without annotation checks, as users have it: those would catch some of these first
def test_arguments_of_another_kind():
    q, positions = torch.randn(2, 5, 4, 8), torch.arange(5.0)
    cases = [
        (
            lambda: ph.TransformerConfig(ph.Vectors(5), ph.Values(), positions="rotary"),  # type: ignore[arg-type]
            "TransformerConfig: positions must be one of Rotary(), RelativeBias(), Alibi(), Learned(), Sinusoidal() "
            "but is 'rotary'",
        ),
        (
            lambda: ph.TransformerConfig(5, ph.Values()),  # type: ignore[arg-type]
            "TransformerConfig: inputs must be one of Tokens(), Vectors(), Patches() but is 5",
        ),
        (lambda: ph.Transformer(ph.Tokens(3)), "Transformer: a TransformerConfig was wanted but Tokens(count=3"),
        (lambda: ph.train.run("fuzzy-hyla"), "train.run: a Run was wanted, as RECIPES['fuzzy-hyla']() makes, but 'fu"),
        (lambda: ph.records(["runs"]), "records: folders were wanted, one argument each, but ['runs'] came"),
        (lambda: ph.TransformerBlock(64, 8), "TransformerBlock: attention must be a MultiHeadAttention but is 64"),
        (lambda: ph.ops.hyla(None, q, q), "hyla: q must be a Tensor (b t h d) but is a NoneType"),
        (
            lambda: ph.ops.latent_code(q, q.double(), normalise="softmax"),
            "latent_code: q and k must have one dtype but have torch.float32, torch.float64",
        ),
        (
            lambda: ph.compat.cs336.RotaryPositionalEmbedding(1e4, 8, 9)(q[:, :, 0], positions),
            "RotaryEmbedding: positions must be of an integer dtype but are torch.float32",
        ),
        (lambda: ph.compat.cs336.SwiGLU(8, 16)(q[..., :3]), "Linear: m = 8 but x (... m) = (2, 5, 4, 3)"),
    ]
    for make, line in cases:
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.compile
@pytest.mark.parametrize("task", [ph.tasks.FuzzyLogic, ph.tasks.Sraven])
def test_sizes_of_tasks_that_are_no_integers(task):
    field = "terms" if task is ph.tasks.FuzzyLogic else "features"
    for value in (2.0, "8", None):
        with pytest.raises(ValueError, match=rf"{task.__name__}: {field} must be an integer but is {value!r}"):
            task(**{field: value})


KINDS = (
    (ph.Softmax, "heads", (4.0, True, "8", None), "an integer"),
    (ph.Softmax, "dim", (2.5,), "an integer or None"),
    (ph.Softmax, "impl", (3,), "a string"),
    (ph.Hyla, "value_depth", (True, 1.0), "an integer"),
    (ph.Relational, "share", ("x", 1), "True or False"),
    (ph.Relational, "symmetric", ("no", None), "True or False"),
    (ph.Relational, "relation_dim", (2.5, True), "an integer or None"),
    (ph.Disentangled, "hidden", ("8",), "an integer or None"),
    (ph.SymbolicAttention, "trainable", ("no",), "True or False"),
    (ph.SymbolicAttention, "shared", (3,), "True or False"),
    (ph.RelationalSymbols, "causal", ("yes",), "True or False or None"),
    (ph.RelativeSymbols, "distance", (2.5,), "an integer or None"),
    (ph.Rotary, "theta", ("x", True), "a number"),
    (ph.Train, "lr", ("fast", True), "a number"),
    (ph.tasks.Images, "flip", ("maybe",), "True or False or None"),
    (ph.tasks.Sraven, "permuted", (0,), "True or False"),
)


@pytest.mark.compile
@pytest.mark.parametrize(("kind", "field", "values", "wanted"), KINDS, ids=lambda x: getattr(x, "__name__", None))
def test_fields_of_another_type(kind: Any, field: str, values: tuple[Any, ...], wanted: str):
    for value in values:
        line = f"{kind.__name__}: {field} must be {wanted} but is {value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            kind(**{field: value})


@pytest.mark.compile
def test_whole_numbers_where_any_are_wanted():
    assert ph.Rotary(**{"theta": 1}) == ph.Rotary(1.0)  # noqa: PIE804
