"""Trained models that come with polyhead: found by name, equal to their cards, downloaded if missing."""

import pathlib
import shutil

import pytest

import polyhead as ph
from polyhead.train import evaluate, shipped
from polyhead.train.store.folder import finished

MODELS = shipped.MODELS
NAME = "fuzzy-hyla-1"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A machine without the repository: an empty cache, and a source of one's own."""
    monkeypatch.setattr(shipped, "REPOSITORY", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source"
    monkeypatch.setattr(shipped, "SOURCE", source.as_uri())
    return source


@pytest.mark.parametrize("name", ["fuzzy-hyla-1", "games-xoccurs-1000-corelnet-0"])
def test_a_model_scores_what_its_result_says(name):
    run, model = ph.load(name)
    result = ph.train.read_result(name)
    assert ph.digest(run) == result.digest
    assert sum(parameter.numel() for parameter in model.parameters()) == result.parameters
    sizes = {"batches": run.train.eval_batches, "batch_size": run.train.batch_size}
    scores = evaluate(model, run.task, "iid", seed=run.seed, **sizes)
    assert scores[run.task.metric] == pytest.approx(result.scores["iid"][run.task.metric], abs=2e-3)


def test_the_folder_holds_the_models_of_the_index_and_a_card_for_each():
    folders = {path.name for path in shipped.REPOSITORY.iterdir() if path.is_dir()}
    assert folders == set(MODELS)
    for name in MODELS:
        card = (shipped.folder(name) / "README.md").read_text(encoding="utf-8")
        result = ph.train.read_result(name)
        assert all(word in card for word in (name, result.digest, f"{result.steps:,}", "Licence"))
        metric = ph.train.read_config(name).task.metric
        for scores in result.scores.values():
            mean, error = round(scores[metric], 4), round(scores[f"{metric}_se"], 4)
            assert f"{mean:.3f} ± {error:.3f}" in card
    assert sum(path.stat().st_size for path in shipped.REPOSITORY.rglob("*")) < 20e6


def test_a_name_without_its_seed_is_that_of_the_lowest_and_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    assert shipped.model_named("fuzzy-hyla") == NAME
    assert shipped.model_named(NAME) == NAME
    assert shipped.model_named("fuzzy") is None
    assert shipped.model_named("games-xoccurs-1000-corelnet") in MODELS
    monkeypatch.setattr(shipped, "MODELS", [*MODELS, "fuzzy-hyla-0"])
    assert shipped.model_named("fuzzy-hyla") == "fuzzy-hyla-0"
    digest = ph.train.read_result(NAME).digest
    monkeypatch.chdir(tmp_path)
    assert finished(pathlib.Path(NAME), digest) is None  # a run in a new folder of that name
    (tmp_path / NAME).mkdir()
    with pytest.raises(ValueError, match=r"fuzzy-hyla-1 holds no config\.json"):
        ph.load(NAME)
    with pytest.raises(ValueError, match=r"fuzzi-hyla-1 does not exist; trained models: polyhead list models"):
        ph.load("fuzzi-hyla-1")


def test_a_missing_model_is_downloaded_once(elsewhere):
    shutil.copytree(shipped.INDEX.parents[3] / "models" / NAME, elsewhere / NAME)
    assert shipped.at_hand(NAME) is None
    assert ph.load(NAME)[0].seed == 1
    shutil.rmtree(elsewhere)
    assert ph.load("fuzzy-hyla")[0].seed == 1


def test_a_failed_download_names_the_folders_of_models(elsewhere):
    with pytest.raises(ValueError, match=r"load: \S+fuzzy-hyla-1 could not be downloaded .*; put that folder into ~"):
        ph.load(NAME)
