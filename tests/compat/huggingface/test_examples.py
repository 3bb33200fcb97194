"""The examples for Hugging Face run offline."""

import runpy

import pytest
from scripts import ROOT
from some import some

transformers = pytest.importorskip("transformers")


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return lambda name: runpy.run_path(str(ROOT / "examples" / "huggingface" / f"{name}.py"))["main"]


@pytest.mark.filterwarnings("default::FutureWarning", "default::UserWarning")  # of PEFT, of what it saves
def test_adapters_learn_and_merge(example):
    pytest.importorskip("peft")
    for first_loss, last_loss, difference in some(example("lora")(12).values()):
        assert last_loss < 0.95 * first_loss
        assert difference < 1e-5


def test_every_way_of_decoding_gives_the_same_text(example):
    text_by_method = example("generate")(None)
    assert len(text_by_method) == 4
    for model in ("ours", "swapped"):
        texts = {text for method, text in text_by_method.items() if method.startswith(model)}
        assert len(texts) == 1
        assert len(texts.pop()) > len("one two three one two")


def test_a_folder_is_loaded_and_trained(example):
    results = example("folder")(40)
    assert results["AutoModel"] == ((1, 8, 32), 2, (1, 4, 8, 8))
    loss_before, loss_after = results["Trainer"]
    assert loss_after < 0.5 * loss_before


@pytest.mark.filterwarnings("default")  # of TRL and what it brings
def test_supervised_fine_tuning_learns_its_answer(example):
    first_loss, last_loss, text = example("sft")(40)
    assert last_loss < 0.05 * first_loss
    assert text == "snow: white"


@pytest.mark.filterwarnings("default")  # of the harness and what it brings
def test_evaluation_scores_what_was_learned(example):
    scores = example("evaluate")(steps=200)
    assert scores["next_number"]["acc,none"] > 0.9  # 0.25 by chance
    assert scores["count_on"]["exact_match,none"] > 0.9
