"""Pages in Chromium without a network."""

import shutil

import pytest
from playwright import sync_api

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARKS = [pytest.mark.browser]


@pytest.fixture(name="browser", scope="module")
def _browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page open in Chromium, what it requested beyond itself, and what went wrong."""

    def __init__(self, browser, path, ready, width=1280, scheme="light"):
        """`ready`: the attribute of the page that says that its script is done."""
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.requests, self.errors = [], []
        own = (path.as_uri(), "data:")
        self.page.on("request", lambda one: None if one.url.startswith(own) else self.requests.append(one.url))
        self.page.on("console", lambda one: self.errors.append(one.text) if one.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(f"html[{ready}]", state="attached", timeout=120_000)

    def fine(self):
        return self.errors == [] and self.requests == []
