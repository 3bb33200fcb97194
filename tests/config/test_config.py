"""A run is a frozen value: writing, reading, comparing and hashing lose no field, and each mistake is one line."""

import enum
import json
import re
import typing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import yaml
from refusals import refusing
from scripts import ROOT
from some import some

from polyhead import config
from polyhead.config import Experts, Hyla, Linear, RelativeBias, Run, Softmax, Train, TransformerConfig, digest
from polyhead.papers.recipes import RECIPES
from polyhead.spec.checked import Checked, field_types
from polyhead.tasks import KINDS, FuzzyLogic


def run_of(**changes):
    task = FuzzyLogic()
    heads = [[Hyla(4, dim=3, act="silu")], [Softmax(2), Linear(2, kv_heads=1)]]
    model = TransformerConfig(*task.ends, heads=heads, positions=RelativeBias(8), feedforward=Experts(3))
    return replace(Run(task=task, model=model, train=Train(clip=1.0)), **changes)


# ----------------------------------------------------------------------------------------------- values and their files
@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_round_trip(name):
    runs = RECIPES[name]()
    runs = runs if isinstance(runs, tuple) else (runs,)
    for run in some(run for run in runs if run.seed == runs[0].seed):  # other seeds are other numbers only
        assert config.from_dict(json.loads(json.dumps(config.to_dict(run))), KINDS) == run
        assert RECIPES[name].__doc__


def test_the_digest_changes_with_what_changes_results_only():
    base = digest(run_of())
    no_effect = {"name": "x", "device": "cuda", "compile": True, "folder": "y", "threads": 2, "deterministic": True}
    no_effect |= {"parallel": "sharded", "track": ("wandb",), "fast_products": False}
    for name, value in no_effect.items():
        assert digest(run_of(**{name: value})) == base, name
    assert digest(run_of(train=Train(clip=1.0, log_every=7, eval_every=9, save_every=3))) == base
    for changed in (run_of(seed=1), run_of(train=Train(lr=0.1)), run_of(task=FuzzyLogic(held_out=0.3))):
        assert digest(changed) != base
    assert digest(Softmax(4, impl="reference")) == digest(Softmax(4)) != digest(Softmax(4, share=True))


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("models/*/config.json"), *ROOT.glob("docs/results/**/config.json")])
)
def test_the_digests_of_published_runs_stay(path):
    values = json.loads(path.read_text())
    recorded = values.pop("digest")
    assert recorded == digest(config.from_dict(values, KINDS))


def test_a_layer_with_one_group_of_heads_needs_no_list():
    tokens = config.Tokens(5), config.Logits(5)
    short = TransformerConfig(*tokens, heads=[Softmax(4), [Hyla(2), Linear(2)]])
    assert short == TransformerConfig(*tokens, heads=[[Softmax(4)], [Hyla(2), Linear(2)]])


@dataclass(frozen=True)
class Spans(Checked):
    spans: tuple[tuple[int, float], ...]


@pytest.mark.compile  # where annotations are not checked
def test_numbers_and_lists_of_a_program_are_those_of_a_file(tmp_path):
    """Else a run was unequal to itself read back, had no hash, or could not be printed."""
    expected = run_of(train=Train(weight_decay=0.0, clip=1.0, betas=(0.0, 0.9), lr=0.25))
    lists = {"betas": [0, 0.9], "evaluate": ["iid", "compositional"]}
    run = run_of(train=Train(weight_decay=0, clip=1, lr=np.float64(0.25), **lists))
    config.save(run, tmp_path / "run.json")
    assert config.load(tmp_path / "run.json", KINDS) == expected == run
    assert hash(expected) == hash(run)
    assert digest(expected) == digest(run) == digest(run_of(train=replace(run.train, weight_decay=-0.0)))
    assert yaml.safe_dump(config.to_dict(expected)) == yaml.safe_dump(config.to_dict(run))
    assert repr(config.to_dict(Spans([[1, 2], [3, 0.5]]))["spans"]) == "[[1, 2.0], [3, 0.5]]"


def test_yaml_reads_numbers_as_people_write_them(tmp_path):
    (tmp_path / "t.yaml").write_text("kind: Train\nlr: 3e-4\nclip: 1\nbetas: [0.9, 0.95]\n")
    assert config.load(tmp_path / "t.yaml") == Train(lr=3e-4, clip=1.0, betas=(0.9, 0.95))


# ------------------------------------------------------------------------------------------------------------- mistakes
VECTORS, VALUES, TWO = {"kind": "Vectors", "size": 5}, {"kind": "Values"}, {"kind": "Classes", "count": 2}
MODEL = {"kind": "TransformerConfig", "inputs": VECTORS, "outputs": VALUES}
OBJECTS = {"kind": "CoRelNetConfig", "inputs": VECTORS, "outputs": TWO}
MISTAKES = [
    ({"kind": "Hylla"}, "unknown kind 'Hylla'; did you mean 'Hyla'"),
    ({"kind": "Hyla", "head": 3}, "unknown field 'head'; did you mean 'heads'"),
    ({"kind": "Hyla", "heads": "x"}, "Hyla: heads must be int but is 'x'"),
    ({"kind": "Hyla", "act": "rellu"}, "Hyla: act must be one of identity|relu|gelu|gelu_tanh|silu but is 'rellu'"),
    ({"kind": "Hyla", "act": "relu\n"}, r"but is 'relu\n'"),
    ({"kind": "Hyla", "heads": 4, "kv_heads": 3}, "kv_heads must divide 4 heads but is 3"),
    ({"kind": "Train", "lr": True}, "lr must be float but is True"),
    ({"kind": "Train", "steps": 2**70}, "steps must be int <= 9223372036854775807 but is 1180591620717411303424"),
    ({"kind": "Train", "batch_size": 8, "accumulate": 3}, "accumulate must divide batch_size 8 but is 3"),
    ({"kind": "Train", "betas": [0.9]}, "betas must be list of length 2 but is (0.9,)"),
    ({"kind": "Train", "clip": 0.0}, "clip must be float > 0.0 but is 0.0"),
    ({"kind": "Train", "lr": float("nan")}, "lr must be a finite number but is nan"),
    ({"kind": "Train", "betas": [0.9, float("inf")]}, "betas must be a finite number but is inf"),
    ({"kind": "Run", "task": {"kind": "FuzyLogic"}}, "task: unknown kind 'FuzyLogic'; did you mean 'FuzzyLogic'? (ch"),
    ({"kind": "TransformerConfig", "positions": {"theta": 3.0}}, 'positions: "kind" is missing (choose from Rotary, R'),
    ({"kind": "TransformerConfig", "heads": [{"heads": 3}]}, 'heads[0]: "kind" is missing (choose from Softmax, Lin'),
    ({"kind": "TransformerConfig", "inputs": {"kind": "Logits"}}, "inputs: unknown kind 'Logits' (choose from Tokens"),
    ({"kind": "Run"}, "missing 2 required positional arguments: 'task' and 'model'"),
    ({"task": {}}, '"kind" is missing (choose from Softmax, Linear'),
    (MODEL | {"heads": []}, "heads must be mechanisms such as [Softmax(4), Hyla(4)] but is ()"),
    (OBJECTS, "CoRelNetConfig: length (the number of objects) must be given for Vectors"),
    (OBJECTS | {"outputs": {"kind": "Classes", "count": 2, "pool": "class"}}, "outputs must be Classes(pool='mean')"),
    ({"kind": "Run", "task": 3, "model": 4}, "Run: task must be Task but is 3"),
    ([1], "must be an object with fields but is [1]"),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_a_wrong_file_gives_one_clear_line(tmp_path, data, message):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"^{path}[^\n]*{re.escape(message)}[^\n]*$"):
        config.load(path, KINDS)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("nowhere.json", None, r"cannot be read \(No such file"),
        ("run.json", "{", "not valid JSON"),
        ("run.json", "[" * 100_000, r"cannot be read \(it is nested too deeply\)"),
        ("run.yaml", "a: [1,\n- b: }", "not valid YAML"),
        ("run.yaml", "[1, 2]: 3", "not valid YAML .*unhashable"),
        # The first of two would have no effect.
        ("run.yaml", "train: {lr: 0.5}\nseed: 1\ntrain: {steps: 7}\n", r"not valid YAML \('train' is given twice\)$"),
        ("run.json", '{"train": {"lr": 0.5}, "train": {"steps": 7}}', r"not valid JSON \('train' is given twice\)$"),
        # A few lines of aliases can stand for billions of values.
        ("run.yaml", "a: &a [1]\nb: [*a, *a]", r"not valid YAML \(aliases are not read"),
        ("run.json", '{"kind": "Run", "task": {"kind": "Sraven"}}', r"task: kind 'Sraven' is not among kinds"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, reason):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^[^\n]*{name}: {reason}[^\n]*$"):
        config.load(tmp_path / name)


def test_a_set_is_refused_because_its_order_changes_between_processes():
    with refusing("Train: evaluate must be a list but is a set"):
        Train(evaluate={"iid", "novel"})


def test_a_string_of_an_enumeration_becomes_plain_so_that_the_file_says_its_value():
    class Norm(str, enum.Enum):  # noqa: UP042 (not a StrEnum: those print as their values)
        RMS = "rms"

    model = config.TransformerConfig(config.Tokens(4), config.Logits(4), norm=Norm.RMS)
    assert type(model.norm) is str
    assert model.norm == "rms"


FREE = {"split_seed", "held_out", "unknown"}
"""Numbers that may be negative, and fractions, which tasks check."""


def kinds_of_configuration(base=Checked):
    """Those of the package: other tests define kinds of their own."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("polyhead."):
            yield cls
            yield from kinds_of_configuration(cls)


@pytest.mark.parametrize("cls", [*kinds_of_configuration()], ids=lambda cls: cls.__name__)
def test_every_number_of_ours_has_bounds(cls):
    for name, hint in field_types(cls).items():
        if name not in FREE and not hasattr(hint, "__metadata__"):
            assert not {int, float} & {hint, *typing.get_args(hint)}, name


@pytest.mark.parametrize("kind", [config.Rotary, config.Swiglu])
def test_a_part_whose_methods_nobody_would_call_takes_no_subclass(kind):
    with pytest.raises(TypeError, match=f"^Mine: {kind.__name__} takes no subclasses; write a block of your own$"):
        type("Mine", (kind,), {"rotate": print})
