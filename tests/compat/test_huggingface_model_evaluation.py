"""Our models under lm-evaluation-harness: tasks on this machine, nothing downloaded."""

import pathlib
import runpy

import pytest

pytest.importorskip("lm_eval", reason="scoring with lm-evaluation-harness needs it: pip install 'polyhead[eval]'")
pytest.importorskip("datasets", reason="lm-evaluation-harness reads its questions with datasets")


@pytest.mark.filterwarnings("default")  # of the harness and what it brings
def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    example = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "evaluate_language.py"))
    scores = example["main"](steps=200)
    assert scores["next_number"]["acc,none"] > 0.9  # 0.25 by chance
    assert scores["count_on"]["exact_match,none"] > 0.9
