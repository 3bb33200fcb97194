"""The committed results stay small."""

from scripts import ROOT


def test_the_folder_of_results_is_below_15_megabytes():
    sizes = [path.stat().st_size for path in (ROOT / "docs" / "results").rglob("*") if path.is_file()]
    assert sum(sizes) < 15e6
