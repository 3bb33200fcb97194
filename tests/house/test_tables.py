"""Tables and pictures in the README and the pages are those that their scripts make from committed data."""

import pathlib

import pytest
from scripts import ROOT, loaded

from polyhead.spec import MECHANISMS

make_tables = loaded("docs", "make_tables.py")

PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "<!-- table:" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_those_of_the_committed_results(page):
    text = page.read_text(encoding="utf-8")
    assert make_tables.with_tables(text) == text, "run: python docs/make_tables.py"


@pytest.mark.parametrize("row", MECHANISMS, ids=lambda row: row.config)
def test_the_facts_on_the_page_of_a_mechanism_are_those_of_the_table(row):
    pages = loaded("docs", "figures", "mechanisms.py")
    assert pages.facts(row) in pages.page(row).read_text(encoding="utf-8"), "run: python docs/figures/mechanisms.py"


def test_the_picture_of_the_first_example_is_that_of_its_data(tmp_path):
    figure = loaded("docs", "figures", "first_model.py")
    figure.draw(tmp_path / "first_model.svg")
    assert (tmp_path / "first_model.svg").read_text() == pathlib.Path(figure.PICTURE).read_text()
