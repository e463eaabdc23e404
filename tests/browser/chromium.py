"""A small client for a headless Chromium: the DevTools protocol over two pipes, no port and no library.

https://chromedevtools.github.io/devtools-protocol/; with --remote-debugging-pipe the browser reads commands from
descriptor 3 and writes to 4, each a JSON text that ends with a zero byte.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0
PROGRAMS = ("chromium", "chromium-browser")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio"),
    *("--no-first-run", "--disable-extensions", "--disable-sync", "--disable-default-apps", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-features=Translate,MediaRouter"),
    *("--force-color-profile=srgb", "--remote-debugging-pipe"),
)
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27}
KEYS |= {"Tab": 9, "Enter": 13}


class BrowserError(Exception):
    """The browser refused a command, or did not answer in time."""


def program() -> str | None:
    """Find the browser's program; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """A running browser. `open` gives pages; close it when done."""

    def __init__(self, path: str, profile: str) -> None:
        down, up = os.pipe(), os.pipe()
        # dash knows descriptors of one digit only, so they are named by path.
        script = f'exec "$@" 3</proc/self/fd/{down[0]} 4>/proc/self/fd/{up[1]}'
        command = ["/bin/sh", "-c", script, "sh", path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        environment = {**os.environ, "HOME": profile, "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, pass_fds=(down[0], up[1]), stdin=quiet, stdout=quiet, stderr=quiet, env=environment
        )
        os.close(down[0])
        os.close(up[1])
        self._commands = os.fdopen(down[1], "wb", buffering=0)
        self._answers = os.fdopen(up[0], "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._news = threading.Condition()
        self._replies: dict[int, Mapping[str, Any]] = {}
        self._events: list[Mapping[str, Any]] = []
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()

    @classmethod
    @contextmanager
    def started(cls, path: str) -> Iterator[Browser]:
        """Start a browser with a profile of its own, and end it."""
        with tempfile.TemporaryDirectory(prefix="nf-chromium-", ignore_cleanup_errors=True) as profile:
            browser = cls(path, profile)
            try:
                yield browser
            finally:
                browser.close()

    def close(self) -> None:
        """End the browser."""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._commands.close()
        self._reader.join(10)
        self._answers.close()

    def call(self, method: str, parameters: Mapping[str, Any] | None = None, session: str | None = None) -> Any:
        """Send a command and return its result. Raises BrowserError."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": dict(parameters or {})}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        with self._news:
            if not self._news.wait_for(lambda: number in self._replies or self._ended, DEADLINE_SECONDS):
                raise BrowserError(f"{method} was not answered within {DEADLINE_SECONDS:g} s")
            reply = self._replies.pop(number, None)
        if reply is None:
            raise BrowserError(f"the browser ended during {method}")
        if "error" in reply:
            raise BrowserError(f"{method}: {reply['error']}")
        return reply["result"]

    def events(self, session: str) -> list[Mapping[str, Any]]:
        """List what a session was told so far."""
        with self._news:
            return [event for event in self._events if event.get("sessionId") == session]

    @contextmanager
    def opened(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Page]:
        """Open a page in a tab of its own, and close that."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        try:
            page.call("Page.navigate", {"url": url})
            yield page
        finally:
            self.call("Target.closeTarget", {"targetId": target})

    def _read(self) -> None:
        rest = b""
        while chunk := self._answers.read(1 << 16):
            *whole, rest = (rest + chunk).split(b"\0")
            with self._news:
                for text in whole:
                    message = json.loads(text)
                    if "id" in message:
                        self._replies[message["id"]] = message
                    else:
                        self._events.append(message)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, parameters: Mapping[str, Any] | None = None) -> Any:
        return self._browser.call(method, parameters, self._session)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, as JSON carries it. Raises BrowserError with what it threw."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until an expression is true. Raises BrowserError after a deadline."""

        def is_so() -> bool:
            try:
                return bool(self.evaluate(f"Boolean({expression})"))
            except BrowserError as error:
                if "context" in str(error):  # the page is being replaced by the next one
                    return False
                raise

        wait(is_so, expression, seconds)

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector finds."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        for key in keys:
            told = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            self.call("Input.dispatchKeyEvent", {"type": "rawKeyDown", **told})
            self.call("Input.dispatchKeyEvent", {"type": "keyUp", **told})

    def type(self, text: str) -> None:
        """Type text where the focus is."""
        self.call("Input.insertText", {"text": text})

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer onto an element, and press there if asked."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(() => {{const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]})()"
        )
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": box[0], "y": box[1]})
        if click:
            self.call("Input.dispatchMouseEvent", {"type": "mousePressed", **where})
            self.call("Input.dispatchMouseEvent", {"type": "mouseReleased", **where})

    def resize(self, width: int, height: int) -> None:
        """Give the page another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is shown as a PNG."""
        shot = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """List what was thrown, written to the console as a warning or worse, or refused by a policy."""
        found = []
        for event in self._browser.events(self._session):
            told = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(str(told["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                    found.append(str(told["args"]))
                case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                    found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """List all addresses that the page has asked for."""
        asked = (e for e in self._browser.events(self._session) if e["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    def responses(self) -> list[Mapping[str, Any]]:
        """List all answers that the page has got."""
        told = (e for e in self._browser.events(self._session) if e["method"] == "Network.responseReceived")
        return [event["params"]["response"] for event in told]


def wait(look: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Look until it is so. Raises BrowserError after the deadline."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise BrowserError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
