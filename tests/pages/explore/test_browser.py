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


class Seen(Opened):
    """An explore page open in Chromium."""

    def __init__(self, browser: Any, path: pathlib.Path, width: int = 1280, scheme: str = "light") -> None:
        super().__init__(browser, path, "data-explore=ready", width, scheme)

    def token(self, i: int) -> Any:
        return self.page.locator(f".token[data-token='{i}']")

    def grid(self, name: str) -> list[list[float]]:
        """The numbers of a table, row by row."""
        rows = f"[...document.querySelectorAll('#{name} tbody tr')]"
        return self.page.evaluate(f"{rows}.map(row => [...row.cells].slice(1).map(cell => Number(cell.dataset.value)))")

    def found(self, name: str) -> list[tuple[int, float]]:
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
    own = codes[:, i, j]
    others = {n: codes[:, n, n - i + j] for n in range(codes.shape[1]) if n != i and n - i + j >= 0}
    return {n: float(own @ code / np.linalg.norm(own) / np.linalg.norm(code)) for n, code in others.items()}


def check_nearest(seen: Seen, wanted: dict[int, float]) -> None:
    found = seen.found("nearest")
    assert len(found) == 8
    assert [x for _, x in found] == sorted((x for _, x in found), reverse=True)
    for i, x in found:
        assert x == pytest.approx(wanted[i], abs=0.02)
    assert min(x for _, x in found) >= sorted(wanted.values())[-8] - 0.02


def check_pair(seen: Seen, layers: Any, i: int, j: int) -> None:
    """The tables show what the reference gives the pair."""
    for row, layer in zip(seen.grid("code"), layers, strict=True):
        assert len(row) == sum(len(group.attention) for group in layer.groups)
        limit = np.abs(heads_of(layer)).max()
        np.testing.assert_allclose(row, heads_of(layer)[:, i, j], atol=limit / 120)
    relations = layers[1].groups[1].relations
    np.testing.assert_allclose(seen.grid("relations"), relations[None, :, i, j], atol=np.abs(relations).max() / 120)
    strips = seen.page.evaluate("[...document.querySelectorAll('.strip')].map(s => JSON.parse(s.dataset.values))")
    np.testing.assert_allclose(strips, layers[1].groups[1].assignments[j], atol=0.005)


def code_limit(layer: Any) -> np.ndarray:
    """By head the largest code of its group."""
    return np.concatenate([np.full(len(group.attention), group.attention.max()) for group in layer.groups])


def test_pointing_shows_the_codes_of_the_reference(browser: Any, shown_model: Any) -> None:
    path, layers = shown_model
    seen = Seen(browser, path)
    for i in (40, 7):
        seen.token(i).hover()
        assert seen.pair().endswith(f"#{i + 1} (itself)")
        check_pair(seen, layers, i, i)
        check_nearest(seen, cosines(heads_of(layers[1]), i, i))
    cell = seen.page.locator("#code tbody tr").nth(1).locator("td").nth(2)
    assert float(cell.inner_text()) == pytest.approx(heads_of(layers[1])[2, 7, 7], abs=0.012)
    seen.page.locator("#scope").select_option("all")
    check_nearest(seen, cosines(np.concatenate([heads_of(layer) for layer in layers]), 7, 7))
    seen.page.locator("#scope").select_option("layer")
    seen.page.locator("#layer").select_option("0")
    check_nearest(seen, cosines(heads_of(layers[0]), 7, 7))
    assert not seen.page.locator("#symbolic").is_visible()
    assert seen.fine()


def test_colours_show_what_a_token_reads(browser: Any, shown_model: Any) -> None:
    path, layers = shown_model
    seen, i = Seen(browser, path), 30
    images = "[...document.querySelectorAll('.token')].map(box => box.style.backgroundImage)"
    seen.token(i).click()  # lines become lower when heads have no rows, and another token is under the mouse
    rows = seen.page.evaluate(images)
    code = heads_of(layers[1])[:, i]
    for j in (0, 12, i):
        alphas = [float(x) for x in re.findall(r"/ ([\d.]+)\)", rows[j])]
        np.testing.assert_allclose(alphas, 0.85 * np.sqrt(code[:, j] / code_limit(layers[1])), atol=0.005)
    assert all(image == "none" for image in rows[i + 1 :])
    assert seen.page.locator(".token.unseen").count() == len(rows) - i - 1
    seen.page.locator("#paint").select_option(label="relation 2")
    values, painted = layers[1].groups[1].relations[1, i], seen.page.evaluate(images)
    signs = ["--minus" in image for image in painted[: i + 1]]
    assert signs == [value < 0 and abs(value) > 0.01 for value in values[: i + 1]]
    assert 0 < sum(signs) < i
    most = sorted(np.abs(values[: i + 1]), reverse=True)[:8]
    np.testing.assert_allclose(
        np.abs(values)[[j for j, _ in seen.found("reads")]], most, atol=np.abs(values).max() / 60
    )
    assert seen.page.locator("#low").inner_text().startswith("−")
    seen.page.locator("#paint").select_option("mean")
    means = code.mean(0)
    np.testing.assert_allclose(means[[j for j, _ in seen.found("reads")]], sorted(means, reverse=True)[:8], atol=0.004)
    seen.page.locator("#code tbody tr").nth(0).locator("td").nth(3).click()
    picked = seen.page.evaluate("['layer', 'paint'].map(id => document.getElementById(id).value)")
    assert picked == ["0", "head 3"]
    assert seen.fine()


def test_pinning_and_keys(browser: Any, shown_model: Any) -> None:
    path, layers = shown_model
    seen = Seen(browser, path)
    seen.token(33).click()
    seen.token(20).hover()
    check_pair(seen, layers, 33, 20)
    check_nearest(seen, cosines(heads_of(layers[1]), 33, 20))
    seen.token(50).hover()  # later: it may not look there
    assert seen.pair().split("#")[2].strip() == "21"
    seen.token(25).click()
    seen.token(3).hover()
    check_pair(seen, layers, 33, 25)
    for wanted in ((33, 25), (33, 33)):
        assert [int(n) - 1 for n in re.findall(r"#(\d+)", seen.pair())] == list(wanted)
        seen.page.keyboard.press("Escape")
        seen.page.keyboard.press("Escape")
    seen.token(10).hover()
    assert seen.pair().endswith("#11 (itself)")
    seen.token(10).focus()
    for key, i in (("ArrowRight", 11), ("ArrowLeft", 10), ("Home", 0), ("ArrowDown", 10), ("ArrowUp", 0)):
        seen.page.keyboard.press(key)
        assert seen.pair().endswith(f"#{i + 1} (itself)"), key
    seen.page.keyboard.press("End")
    seen.page.keyboard.press("Enter")
    seen.page.keyboard.press("ArrowLeft")
    last = len(TEXT.encode())
    assert [int(n) for n in re.findall(r"#(\d+)", seen.pair())] == [last, last - 1]
    check_pair(seen, layers, last - 1, last - 2)
    assert seen.fine()


def test_what_a_window_hides_is_not_shown_as_zero(browser: Any, tmp_path: pathlib.Path) -> None:
    """A layer with a window of four, and the same layer without."""
    near, batch = model_of((ph.Hyla(4),), window=4), batch_of(TEXT)
    taps = [*capture(near, batch), *capture(model_of((ph.Hyla(4),)), batch)]
    tokens = [chr(97 + i % 26) for i in range(batch.inputs.shape[1])]
    seen = Seen(browser, explore.write(taps, tokens, tmp_path / "page.html", progress=False))
    seen.token(30).click()
    assert seen.page.locator(".token.unseen").count() == len(tokens) - 31
    seen.token(20).hover()
    cells = seen.page.locator("#code tbody tr").nth(0).locator("td")
    assert cells.all_inner_texts() == ["–"] * 4
    assert cells.nth(0).get_attribute("title").endswith("not visible")
    assert seen.page.locator("#code td.hidden").count() == 4
    assert "not visible" not in seen.pair()
    seen.page.locator("#layer").select_option("0")
    assert seen.page.locator(".token.unseen").count() == len(tokens) - 4
    assert [i for i, _ in seen.found("reads")] != []
    assert {i for i, _ in seen.found("reads")} == {27, 28, 29, 30}
    assert seen.pair().endswith("(not visible in this layer)")
    assert seen.found("nearest") == []
    assert "not visible" in seen.page.locator("#about").inner_text()
    assert seen.fine()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (420, "dark")])
def test_text_stays_text(browser: Any, tmp_path: pathlib.Path, width: int, scheme: str) -> None:
    """Whole tags as tokens, wherever tokens are shown: in the text, the pair, and both lists."""
    tags = ["<script>hacked=1</script>", "<img src=x onerror='hacked=2'>", " &amp;", "\n", "\t</code>", "é"]
    ids = torch.arange(6)[None]
    taps = capture(model_of((ph.Hyla(4),), DUAL), Batch(ids, ids, None, torch.ones(1, 6), {}))
    seen = Seen(
        browser, explore.write(taps, tags, tmp_path / "x.html", title="<b>small</b>", progress=False), width, scheme
    )
    texts = seen.page.locator(".token").all_inner_texts()
    assert texts == [tag.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") for tag in tags]
    seen.token(5).click()
    for i in (0, 1):
        seen.token(i).hover()
        assert texts[i] in seen.pair()
    assert len(seen.found("reads")) == 6
    assert seen.page.locator("main img, main script").count() == 0
    assert seen.page.evaluate("window.hacked") is None
    assert seen.page.locator("h1").inner_text() == "What <b>small</b> reads"
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    dark = seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 25, 30)"
    assert dark == (scheme == "dark")
    assert seen.fine()
