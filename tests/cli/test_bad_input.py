"""Every invalid input gives one clear line and exit code 2, and no data are lost."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import types
import typing

import pytest
import torch
from commands import mistake, small
from refusals import refusing

import polyhead as ph
from polyhead import config as configs
from polyhead.cli.dispatch import main
from polyhead.cli.mistakes import one_line
from polyhead.config import save
from polyhead.papers import recipes

# ---------------------------------------------------------------------------------------------------- the command line
TABLE = """
trian fuzzy-hyla | unknown command 'trian'; did you mean 'train'? (choose from demo, train, sweep, tune, plan, reprod
train | polyhead train: RECIPE is missing; see polyhead list recipes
train --seed 1 | polyhead train: RECIPE comes first but --seed came
train fuzzy-hila | polyhead train: unknown recipe 'fuzzy-hila'; did you mean 'fuzzy-hyla'? (choose from
train fuzzy-hyla --threads 0 | Run: threads must be at least 1 but is 0
train fuzzy-hyla --model.dm 3 | polyhead train fuzzy-hyla: unknown option --model.dm; did you mean --model.dim?
train fuzzy-hyla --qqqq | polyhead train fuzzy-hyla: unknown option --qqqq; see polyhead train fuzzy-hyla --help
train fuzzy-hyla --batch_size 2 | unknown option --batch_size; did you mean --train.batch-size?
train fuzzy-hyla 3 | polyhead train fuzzy-hyla: unknown argument 3; see polyhead train fuzzy-hyla --help
train fuzzy-hyla --train.lr fast | polyhead train fuzzy-hyla: --train.lr must be a number but is 'fast'
train fuzzy-hyla --train.steps 2.5 | --train.steps must be an integer but is '2.5'
train fuzzy-hyla --threads x | polyhead train fuzzy-hyla: --threads must be an integer or None but is 'x'
train digits-dual --task.flip maybe | --task.flip must be True or False or None but is 'maybe'
train digits-dual --model.causal maybe | 'maybe' came: give --model.causal or --model.no-causal alone
train fuzzy-hyla --seed | polyhead train fuzzy-hyla: --seed needs a value
train fuzzy-hyla --train.betas 0.9 | polyhead train fuzzy-hyla: --train.betas needs 2 values
train fuzzy-hyla --model.heads.0.dim None --model.dim 30 | do not divide
train fuzzy-hyla --model.heads softmax:,hyla:4 | --model.heads: softmax:: a number of heads was wanted but ''
train fuzzy-hyla --model.heads hyla:² | --model.heads: hyla:²: a number of heads was wanted but '²'
train nowhere.yaml | nowhere.yaml: cannot be read (No such file or directory)
train demo --print | polyhead train: --print is for one run but demo has 8
train three.yaml | three.yaml: recipe must be a name but is 3
train list.yaml | list.yaml: an object with fields was wanted but [1, 2] came$
train demo.yaml | demo.yaml: demo has 8 runs but a file is one
train hula.yaml | hula.yaml: unknown mechanism 'hula'; did you mean 'hyla'
train count.yaml | count.yaml: hyla:x: a number of heads was wanted but 'x'
train rate.yaml | rate.yaml: train: unknown field 'rate'
train dot.yaml | dot.yaml: its recipe leads back to ./dot.yaml: dot.yaml -> ./dot.yaml$
train a.yaml | b.yaml: its recipe leads back to a.yaml: a.yaml -> b.yaml -> a.yaml$
train to-itself.yaml | itself.yaml: its recipe leads back to itself.yaml: to-itself.yaml -> itself.yaml -> itself.yaml$
resume | polyhead resume: RUN is missing; see polyhead resume --help
resume nowhere | run folder: nowhere does not exist
resume . | run folder: . holds no config.json, so it is not a run
resume RUN --seed 9 | seed 0; another seed is another run
eval RUN --batches 0 | eval: batches must be at least 1 but is 0
eval RUN --device mps:9 | device: this machine has no mps:9 (choose from auto,
eval RUN --checkpoint 3 | has none of '3' (choose from newest, best, 2, 4)
probe RUN --sequences -1 | probe: sequences must be at least 2 but is -1
report | report: no run folder was given
report RUN/.. | holds no config.json, so it is not a run; of the 1 runs in it, name one, or
demo --workers 0 | demo: workers must be at least 1 but is 0
demo --steps 0 | demo: steps must be at least 1 but is 0
list mechanism | polyhead list: unknown kind 'mechanism'; did you mean 'mechanisms'? (choose from recipes, figures,
list tasks --dim 64 | polyhead list: --dim is for mechanisms but tasks were asked for
list mechanisms --dim 10 | polyhead list: --heads must divide --dim 10 but is 8
list mechanisms --length 0 | polyhead list: --length must be at least 1 but is 0
list tasks RUN | polyhead list: a folder is for runs but tasks were asked for
list runs nowhere | list runs: nowhere does not exist
compare | compare: two runs were wanted but none came
compare RUN RUN/. | compare: two runs were wanted but 1 came
completion csh | polyhead completion: unknown shell 'csh'; did you mean 'zsh'? (choose from bash, zsh, fish)$
sweep small --scale small | --scale is for the recipes of figures and fuzzy-softmax,
sweep fig-2c --scale | --scale needs a value
sweep fuzzy-hyla --model.heads softmx:4 | polyhead sweep: --model.heads: unknown mechanism 'softmx'
sweep small --ray local --slurm | --ray and --slurm exclude each other but both were given
sweep small --partition gpu | --partition is for --slurm
sweep small --ray local --minutes 9 | --minutes is for --slurm
sweep small --gpus 1 | --gpus is for --ray and --slurm
sweep small --slurm --gpus nan | gpus must be a finite number but is nan
sweep small --slurm --gpus 0.5 | Slurm gives whole GPUs but gpus is 0.5
sweep small --slurm --minutes 0 | minutes must be at least 1 but is 0
sweep small --devices 2 | --devices is for one run: polyhead train
sweep empty.yaml | empty.yaml: a grid needs `recipe`
sweep odd.yaml | odd.yaml: seed must be {values: [...]} or {value: ...} but is 3
sweep bayes.yaml | bayes.yaml: a grid is `method: grid`
sweep mixture.yaml | mixture.yaml: model.heads: a comma separates values but 'softmax:4,hyla:4' has one (join
sweep scale.yaml | scale.yaml: unknown field 'scale'
table nowhere --out folder | table: folder cannot be written (Is a directory)$
explore nowhere --text a --out folder | explore: folder cannot be written (Is a directory)$
explore nowhere --text a --out file/page | explore: file/page cannot be written (File exists)$
explore nowhere --text a --out /proc/page | explore: /proc/page cannot be written (No such file or directory)$
demo --folder file | demo: file/report.html cannot be written (File exists)$
reproduce fig-2e | unknown figure 'fig-2e'; did you mean 'fig-
reproduce fig-a9 --workers many | --workers must be
reproduce fig-a9 --seeds 5 | has no runs, so --seeds has no effect
reproduce fig-5c --scale smoke --seeds 0 | seeds must be at least 1 but is 0
reproduce lm-bytes --from RESULTS --scale small | --from trains nothing, so --scale has no effect
reproduce lm-bytes --from RESULTS --seeds 5 | --from trains nothing, so --seeds has no effect
reproduce lm-bytes --from RESULTS --workers 2 | --from trains nothing, so --workers has no effect
reproduce lm-bytes --from RESULTS --device cpu | --from trains nothing, so --device has no effect
reproduce lm-bytes --scale smoke --folder file | reproduce: file/lm-bytes cannot be written (Not a directory)$
reproduce lm-bytes --from RESULTS --folder file | reproduce: file cannot be written (File exists)$
sweep fuzzy-hyla --folder file | sweep: file cannot be written (File exists)$
train fuzzy-hyla --folder file | run folder: file cannot be made (File exists)$
"""
"""Commands, and a part of their one line ($ is its end).  RUN is a trained run."""

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "small" / "lm-bytes"

FILES = {
    "three": "recipe: 3",
    "list": "[1, 2]",
    "demo": "recipe: demo",
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
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    ph.train.run(small(folder=str(folder)), progress=False)
    return folder


@pytest.mark.thinned(2)
@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_a_mistake_is_one_line(trained, tmp_path, monkeypatch, capsys, row):
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


@pytest.mark.parametrize("columns", ["45", "80"])
def test_a_long_word_stays_whole_in_a_narrow_terminal(monkeypatch, capsys, columns):
    """The library breaks lines at hyphens and in words."""
    monkeypatch.setenv("COLUMNS", columns)
    option, value = f"--train.{'very-long-' * 9}option", "a" * 90
    said = mistake(capsys, f"train fuzzy-hyla {option} 3")
    assert said.startswith(f"polyhead train fuzzy-hyla: unknown option {option}; ")
    for words in (f"--train.lr {value}", f"--train.lr={value}"):
        said = mistake(capsys, f"train fuzzy-hyla {words}")
        assert said == f"polyhead train fuzzy-hyla: --train.lr must be a number but is {value!r}"


def test_a_full_disk_before_the_first_step_is_one_line_and_exit_1(tmp_path, capsys):
    path, folder = tmp_path / "mine.json", tmp_path / "run"
    save(small(folder=str(folder)), path)
    folder.mkdir()
    (folder / "config.json.partial").mkdir()
    assert main(["train", str(path)]) == 1
    assert re.fullmatch(r"polyhead: \S+config.json: cannot be written \(.+\)\n", capsys.readouterr().err)


def test_the_worker_says_one_line_and_knows_no_command_line_library(trained, tmp_path):
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
    for make, line in [
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
        (lambda: ph.sweep(ph.recipes.RECIPES["fuzzy-hyla"](), "runs"), "sweep: a list of runs was wanted but Run("),  # type: ignore[arg-type]
        (lambda: ph.sweep((run for run in ()), "runs"), "sweep: a list of runs was wanted but <generator"),  # type: ignore[arg-type]
        (lambda: ph.sweep(["demo"], "runs"), "sweep: a Run was wanted, as"),  # type: ignore[list-item]
        (lambda: ph.analysis.codes([], 0, 0), "codes: taps must be those of one layer, taps[0], "),  # type: ignore[arg-type]
        (lambda: ph.analysis.value_network(q, 0, 0), "value_network: taps must be Taps, as layer(x, "),  # type: ignore[arg-type]
        (lambda: ph.analysis.capture(torch.nn.Linear(3, 3), q), "capture: batch must be a Batch, as task.bat"),  # type: ignore[arg-type]
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
        (lambda: ph.analysis.embed(torch.zeros(4)), "embed: codes must be (b h) but have shape (4,)"),
        (lambda: ph.compat.dual_attention.load({}, (4, 8)), "load: arguments by name were wanted but (4, 8) came"),  # type: ignore[arg-type]
        (lambda: ph.compat.dual_attention.load_attention({}, [4]), "load_attention: arguments by name were wanted"),  # type: ignore[arg-type]
    ]:
        with refusing(line):
            make()


TYPES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}
PUBLIC = {getattr(place, name) for place in (configs, ph.tasks) for name in place.__all__}
KINDS = [kind for kind in PUBLIC if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def has_defaults(kind):
    fields = dataclasses.fields(kind)
    return all(f.default is not f.default_factory or not f.init for f in fields)  # both are MISSING without one


@pytest.mark.compile
@pytest.mark.parametrize("kind", sorted(filter(has_defaults, KINDS), key=lambda kind: kind.__name__))
def test_fields_of_another_type(kind):
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
