"""A report on a run whose metrics.jsonl or result.json has huge integers, as another tool may write them."""

import json

import pytest
from reported import fabricate, run_of, scored, small, written

from polyhead.train import Damaged

HUGE = 10**400


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small(monkeypatch)


@pytest.mark.parametrize("row", [{"step": 40, "loss": HUGE}, {"step": HUGE, "loss": 0.5}, {"step": -1, "loss": 0.5}])
def test_rows_of_huge_integers_are_left_out_of_the_curves(tmp_path, row):
    rows = [{"kind": "train", "step": 20, "loss": 0.5}, {"kind": "train", **row}, *scored(60, iid=0.4)]
    page = written([fabricate(tmp_path, run_of("hyla"), {"iid": (0.4, 0.1)}, rows)], tmp_path / "report.html")
    assert page.cells("HYLA")[0] == "0.400 ± 0.100"
    assert "HYLA</text>" in page.figure("curves-loss")


@pytest.mark.parametrize("field", ["scores", "parameters", "seconds"])
def test_a_result_with_huge_integers_is_damaged(tmp_path, field):
    folder = fabricate(tmp_path, run_of("hyla"), {"iid": (0.4, 0.1), "compositional": (0.3, 0.1)})
    result = json.loads((folder / "result.json").read_text())
    if field == "scores":
        result["scores"]["compositional"]["r2"] = HUGE
    else:
        result[field] = HUGE
    (folder / "result.json").write_text(json.dumps(result))
    with pytest.raises(Damaged, match=r"not a result \(int too large to convert to float\)"):
        written([folder], tmp_path / "report.html")
