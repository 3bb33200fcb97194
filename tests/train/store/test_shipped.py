"""Trained models that come with polyhead: found by name, equal to their cards, downloaded if missing."""

import itertools
import json
import shutil
import types

import pytest
from scripts import loaded

import polyhead as ph
from polyhead import cli
from polyhead.scale.records import records
from polyhead.train import evaluate
from polyhead.train.store import shipped
from polyhead.train.store.files import Damaged

MODELS = shipped.models()
NAME = "fuzzy-hyla-1"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A machine without the repository: an empty cache, and a source of one's own."""
    monkeypatch.setattr(shipped, "REPOSITORY", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(shipped.OWN, raising=False)
    source = tmp_path / "source"
    monkeypatch.setattr(shipped, "SOURCE", source.as_uri())
    return source


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MODELS)
def test_each_scores_as_it_did_when_it_was_published(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # prepared text is put beside
    run, model = ph.load(name)
    about = MODELS[name]
    assert (ph.digest(run), run.train.steps, run.seed) == (about["digest"], about["steps"], about["seed"])
    assert sum(parameter.numel() for parameter in model.parameters()) == about["parameters"]
    size, wanted = about["sampled"], about["sample"]
    assert wanted.keys() == about["scores"].keys()
    if about["text"] is not None and run.task.fingerprint() != about["text"]:
        pytest.skip("the text on this machine is another than that of its card")
    near = 2 / size if about["metric"] in ("accuracy", "exact_match") else 1e-3  # processors round differently
    for split, score in wanted.items():
        found = evaluate(model, run.task, split, seed=run.seed, batches=1, batch_size=size)
        assert found[about["metric"]] == pytest.approx(score, abs=near), split


@pytest.fixture
def ship_models():
    return loaded("benchmarks", "ship_models.py")


@pytest.mark.parametrize(("off", "wrong"), [(0.0, False), (0.1, True), (float("nan"), True)])
def test_a_score_that_is_not_that_of_its_card_is_wrong(ship_models, monkeypatch, off, wrong):
    cards = iter(ph.train.read_result(shipped.REPOSITORY / NAME).scores[split] for split in MODELS[NAME]["scores"])
    scored = lambda *_, **__: (own := next(cards)) | {"r2": own["r2"] + off}  # noqa: E731
    monkeypatch.setattr(ship_models, "evaluate", scored)
    assert ship_models.check(NAME) == wrong * len(MODELS[NAME]["scores"])


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_model_whose_check_was_killed_has_failed(ship_models, monkeypatch, code):
    codes = itertools.chain([code], itertools.repeat(0))
    monkeypatch.setattr(ship_models.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=next(codes)))
    monkeypatch.setattr(ship_models.sys, "argv", ["ship_models.py", "--check"])
    assert bool(ship_models.main()) == (code != 0)


def test_the_folder_holds_the_index_and_a_card_for_each():
    there = {path.name for path in shipped.REPOSITORY.iterdir() if path.is_dir()}
    kept = {"checkpoint.safetensors", "config.json", "metrics.jsonl", "result.json"}
    assert all(model["files"].keys() == kept for model in MODELS.values())  # a lock changes with each use
    assert there == MODELS.keys()
    for name, about in MODELS.items():
        card = (shipped.REPOSITORY / name / "README.md").read_text(encoding="utf-8")
        assert all(word in card for word in (name, about["digest"], f"{about['steps']:,}", "Licence"))
        assert all(f"{mean:.3f} ± {error:.3f}" in card for mean, error in about["scores"].values())
    assert sum(path.stat().st_size for path in shipped.REPOSITORY.rglob("*")) < 20e6


def test_a_name_without_its_seed_is_that_of_the_lowest_and_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    assert shipped.named("fuzzy-hyla") == NAME
    assert shipped.named(NAME) == NAME
    assert shipped.named("fuzzy") is None
    assert shipped.named("games-xoccurs-1000-corelnet") in MODELS
    monkeypatch.setitem(MODELS, "fuzzy-hyla-0", MODELS[NAME])
    assert shipped.named("fuzzy-hyla") == "fuzzy-hyla-0"
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    with pytest.raises(ValueError, match=r"fuzzy-hyla-1 holds no config\.json"):
        ph.load(NAME)
    with pytest.raises(
        ValueError, match=r"fuzzi-hyla-1 does not exist \(did you mean .*'fuzzy-hyla-1'\? polyhead list"
    ):
        ph.load("fuzzi-hyla-1")


def test_a_missing_model_is_downloaded_once(elsewhere):
    shutil.copytree(shipped.INDEX.parents[4] / "models" / NAME, elsewhere / NAME)
    assert shipped.at_hand(NAME) is None
    assert ph.load(NAME)[0].seed == 1
    shutil.rmtree(elsewhere)
    assert ph.load("fuzzy-hyla")[0].seed == 1


def test_a_failed_download_names_the_folders_of_models(elsewhere):
    with pytest.raises(ValueError, match=r"load: fuzzy-hyla-1 is not here and \S+ could not be downloaded .*POLYHEAD"):
        ph.load(NAME)


def test_another_file_than_the_published_is_refused(elsewhere, monkeypatch, tmp_path):
    origin = shipped.INDEX.parents[4] / "models" / NAME
    for file in ("checkpoint.safetensors", "config.json"):
        mine = tmp_path / file / NAME
        shutil.copytree(origin, mine)
        data = bytearray((mine / file).read_bytes())
        data[-9] ^= 1
        (mine / file).write_bytes(data)
        monkeypatch.setenv(shipped.OWN, str(mine.parent))
        with pytest.raises(Damaged, match=f"{file} is damaged: it is not the file that was published as {NAME}"):
            ph.load(NAME)
        shutil.copytree(mine, elsewhere / NAME, dirs_exist_ok=True)
        monkeypatch.delenv(shipped.OWN)
        with pytest.raises(ValueError, match=r"could not be downloaded .*hash"):
            ph.load(NAME)


def test_they_are_listed(capsys):
    assert cli.main(["list", "models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in listed] == list(MODELS)
    assert all(row["here"] == "yes" for row in listed)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("eval fuzzy-softmax --splits iid --batches 1 --batch-size 8", "fuzzy_logic"),
        ("compare fuzzy-hyla fuzzy-softmax-2", "softmax"),
        ("table fuzzy-hyla games-xoccurs-1000-corelnet", "corelnet"),
        ("explore lm-bytes-softmax --text def --out page.html", "page.html"),
        ("generate lm-bytes-softmax --prompt def --steps 2", "def"),
    ],
)
def test_what_takes_a_run_takes_a_name(command, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()) == 0
    assert wanted in capsys.readouterr().out
    assert ph.train.read_result("lm-bytes-softmax").steps == 1275
    with pytest.raises(ValueError, match=r"compare: fuzzi-hyla does not exist \(did you mean .*fuzzy-hyla"):
        records("fuzzi-hyla", who="compare")
