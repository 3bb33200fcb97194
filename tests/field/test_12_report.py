"""A report on a run whose metrics.jsonl has huge integers, as another tool may write them."""

import pytest
from reported import fabricate, run_of, scored, small, written

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
