"""A real browser for tests: headless Chromium, by the W3C WebDriver protocol of its own driver. Nothing beside them.

See https://www.w3.org/TR/webdriver2/ for the calls; the logs are Chromium's own (`goog:loggingPrefs`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from workspace import wait_until

_PORT = re.compile(r"started successfully on port (\d+)")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard
_CALL_S = 60
_SETTLE_S = 20
_PASSING = ("no such element", "stale element reference", "javascript error")  # while one page gives way to the next


def missing() -> str:
    """What is not installed here; empty when a browser can be started."""
    return " and ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


class BrowserError(AssertionError):
    """What the driver says went wrong; `code` is one of the standard's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Browser:
    """One window."""

    def __init__(self, session_url: str) -> None:
        self._session_url = session_url
        self._http = requests.Session()
        self._http.trust_env = False  # no proxy between us and our own driver
        self._requested: list[str] = []

    def _call(self, method: str, path: str, **body: Any) -> Any:
        # A GET has no body, a POST always has one.
        sent = json.dumps(body) if method == "POST" else None
        answer = self._http.request(method, f"{self._session_url}{path}", data=sent, timeout=_CALL_S)
        value = answer.json()["value"]
        if not answer.ok:
            raise BrowserError(value["error"], value["message"])
        return value

    def open(self, url: str) -> None:
        self._call("POST", "/url", url=url)

    def text(self) -> str:
        """What a person reads, as of now."""
        return str(_settled(lambda: self._call("GET", f"/element/{self._find('css selector', 'body')}/text")))

    def click(self, xpath: str) -> None:
        # The page exchanges its tables while it is looked at: what was found may be gone before it is clicked.
        _settled(lambda: self._call("POST", f"/element/{self._find('xpath', xpath)}/click"))

    def type(self, css: str, text: str) -> None:
        _settled(lambda: self._call("POST", f"/element/{self._find('css selector', css)}/value", text=text))

    def json_text(self) -> str:
        """The page, which is JSON, as it was sent; waits until such a page is the one that is shown."""
        script = (
            "if (document.contentType !== 'application/json') throw new Error('another page');"
            "return document.querySelector('pre').textContent"
        )
        return str(_settled(lambda: self.evaluate(script)))

    def evaluate(self, script: str, *args: Any) -> Any:
        """The value of a promise or an expression that `script` returns, in the page's own context."""
        return self._call("POST", "/execute/sync", script=script, args=list(args))

    def cells(self, table: str, run: str) -> list[str]:
        """The row of a run in the table of that id; empty when it has none."""
        script = (
            "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
            ".map(row => [...row.cells].map(cell => cell.innerText))"
        )
        return next((row for row in self.evaluate(script, table) if row[0] == run), [])

    def screenshot(self) -> str:
        """PNG, in base64."""
        return str(self._call("GET", "/screenshot"))

    def complaints(self) -> list[str]:
        """Errors and warnings that the console has shown since the last call; Chromium's advice is left out."""
        entries = self._call("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def hosts(self) -> set[str]:
        """Every host and port that this window's pages have asked anything of."""
        for entry in self._call("POST", "/se/log", type="performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                self._requested.append(event["params"]["request"]["url"])
        return {urlsplit(url).netloc for url in self._requested if urlsplit(url).scheme in ("http", "https", "ws")}

    def close(self) -> None:
        self._call("DELETE", "")

    def _find(self, using: str, value: str) -> str:
        return str(self._call("POST", "/element", using=using, value=value)[_ELEMENT])


def _settled(call: Callable[[], Any]) -> Any:
    """The answer, once the page has come to rest: a click may return before the page that it asked for is there."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            return call()
        except BrowserError as error:
            if error.code not in _PASSING or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class Driver:
    """A running chromedriver; `window` opens a browser of its own, with a profile of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._count = 0

    @contextlib.contextmanager
    def window(self, *, javascript: bool = True) -> Iterator[Browser]:
        self._count += 1
        arguments = [
            "--headless=new",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-dev-shm-usage",  # containers have 64 MB there
            "--disable-gpu",
            f"--user-data-dir={self._folder / f'profile-{self._count}'}",
        ]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium's sandbox refuses root
        chrome: dict[str, Any] = {"binary": shutil.which("chromium"), "args": arguments}
        if not javascript:
            chrome["prefs"] = {"profile.managed_default_content_settings.javascript": 2}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": chrome,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        with requests.Session() as http:
            http.trust_env = False
            answer = http.post(f"{self._url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=_CALL_S)
        value = answer.json()["value"]
        assert answer.ok, value["message"]
        browser = Browser(f"{self._url}/session/{value['sessionId']}")
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def driver(folder: Path) -> Iterator[Driver]:
    """A chromedriver on a port of its own. Its browsers end with the block."""
    log = folder / "chromedriver.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["chromedriver", "--port=0"],
            cwd=folder,
            env=os.environ | {"HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        wait_until(lambda: _PORT.search(log.read_text()) or process.poll() is not None, 60, "chromedriver listens")
        found = _PORT.search(log.read_text())
        assert found, log.read_text()
        yield Driver(f"http://127.0.0.1:{found[1]}", folder)
    finally:
        process.terminate()
        process.wait(20)
