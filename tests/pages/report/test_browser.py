"""The report in Chromium without a network, on two runs trained here."""

import pathlib
from typing import Any

import numpy as np
import pytest
from chromium import MARKS, Opened, _browser  # noqa: F401 (a fixture)
from reported import HEADS, TASK, small, trained, written

import polyhead as ph
from polyhead.analysis import look
from polyhead.analysis.probe import draws
from polyhead.tasks import RelationalGames, Sraven

pytestmark = MARKS


def page_on(root: pathlib.Path, task: ph.Task, runs: list[tuple[str, Any, int]]) -> pathlib.Path:
    """A report on runs of a few steps."""
    told = ("iid", "compositional" if "compositional" in task.splits else "novel")
    folders = [
        trained(root, task, name, heads, seed, steps=6, warmup=2, eval_every=2, log_every=2, evaluate=told)
        for name, heads, seed in runs
    ]
    with pytest.MonkeyPatch.context() as patch:
        small(patch, POINTS=50, ZEROED=20, SEQUENCES=200)
        written(folders, root / "report.html")
    return root / "report.html"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A report on two seeds of softmax and one of HYLA."""
    runs = [(name, (HEADS[name],), seed) for name, seed in (("softmax", 0), ("softmax", 1), ("hyla", 0))]
    return page_on(tmp_path_factory.mktemp("runs"), TASK, runs)


def opened(browser: Any, path: pathlib.Path, width: int = 1280, scheme: str = "light") -> tuple[Any, Opened]:
    """The page with its figures drawn, and what it asked for and what went wrong."""
    one = Opened(browser, path, "data-figures=done", width, scheme)
    return one.page, one


def undrawn(page: Any) -> list[str]:
    """Figures in sight of a reader that hold no drawing, or an empty one."""
    return page.evaluate(
        """() => {
            const away = 'details:not([open]), [hidden]';
            const shown = [...document.querySelectorAll('.plot')].filter(box => !box.closest(away));
            const marks = '.main-svg .trace path, .main-svg .hm image';
            const empty = box => box.querySelectorAll(marks).length === 0 || box.clientHeight < 100;
            return shown.filter(empty).map(box => box.id);
        }"""
    )


def test_all_figures_are_drawn_without_requests_or_errors(browser: Any, page_file: pathlib.Path) -> None:
    page, one = opened(browser, page_file)
    # opening, results, curves, attention of both mechanisms, three kinds of probes, clusters; by run: heads, maps
    assert page.locator(".plot").count() == 1 + 1 + 3 + 2 + 3 + 1 + 3 * (1 + 2 * 4)
    assert undrawn(page) == []
    for box in page.locator("details", has_text="seed").locator("summary").all():
        box.click()
    page.wait_for_function("() => document.querySelectorAll('.plot:not(.js-plotly-plot)').length === 0", timeout=60_000)
    assert undrawn(page) == []
    assert one.fine()


@pytest.fixture(scope="module")
def games_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A report on relational games: a layer of softmax heads alone, then one of both kinds."""
    relational = ph.Relational(1, symbols=ph.SymbolicAttention(count=5), relations=3)
    runs = [("dual", ((ph.Softmax(4),), (ph.Softmax(3), relational)), 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RelationalGames, "token_names", lambda *_, **__: NAMES)
        return page_on(tmp_path_factory.mktemp("games"), RelationalGames(examples=20), runs)


NAMES = ("<s>", "a<b>c", "&lt;", *"456789")
"""Of tokens: Plotly would read tags and entities."""

LOOK = """() => {
    const shown = (box) => box.getClientRects().length > 0, look = document.querySelector('.look');
    const options = (name) => [...look.querySelector(`select[name=${name}]`).options].map(option => option.text);
    const plots = [...look.querySelectorAll('.plot')].filter(shown).map(box => box.data[0]);
    const images = [...look.querySelectorAll('.seen')].filter(shown).map(box => Number(box.dataset.example));
    const [z, scales] = ['z', 'zmax'].map(name => plots.map(trace => trace[name]));
    return {heads: options('attention'), z, scales, images};
}"""


@pytest.mark.parametrize("width", [1280, 420])
def test_a_reader_chooses_what_to_look_at(browser: Any, games_file: pathlib.Path, width: int) -> None:
    page, one = opened(browser, games_file, width, "dark")
    run, model = ph.train.load_model(games_file.parent / "dual-0")
    (batch,) = draws(run.task, "novel", 3, seed=0, purpose="look")
    first, wanted = page.evaluate(LOOK), [look(model, batch, sample=i) for i in (0, 1)]
    assert undrawn(page) == []
    assert (first["heads"][3], first["images"], len(first["z"])) == ("head 4", [0], 1)
    assert set(page.locator(".look .ytick text").all_text_contents()) >= set(NAMES)
    page.locator("select[name=attention]").select_option("head 4")
    softmax = wanted[0][0].groups[0]
    np.testing.assert_allclose(np.array(page.evaluate(LOOK)["z"][0]), softmax.attention[3], atol=1e-3)
    page.locator("select[name=layer]").select_option("layer 2")
    second = page.evaluate(LOOK)
    assert second["heads"] == ["head 1 (softmax)", "head 2 (softmax)", "head 3 (softmax)", "head 4 (relational)"]
    assert [(len(z), len(z[0])) for z in second["z"]] == [(9, 9), (9, 9), (9, 5)]
    page.locator("select[name=example]").select_option(index=1)
    page.locator("select[name=relations]").select_option("relation 3")
    third, relational = page.evaluate(LOOK), wanted[1][1].groups[1]
    np.testing.assert_allclose(np.array(third["z"][0]), relational.attention[0], atol=1e-3)
    np.testing.assert_allclose(np.array(third["z"][1]), relational.relations[2], atol=1e-3 * third["scales"][1])
    np.testing.assert_allclose(np.array(third["z"][2]), relational.assignments[:, 0], atol=1e-3)
    assert third["images"] == [1]
    assert undrawn(page) == []
    fits = "box => box.querySelector('.main-svg').clientWidth === box.clientWidth"
    page.wait_for_function(f"() => [...document.querySelectorAll('.look .plot')].every({fits})", timeout=10_000)
    page.locator("select[name=layer]").select_option("layer 1")
    assert len(page.evaluate(LOOK)["z"]) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.fine()


def test_sraven_on_a_phone(browser: Any, tmp_path: pathlib.Path) -> None:
    """Results, curves, two views of probes and of clusters, heads; matrices by view; maps by view and layer."""
    file = page_on(tmp_path, Sraven(features=2, values=5), [("hyla", (ph.Hyla(4),), 0)])
    page, one = opened(browser, file, 420)
    assert page.locator(".plot").count() == 1 + 1 + 3 + 1 + 2 + 2 + 1 + 2 * (2 * 2 + 2) + 2 * 2 * 2
    assert undrawn(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert one.fine()


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_scrolls_sideways(browser: Any, page_file: pathlib.Path, width: int) -> None:
    page, one = opened(browser, page_file, width)
    for box in page.locator("details > summary").all():
        box.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        "() => [...document.querySelectorAll('body *:not(svg *)')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert one.fine()


def test_switch_between_tsne_and_pca(browser: Any, page_file: pathlib.Path) -> None:
    page, one = opened(browser, page_file)
    first = "() => Array.from(document.querySelector('.maps .plot').data[0].x)"
    tsne = page.evaluate(first)
    page.get_by_label("PCA").check()
    pca = page.evaluate(first)
    page.get_by_label("t-SNE").check()
    assert len(tsne) == len(pca) == 50
    assert tsne != pca
    assert page.evaluate(first) == tsne
    assert one.fine()


def test_dark_theme_changes_paper_and_figures(browser: Any, page_file: pathlib.Path) -> None:
    look = (
        "() => [getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color,"
        " getComputedStyle(document.querySelector('.swatch')).color]"
    )
    light, _ = opened(browser, page_file)
    dark, one = opened(browser, page_file, scheme="dark")
    assert light.evaluate(look) == ["rgb(255, 255, 255)", "#24292f", "rgb(0, 114, 178)"]
    assert dark.evaluate(look) == ["rgb(21, 25, 30)", "#e6e9ed", "rgb(79, 168, 224)"]
    dark.emulate_media(color_scheme="light")
    dark.wait_for_function("() => document.querySelector('.plot').layout.font.color === '#24292f'", timeout=30_000)
    assert dark.evaluate(look) == light.evaluate(look)
    assert one.fine()
