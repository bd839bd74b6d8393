"""Thirty jobs under a real Dagster, and a browser: both for all tests of this folder."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What plays jobs for other tests lies beside those.
for shared in ("tests/orchestration", "tests/state_runtime"):
    sys.path.insert(0, str(ROOT / shared))

from black_holes import black_hole  # noqa: E402
from house import House, write_house  # noqa: E402
from job_roots import FakeClock  # noqa: E402
from maintenance_root import Job as RealJob  # noqa: E402

from state_runtime.base.clock import SYSTEM_CLOCK  # noqa: E402
from state_runtime.base.steps import Step  # noqa: E402
from state_runtime.snapshot.manifest import TimeEntry  # noqa: E402
from state_runtime.store import open_store  # noqa: E402

from .site import Site  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHOTS = ROOT / ".browser"
"""Where pictures go that somebody looks at and forgets."""
PUBLISHED = Path(os.environ.get("STILLSTATE_PICTURES") or SHOTS)
"""Where those go that the documents show: `make pictures` names docs/images."""
WIDTH, HEIGHT, MENU = 1440, 1000, 240
DAY_MS = 86_400_000

NAMES = [
    "baggage",
    "boarding",
    "bookings",
    "cancellations",
    "carriers",
    "catering",
    "checkin",
    "claims",
    "connections",
    "crews",
    "delays",
    "departures",
    "fares",
    "fuel",
    "gates",
    "holds",
    "invoices",
    "legs",
    "lounges",
    "loyalty",
    "maintenance",
    "meals",
    "parking",
    "payments",
    "planes",
    "refunds",
    "seats",
    "slots",
    "vouchers",
    "weather",
]
HANGING, CRASHING, KILLED, RETAINED, MIGRATED = "baggage", "refunds", "boarding", "fares", "bookings"
DRAWN = "legs"
STEPS = (
    Step(kind="source", name="flights", rows=336_776),
    Step(kind="source", name="weather", rows=26_115),
    Step(kind="interval_join", name="with-weather", reads=(0, 1), keys=(("origin",), ("origin",)), rows=362_891, late_rows=12),
    Step(kind="deduplicate", name="plane-day", reads=(2,), keys=(("tailnum",),), rows=335_220, late_rows=0, state_rows=4_043),
    Step(kind="sink", name="legs", reads=(3,), rows=331_072),
    Step(kind="transform", name="delayed", reads=(2,)),
    Step(kind="aggregate", name="by-carrier", reads=(5,), keys=(("carrier", "origin"),), rows=128_432, late_rows=3, state_rows=35),
    Step(kind="sink", name="by <carrier>", reads=(6,), rows=128_432),
)  # fmt: skip
"""A pipeline with what a picture of one must show: two sources, a branch, sinks, and a name that is no HTML."""


def settings_of_the_house() -> dict[str, str]:
    quick = "heartbeat_timeout_s: 5, backoff_s: 1, first_checkpoint_s: 60"
    started = "launcher: {restarts: 0, start_timeout_s: 60}"
    return {
        CRASHING: f"{{parallelism: 4, options: {{behaviour: crashes}}, {started}, recovery: {{{quick}, max_attempts: 2}}}}",
        KILLED: f"{{options: {{behaviour: checkpoints, lives_s: 1800}}, {started}, recovery: {{{quick}}}}}",
        MIGRATED: f"{{parallelism: 2, options: {{behaviour: narrow, lives_s: 1800}}, {started}, recovery: {{{quick}}}}}",
        RETAINED: "{retention: {keep_last: 3, keep_tags: [release], deleted_share_max: 0.9}}",
    }


def clocks(now_ms: int) -> TimeEntry:
    """Of that pipeline: one source is behind the other, and so is what reads both."""
    seen_ms = {"flights.at": now_ms - 2_000, "weather.at": now_ms - 95_000}
    return TimeEntry(now_ms, now_ms - 155_000, seen_ms, clocks={"by-carrier": now_ms - 160_000})


class Rooms:
    """The house, its site, and the roots that tests look at."""

    def __init__(self, house: House, site: Site, retained: RealJob) -> None:
        self.house, self.site, self.retained = house, site, retained


@pytest.fixture(scope="session")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rooms]:
    with open_house(tmp_path_factory.mktemp("house")) as made:
        yield made


@contextmanager
def open_house(folder: Path) -> Iterator[Rooms]:
    """Thirty jobs: one starts and dies again and again, one is on a store that accepts and never answers, one has ten
    days of snapshots, one runs and can be killed, one runs and can be migrated; the others are well."""
    now_ms = SYSTEM_CLOCK.now_ms()
    with black_hole() as hole:
        house = write_house(
            folder,
            FakeClock(now_ms - 60_000),
            jobs=len(NAMES),
            hanging=1,
            refused=0,
            hole=hole,
            closed="",
            extra="observation: {interval_s: 5, timeout_s: 3}",
            defaults="recovery: {heartbeat_timeout_s: 3600}\ngarbage: {schedule: off}\n"
            "verification: {sample: off, full: off}",
            host="worker-3",
            names=NAMES,
            settings=settings_of_the_house(),
        )
        assert house.hanging == [HANGING]
        for n, root in enumerate(house.roots.values()):
            root.clock = FakeClock(now_ms - 1000 * (1 + 37 * n % 50))
            drawn = root.name == DRAWN
            root.checkpoint(rows=1000 + 613 * n % 5000, **({"time": clocks(root.clock.now_ms())} if drawn else {}))
            root.beat(steps=STEPS if drawn else ())
        retained = ten_days(folder, now_ms)
        RealJob(open_store(str(folder / "state")), FakeClock(now_ms - 120_000), name=MIGRATED).checkpoints(5).ended()
        site = Site(folder)
        try:
            site.start()
            for name in (CRASHING, KILLED, MIGRATED):
                site.launch(f"start_{name}")
            yield Rooms(house, site, retained)
        finally:
            site.close()


def ten_days(folder: Path, now_ms: int) -> RealJob:
    """A job that made a snapshot a day, with real segments, and stopped."""
    job = RealJob(open_store(str(folder / "state")), FakeClock(now_ms - 10 * DAY_MS), name=RETAINED)
    for _ in range(9):
        job.checkpoint(seconds=DAY_MS / 1000)
    return job.ended()


class Screen:
    """A window of the browser on Dagster's pages. Whatever is waited for has a deadline, and none is a sleep."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url

    def open(self, path: str) -> None:
        self.page.goto(f"{self.url}{path}")

    def see(self, text: str | re.Pattern[str], timeout_s: float = 120) -> None:
        """Wait until a text is on the page, and on no part of it that is hidden."""
        self.page.get_by_text(text).locator("visible=true").first.wait_for(timeout=timeout_s * 1000)

    def press(self, text: str, timeout_s: float = 120) -> None:
        """Press what has this text and no other."""
        self.page.get_by_text(text, exact=True).locator("visible=true").first.click(timeout=timeout_s * 1000)

    def open_event(self, asset: tuple[str, ...], at_ms: str) -> None:
        """The page of an asset's events, on the one of that moment."""
        self.open(f"/assets/{'/'.join(asset)}?view=events&time={at_ms}")

    def text(self) -> str:
        return self.page.inner_text("body")

    def bottom_of(self, text: str) -> int:
        """How far down the last line with exactly this text is, with some room below it."""
        box = self.page.get_by_text(text, exact=True).locator("visible=true").last.bounding_box()
        assert box is not None
        return int(box["y"] + box["height"] + 30)

    def shoot(self, name: str, *, folder: Path = SHOTS, down_to: str = "") -> None:
        """A picture of the window, without its menu, which says nothing of a job.

        Args:
            down_to: the last line that it shows; empty: as far as the window goes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        height = min(self.bottom_of(down_to), 2 * HEIGHT) if down_to else HEIGHT
        cut = {"x": MENU, "y": 0, "width": WIDTH - MENU, "height": height}
        self.page.screenshot(path=folder / f"{name}.png", clip=cut, animations="disabled")

    def publish(self, name: str, *, down_to: str) -> None:
        """A picture that the documents show."""
        self.shoot(name, folder=PUBLISHED, down_to=down_to)


@pytest.fixture(scope="session")
def browser_page() -> Iterator[Page]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("the package playwright is not installed: pip install '.[browser]'", pytrace=False)
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail("no Chromium on the path; on Debian: apt-get install chromium", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, timezone_id="UTC", locale="en-GB")
            yield page
        finally:
            browser.close()


@pytest.fixture
def screen(browser_page: Page, rooms: Rooms, request: pytest.FixtureRequest) -> Iterator[Screen]:
    """A window; of a test that fails a picture too."""
    made = Screen(browser_page, rooms.site.dagster.url)
    yield made
    if getattr(request.node, "failed", False):
        made.shoot(f"failed-{request.node.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.failed = report.failed  # type: ignore[attr-defined]
    return report
