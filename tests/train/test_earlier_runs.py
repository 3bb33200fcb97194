"""Files written by commit 3743f16 can be read, and its runs resume with the same numbers.

The script that wrote them needs the API of that commit; it is tests/support/old_runs.py of commit b6144f5.  Each run
was stopped after step 6 of 8; expected.json has its results after resuming.
"""

import functools
import json
import math
import pathlib
import shutil

import pytest
import torch
from run_folders import rows

import polyhead as ph
from polyhead import config as configs
from polyhead.papers.recipes import RECIPES, SINGLE
from polyhead.tasks import KINDS
from polyhead.train.store.folder import environment, read_metrics

MADE = pathlib.Path(__file__).parents[1] / "fixtures" / "made_by_3743f16"
SAVED = 4
QUICK = ("fuzzy-hyla", "sraven-softmax", "digits-dual", "lm-dual", "table-a1 paper", "fig-a7 paper", "fig-5d small")
QUICK += tuple(
    f"{name} smoke" for name in ("fig-2c", "fig-4b", "fig-a4", "set", "order", "images", "split", "lm-bytes")
)
"""Recipes that are made in less than half a second; the others are for `make campaign`."""


def read(name):
    return json.loads((MADE / name).read_text())


DIGESTS = {name: digests for name, digests in read("digests.json").items() if name != "demo"}  # it has other runs now


@functools.cache
def closeness():
    """1e-5 where PyTorch, name of the processor and vectors are those that wrote the numbers: of two such processors
    one gives them to the last digit, the other rounds differently."""
    made = read("expected.json")["made"]
    here = environment(torch.device("cpu"))
    vectors = torch.backends.cpu.get_cpu_capability()  # it differs between processors of one name
    return 1e-5 if made == {name: here[name] for name in made} and vectors == "AVX2" else 1e-4


def near(value):
    return pytest.approx(value, rel=closeness(), abs=closeness() / 10) if isinstance(value, float) else value


def counted_by_position(rows, result, wanted):
    """Move the scores of splits of text into `wanted`, if they are nearly the same.

    Commit 3743f16 averaged them over windows.  Now each scored position counts alike, so that the last, shorter window
    of a file counts less.
    """
    names = {"loss", "perplexity", "bits_per_byte", "bits_per_byte_se", "accuracy", "accuracy_se"}
    pairs = [(row, old) for row, old in zip(rows, wanted["rows"], strict=True) if row["kind"] == "eval"]
    pairs += [(result.scores[split], old) for split, old in wanted["scores"].items()]
    for new, old in pairs:
        for name in names if "perplexity" in new else ():
            assert name.endswith("_se") or new[name] == pytest.approx(old[name], rel=2e-2)
            old[name] = new[name]
    for new in result.scores.values():
        if "perplexity" in new:
            assert new["bits_per_byte"] == pytest.approx(new["loss"] / math.log(2), rel=1e-6)


def check(folder, before, wanted):
    """It has the wanted numbers, and resumed from its checkpoint: earlier rows are unchanged, with their times."""
    found, earlier = read_metrics(folder), read_metrics(before)
    kept = [row for row in earlier if row["step"] <= SAVED]
    assert found[: len(kept)] == kept
    result, found = ph.train.read_result(folder), rows(folder)
    counted_by_position(found, result, wanted)
    assert found == [{name: near(value) for name, value in row.items()} for row in wanted["rows"]]
    assert result.scores == {split: {k: near(v) for k, v in of.items()} for split, of in wanted["scores"].items()}
    assert result.parameters == wanted["parameters"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A copy of the folders, in which relative paths in their configurations hold."""
    for path in MADE.iterdir():
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("name", ["fuzzy", "sorting", "order", "language", "sharded"])
def test_a_stopped_run_resumes(here, name):
    """The checkpoint of one is sharded; one process resumes it."""
    ph.train.run(ph.train.read_config(name), progress=False, resume=True)
    check(here / name, MADE / name, read("expected.json")[name])


def test_a_finished_run_is_unchanged(here):
    wanted = read("expected.json")["finished"]
    before = (here / "finished" / "metrics.jsonl").read_bytes()
    result = ph.train.run(ph.train.read_config("finished"), progress=False, resume=True)
    assert result.seconds == json.loads((MADE / "finished" / "result.json").read_text())["seconds"]
    assert (here / "finished" / "metrics.jsonl").read_bytes() == before
    check(here / "finished", MADE / "finished", wanted)


def test_configurations_are_read_and_written_as_they_were():
    for entry in read("configs.json"):
        run = configs.from_dict(entry["config"], KINDS)
        assert configs.digest(run) == entry["digest"]
        written = configs.to_dict(run)
        assert {name: written[name] for name in entry["config"]} == entry["config"]


FEWER = {"games smoke": 72}
"""Runs that are gone: the smoke of games took more than a minute with two numbers of images for every game."""


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.campaign] * (key not in QUICK)) for key in DIGESTS]
)
def test_a_recipe_makes_the_runs_it_made(key):
    """It may have gained runs, of models that were added; the earlier ones are there, unchanged and in their order."""
    name, _, scale = key.partition(" ")
    scale = scale or ("paper" if name in SINGLE else "")  # recipes of one run had no scale
    made = RECIPES[name](scale) if scale else RECIPES[name]()
    found = [configs.digest(run) for run in (made if isinstance(made, tuple) else (made,))]
    left = [digest for digest in DIGESTS[key] if digest in set(found)]
    assert [digest for digest in found if digest in set(left)] == left
    assert len(DIGESTS[key]) - len(left) == FEWER.get(key, 0)
