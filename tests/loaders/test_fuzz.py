"""Randomly changed inputs are accepted or refused in one line: fifteen hundred of the campaign's."""

import pytest
from fuzz import FEW, Target, fuzz, targets
from scenarios import tiny

import polyhead as ph

COUNTS = {
    "config": 500,
    "config.json": 200,
    "run.yaml": 100,
    "checkpoint": 200,
    "vouched checkpoint": 60,
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("two\nlines"), "not of one line"),
        (ValueError(), "not of one line"),
    ],
)
def test_what_is_no_line_is_told(error, told):
    def read(given):
        if given == 3:
            raise error

    numbers = iter(range(5))
    found = fuzz(Target(lambda dice: next(numbers), read), "made up", range(5))
    assert [number for number, _ in found["bad"]] == [3]
    assert told in found["bad"][0][1]
    assert found["taken"] == 4


def test_what_takes_too_much_memory_is_told(monkeypatch):
    used = iter([1 << 30, (1 << 30) + (1 << 20), 2 << 30])
    monkeypatch.setattr("fuzz.most", lambda: next(used))
    bad = fuzz(Target(lambda dice: None, lambda given: None), "made up", range(2))["bad"]
    assert bad == [(1, "took 1023 MiB of memory")]
