"""A small part of the campaign of faults (benchmarks/fault_campaign.py): killed runs and damaged files."""

import shutil
import sys
from dataclasses import replace

import pytest
from killed_or_damaged import GOOD, Campaign
from lives import DAMAGES, Zygote

from polyhead.train.store.checkpoint import read_metadata
from polyhead.train.store.folder import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lives are counted with Linux's /proc and prctl")
SEED = 7


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    with Zygote() as zygote:
        yield Campaign(zygote, tmp_path_factory.mktemp("faults"), SEED)


def fine(records):
    """The records of faults that hit; all outcomes are good."""
    assert [record for record in records if record["outcome"] not in GOOD] == []
    return [record for record in records if record["outcome"] != "unharmed"]


KILLS = [("train", 1, 4), ("tokenise", 1, 4), ("text run", 1, 3), ("sweep", 1, 3)]


@pytest.mark.parametrize(("kind", "cases", "faults"), KILLS)
def test_killed_again_and_again(campaign, kind, cases, faults):
    """In all at least 9 times, mostly inside an operation on a file."""
    if kind in ("tokenise", "text run"):
        pytest.importorskip("tokenizers")
    # A run may be faster or slower, so the last fault may come too late.
    aims = ("file",) * (faults - 1) + ("moment" if kind in ("train", "text run") else "file",)
    killed = [record for case in range(cases) for record in fine(campaign.kills(kind, case, faults, aims))]
    assert len(killed) >= {"train": 2, "tokenise": 2, "text run": 2, "sweep": 1}[kind]
    assert all(record["moment"] for record in killed)


STOPPED = {
    "run/checkpoint.safetensors": "truncated",
    "run/metrics.jsonl": "emptied",
    "run/config.json": "flipped",
    "run/best.safetensors": "zeroed",
}
FINISHED = {
    "run/result.json": "flipped",
    "run/checkpoint.safetensors": "zeroed",
    "run/metrics.jsonl": "missing",
    "run/config.json": "truncated",
}


@pytest.mark.parametrize("finished", [False, True])
def test_every_file_is_damaged_once(campaign, finished):
    cases = FINISHED if finished else STOPPED
    found = {name: campaign.damaged("train", 0, name, how, finished=finished) for name, how in cases.items()}
    fine(list(found.values()))
    assert all("file" in record for record in found.values()), "they were there"
    assert found["run/metrics.jsonl"]["outcome"] == "told"
    assert found["run/config.json"]["outcome"] == "refused"
    if finished:  # its model is trained again
        assert found["run/checkpoint.safetensors"]["outcome"] == "went on"
    assert set(DAMAGES) == {*STOPPED.values(), *FINISHED.values()}


@pytest.mark.parametrize("kind", ["train"])
def test_checkpoints_vouch_for_the_rows_before_them(campaign, kind):
    found = list(campaign.undisturbed(kind).root.rglob("checkpoint.safetensors"))
    assert len(found) == {"train": 1}[kind]
    for path in found:
        rows, said = read_metrics(path.parent), read_metadata(path)
        assert said["rows"] == sum(row["kind"] == "train" or row["step"] < said["step"] for row in rows) > 0


@pytest.mark.parametrize("cut", [slice(3, 6), slice(-2, None)])
def test_rows_that_are_lost_are_told(campaign, tmp_path, capsys, cut):
    """Those in the middle, and those of the last evaluation, which is not before any checkpoint."""
    from polyhead.train import run
    from polyhead.train.store.folder import read_config

    shutil.copytree(campaign.undisturbed("train").root / "run", tmp_path / "mine")
    path = tmp_path / "mine" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    count, whole = len(lines[cut]), len(lines)
    del lines[cut]
    path.write_bytes(b"".join(lines))
    capsys.readouterr()
    run(replace(read_config(path.parent), folder=str(path.parent)), resume=True, progress=False)
    assert f"{count} of {whole} rows are lost or damaged" in capsys.readouterr().err


def test_damaged_files_of_a_text_run(campaign):
    pytest.importorskip("tokenizers")
    fine([campaign.damaged("text run", 0, "run/tokenizer.json", "truncated", finished=True)])
    assert (
        fine([campaign.damaged("text run", 0, "run/data.json", "emptied", finished=False)])[0]["outcome"] == "refused"
    )
