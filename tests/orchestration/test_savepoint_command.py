"""`stillstate savepoint` and `savepoints`: with a driver that is played, and of a job that does not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_roots import FakeClock, JobRoot
from typer.testing import CliRunner, Result

from state_runtime.base.errors import InvalidConfiguration, JobNotFound, SavepointExists, Unavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.convert.into_savepoint import convert_small
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.copy.savepointer import Savepointer
from state_runtime.snapshot.control import ControlRequest, new_requests, request_savepoint
from state_runtime.snapshot.savepoint_record import (
    SavepointRecord,
    create_savepoint,
    read_savepoint,
    rewrite_savepoint,
)
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.cli import app
from stillstate.orchestration.running.make_savepoint import failed, savepoint_rows
from stillstate.orchestration.show.savepoints import savepoints_table


class Driver:
    """A run that looks at its requests when the one who waits looks away."""

    def __init__(self, root: JobRoot) -> None:
        self.root = root
        self.term = root.start("running")
        assert root.committer is not None
        self.committer = root.committer
        self.savepoints = Savepoints(
            root.catalog.root, self.committer.info, self.term, clock=root.clock, ids=SYSTEM_IDS
        )
        self.polls = 0
        self.plays = True
        self.seen: list[SavepointRecord] = []

    def runs(self) -> RunStatus | None:
        status = self.root.catalog.status()
        return status if status is not None and status.state == "running" else None

    def poll(self, _: float) -> None:
        self.polls += 1
        assert self.polls < 50, "somebody waits for ever"
        if not self.plays:
            return
        for request in new_requests(self.root.catalog.root, self.term, ()).values():
            assert request is not None
            self.savepoints.hear(request)
        ends = self.savepoints.begin(self.committer.last)
        self.savepoints.do_one()
        if ends:
            self.root.beat("stopped")

    def client(self) -> Savepointer:
        return Savepointer(
            self.root.catalog, self.runs, clock=self.root.clock, ids=SYSTEM_IDS, convert=convert_small,
            watch=self.seen.append, poll=self.poll,
        )  # fmt: skip


@pytest.fixture
def driver(flights: JobRoot) -> Driver:
    return Driver(flights)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_driver_writes_the_format_that_was_asked_for(driver: Driver) -> None:
    """And of a small state it does so itself; the request says it, and the record."""
    record = driver.client().make("one", format="canonical", independent=True)
    assert isinstance(record, SavepointRecord)
    assert (record.state, record.format, record.independent) == ("COMPLETED", "canonical", True)
    (row,) = savepoint_rows(driver.root.catalog, driver.root.clock)
    assert (row.format, row.shared_files) == ("canonical", 0)


def test_what_is_younger_than_the_format_is_not_written_while_it_says_what_was_always_so(driver: Driver) -> None:
    """So an earlier version reads every record but those that it could not make."""
    driver.client().make("plain")
    driver.client().make("other", format="canonical")
    root = driver.root.catalog.root
    assert b"format" not in root.read("savepoints/plain/savepoint.json", 10_000).partition(b"\n")[2]
    assert b'"format":"canonical"' in root.read("savepoints/other/savepoint.json", 10_000)


def test_savepoints_are_listed_among_the_snapshots_that_can_be_gone_back_to(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    """Only complete ones; the first column is what `rollback` and `--from-snapshot` take."""
    config = str(write_config())
    flights.start("stopped")
    root = flights.catalog.root
    work = SavepointWork(root, "h:1", flights.clock, SYSTEM_IDS)
    whole = savepoint_of_stopped(work, "whole")
    create_savepoint(root, replace(whole, name="failed", state="FAILED"))
    create_savepoint(root, replace(whole, name="gone"))
    rows = json.loads(call("snapshots", "--json", "-c", config).stdout)
    assert [(r["name"], r["snapshot_id"], r["kind"], r["format"]) for r in rows] == [
        ("whole", 1, "savepoint", "canonical"),
        ("gone", 1, "invalid", ""),
        ("@1", 1, "fencing", "canonical"),
    ]
    text = call("snapshots", "-c", config).stdout
    assert "savepoint" in text
    assert "@1" in text
    assert len(json.loads(call("snapshots", "-n", "1", "--json", "-c", config).stdout)) == 1
    shown = json.loads(call("rollback", "flights", "whole", "--dry-run", "--json", "-c", config).stdout)
    assert shown["snapshot_id"] == 1
    assert json.loads(call("rollback", "flights", "1", "--dry-run", "--json", "-c", config).stdout) == {
        **shown,
        "place": f"{root.url}@1",
    }


def test_a_running_job_is_asked_and_waited_for(driver: Driver) -> None:
    record = driver.client().make("one", tags=("release",), note="v2", trigger="upgrade")
    assert isinstance(record, SavepointRecord)
    assert (record.state, record.term, record.trigger, record.tags) == ("COMPLETED", 1, "upgrade", ("release",))
    assert driver.seen[-1] == record
    assert driver.runs() is not None, "the job goes on"


def test_a_job_that_stops_after_its_savepoint_is_waited_for_too(driver: Driver) -> None:
    record = driver.client().make("one", then="stop")
    assert isinstance(record, SavepointRecord)
    assert (record.state, record.then) == ("COMPLETED", "stop")
    assert driver.runs() is None


def test_without_waiting_the_request_is_all_there_is(driver: Driver) -> None:
    request = driver.client().make(wait=False)
    assert isinstance(request, ControlRequest)
    assert request.name.startswith("20231114t221320-"), "named after the time"
    (row,) = savepoint_rows(driver.root.catalog, driver.root.clock)
    assert (row.name, row.state, row.message) == (request.name, "REQUESTED", "the run has not answered yet")


def test_what_the_run_refuses_is_the_commands_error(driver: Driver) -> None:
    client = driver.client()
    client.make("one")
    with pytest.raises(InvalidConfiguration, match=r"refused: .*'one' already"):
        client.make("one")


def test_a_run_that_ends_without_answering_is_not_waited_for(driver: Driver) -> None:
    """And what was asked is void: the listing says so."""
    client = driver.client()
    driver.plays = False

    def dies(_: float) -> None:
        driver.root.beat("failed")

    client._poll = dies
    with pytest.raises(Unavailable, match="ended before it made savepoint 'one'"):
        client.make("one")
    (row,) = savepoint_rows(driver.root.catalog, driver.root.clock)
    assert (row.state, row.message) == ("ABANDONED", "the run that was asked (term 1) is over")


def test_whoever_waits_goes_on_when_the_owner_has_died(driver: Driver) -> None:
    """The driver was killed while it copied; the one who asked makes it."""
    root, clock = driver.root.catalog.root, driver.root.clock
    now_ms = clock.now_ms()
    record = SavepointRecord(
        "one", "u", "flights", "j", "IN_PROGRESS", "user", now_ms, "driver:1", now_ms, term=1, snapshot_id=1
    )  # fmt: skip
    create_savepoint(root, record)
    client = driver.client()
    client._poll = lambda seconds: clock.advance_s(25)
    made = client.wait_for("one")
    assert (made.state, made.number) == ("COMPLETED", 2)


def test_a_job_that_does_not_run_is_saved_by_the_command(write_config: Callable[..., Path], flights: JobRoot) -> None:
    config = str(write_config())
    flights.start("stopped")
    done = call("savepoint", "flights", "one", "--tag", "a", "--tag", "b", "--note", "why", "--json", "-c", config)
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["name"], shown["state"], shown["snapshot_id"], shown["tags"]) == ("one", "COMPLETED", 1, ["a", "b"])
    plain = call("savepoint", "flights", "two", "-c", config)
    assert plain.exit_code == 0
    assert "flights: savepoint two of snapshot 1: 0 objects" in plain.stdout
    rows = json.loads(call("savepoints", "flights", "--json", "-c", config).stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("two", "COMPLETED"), ("one", "COMPLETED")]
    assert rows[0]["place"].endswith("state/flights/savepoints/two")
    table = call("savepoints", "flights", "-c", config).stdout
    assert all(word in table for word in ("one", "COMPLETED", "a, b", "user", "why"))
    again = call("savepoint", "flights", "one", "-c", config)
    assert again.exit_code == 2
    assert "SavepointExists" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "--drain"], "only a driver can drain"),
        (["one", "--stop", "--drain"], "give one of"),
        (["--resume"], "takes the NAME"),
        (["one", "--resume", "--stop"], "and nothing else"),
        (["UP"], "savepoint name 'UP' must be 1 to"),
        (["one", "--tag", "no spaces"], "tag"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused(
    arguments: list[str], message: str, write_config: Callable[..., Path], flights: JobRoot
) -> None:
    flights.start("stopped")
    done = call("savepoint", "flights", *arguments, "-c", str(write_config()))
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert savepoint_rows(flights.catalog, flights.clock) == []


def test_a_job_that_never_ran_has_nothing_to_save(write_config: Callable[..., Path], flights: JobRoot) -> None:
    done = call("savepoint", "flights", "-c", str(write_config()))
    assert done.exit_code == 2
    assert "JobNotFound" in done.output
    with pytest.raises(JobNotFound):
        savepoint_rows(flights.catalog)


def test_a_failed_one_is_shown_with_its_reason_and_resumed_by_name(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    config = str(write_config())
    flights.start("stopped")
    root, now_ms = flights.catalog.root, flights.clock.now_ms()
    record = SavepointRecord(
        "one", "u", "flights", "j", "IN_PROGRESS", "user", now_ms, "h:1", now_ms, snapshot_id=1, attempts=2
    )  # fmt: skip
    create_savepoint(root, record)
    waits = rewrite_savepoint(root, record.failed_attempt(now_ms, "StoreUnavailable: busy", again=True))
    (row,) = savepoint_rows(flights.catalog, flights.clock)
    assert (row.state, row.attempts, row.next_attempt_s) == ("IN_PROGRESS", 2, 2.0)
    rewrite_savepoint(root, waits.failed_attempt(now_ms, "StoreRefused: no", again=False))
    table = call("savepoints", "-c", config).stdout
    assert "FAILED" in table
    assert "StoreRefused: no" in table
    done = call("savepoint", "flights", "one", "--resume", "-c", config)
    assert done.exit_code == 0, done.output
    assert read_savepoint(root, "one").state == "COMPLETED"


def test_a_record_that_cannot_be_read_is_a_row_of_its_own(write_config: Callable[..., Path], flights: JobRoot) -> None:
    """The others still show; a folder without a record belongs to nobody."""
    config = str(write_config())
    flights.start("stopped")
    for name in ("one", "two"):
        assert call("savepoint", "flights", name, "-c", config).exit_code == 0
    flights.catalog.root.put("savepoints/two/savepoint.json", b"{}")
    flights.catalog.root.put("savepoints/left-over/x", b"")
    flights.catalog.root.put("savepoints/NOT-OURS/x", b"")
    rows = json.loads(call("savepoints", "--json", "-c", config).stdout)
    assert {row["name"]: row["state"] for row in rows} == {"one": "COMPLETED", "two": "UNREADABLE"}
    assert "UNREADABLE" in call("savepoints", "-c", config).stdout


def test_one_that_is_not_complete_ends_the_command_with_an_error(clock: FakeClock) -> None:
    at_rest = SavepointRecord("one", "u", "f", "j", "FAILED", "user", 0, "h:1", 0, message="no space")
    error = failed(at_rest)
    assert isinstance(error, Unavailable)
    assert "no space" in str(error)
    assert failed(SavepointRecord("one", "u", "f", "j", "COMPLETED", "user", 0, "h:1", 0)) is None


def test_a_request_by_hand_and_its_record_are_one_row(driver: Driver) -> None:
    root = driver.root.catalog.root
    request_savepoint(root, driver.term, "one", clock=driver.root.clock, ids=SYSTEM_IDS)
    assert [r.name for r in savepoint_rows(driver.root.catalog, driver.root.clock)] == ["one"]
    driver.poll(0)
    (row,) = savepoint_rows(driver.root.catalog, driver.root.clock)
    assert row.state == "COMPLETED"
    assert savepoints_table("flights", [row]).row_count == 1
    with pytest.raises(SavepointExists):
        create_savepoint(root, SavepointRecord("one", "u", "f", "j", "REQUESTED", "user", 0, "h:1", 0))
