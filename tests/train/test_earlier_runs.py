"""Files written by commit 3743f16 (tests/support/old_runs.py) can be read, and runs resume with the same numbers."""

import functools
import json
import math
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import old_runs

import polyhead as ph
from polyhead import config as configs
from polyhead.scale import population
from polyhead.tasks import KINDS
from polyhead.train.store.folder import environment, read_metrics

MADE = pathlib.Path(__file__).parents[1] / "fixtures" / "made_by_3743f16"
SAVED = 4
CLOCK = ("seconds", "steps_per_second", "tokens_per_second")
RUNS = ("fuzzy", "sorting", "order", "language")
QUICK = ("fuzzy-hyla", "sraven-softmax", "digits-dual", "lm-dual", "table-a1 paper", "fig-a7 paper", "fig-5d small")
QUICK += tuple(
    f"{name} smoke" for name in ("fig-2c", "fig-4b", "fig-a4", "set", "order", "images", "split", "lm-bytes")
)
"""Recipes that are made in less than half a second; `python tests/support/old_runs.py` compares all of them."""


def read(name: str) -> Any:
    return json.loads((MADE / name).read_text())


@functools.cache
def closeness() -> float:
    """0 where this machine and PyTorch are those that wrote the numbers: then they are the same to the last digit."""
    made = read("expected.json")["made"]
    here = environment(torch.device("cpu"))
    vectors = (
        torch.backends.cpu.get_cpu_capability()
    )  # processors of one name differ in it, and then in the last digits
    return 0.0 if made == {name: here[name] for name in made} and vectors == "AVX2" else 1e-4


def near(value: Any) -> Any:
    return pytest.approx(value, rel=closeness(), abs=closeness() / 10) if isinstance(value, float) else value


def counted_by_position(rows: list[dict[str, Any]], result: ph.train.Result, wanted: dict[str, Any]) -> None:
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


def check(folder: pathlib.Path, before: pathlib.Path, wanted: dict[str, Any]) -> None:
    """It has the wanted numbers, and went on from its checkpoint: rows before it are as they were, with their times."""
    found, earlier = read_metrics(folder), read_metrics(before)
    kept = [row for row in earlier if row["step"] <= SAVED]
    assert found[: len(kept)] == kept
    rows = [{name: value for name, value in row.items() if name not in CLOCK} for row in found]
    result = ph.train.read_result(folder)
    assert result is not None
    counted_by_position(rows, result, wanted)
    assert rows == [{name: near(value) for name, value in row.items()} for row in wanted["rows"]]
    assert result.scores == {split: {k: near(v) for k, v in of.items()} for split, of in wanted["scores"].items()}
    assert result.parameters == wanted["parameters"]


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A copy of the folders, in which relative paths in their configurations hold."""
    for path in MADE.iterdir():
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on(here: pathlib.Path, name: str):
    ph.train.run(replace(ph.train.read_config(name), folder=name), progress=False, resume=True)
    check(here / name, MADE / name, read("expected.json")[name])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_a_run_in_parts_goes_on_in_one_process(here: pathlib.Path):
    assert [path.name for path in (here / "sharded").glob("checkpoint*")] == ["checkpoint-00000004.sharded"]
    ph.train.run(ph.train.read_config("sharded"), progress=False, resume=True)
    check(here / "sharded", MADE / "sharded", read("expected.json")["sharded"])


def test_a_population_goes_on(here: pathlib.Path):
    folders = sorted((here / "population").iterdir())
    members = [replace(ph.train.read_config(folder), folder=None) for folder in folders]
    results = population.train(members, "population", progress=False)
    assert [result.folder.name for result in results if isinstance(result, ph.train.Result)] == [
        f.name for f in folders
    ]
    for folder in folders:
        check(folder, MADE / "population" / folder.name, read("expected.json")[f"population/{folder.name}"])


def test_a_finished_run_is_what_it_was(here: pathlib.Path):
    wanted = read("expected.json")["finished"]
    before = (here / "finished" / "metrics.jsonl").read_bytes()
    result = ph.train.run(ph.train.read_config("finished"), progress=False, resume=True)
    assert result.seconds == json.loads((MADE / "finished" / "result.json").read_text())["seconds"]
    assert (here / "finished" / "metrics.jsonl").read_bytes() == before
    check(here / "finished", MADE / "finished", wanted)
    config, model = ph.train.load_model("finished")
    split, train = "iid", config.train
    again = ph.train.evaluate(
        *(model, config.task, split), batches=train.eval_batches, batch_size=train.batch_size, seed=config.seed
    )
    assert again == {name: pytest.approx(value, rel=1e-5) for name, value in wanted["scores"][split].items()}


def test_configurations_are_read_and_written_as_they_were():
    for entry in read("configs.json"):
        run = configs.from_dict(entry["config"], KINDS)
        assert configs.digest(run) == entry["digest"]
        written = configs.to_dict(run)
        assert {name: written[name] for name in entry["config"]} == entry["config"]


@pytest.mark.parametrize("key", QUICK)
def test_a_recipe_makes_the_runs_it_made(key: str):
    """It may have gained runs, of models that were added; those of before are there, unchanged and in their order."""
    wanted = read("digests.json")[key]
    assert [digest for digest in old_runs.digests_now(key) if digest in set(wanted)] == wanted
