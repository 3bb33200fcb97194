"""A run is a frozen value: writing, reading, comparing and hashing lose no field."""

import enum
import json
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import yaml
from refusals import refusing
from scripts import ROOT
from some import some

from polyhead import config
from polyhead.config import Experts, Hyla, Linear, RelativeBias, Run, Softmax, Train, TransformerConfig, digest
from polyhead.config.checked import Checked, field_types, union_members
from polyhead.papers.recipes import RECIPES
from polyhead.tasks import KINDS, FuzzyLogic


def run_of(**changes):
    task = FuzzyLogic()
    heads = [[Hyla(4, dim=3, act="silu")], [Softmax(2), Linear(2, kv_heads=1)]]
    model = TransformerConfig(*task.ends, heads=heads, positions=RelativeBias(8), feedforward=Experts(3))
    return replace(Run(task=task, model=model, train=Train(clip=1.0)), **changes)


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
    unseen = {"name": "x", "device": "cuda", "compile": True, "folder": "y", "threads": 2, "deterministic": True}
    unseen |= {"parallel": "sharded", "track": ("wandb",), "fast_products": False}
    for name, value in unseen.items():
        assert digest(run_of(**{name: value})) == base, name
    assert digest(run_of(train=Train(clip=1.0, log_every=7, eval_every=9, save_every=3))) == base
    for other in (run_of(seed=1), run_of(train=Train(lr=0.1)), run_of(task=FuzzyLogic(held_out=0.3))):
        assert digest(other) != base
    assert digest(Softmax(4, impl="reference")) == digest(Softmax(4)) != digest(Softmax(4, share=True))  # added later
    assert digest(Train(accumulate=2)) != digest(Train())
    assert config.to_dict(Softmax(4))["share"] is False  # in files it is spelled out


MISTAKES = [
    ({"kind": "Hylla"}, "unknown kind 'Hylla'; did you mean 'Hyla'"),
    ({"kind": "Hyla", "head": 3}, "unknown field 'head'; did you mean 'heads'"),
    ({"kind": "Hyla", "heads": "x"}, "Hyla: heads must be int but is 'x'"),
    ({"kind": "Hyla", "heads": 4, "kv_heads": 3}, "kv_heads must divide 4 heads but is 3"),
    ({"kind": "Hyla", "value_depth": 3}, "value_depth must be int <= 2 but is 3"),
    ({"kind": "RelationalSymbols", "neighbours": 4097}, "neighbours must be int <= 4096 but is 4097"),
    ({"kind": "Train", "lr": True}, "lr must be float but is True"),
    ({"kind": "Train", "batch_size": 8, "accumulate": 3}, "accumulate must divide batch_size 8 but is 3"),
    ({"kind": "Experts", "top_k": 0}, "top_k must be int >= 1 but is 0"),
    ({"kind": "Train", "betas": [0.9]}, "betas must be list of length 2 but is (0.9,)"),
    ({"kind": "Train", "betas": [0.9, 1.0]}, "betas[1] must be float < 1.0 but is (0.9, 1.0)"),
    ({"kind": "Train", "clip": 0.0}, "clip must be float > 0.0 but is 0.0"),
    ({"kind": "Rotary", "theta": 0.0}, "theta must be float > 0.0 but is 0.0"),
    ({"task": {"kind": "FuzyLogic"}}, "task: unknown kind 'FuzyLogic'; did you mean 'FuzzyLogic'? (choose from Fuzzy"),
    ({"kind": "TransformerConfig", "positions": {"theta": 3.0}}, 'positions: "kind" is missing (choose from Rotary, R'),
    ({"kind": "Run"}, "Run needs task, model"),
    ([1], "must be an object with fields but is [1]"),
    (
        {
            "kind": "TransformerConfig",
            "inputs": {"kind": "Logits", "count": 3},
            "outputs": {"kind": "Logits", "count": 3},
        },
        "inputs must be Tokens or Vectors or Patches but is Logits(",
    ),
]


@pytest.mark.parametrize(("data", "text"), MISTAKES)
def test_a_wrong_file_gives_one_clear_line(tmp_path, data, text):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"^{path}[^\n]*{re.escape(text)}[^\n]*$"):
        config.load(path, KINDS)


def test_a_task_needs_the_classes_of_tasks():
    with pytest.raises(ValueError, match=r"^config: task: kind 'Sraven' is not among kinds \(for tasks: kinds="):
        config.from_dict({"task": {"kind": "Sraven"}})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("nowhere.json", None, r"cannot be read \(No such file"),
        ("run.json", "{", "not valid JSON"),
        ("run.yaml", "a: [1,\n- b: }", "not valid YAML"),
        ("run.yaml", "[1, 2]: 3", "not valid YAML .*unhashable key"),
        # The first of two would have no effect.
        ("run.yaml", "train: {lr: 0.5}\nseed: 1\ntrain: {steps: 7}\n", r"not valid YAML \('train' is given twice\)$"),
        ("run.json", '{"train": {"lr": 0.5}, "train": {"steps": 7}}', r"not valid JSON \('train' is given twice\)$"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, reason):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^[^\n]*{name}: {reason}[^\n]*$"):
        config.load(tmp_path / name)


def test_an_alias_may_be_overridden(tmp_path):
    (tmp_path / "merged.yaml").write_text("a: &a {lr: 1}\nb: {<<: *a, lr: 2}\n")
    assert config.serial.read(tmp_path / "merged.yaml")["b"] == {"lr": 2}


def test_yaml_reads_numbers_and_none_as_people_write_them(tmp_path):
    (tmp_path / "t.yaml").write_text("kind: Train\nlr: 3e-4\nclip: 1\nbetas: [0.9, 0.95]\n")
    assert config.load(tmp_path / "t.yaml") == Train(lr=3e-4, clip=1.0, betas=(0.9, 0.95))
    (tmp_path / "t.yaml").write_text("kind: Train\nclip: None\n")
    assert config.load(tmp_path / "t.yaml") == Train(clip=None)


def test_whole_numbers_and_fractions_are_one_run(tmp_path):
    same = run_of(train=Train(weight_decay=0.0, clip=1.0, betas=(0.0, 0.9)))
    whole = run_of(train=Train(weight_decay=0, clip=1, betas=(0, 0.9)))
    config.save(whole, tmp_path / "run.json")
    assert config.load(tmp_path / "run.json", KINDS) == same == whole
    assert config.digest(whole) == config.digest(same)


def test_a_number_of_numpy_and_a_member_of_an_enumeration_are_written_as_plain_values():
    """A recipe with a rate of np.geomspace could not be printed: YAML refused it."""
    name = enum.Enum("Name", {"short": "fp32"}, type=str).short
    train = Train(lr=np.float64(0.25), betas=(np.float64(0.5), 0.75), precision=name, early_floor=True)
    wanted = Train(lr=0.25, betas=(0.5, 0.75), precision="fp32", early_floor=True)
    assert yaml.safe_dump(config.to_dict(train)) == yaml.safe_dump(config.to_dict(wanted))


@dataclass(frozen=True)
class Spans(Checked):
    spans: tuple[tuple[int, float], ...]


def test_values_of_a_tuple_have_types_of_their_own():
    """All were read, and written, as if they had the type of the first."""
    written = config.to_dict(Spans(((1, 2), (3, 0.5))))
    assert repr(written["spans"]) == "[[1, 2.0], [3, 0.5]]"
    assert repr(config.serial.build(written | {"kind": None}, Spans, {}, "x").spans) == "((1, 2.0), (3, 0.5))"
    with refusing("x: Spans: spans[0] must be list of length 2 but is ((1,),)"):
        config.serial.build({"spans": [[1]]}, Spans, {}, "x")


@pytest.mark.compile  # where annotations are not checked
def test_a_list_of_a_program_is_that_of_a_file():
    """It made a run that was unequal to itself read back, and that had no hash."""
    train = Train(evaluate=["iid"], betas=[0.5, 0.9])
    assert train == Train(evaluate=("iid",), betas=(0.5, 0.9))
    assert hash(train) == hash(Train(evaluate=("iid",), betas=(0.5, 0.9)))
    with refusing("Train: evaluate must be list but is 'iid'"):
        Train(evaluate="iid")


@pytest.mark.parametrize("name", ["1e5", "12e4", ".5e3", "None", "no", "07", "plain"])
def test_yaml_that_we_write_is_read_back(name, tmp_path):
    (tmp_path / "t.yaml").write_text(config.serial.to_yaml({"name": name, "lr": 3e-4, "clip": None}))
    assert config.serial.read(tmp_path / "t.yaml") == {"name": name, "lr": 3e-4, "clip": None}


def test_a_set_is_refused_because_its_order_changes_between_processes():
    with refusing("Train: evaluate must be a list but is a set"):
        Train(evaluate={"iid", "novel"})


FREE = {"seed", "split_seed", "held_out", "unknown"}
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
        assert name in FREE or not {int, float} & set(union_members(hint)), name


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(number):
    """Comparisons pass NaN, and JSON has neither NaN nor infinity."""
    for changes in ({"lr": number}, {"betas": (0.9, number)}):
        with pytest.raises(ValueError, match=r"^Train: (lr|betas\[1\]) must be "):
            Train(**changes)


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("models/*/config.json"), *ROOT.glob("docs/results/**/config.json")])
)
def test_the_digests_of_published_runs_stay(path):
    values = json.loads(path.read_text())
    recorded = values.pop("digest", None)
    assert recorded in (None, digest(config.from_dict(values, KINDS)))


@pytest.mark.parametrize("kind", [config.Rotary, config.Swiglu])
def test_a_part_whose_methods_nobody_would_call_takes_no_subclass(kind):
    with pytest.raises(TypeError, match=f"^Mine: {kind.__name__} takes no subclasses; write a block of your own$"):
        type("Mine", (kind,), {"rotate": print})
