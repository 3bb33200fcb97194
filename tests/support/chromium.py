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

    def __init__(self, browser, path, ready_attribute, width=1280, scheme="light"):
        """`ready_attribute`: the attribute of the page that says that its script is done."""
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.requests, self.errors = [], []
        own_urls = (path.as_uri(), "data:")

        def record_request(request):
            if not request.url.startswith(own_urls):
                self.requests.append(request.url)

        def record_message(message):
            if message.type in ("error", "warning"):
                self.errors.append(message.text)

        self.page.on("request", record_request)
        self.page.on("console", record_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(f"html[{ready_attribute}]", state="attached", timeout=120_000)

    def fine(self):
        return self.errors == [] and self.requests == []
