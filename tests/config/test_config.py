"""A run is a frozen value: writing, reading, comparing and hashing lose no field."""

import enum
import json
import re
import typing
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
import yaml
from refusals import refusing
from some import some

from polyhead import config
from polyhead.config import (
    Classes,
    Decay,
    Experts,
    Hyla,
    Linear,
    Logits,
    Patches,
    RelativeBias,
    Run,
    Softmax,
    SymbolSource,
    Tokens,
    Train,
    TransformerConfig,
    Values,
    Vectors,
    digest,
    stream,
)
from polyhead.config.checked import Checked
from polyhead.config.components import FEEDFORWARDS, POSITIONS
from polyhead.config.mechanisms import MECHANISMS
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


def test_streams_never_meet():
    names = ["fuzzy_logic/train", "fuzzy_logic/iid", "fuzzy_logic/compositional", "init", "dropout"]
    seeds = {stream(seed, name, step) for seed in range(5) for name in names for step in range(50)}
    assert len(seeds) == 5 * 5 * 50
    assert all(0 <= s < 2**63 for s in seeds)
    assert stream(1, "train", 23) == 3332356567283682511  # in every process and version: batches are drawn by it


MISTAKES = [
    ({"kind": "Hylla"}, "unknown kind 'Hylla'; did you mean 'Hyla'"),
    ({"kind": "Hyla", "head": 3}, "unknown field 'head'; did you mean 'heads'"),
    ({"kind": "Hyla", "heads": "x"}, "heads: int was wanted but 'x' came"),
    ({"kind": "Hyla", "heads": 4, "kv_heads": 3}, "kv_heads must divide 4 heads but is 3"),
    ({"kind": "Hyla", "value_depth": 3}, "value_depth must be 1 or 2 but is 3"),
    ({"kind": "RelationalSymbols", "neighbours": 4097}, "neighbours must be at most 4096 but is 4097"),
    ({"kind": "Train", "lr": True}, "lr: float was wanted but True came"),
    ({"kind": "Train", "batch_size": 8, "accumulate": 3}, "accumulate must divide batch_size 8 but is 3"),
    ({"kind": "Experts", "top_k": 0}, "top_k must be 1 to 4 (experts) but is 0"),
    ({"kind": "Train", "betas": [0.9]}, "betas: 2 values were wanted but [0.9] came"),
    ({"kind": "Train", "betas": [0.9, 1]}, "betas must be two numbers in [0, 1) but are (0.9, 1.0)"),
    ({"kind": "Train", "clip": 0}, "clip must be above 0, or None, but is 0.0"),
    ({"kind": "Rotary", "theta": 0}, "theta must be above 0 but is 0.0"),
    ({"task": {"kind": "FuzyLogic"}}, "task: unknown kind 'FuzyLogic'; did you mean 'FuzzyLogic'? (choose from Fuzzy"),
    ({"kind": "Run"}, "Run needs task, model"),
    ([1], "an object with fields was wanted but [1] came"),
    (
        {"kind": "TransformerConfig", "inputs": {"kind": "Logits", "count": 3}},
        "Tokens or Vectors or Patches was wanted",
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
    run = replace(RECIPES["fuzzy-hyla"](), folder="None")  # it is no folder of that name
    assert config.from_dict(config.to_dict(run), KINDS).folder is None


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
    with refusing("x: spans: 2 values were wanted but [1] came"):
        config.serial.build({"spans": [[1]]}, Spans, {}, "x")


@pytest.mark.compile  # where annotations are not checked
def test_a_list_of_a_program_is_that_of_a_file():
    """It made a run that was unequal to itself read back, and that had no hash."""
    train = Train(evaluate=["iid"], betas=[0.5, 0.9])
    assert train == Train(evaluate=("iid",), betas=(0.5, 0.9))
    assert hash(train) == hash(Train(evaluate=("iid",), betas=(0.5, 0.9)))
    with refusing("Train: evaluate must be a list but is 'iid'"):
        Train(evaluate="iid")


PARTS = (
    *(cls() for cls in (*KINDS, *MECHANISMS, *POSITIONS, *FEEDFORWARDS, *typing.get_args(SymbolSource), Decay, Train)),
    *(Tokens(3), Vectors(3), Patches((1, 2, 2), (1, 1)), Logits(3), Values(3), Classes(3)),
    *(cls(Vectors(3), Classes(3), length=4) for cls in (config.CoRelNetConfig, config.PrediNetConfig)),
    *(config.AbstractorConfig(Tokens(3)), TransformerConfig(Tokens(3), Logits(3)), run_of()),
)
BASES = {"Task", "Classification", "Mechanism", "SymbolHeads", "Symbols", "Position", "FeedForward", "Objects"}
ZERO = {"lr", "weight_decay", "warmup", "final", "eps", "norm_eps", "noise", "shift", "pool", "split_seed"}
"""Numbers that may be 0; all sizes are at least 1."""

FREE = {
    *{"FuzzyLogic.split_seed", "Sraven.split_seed", "Run.seed", "Experts.top_k", "Hyla.value_depth"},
    *{"AbstractorConfig.encoder_layers", "Run.name", "Run.device", "Run.folder", "Maths.folder"},
    *{"Images.folder", "RelationalGames.folder", "Text.data", "Text.tokenizer", "Text.column", "Text.folder"},
    *(f"{cls.__name__}.impl" for cls in MECHANISMS),
}
"""Fields that may hold anything, or are checked in a way of their own."""


def kinds_of_configuration(base=Checked):
    for cls in base.__subclasses__():
        yield cls
        yield from kinds_of_configuration(cls)


def test_all_parts_of_a_configuration_are_looked_at_here():
    ours = {cls.__name__ for cls in kinds_of_configuration() if cls.__module__.startswith("polyhead.")}
    assert ours - {type(part).__name__ for part in PARTS} == BASES


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_sizes_have_bounds_names_choices_and_numbers_are_finite(part):
    """Comparisons pass NaN, and JSON has neither NaN nor infinity."""
    who, hints = type(part).__name__, typing.get_type_hints(type(part))

    def refused(name, value, reason):
        with pytest.raises(ValueError, match=rf"^{who}: {reason}[^\n]*$"):
            replace(part, **{name: value})

    for name in (field.name for field in fields(part)):
        kinds = {hints[name], *typing.get_args(hints[name])} - {type(None)}
        if float in kinds:
            for number in (float("nan"), float("inf"), -float("inf")):
                given = (number, 0.9) if name == "betas" else number
                refused(name, given, rf"{name} must be .* but (is|are) \(?{number}")
        if name in ZERO and str not in kinds and f"{who}.{name}" not in FREE:
            refused(name, -1.0 if float in kinds else -1, f"{name} must be at least 0 but is -1")
        elif int in kinds and tuple not in map(typing.get_origin, kinds) and f"{who}.{name}" not in FREE:
            refused(name, 0, rf"{name} must be at least \d but is 0")
        elif str in kinds and tuple not in map(typing.get_origin, kinds) and f"{who}.{name}" not in FREE:
            refused(name, "none such", f"unknown {name} 'none such'")


def test_the_direction_of_a_users_metric_is_checked():
    @dataclass(frozen=True)
    class Loss(FuzzyLogic):
        better = "Lower"

    with refusing("Loss: unknown better 'Lower'; did you mean 'lower'? (choose from higher, lower)"):
        Loss()


def test_a_batch_without_a_mask_has_real_tokens_only_beside_one_with_a_mask():
    """The masks of all were those of the first: none."""
    x, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [True, False, False]])
    whole, padded = (config.Batch(x, x, one, x == 0, {}) for one in (None, mask))
    for batches in ([whole, padded], [padded, whole]):
        masks = [mask if batch is padded else torch.ones_like(mask) for batch in batches]
        assert torch.equal(config.Batch.stack(batches).mask, torch.stack(masks))
        assert torch.equal(config.Batch.cat(batches).mask, torch.cat(masks))
    assert config.Batch.cat([whole, whole]).mask is None


def test_batches_are_joined_if_they_have_the_same_parts():
    """The labels of the first were kept and all others lost."""
    x = torch.zeros(2, 3)
    plain, rule, source = (config.Batch(x, x, None, x == 0, *more) for more in (({},), ({"rule": x},), ({}, x)))
    for batches, part in (
        ([plain, rule], "latents['rule']"),
        ([rule, plain], "latents['rule']"),
        ([plain, source], "source"),
    ):
        with refusing(f"Batch: {part} must be in all batches or in none, but is in some of 2"):
            config.Batch.cat(batches)
    with refusing("Batch: at least one batch was wanted but none came"):
        config.Batch.stack([])
    assert config.Batch.cat([rule, rule]).latents["rule"].shape == (4, 3)


def test_a_batch_moves_as_other_libraries_move_it():
    x = torch.zeros(2, 3)
    moved = config.Batch(x, x, None, x == 0, {"rule": x}, source=x).to(torch.device("meta"), non_blocking=True)
    arrays = (moved.inputs, moved.targets, moved.scored, moved.latents["rule"], moved.source)
    assert all(array.is_meta for array in arrays)
    assert moved.mask is None
    assert moved.source_mask is None
