"""Every invalid input gives one clear line and exit code 2, and no data are lost."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import types
import typing
from typing import Any

import pytest
import torch
from commands import mistake, small

import polyhead as ph
from polyhead import config as configs
from polyhead.cli.mistakes import one_line
from polyhead.cli.verbs import main
from polyhead.config import save
from polyhead.papers import recipes

# ---------------------------------------------------------------------------------------------------- the command line
TABLE = """
trian fuzzy-hyla | unknown command 'trian'; did you mean 'train'? (choose from demo, train, sweep, tune, plan, reprod
train | polyhead train: RECIPE is missing; see polyhead list recipes
train --seed 1 | polyhead train: RECIPE comes first but --seed came
train fuzzy-hila | polyhead train: unknown recipe 'fuzzy-hila'; did you mean 'fuzzy-hyla'? (choose from
train fuzzy-hyla --threads 0 | Run: threads must be at least 1, or None, but is 0
train fuzzy-hyla --model.heads softmax:4,hyla:3 | Softmax: 7 heads in all (4 of them here) do not divide
train fuzzy-hyla --model.dm 3 | polyhead train fuzzy-hyla: unknown option --model.dm; did you mean --model.dim?
train fuzzy-hyla --qqqq | polyhead train fuzzy-hyla: unknown option --qqqq; see polyhead train fuzzy-hyla --help
train fuzzy-hyla --model.heads.heads 2 | unknown option --model.heads.heads; did you mean --model.heads.0.heads?
train fuzzy-hyla --learning_rate 2 | unknown option --learning_rate; did you mean --train.lr?
train fuzzy-hyla --batch_size 2 | unknown option --batch_size; did you mean --train.batch-size?
train fuzzy-hyla 3 | polyhead train fuzzy-hyla: unknown argument 3; see polyhead train fuzzy-hyla --help
train fuzzy-hyla --train.lr fast | polyhead train fuzzy-hyla: --train.lr must be a number but is 'fast'
train fuzzy-hyla --train.steps 2.5 | --train.steps must be an integer but is '2.5'
train fuzzy-hyla --threads x | polyhead train fuzzy-hyla: --threads must be an integer or None but is 'x'
train digits-dual --task.flip maybe | --task.flip must be True or False or None but is 'maybe'
train digits-dual --model.causal maybe | 'maybe' came: give --model.causal or --model.no-causal alone
train digits-dual --model.heads.1.no-symmetric no | --model.heads.1.no-symmetric or --model.heads.1.symmetric alone
train fuzzy-hyla --seed | polyhead train fuzzy-hyla: --seed needs a value
train fuzzy-hyla --train.betas 0.9 | polyhead train fuzzy-hyla: --train.betas needs 2 values
train fuzzy-hyla --train.steps 0 | Train: steps must be at least 1 but is 0
train fuzzy-hyla --train.precision fp8 | Train: unknown precision 'fp8'; did you mean 'fp32'? (choose from
train fuzzy-hyla --model.heads.0.dim None --model.dim 30 | do not divide
train fuzzy-hyla --train.evaluate ood | FuzzyLogic: unknown split 'ood'
train fuzzy-hyla --device gpu | device: unknown device 'gpu'; did you mean 'cpu'? (choose from auto, cpu, cuda
train nowhere.yaml | nowhere.yaml: cannot be read (No such file or directory)
train demo --print | polyhead train: --print is for one run but demo has 8
train three.yaml | three.yaml: recipe must be a name but is 3
train demo.yaml | demo.yaml: demo has 8 runs but a file is one
train hila.yaml | unknown recipe 'fuzzy-hila'; did you mean 'fuzzy-hyla'
train hula.yaml | hula.yaml: unknown mechanism 'hula'; did you mean 'hyla'
train count.yaml | count.yaml: hyla:x: a number of heads was wanted but 'x'
train rate.yaml | rate.yaml: train: unknown field 'rate'
train itself.yaml | itself.yaml: its recipe leads back to itself.yaml: itself.yaml -> itself.yaml$
sweep itself.yaml | itself.yaml: its recipe leads back to itself.yaml: itself.yaml -> itself.yaml$
train dot.yaml | dot.yaml: its recipe leads back to ./dot.yaml: dot.yaml -> ./dot.yaml$
train a.yaml | b.yaml: its recipe leads back to a.yaml: a.yaml -> b.yaml -> a.yaml$
train to-itself.yaml | itself.yaml: its recipe leads back to itself.yaml: to-itself.yaml -> itself.yaml -> itself.yaml$
resume | polyhead resume: RUN is missing; see polyhead resume --help
resume nowhere | run folder: nowhere does not exist
resume . | run folder: . holds no config.json, so it is not a run
resume RUN --seed 9 | seed 0; another seed is another run
eval nowhere | run folder: nowhere does not exist
eval RUN --splits ood | FuzzyLogic: unknown split 'ood'
eval RUN --batches 0 | eval: batches must be at least 1 but is 0
eval RUN --sed 1 | polyhead eval: unknown option --sed; did you mean --seed?
eval RUN --device mps:9 | device: this machine has no mps:9 (choose from auto,
eval RUN --checkpoint 3 | has none of '3' (choose from newest, best, 2, 4)
probe RUN --sequences -1 | probe: sequences must be at least 2 but is -1
probe nowhere | run folder: nowhere does not exist
report | report: no run folder was given
report nowhere | run folder: nowhere does not exist
report RUN --out . | report: . cannot be written (Is a directory)
report RUN/.. | holds no config.json, so it is not a run; of the 1 runs in it, name one, or
demo --workers 0 | demo: workers must be at least 1 but is 0
demo --steps 0 | demo: steps must be at least 1 but is 0
plan fuzzy-hyla --card h20 | plan: unknown card 'h20'; did you mean 'h200'
plan fuzzy-hyla --hours 0 | plan: hours must be above 0 but is 0.0
plan fuzzy-hyla --hours inf | plan: hours must be a finite number but is inf
list | polyhead list: WHAT is missing; see polyhead list --help
list mechanism | polyhead list: unknown kind 'mechanism'; did you mean 'mechanisms'? (choose from recipes, figures,
list tasks --dim 64 | polyhead list: --dim is for mechanisms but tasks were asked for
list mechanisms --dim 10 | polyhead list: --heads must divide --dim 10 but is 8
list mechanisms --length 0 | polyhead list: --length must be at least 1 but is 0
list tasks RUN | polyhead list: a folder is for runs but tasks were asked for
list runs nowhere | list runs: nowhere does not exist
compare | compare: two runs were wanted but none came
compare RUN RUN/. | compare: two runs were wanted but 1 came
compare nowhere RUN | compare: nowhere does not exist
table RUN --format xls | records: unknown format 'xls'
completion csh | polyhead completion: unknown shell 'csh'; did you mean 'zsh'? (choose from bash, zsh, fish)$
sweep | polyhead sweep: RECIPE is missing
sweep --seed 1 | polyhead sweep: RECIPE comes first but --seed came
sweep smal | unknown recipe 'smal'; did you mean 'small'
sweep small --scale small | --scale is for the recipes of figures and fuzzy-softmax,
sweep fig-2c --scale | --scale needs a value
sweep fig-2c --scale huge | unknown scale 'huge'
sweep small --train.lr 1e-3,fast | --train.lr must be a number but is 'fast'
sweep small --train.rate 1,2 | unknown option --train.rate
sweep fuzzy-hyla --model.heads softmx:4 | polyhead sweep: --model.heads: unknown mechanism 'softmx'
sweep small --ray local --slurm | --ray and --slurm exclude each other but both were given
sweep small --partition gpu | --partition is for --slurm
sweep small --ray local --minutes 9 | --minutes is for --slurm
sweep small --gpus 1 | --gpus is for --ray and --slurm
sweep small --slurm --gpus 0.5 | Slurm gives whole GPUs but gpus is 0.5
sweep small --slurm --minutes 0 | minutes must be at least 1 but is 0
sweep small --ray local --cpus 0 | cpus must be at least 1 but is 0
sweep small --ray nowhere | --ray wants HOST:PORT, auto or local but 'nowhere' came
sweep small --population --slurm | --population trains in one process, so --slurm has nothing to do
sweep small --population --ray local | --population trains in one process, so --ray has nothing to do
sweep small --population --workers 2 | --population trains in one process, so --workers has nothing to do
sweep small --retries -1 | retries must be at least 0 but is -1
sweep small --devices 2 | --devices is for one run: polyhead train
sweep small --seed 0,0 | the run 'small' occurs twice
sweep missing.yaml | missing.yaml
sweep empty.yaml | empty.yaml: a grid needs `recipe`
sweep odd.yaml | odd.yaml: seed must be {values: [...]} or {value: ...} but is 3
sweep bayes.yaml | bayes.yaml: a grid is `method: grid`
sweep mixture.yaml | mixture.yaml: model.heads: a comma separates values but 'softmax:4,hyla:4' has one (join
sweep scale.yaml | scale.yaml: unknown field 'scale'
table nowhere --out folder | table: folder cannot be written (Is a directory)$
table nowhere --out file/page | table: file/page cannot be written (File exists)$
explore nowhere --text a --out folder | explore: folder cannot be written (Is a directory)$
explore nowhere --text a --out file/page | explore: file/page cannot be written (File exists)$
explore nowhere --text a --out /proc/page | explore: /proc/page cannot be written (No such file or directory)$
bench hyla --out file | bench: file cannot be written (File exists)$
demo --folder file | demo: file/report.html cannot be written (File exists)$
reproduce lm-bytes --scale smoke --folder file | reproduce: file/lm-bytes cannot be written (Not a directory)$
reproduce lm-bytes --from RESULTS --folder file | reproduce: file cannot be written (File exists)$
tune fuzzy-hyla --train.lr 1e-4:1e-2 --folder file | tune: file cannot be written (File exists)$
sweep fuzzy-hyla --folder file | sweep: file cannot be written (File exists)$
train fuzzy-hyla --folder file | run folder: file cannot be made (File exists)$
"""
"""Commands, and a part of their one line ($ is its end).  RUN is a trained run."""

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "small" / "lm-bytes"

FILES = {
    "three": "recipe: 3",
    "demo": "recipe: demo",
    "hila": "recipe: fuzzy-hila",
    "hula": "recipe: fuzzy-hyla\nmodel: {heads: 'hula:4'}",
    "count": "recipe: fuzzy-hyla\nmodel: {heads: 'hyla:x'}",
    "rate": "recipe: fuzzy-hyla\ntrain: {rate: 1}",
    "itself": "recipe: itself.yaml",
    "dot": "recipe: ./dot.yaml",
    "a": "recipe: b.yaml",
    "b": "recipe: a.yaml",
    "to-itself": "recipe: itself.yaml",
    "empty": "parameters: {}",
    "odd": "recipe: small\nparameters: {seed: 3}",
    "bayes": "recipe: small\nmethod: bayes\nparameters: {seed: {value: 3}}",
    "mixture": "recipe: small\nparameters: {model.heads: {values: ['softmax:4,hyla:4', 'softmax:8']}}",
    "scale": "recipe: small\nscale: paper\nparameters: {seed: {value: 3}}",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    ph.train.run(small(folder=str(folder)), progress=False)
    return folder


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_a_mistake_is_one_line(
    trained: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, row: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    for name, text in FILES.items():
        pathlib.Path(f"{name}.yaml").write_text(text + "\n")
    pathlib.Path("folder").mkdir()
    pathlib.Path("file").touch()
    before = sorted(tmp_path.rglob("*"))
    command, line = row.split(" | ")
    if command.startswith("tune"):
        pytest.importorskip("optuna")
    said = mistake(capsys, command.replace("RUN", str(trained)).replace("RESULTS", str(RESULTS)))
    assert line in f"{said}$"
    left = sorted(tmp_path.rglob("*"))
    assert left == before or " cannot be " not in line
    assert not [path for path in left if path.suffix in (".json", ".jsonl", ".safetensors")]  # no run was begun


def test_a_value_that_the_oldest_library_misses():
    """tyro 1.0.0 names an option as a tuple."""
    box = "Missing value for argument '('--seed',)'. Expected 1 values. For full helptext, see --help"
    assert one_line(box, "polyhead train x") == "polyhead train x: --seed needs a value"


# ------------------------------------------------------------------------------------------------------ files, folders
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


def test_another_runs_folder(tmp_path: pathlib.Path, capsys: Any, trained: pathlib.Path):
    path = tmp_path / "mine.json"
    save(small(folder=str(trained), seed=5), path)
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
    save(small(folder=str(folder)), path)
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
    save(small(folder=str(folder)), path)
    folder.mkdir()
    (folder / "config.json.partial").mkdir()
    assert main(["train", str(path)]) == 1
    assert re.fullmatch(r"polyhead: \S+config.json: cannot be written \(.+\)\n", capsys.readouterr().err)


def test_ctrl_c_is_one_line_with_the_way_on_and_exit_130(tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any):
    path, folder = tmp_path / "mine.json", tmp_path / "run"
    save(small(folder=str(folder)), path)
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


TYPES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}
PUBLIC = {getattr(place, name) for place in (configs, ph.tasks) for name in place.__all__}
KINDS = [kind for kind in PUBLIC if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def has_defaults(kind: Any) -> bool:
    fields = dataclasses.fields(kind)
    return all(f.default is not f.default_factory or not f.init for f in fields)  # both are MISSING without one


@pytest.mark.compile
@pytest.mark.parametrize("kind", sorted(filter(has_defaults, KINDS), key=lambda kind: kind.__name__))
def test_fields_of_another_type(kind: Any):
    """A field for Booleans, numbers or strings refuses other types; an integer is a number, a Boolean is none."""
    hints = typing.get_type_hints(kind)
    for field in (f for f in dataclasses.fields(kind) if f.init):
        union = typing.get_origin(hints[field.name]) in (typing.Union, types.UnionType)
        options = typing.get_args(hints[field.name]) if union else (hints[field.name],)
        for value in (True, 3, 2.5, "x", None):
            fits = type(value) in options or (type(value) is int and float in options)
            if TYPES.keys() >= {*options} and not fits:
                line = f"{kind.__name__}: {field.name} must be {' or '.join(map(TYPES.get, options))} but is {value!r}"
                with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
                    kind(**{field.name: value})


@pytest.mark.compile
def test_whole_numbers_where_any_are_wanted():
    assert ph.Rotary(**{"theta": 1}) == ph.Rotary(1.0)  # noqa: PIE804
