"""The report in Chromium without a network: it is read without a script, on a phone and in the dark."""

import pytest
from chromium import MARKS, Opened, _browser  # noqa: F401 (a fixture)
from reported import HEADS, TASK, small, trained, written

pytestmark = MARKS


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """A report on softmax and HYLA."""
    root = tmp_path_factory.mktemp("runs")
    folders = [trained(root, TASK, name, (HEADS[name],)) for name in ("softmax", "hyla")]
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        written(folders, root / "report.html")
    return root / "report.html"


COLOURS = (
    "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('figure text')).fill]"
)


@pytest.mark.parametrize(
    ("width", "scheme", "colours"),
    [
        (1280, "light", ["rgb(255, 255, 255)", "rgb(36, 41, 47)"]),
        (400, "dark", ["rgb(21, 25, 30)", "rgb(230, 233, 237)"]),
    ],
)
def test_figures_are_visible_in_the_theme_and_nothing_scrolls_sideways(browser, page_file, width, scheme, colours):
    opened = Opened(browser, page_file, "lang", width, scheme)
    opened.page.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true; })")
    figures = "[...document.querySelectorAll('figure svg')]"
    sizes = opened.page.evaluate(f"{figures}.map(svg => svg.getBoundingClientRect().height)")
    assert len(sizes) >= 9
    assert min(sizes) > 60
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.evaluate(COLOURS) == colours
    assert opened.fine()
