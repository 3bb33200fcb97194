"""A report on a run whose metrics.jsonl or result.json has huge integers, as another tool may write them."""

import json

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


@pytest.mark.parametrize(("field", "column"), [("scores", None), ("parameters", 3), ("seconds", 4)])
def test_huge_integers_in_a_result_are_no_numbers(tmp_path, field, column):
    folder = fabricate(tmp_path, run_of("hyla"), {"iid": (0.4, 0.1), "compositional": (0.3, 0.1)})
    result = json.loads((folder / "result.json").read_text())
    if field == "scores":
        result["scores"]["compositional"]["r2"] = HUGE
    else:
        result[field] = HUGE
    (folder / "result.json").write_text(json.dumps(result))
    page = written([folder], tmp_path / "report.html")
    if column is None:
        assert "hyla-0: r2 on compositional is not finite and is left out." in page.words
    else:
        assert page.cells("HYLA")[column] == "–"
