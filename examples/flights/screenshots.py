"""Pictures of Dagster's pages, taken with Chromium without a window. Nothing else in the example needs a browser.

The browser is driven through its debugging protocol, since the plots of an asset appear only after a click.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from examples.flights.stack import JOB
from examples.servers.dagster import CODE_LOCATION, Dagster, wait_for

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_WIDTH, _HEIGHT = 1600, 1000
_START_S: Final = 30.0
_PAGE_S: Final = 40.0
_ANSWER_S: Final = 20.0
_ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
_SETTLE_S: Final = 1.5  # plots and the graph move into place


class BrowserMissing(FileNotFoundError):
    """No Chromium on the path. Install it (on Debian: ``apt-get install chromium``), or leave out ``--screenshots``."""


@dataclass(frozen=True)
class Page:
    """One picture.

    Attributes:
        name: of the file.
        path: below Dagster's address.
        ready: JavaScript that is true once the page shows its data.
        click: text of a button to press then; "" for none.
        shown: JavaScript that is true once that has had its effect.
        width: of the picture, from the left; what is right of it says nothing about the page's subject.
    """

    name: str
    path: str
    ready: str
    click: str = ""
    shown: str = "true"
    width: int = _WIDTH


PAGES: Final = (
    Page(
        "asset-graph",
        f"/locations/{CODE_LOCATION}/asset-groups/{JOB}/lineage",
        ready="document.body.innerText.includes('checkpoints') && document.body.innerText.includes('Materialized')",
    ),
    Page(
        "checkpoint-plots",
        f"/assets/{JOB}/checkpoints?view=overview",
        ready="[...document.querySelectorAll('button')].some(b => b.innerText.trim() === 'Plots')",
        click="Plots",
        shown="document.querySelectorAll('canvas').length >= 4",
        width=1190,  # without the sidebar, which has the path of the store on this machine
    ),
    Page(
        "materialization-plots",
        f"/assets/{JOB}/materialized_state?view=overview",
        ready="[...document.querySelectorAll('button')].some(b => b.innerText.trim() === 'Plots')",
        click="Plots",
        shown="document.querySelectorAll('canvas').length >= 4",
        width=1190,
    ),
    Page("runs", "/runs", ready=f"document.body.innerText.includes('start_{JOB}')"),
)


def take_screenshots(dagster: Dagster, folder: Path) -> list[Path]:
    """Take a picture of every page in ``PAGES``; return the files.

    Args:
        dagster: The running web server.
        folder: Where the pictures go; made if it is not there.

    Raises:
        BrowserMissing: There is no browser to take them with.
        WaitedTooLong: A page did not show its data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dagster.query("mutation { setNuxSeen }")  # otherwise the first visit is greeted by a dialogue over the page
    with _browser() as browser:
        return [_take(browser, dagster.url, page, folder) for page in PAGES]


class _Browser:
    """One page of a running browser."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._ids = count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol and return its result."""
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:  # events arrive between the answers; each `recv` is bounded
            answer = json.loads(self._connection.recv(timeout=_ANSWER_S))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"the browser refused {method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; None if it fails, for a page that is not there yet."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@contextmanager
def _browser() -> Iterator[_Browser]:
    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        raise BrowserMissing(
            "screenshots need Chromium and it is not on the path; install it (on Debian: apt-get install chromium), "
            "or leave out --screenshots"
        )
    # A dependency of Dagster's web server; imported here, so that nothing else needs it.
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                path,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={_WIDTH},{_HEIGHT}",
                "--remote-debugging-port=0",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_page_address(Path(profile)), max_size=_ANSWER_BYTES_MAX, proxy=None) as connection:
                yield _Browser(connection)
        finally:
            process.kill()
            process.wait(_ANSWER_S)


def _page_address(profile: Path) -> str:
    chosen = profile / "DevToolsActivePort"  # the browser writes its port here when it listens
    wait_for("Chromium to start", lambda: chosen.exists() and chosen.read_text().count("\n") >= 1, _START_S)
    port = int(chosen.read_text().split("\n")[0])
    local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with local.open(f"http://127.0.0.1:{port}/json/list", timeout=_ANSWER_S) as answer:
        targets = json.loads(answer.read())
    return str(next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page"))


def _take(browser: _Browser, url: str, page: Page, folder: Path) -> Path:
    # In a headless window of this size the page itself would be smaller.
    browser.call("Emulation.setDeviceMetricsOverride", width=_WIDTH, height=_HEIGHT, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=f"{url}{page.path}")
    wait_for(f"the page {page.path} to show its data", lambda: browser.evaluate(page.ready), _PAGE_S)
    if page.click:
        button = f"[...document.querySelectorAll('button')].find(b => b.innerText.trim() === '{page.click}')"
        browser.evaluate(f"{button}.click()")
        wait_for(f"the page {page.path} after a click on {page.click}", lambda: browser.evaluate(page.shown), _PAGE_S)
        browser.evaluate(f"{button}.scrollIntoView()")
    threading.Event().wait(_SETTLE_S)
    path = folder / f"{page.name}.png"
    clip = {"x": 0, "y": 0, "width": page.width, "height": _HEIGHT, "scale": 1}
    picture = browser.call("Page.captureScreenshot", format="png", clip=clip)
    path.write_bytes(base64.b64decode(picture["data"]))
    return path
