"""The explore page in Chromium without a network: its numbers against the reference."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from chromium import MARKS, Opened, _browser  # noqa: F401 (a fixture)
from explored import DUAL, TEXT, batch_of, model_of

import polyhead as ph
from polyhead.analysis import capture, look
from polyhead.pages.explore import writer as explore
from polyhead.tasks.base import Batch
from polyhead.tasks.text.tokens import Bytes

pytestmark = MARKS


class ExplorePage(Opened):
    """An explore page open in Chromium."""

    def __init__(self, browser: Any, path: pathlib.Path, width: int = 1280, scheme: str = "light") -> None:
        super().__init__(browser, path, "data-explore=ready", width, scheme)

    def token(self, i: int) -> Any:
        return self.page.locator(f".token[data-token='{i}']")

    def grid(self, name: str) -> list[list[float]]:
        """The numbers of a table, row by row."""
        rows = f"[...document.querySelectorAll('#{name} tbody tr')]"
        return self.page.evaluate(f"{rows}.map(row => [...row.cells].slice(1).map(cell => Number(cell.dataset.value)))")

    def listed(self, name: str) -> list[tuple[int, float]]:
        """A list of tokens: (which, its number)."""
        buttons = f"[...document.querySelectorAll('#{name} button')]"
        return self.page.evaluate(f"{buttons}.map(b => [Number(b.dataset.at), Number(b.dataset.value)])")

    def pair(self) -> str:
        return self.page.locator("#pair").inner_text()


@pytest.fixture(scope="module")
def shown_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    """A page on a layer of HYLA heads and one of both softmax and relational heads, and what it should show."""
    model, batch = model_of((ph.Hyla(4),), DUAL), batch_of(TEXT)
    path = tmp_path_factory.mktemp("page") / "page.html"
    title = "<b>small</b>"
    return explore.explore(model, TEXT, Bytes(), path, title=title, progress=False), look(model, batch)


def heads_of(layer: Any) -> np.ndarray:
    """The codes of all heads of a layer (h t s)."""
    return np.concatenate([group.attention for group in layer.groups])


def cosines(codes: np.ndarray, i: int, j: int) -> dict[int, float]:
    """By token n the cosine of its code, for the token i - j before it, with that of the pair (i, j)."""
    code = codes[:, i, j]
    other_codes = {n: codes[:, n, n - i + j] for n in range(codes.shape[1]) if n != i and n - i + j >= 0}
    return {n: float(code @ other / np.linalg.norm(code) / np.linalg.norm(other)) for n, other in other_codes.items()}


def check_nearest(opened: ExplorePage, expected: dict[int, float]) -> None:
    nearest = opened.listed("nearest")
    assert len(nearest) == 8
    assert [x for _, x in nearest] == sorted((x for _, x in nearest), reverse=True)
    for i, x in nearest:
        assert x == pytest.approx(expected[i], abs=0.02)
    assert min(x for _, x in nearest) >= sorted(expected.values())[-8] - 0.02


def check_pair(opened: ExplorePage, layers: Any, i: int, j: int) -> None:
    """The tables show what the reference gives the pair."""
    for row, layer in zip(opened.grid("code"), layers, strict=True):
        assert len(row) == sum(len(group.attention) for group in layer.groups)
        limit = np.abs(heads_of(layer)).max()
        np.testing.assert_allclose(row, heads_of(layer)[:, i, j], atol=limit / 120)
    relations = layers[1].groups[1].relations
    np.testing.assert_allclose(opened.grid("relations"), relations[None, :, i, j], atol=np.abs(relations).max() / 120)
    strips = opened.page.evaluate("[...document.querySelectorAll('.strip')].map(s => JSON.parse(s.dataset.values))")
    np.testing.assert_allclose(strips, layers[1].groups[1].assignments[j], atol=0.005)


def code_limit(layer: Any) -> np.ndarray:
    """By head the largest code of its group."""
    return np.concatenate([np.full(len(group.attention), group.attention.max()) for group in layer.groups])


def test_pointing_shows_the_codes_of_the_reference(browser: Any, shown_model: Any) -> None:
    path, layers = shown_model
    opened = ExplorePage(browser, path)
    for i in (40, 7):
        opened.token(i).hover()
        assert opened.pair().endswith(f"#{i + 1} (itself)")
        check_pair(opened, layers, i, i)
        check_nearest(opened, cosines(heads_of(layers[1]), i, i))
    cell = opened.page.locator("#code tbody tr").nth(1).locator("td").nth(2)
    assert float(cell.inner_text()) == pytest.approx(heads_of(layers[1])[2, 7, 7], abs=0.012)
    opened.page.locator("#scope").select_option("all")
    check_nearest(opened, cosines(np.concatenate([heads_of(layer) for layer in layers]), 7, 7))
    opened.page.locator("#scope").select_option("layer")
    opened.page.locator("#layer").select_option("0")
    check_nearest(opened, cosines(heads_of(layers[0]), 7, 7))
    assert not opened.page.locator("#symbolic").is_visible()
    assert opened.fine()


def test_colours_show_what_a_token_reads(browser: Any, shown_model: Any) -> None:
    path, layers = shown_model
    opened, i = ExplorePage(browser, path), 30
    background_images = "[...document.querySelectorAll('.token')].map(box => box.style.backgroundImage)"
    opened.token(i).click()  # lines become lower when heads have no rows, and another token is under the mouse
    rows = opened.page.evaluate(background_images)
    code = heads_of(layers[1])[:, i]
    for j in (0, 12, i):
        alphas = [float(x) for x in re.findall(r"/ ([\d.]+)\)", rows[j])]
        np.testing.assert_allclose(alphas, 0.85 * np.sqrt(code[:, j] / code_limit(layers[1])), atol=0.005)
    assert all(image == "none" for image in rows[i + 1 :])
    assert opened.page.locator(".token.unseen").count() == len(rows) - i - 1
    opened.page.locator("#paint").select_option(label="relation 2")
    values, painted = layers[1].groups[1].relations[1, i], opened.page.evaluate(background_images)
    signs = ["--minus" in image for image in painted[: i + 1]]
    assert signs == [value < 0 and abs(value) > 0.01 for value in values[: i + 1]]
    assert 0 < sum(signs) < i
    largest = sorted(np.abs(values[: i + 1]), reverse=True)[:8]
    order = [j for j, _ in opened.listed("reads")]
    np.testing.assert_allclose(np.abs(values)[order], largest, atol=np.abs(values).max() / 60)
    assert opened.page.locator("#low").inner_text().startswith("−")
    opened.page.locator("#paint").select_option("mean")
    means = code.mean(0)
    order = [j for j, _ in opened.listed("reads")]
    np.testing.assert_allclose(means[order], sorted(means, reverse=True)[:8], atol=0.004)
    opened.page.locator("#code tbody tr").nth(0).locator("td").nth(3).click()
    selected = opened.page.evaluate("['layer', 'paint'].map(id => document.getElementById(id).value)")
    assert selected == ["0", "head 3"]
    assert opened.fine()


def test_pinning_and_keys(browser: Any, shown_model: Any) -> None:
    path, layers = shown_model
    opened = ExplorePage(browser, path)
    opened.token(33).click()
    opened.token(20).hover()
    check_pair(opened, layers, 33, 20)
    check_nearest(opened, cosines(heads_of(layers[1]), 33, 20))
    opened.token(50).hover()  # later: it may not look there
    assert opened.pair().split("#")[2].strip() == "21"
    opened.token(25).click()
    opened.token(3).hover()
    check_pair(opened, layers, 33, 25)
    for positions in ((33, 25), (33, 33)):
        assert [int(n) - 1 for n in re.findall(r"#(\d+)", opened.pair())] == list(positions)
        opened.page.keyboard.press("Escape")
        opened.page.keyboard.press("Escape")
    opened.token(10).hover()
    assert opened.pair().endswith("#11 (itself)")
    opened.token(10).focus()
    for key, i in (("ArrowRight", 11), ("ArrowLeft", 10), ("Home", 0), ("ArrowDown", 10), ("ArrowUp", 0)):
        opened.page.keyboard.press(key)
        assert opened.pair().endswith(f"#{i + 1} (itself)"), key
    opened.page.keyboard.press("End")
    opened.page.keyboard.press("Enter")
    opened.page.keyboard.press("ArrowLeft")
    last = len(TEXT.encode())
    assert [int(n) for n in re.findall(r"#(\d+)", opened.pair())] == [last, last - 1]
    check_pair(opened, layers, last - 1, last - 2)
    assert opened.fine()


def test_what_a_window_hides_is_not_shown_as_zero(browser: Any, tmp_path: pathlib.Path) -> None:
    """A layer with a window of four, and the same layer without."""
    windowed, batch = model_of((ph.Hyla(4),), window=4), batch_of(TEXT)
    taps = [*capture(windowed, batch), *capture(model_of((ph.Hyla(4),)), batch)]
    tokens = [chr(97 + i % 26) for i in range(batch.inputs.shape[1])]
    opened = ExplorePage(browser, explore.write(taps, tokens, tmp_path / "page.html", progress=False))
    opened.token(30).click()
    assert opened.page.locator(".token.unseen").count() == len(tokens) - 31
    opened.token(20).hover()
    cells = opened.page.locator("#code tbody tr").nth(0).locator("td")
    assert cells.all_inner_texts() == ["–"] * 4
    assert cells.nth(0).get_attribute("title").endswith("not visible")
    assert opened.page.locator("#code td.hidden").count() == 4
    assert "not visible" not in opened.pair()
    opened.page.locator("#layer").select_option("0")
    assert opened.page.locator(".token.unseen").count() == len(tokens) - 4
    assert [i for i, _ in opened.listed("reads")] != []
    assert {i for i, _ in opened.listed("reads")} == {27, 28, 29, 30}
    assert opened.pair().endswith("(not visible in this layer)")
    assert opened.listed("nearest") == []
    assert "not visible" in opened.page.locator("#about").inner_text()
    assert opened.fine()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (420, "dark")])
def test_text_stays_text(browser: Any, tmp_path: pathlib.Path, width: int, scheme: str) -> None:
    """Whole tags as tokens, wherever tokens are shown: in the text, the pair, and both lists."""
    tags = ["<script>hacked=1</script>", "<img src=x onerror='hacked=2'>", " &amp;", "\n", "\t</code>", "é"]
    ids = torch.arange(6)[None]
    taps = capture(model_of((ph.Hyla(4),), DUAL), Batch(ids, ids, None, torch.ones(1, 6), {}))
    opened = ExplorePage(
        browser, explore.write(taps, tags, tmp_path / "x.html", title="<b>small</b>", progress=False), width, scheme
    )
    texts = opened.page.locator(".token").all_inner_texts()
    assert texts == [tag.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") for tag in tags]
    opened.token(5).click()
    for i in (0, 1):
        opened.token(i).hover()
        assert texts[i] in opened.pair()
    assert len(opened.listed("reads")) == 6
    assert opened.page.locator("main img, main script").count() == 0
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("h1").inner_text() == "What <b>small</b> reads"
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    dark = opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 25, 30)"
    assert dark == (scheme == "dark")
    assert opened.fine()
