"""The examples for Hugging Face run offline."""

import pathlib
import runpy

import pytest

transformers = pytest.importorskip("transformers")
EXAMPLES = pathlib.Path(__file__).parents[3] / "examples" / "huggingface"


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.filterwarnings("default::FutureWarning", "default::UserWarning")  # of PEFT, of what it saves
def test_adapters(example):
    pytest.importorskip("peft")
    for first, last, off in example("lora")(12).values():
        assert last < 0.95 * first
        assert off < 1e-5


def test_every_way_of_decoding_says_the_same(example):
    said = example("generate")(None)
    assert len(said) == 5
    for who in ("ours", "swapped"):
        texts = {text for way, text in said.items() if way.startswith(who)}
        assert len(texts) == 1
        assert len(texts.pop()) > len("one two three one two")


def test_a_folder(example):
    found = example("folder")(40)
    assert found["AutoModel"] == ((1, 8, 32), 2, (1, 4, 8, 8))
    before, after = found["Trainer"]
    assert after < 0.5 * before


@pytest.mark.filterwarnings("default")  # of TRL and what it brings
def test_supervised_fine_tuning(example):
    pytest.importorskip("trl", reason="SFTTrainer needs it: pip install trl")
    first, last, said = example("sft")(40)
    assert last < 0.05 * first
    assert said == "snow: white"


@pytest.mark.filterwarnings("default")  # of the harness and what it brings
def test_evaluation(example):
    pytest.importorskip("lm_eval", reason="scoring with lm-evaluation-harness needs it: pip install 'polyhead[eval]'")
    pytest.importorskip("datasets", reason="lm-evaluation-harness reads its questions with datasets")
    scores = example("evaluate")(steps=200)
    assert scores["next_number"]["acc,none"] > 0.9  # 0.25 by chance
    assert scores["count_on"]["exact_match,none"] > 0.9
