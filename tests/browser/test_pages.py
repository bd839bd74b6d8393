"""What an operator of thirty jobs sees: each test opens real pages and keeps a picture of what it saw."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from examples.servers.dagster import wait_for
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store

from .conftest import CRASHING, DRAWN, HANGING, KILLED, MIGRATED, NAMES, PUBLISHED, RETAINED, WIDTH, Rooms, Screen

pytestmark = pytest.mark.browser

OVERVIEW = ("stillstate", "overview")
LONG_S = 300
"""For what takes several of Dagster's runs, on a machine that has other work."""


def status_of(rooms: Rooms, job: str) -> RunStatus | None:
    return Catalog(open_store(str(rooms.site.folder / "state")), job).status()


def is_red(rooms: Rooms, job: str) -> dict[str, Any] | None:
    """The check `driver_alive`, once somebody must look."""
    found = rooms.site.check((job, "stream"), "driver_alive")
    return found if found is not None and not found["success"] and found["severity"] == "ERROR" else None


def test_a_crash_loop_ends_as_a_red_check_with_its_reason_and_the_end_of_the_log(rooms: Rooms, screen: Screen) -> None:
    """Started by the fixture: it dies as soon as it runs, is brought back twice, and given up."""
    red = wait_for("the check of a job that was given up", lambda: is_red(rooms, CRASHING), LONG_S)
    assert "gave up after 2 recovery attempts without a new checkpoint" in red["description"]
    screen.open(f"/assets/{CRASHING}/stream?view=checks")
    screen.see("log_last_line")
    for said in ("no room for 4 shards", "gave up after 2 recovery attempts", "last_recovery_run"):
        assert said in screen.text()
    screen.publish("driver-alive-red", down_to="verdict")
    screen.press("[Show Markdown]")
    screen.see(re.compile(r"shards to restore"))
    screen.shoot("driver-alive-log")


def test_a_recovery_says_from_where_and_how_long_it_took_to_the_first_checkpoint(rooms: Rooms, screen: Screen) -> None:
    stream = (KILLED, "stream")
    before = wait_for(
        "a driver with a checkpoint",
        lambda: status if (status := status_of(rooms, KILLED)) and status.state == "running" else None,
        LONG_S,
    )
    os.kill(before.pid, signal.SIGKILL)
    event = wait_for("its recovery", lambda: rooms.site.observation(stream, "goes on from snapshot"), LONG_S)
    assert rooms.site.ended(event["runId"], LONG_S) == "SUCCESS"
    after = status_of(rooms, KILLED)
    assert after is not None
    assert after.term > before.term
    screen.open_event(stream, event["timestamp"])
    for name in ("restored_from", "first_checkpoint_after_s", "down_s", "reason"):
        screen.see(name)
    assert f"term {before.term} (process {before.pid}" in screen.text()
    screen.publish("recovery-event", down_to="first_checkpoint")
    screen.open(f"/runs/{event['runId']}")
    screen.see("first_checkpoint_after_s")
    screen.shoot("recovery-run")


def test_a_retention_plan_is_a_table_with_its_digest_and_is_what_was_deleted(rooms: Rooms, screen: Screen) -> None:
    run = rooms.site.launch(f"retain_{RETAINED}")
    assert rooms.site.ended(run, LONG_S) == "SUCCESS"
    assert len(rooms.retained.catalog.snapshot_ids()) == 3
    screen.open(f"/assets/{RETAINED}/retained_snapshots?view=events")
    screen.see("plan_digest")
    said = screen.text()
    assert said.count("no rule keeps it") == 7
    assert "last 1 of 3" in said
    digest = re.search(r"\b[0-9a-f]{64}\b", said)
    assert digest is not None
    screen.publish("retention-plan", down_to="deleted_share")
    screen.open(f"/assets/{RETAINED}/deleted_snapshots?view=events")
    screen.see(digest[0])


def test_a_migration_that_is_taken_back_shows_its_plan_its_steps_and_why(rooms: Rooms, screen: Screen) -> None:
    stream = (MIGRATED, "stream")
    wait_for(
        "a driver",
        lambda: (status := status_of(rooms, MIGRATED)) is not None and status.state == "running",
        LONG_S,
    )
    ops = {f"migrate_{MIGRATED}_driver": {"config": {"parallelism": 4, "timeout_s": 60}}}
    run = rooms.site.launch(f"migrate_{MIGRATED}", {"ops": ops})
    assert rooms.site.ended(run, LONG_S) == "FAILURE"
    event = rooms.site.observation(stream, "rolled-back")
    assert event is not None
    screen.open_event(stream, event["timestamp"])
    for step in ("save", "verify", "start", "stop-new", "restore", "start-old", "rolled-back"):
        screen.see(re.compile(rf"^{step}$"))
    screen.see(re.compile(r"ended with exit code 1 before it ran"))
    screen.see("MemoryError: no room for 4 shards")
    screen.publish("migration-steps", down_to="log_last_line")
    screen.open(f"/runs/{run}")
    screen.see(re.compile(r"runs again with parallelism 2"))
    screen.shoot("migration-run")
    after = status_of(rooms, MIGRATED)
    assert after is not None
    assert (after.state, after.parallelism) == ("running", 2)


def test_a_savepoint_says_whose_bytes_it_shares_and_how_to_go_back_to_it(rooms: Rooms, screen: Screen) -> None:
    run = rooms.site.launch(f"savepoint_{RETAINED}")
    assert rooms.site.ended(run, LONG_S) == "SUCCESS"
    screen.open(f"/assets/{RETAINED}/savepoints?view=events")
    screen.see(re.compile(f"stillstate rollback {RETAINED} "))
    assert re.search(r"\d+ shared with the job", screen.text()), "on a local store a savepoint is a hard link"
    screen.shoot("savepoints", down_to="complete")


@pytest.mark.parametrize("theme", ["Dark", "Light"])
def test_a_click_shows_the_picture_of_a_pipeline(rooms: Rooms, screen: Screen, theme: str) -> None:
    """Dagster passes over images that it does not trust, and shows a broken one as nothing."""
    wait_for("an event", lambda: rooms.site.numbers((DRAWN, "checkpoints")), LONG_S)
    screen.open(f"/assets/{DRAWN}/checkpoints?view=events")
    screen.page.evaluate("theme => localStorage.setItem('dagster-theme', JSON.stringify(theme))", theme)
    screen.open(f"/assets/{DRAWN}/checkpoints?view=events")
    screen.see("pipeline")
    screen.press("[Show Markdown]")
    image = screen.page.locator("img[src^='data:image/svg']")
    image.wait_for(timeout=LONG_S * 1000)
    assert image.evaluate("i => i.decode().then(() => i.naturalWidth == i.width && i.naturalHeight == i.height)")
    screen.shoot(f"pipeline-{theme.lower()}")
    if theme == "Light":
        image.screenshot(path=PUBLISHED / "pipeline.png", animations="disabled")
    screen.page.evaluate("localStorage.removeItem('dagster-theme')")


def test_the_overview_names_who_is_ill_and_a_hanging_store_hides_nobody(rooms: Rooms, screen: Screen) -> None:
    """One of thirty is down, one is on a store that accepts and never answers: the other 28 are seen."""
    assert wait_for("a red check", lambda: is_red(rooms, CRASHING), LONG_S)
    site = rooms.site
    wait_for(
        "28 of 30 well", lambda: (n := site.numbers(OVERVIEW)).get("jobs_well") == 28 and n["jobs_ill"] == 2, LONG_S
    )
    for name in rooms.house.healthy:
        assert site.numbers((name, "checkpoints"))["interval_input_rows"] > 0, f"{name} is published"
    screen.page.set_viewport_size({"width": WIDTH, "height": 1800})
    screen.open("/assets/stillstate/overview?view=events")
    screen.see("jobs_well")
    said = screen.text()
    assert all(name in said for name in NAMES)
    everybody = said[said.index("savepoint") :]
    assert everybody.index(HANGING) < everybody.index(CRASHING) < everybody.index(KILLED), (
        "those that are ill come first"
    )
    screen.publish("overview", down_to="connections")
    screen.open("/assets/stillstate/overview")
    screen.see("jobs_well")
    screen.shoot("overview-tab")
