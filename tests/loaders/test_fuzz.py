"""Randomly changed inputs are accepted or refused in one line: fifteen hundred of the campaign's."""

import pytest
from fuzz import FEW, fuzz, targets
from tiny_runs import tiny

import polyhead as ph

COUNTS = {
    "config": 500,
    "config.json": 200,
    "run.yaml": 100,
    "checkpoint": 200,
    "result.json": 100,
    "metrics.jsonl": 160,
    "tokenizer.json": 40,
    "images.npz": 100,
    "package": 100,
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    run = tiny(root / "run", steps=2)
    ph.train.run(run, progress=False)
    (root / "files").mkdir()
    return targets(root / "files", run, FEW)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", COUNTS)
def test_inputs_changed_at_random(known, name):
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers")
    found = fuzz(known[name], name, range(COUNTS[name]))
    assert found["bad"] == []
    assert found["taken"] + found["refused"] == COUNTS[name]
    assert found["refused"] or name == "metrics.jsonl"


def test_every_target_is_fuzzed_here(known):
    assert known.keys() == COUNTS.keys()
    assert sum(COUNTS.values()) >= 1500
