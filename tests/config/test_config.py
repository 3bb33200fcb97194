"""A run is a frozen value: writing, reading, comparing and hashing lose no field."""

import json
import typing
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from some import some

from polyhead import config
from polyhead.config import (
    Experts,
    Hyla,
    Linear,
    Logits,
    RelativeBias,
    Rotary,
    Run,
    Softmax,
    Tokens,
    Train,
    TransformerConfig,
    Values,
    Vectors,
    digest,
    stream,
)
from polyhead.config.serial import Checked
from polyhead.papers.recipes import RECIPES
from polyhead.tasks import KINDS, FuzzyLogic


def run_of(**changes):
    task = FuzzyLogic()
    heads = [[Hyla(4, dim=3, act="silu")], [Softmax(2), Linear(2, kv_heads=1)]]
    model = TransformerConfig(*task.ends, heads=heads, positions=RelativeBias(8), feedforward=Experts(3))
    return replace(Run(task=task, model=model, train=Train(clip=1.0)), **changes)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_written_and_read_it_is_the_same(tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    config.save(run_of(), path)  # JSON is YAML
    assert config.load(path, KINDS) == run_of()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_round_trip(name):
    runs = RECIPES[name]()
    runs = runs if isinstance(runs, tuple) else (runs,)
    for run in some(run for run in runs if run.seed == runs[0].seed):  # other seeds are other numbers only
        assert config.from_dict(json.loads(json.dumps(config.to_dict(run))), KINDS) == run
        assert RECIPES[name].__doc__


def test_the_digest_changes_with_what_changes_results_only():
    base = digest(run_of())
    assert base == digest(run_of())
    for same in (run_of(name="x"), run_of(device="cuda"), run_of(compile=True), run_of(folder="y"), run_of(threads=2)):
        assert digest(same) == base
    assert digest(run_of(train=Train(clip=1.0, log_every=7, eval_every=9, save_every=3))) == base
    assert digest(run_of(model=replace(run_of().model, heads=[Softmax(4, impl="reference")]))) == digest(
        run_of(model=replace(run_of().model, heads=[Softmax(4)]))
    )
    for other in (run_of(seed=1), run_of(train=Train(lr=0.1)), run_of(task=FuzzyLogic(held_out=0.3))):
        assert digest(other) != base


def test_streams_never_meet():
    names = ["fuzzy_logic/train", "fuzzy_logic/iid", "fuzzy_logic/compositional", "init", "dropout"]
    seeds = {stream(seed, name, step) for seed in range(5) for name in names for step in range(50)}
    assert len(seeds) == 5 * 5 * 50
    assert all(0 <= s < 2**63 for s in seeds)
    assert stream(1, "train", 23) == stream(1, "train", 23)


def test_a_run_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        run_of().seed = 3
    assert isinstance(hash(run_of()), int)


GOOD = {"kind": "Hyla", "heads": 4}
ENDS = {"inputs": {"kind": "Tokens", "count": 3}, "outputs": {"kind": "Logits", "count": 3}}
MISTAKES = [
    ({"kind": "Hylla"}, "unknown kind 'Hylla'; did you mean 'Hyla'"),
    (GOOD | {"head": 3}, "unknown field 'head'; did you mean 'heads'"),
    (GOOD | {"heads": "x"}, "heads: int was wanted but 'x' came"),
    (GOOD | {"heads": 0}, "heads must be at least 1 but is 0"),
    ({"kind": "RelativeBias", "max_distance": 0}, "max_distance must be at least 1 but is 0"),
    (GOOD | {"kv_heads": 3}, "kv_heads must divide 4 heads but is 3"),
    (GOOD | {"act": "rulu"}, "unknown act 'rulu'; did you mean 'relu'"),
    (GOOD | {"value_depth": 3}, "value_depth must be 1 or 2 but is 3"),
    ({"kind": "Train", "steps": 2.5}, "steps: int was wanted but 2.5 came"),
    ({"kind": "Train", "steps": True}, "steps: int was wanted but True came"),
    ({"kind": "Train", "lr": True}, "lr: float was wanted but True came"),
    ({"kind": "Experts", "top_k": 0}, "top_k must be 1 to 4 (experts) but is 0"),
    ({"kind": "Train", "betas": [0.9]}, "betas: 2 values were wanted but [0.9] came"),
    ({"kind": "Train", "betas": [0.9, 1]}, "betas must be two numbers in [0, 1) but are (0.9, 1.0)"),
    ({"kind": "Train", "clip": 0}, "clip must be above 0, or None, but is 0.0"),
    ({"kind": "Train", "lr": float("nan")}, "lr must be a finite number but is nan"),
    ({"kind": "Rotary", "theta": 0}, "theta must be above 0 but is 0.0"),
    ({"kind": "TransformerConfig", **ENDS, "norm_eps": -1}, "norm_eps must be at least 0 but is -1.0"),
    *(
        ({"kind": "Train", name: -1}, f"{name} must be at least 0 but is -1")
        for name in ("lr", "weight_decay", "warmup", "final", "eps")
    ),
    ({"kind": "Train", "steps": 0}, "steps must be at least 1 but is 0"),
    *(
        ({"kind": "Train", name: 0}, f"{name} must be at least 1 but is 0")
        for name in ("batch_size", "eval_batches", "eval_every", "log_every", "save_every")
    ),
    *(
        (
            {"kind": "TransformerConfig", **ENDS, name: 0},
            f"{name} must be at least 1 but is 0",
        )
        for name in ("dim", "layers", "max_length")
    ),
    ({"kind": "Run"}, "Run needs task, model"),
    ([1], "an object with fields was wanted but [1] came"),
    (
        {"kind": "TransformerConfig", "inputs": {"kind": "Logits", "count": 3}},
        "Tokens or Vectors or Patches was wanted but Logits",
    ),
]


@pytest.mark.parametrize(("data", "text"), MISTAKES)
def test_a_wrong_file_gives_one_clear_line(tmp_path, data, text):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"run\.json") as error:
        config.load(path, KINDS)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.json: cannot be read \(No such file"):
        config.load(tmp_path / "nowhere.json")
    for name, text in (("run.json", "{"), ("run.yaml", "a: [1,\n- b: }")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="not valid") as error:
            config.load(tmp_path / name)
        assert "\n" not in str(error.value)
    (tmp_path / "code.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ValueError, match="not valid YAML"):
        config.load(tmp_path / "code.yaml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "train: {lr: 0.5}\nseed: 1\ntrain: {steps: 7}\n"),
        ("run.json", '{"train": {"lr": 0.5}, "seed": 1, "train": {"steps": 7}}'),
    ],
)
def test_a_field_that_is_given_twice_is_refused(tmp_path, name, text):
    """The first would have no effect."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}: not valid (YAML|JSON) \('train' is given twice\)$"):
        config.load(tmp_path / name)
    (tmp_path / "merged.yaml").write_text("a: &a {lr: 1}\nb: {<<: *a, lr: 2}\n")  # an alias may be overridden
    assert config.serial.read(tmp_path / "merged.yaml")["b"] == {"lr": 2}


def test_yaml_reads_numbers_as_people_write_them(tmp_path):
    (tmp_path / "t.yaml").write_text("kind: Train\nlr: 3e-4\nclip: 1\nbetas: [0.9, 0.95]\n")
    assert config.load(tmp_path / "t.yaml") == Train(lr=3e-4, clip=1.0, betas=(0.9, 0.95))


def test_none_is_none_as_on_the_command_line(tmp_path):
    """It is no folder of that name."""
    (tmp_path / "t.yaml").write_text("kind: Train\nclip: None\n")
    assert config.load(tmp_path / "t.yaml") == Train(clip=None)
    run = replace(RECIPES["fuzzy-hyla"](), folder="None")
    assert config.from_dict(config.to_dict(run), KINDS).folder is None


def test_whole_numbers_and_fractions_are_one_run(tmp_path):
    run = RECIPES["fuzzy-hyla"]()
    same = replace(run, train=replace(run.train, weight_decay=0.0, clip=1.0, betas=(0.0, 0.9)))
    whole = replace(run, train=replace(same.train))
    for name, value in {"weight_decay": 0, "clip": 1, "betas": (0, 0.9)}.items():
        object.__setattr__(whole.train, name, value)  # as where annotations are not checked: everywhere but here
    config.save(whole, tmp_path / "run.json")
    assert config.digest(whole) == config.digest(same) == config.digest(config.load(tmp_path / "run.json", KINDS))


def test_lists_of_heads_become_tuples():
    one = TransformerConfig(Tokens(3), Logits(3), heads=[Softmax(2)])
    assert one.heads == (Softmax(2),)
    assert one.layer_heads(1) == (Softmax(2),)
    assert TransformerConfig(Vectors(3), Values(3), heads=Softmax(2)) == replace(
        one, inputs=Vectors(3), outputs=Values(3)
    )


def test_a_late_field_leaves_old_digests_alone():
    old = config.Softmax(4)
    assert "share" not in config.to_dict(old, semantic=True)
    assert config.to_dict(config.Softmax(4, share=True), semantic=True)["share"] is True
    assert config.digest(old) != config.digest(config.Softmax(4, share=True))
    assert "share" in config.to_dict(old)  # in the file it is spelled out


EVERY = (
    *(cls() for cls in (*KINDS, Rotary, Experts, Train)),
    TransformerConfig(Tokens(3), Logits(3)),
    config.AbstractorConfig(Tokens(3)),
)


def kinds_of_configuration(base=Checked):
    for cls in base.__subclasses__():
        yield cls
        yield from kinds_of_configuration(cls)


def numbers(cls):
    hints = typing.get_type_hints(cls)
    return [f.name for f in fields(cls) if float in (hints[f.name], *typing.get_args(hints[f.name])) and f.init]


def test_every_number_of_a_configuration_is_finite():
    """Comparisons pass NaN, and JSON has neither NaN nor infinity."""
    ours = {cls for cls in kinds_of_configuration() if cls.__module__.startswith("polyhead.") and numbers(cls)}
    assert ours <= {type(part) for part in EVERY}
    for part in EVERY:
        for name in numbers(type(part)):
            for number in (float("nan"), float("inf"), -float("inf")):
                given = (number, 0.9) if name == "betas" else number
                with pytest.raises(
                    ValueError, match=rf"^{type(part).__name__}: {name} must be .* but (is|are) \(?{number}"
                ):
                    replace(part, **{name: given})
