"""The browser of these tests: Chromium, which Playwright drives over pipes, and what its pages say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, sync_playwright

from tests.waiting import SECONDS, until

PROGRAMS = ("chromium", "chromium-browser")
OPTIONS = ("--no-proxy-server", "--force-color-profile=srgb")


def program() -> str | None:
    """Find the browser's program; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def started(path: str) -> Iterator[Browser]:
    """Start a browser, and end it. Of these there is one at a time in a thread."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS, chromium_sandbox=False)
        yield browser
        browser.close()


class Tab:
    """An open page, and what it complained of and asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        """What was thrown, written to the console as a warning or worse, or refused by a policy."""
        self.requests: list[str] = []
        """All addresses that the page has asked for."""
        self.answers: list[tuple[str, int]] = []
        """Of which addresses it has got answers, and their status."""
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("response", lambda answer: self.answers.append((answer.url, answer.status)))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, as JSON carries it."""
        return self.page.evaluate(expression)

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector finds."""
        return self.page.text_content(selector) or ""

    def until(self, expression: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true. Not by `wait_for_function`, whose eval the page's policy refuses."""
        until(lambda: bool(self.evaluate(expression)), seconds)

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        for key in keys:
            self.page.keyboard.press(key)


@contextmanager
def opened(browser: Browser, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Tab]:
    """Open a page in a tab of its own, and close that."""
    scheme: Literal["dark", "light"] = "dark" if dark else "light"
    size: ViewportSize = {"width": width, "height": height}
    with closing(browser.new_page(viewport=size, color_scheme=scheme, is_mobile=width < 600)) as page:
        tab = Tab(page)
        page.goto(url)
        yield tab
