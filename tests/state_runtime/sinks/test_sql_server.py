"""A table in PostgreSQL gets each epoch once: after crashes of drivers and of the server, and from two drivers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sql_helpers import Crash, Database, staged
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from examples.servers.postgres import PostgresServer
from state_runtime.base import faults
from state_runtime.base.errors import MissingFile, StoreUnavailable
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks import sql_table
from state_runtime.sinks.sql import SqlSink
from stillstate.testing import check_sink

pytestmark = pytest.mark.servers
BOTH = pytest.mark.parametrize("merge_on", [None, ["k"]], ids=["append", "merge"])
ONE, TWO = {"k": "a", "n": 1}, {"k": "b", "n": 2}


@pytest.fixture
def server_of_its_own() -> Iterator[Callable[..., PostgresServer]]:
    """For tests of a server with other settings."""
    made: list[PostgresServer] = []

    def make(**settings: str) -> PostgresServer:
        made.append(PostgresServer(**settings))
        return made[-1]

    yield make
    for server in made:
        server.close()


def once(point: str, action: Callable[[], Any]) -> Callable[[str], None]:
    """Do something when the driver comes to a point for the first time."""
    left = [action]

    def reach(name: str) -> None:
        if name == point and left:
            left.pop()()

    return reach


def wait_until(holds: Callable[[], bool]) -> None:
    Retrying(retry=retry_if_result(lambda found: not found), stop=stop_after_delay(60), wait=wait_fixed(0.02))(holds)


@BOTH
def test_a_table_keeps_the_contract_of_sinks(database: Database, merge_on: Any) -> None:
    def rows() -> list[dict[str, Any]]:
        ((there,),) = database.execute("SELECT to_regclass('totals')")
        return database.rows() if there else []

    url = database.server.url(database.name)
    check_sink(lambda: SqlSink("totals", dsn=url, merge_on=merge_on), rows, str(database.root))


def test_the_contract_finds_a_sink_that_forgets_who_writes(database: Database) -> None:
    """A test that cannot fail protects nothing: one id for all roots, as the epoch alone would be."""

    class Forgets(SqlSink):
        def spec(self, job_name: str, job_uid: str, name: str, root: Any) -> SinkSpec:
            return super().spec(job_name, "0" * 32, name, root)

    database.execute("CREATE TABLE totals (k text, n bigint)")
    url = database.server.url(database.name)
    with pytest.raises(AssertionError, match="a root that was made anew has published nothing here"):
        check_sink(lambda: Forgets("totals", dsn=url), database.rows, str(database.root))


# --- crashes -------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("point", faults.SQL_KILL_POINTS)
def test_a_crash_anywhere_in_publishing_is_repaired_by_the_next_driver(
    database: Database, monkeypatch: pytest.MonkeyPatch, point: str, merge_on: Any
) -> None:
    """The next one publishes first what the snapshot names, whatever has become of it."""
    sink, spec = database.sink(merge_on=merge_on)
    output = staged(spec, 1, [ONE, TWO])

    def crash() -> None:
        raise Crash

    monkeypatch.setattr(faults, "reach", once(point, crash))
    with pytest.raises(Crash):
        sink.publish(spec, output, None)
    assert len(database.rows()) == (2 if point == "sql-committed" else 0), "an epoch is visible whole, or not at all"
    again, spec = database.sink(merge_on=merge_on)
    again.publish_again(spec, output, None)
    assert database.rows() == [ONE, TWO]


@BOTH
def test_a_server_that_dies_before_the_commit_and_comes_back_has_the_rows_once(
    database: Database, monkeypatch: pytest.MonkeyPatch, merge_on: Any
) -> None:
    """All was copied, and nothing of it is there any more. The driver does not end: it does it again."""
    sink, spec = database.sink(merge_on=merge_on)
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    monkeypatch.setattr(faults, "reach", once("sql-written", database.server.restart))
    sink.publish(spec, staged(spec, 2, [TWO]), None)
    assert database.rows() == [ONE, TWO]


@BOTH
def test_a_server_that_dies_with_the_answer_to_a_commit_has_the_rows_once(database: Database, merge_on: Any) -> None:
    """The commit is on the disk, and waits for a standby that never comes: so its answer is never sent. A driver that
    took the lost connection for a failure would write the rows a second time, as appended ones."""
    server = database.server
    sink, spec = database.sink(merge_on=merge_on, wait_s=0.5)
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    server.restart(synchronous_standby_names="nobody")
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(sink.publish, spec, staged(spec, 2, [TWO]), None)
        wait_until(lambda: bool(database.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")))
        server.restart()
        published.result(60)
    assert database.rows() == [ONE, TWO]
    assert sink.newest_published_epoch(spec) == 2


@BOTH
def test_a_server_that_dies_in_the_middle_of_a_commit_has_the_rows_once(database: Database, merge_on: Any) -> None:
    """The client has said COMMIT, and the server is still at what it does before: a deferred trigger, which sleeps."""
    server = database.server
    sink, spec = database.sink(merge_on=merge_on, wait_s=0.5)
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(600); RETURN NULL; END'"
    )
    database.execute(
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT OR UPDATE ON totals DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
        "EXECUTE FUNCTION slow()"
    )
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(sink.publish, spec, staged(spec, 2, [TWO]), None)
        asked = "SELECT 1 FROM pg_stat_activity WHERE query = 'COMMIT' AND wait_event = 'PgSleep'"
        wait_until(lambda: bool(database.execute(asked)))
        server.kill()
        server.start(session_replication_role="replica")  # no trigger fires
        published.result(60)
    server.restart()
    assert database.rows() == [ONE, TWO]


def test_an_epoch_that_a_server_has_confirmed_is_there_after_its_crash(
    server_of_its_own: Callable[..., PostgresServer], tmp_path: Path
) -> None:
    """`synchronous_commit=off` confirms what is not on the disk yet. The next checkpoint removes what is staged, so the
    sink does not take it from such a server."""
    server = server_of_its_own(synchronous_commit="off", wal_writer_delay="10s")
    database = Database(server, tmp_path, server.database())
    sink, spec = database.sink()
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    sink.publish(spec, staged(spec, 2, [TWO]), None)
    server.restart()
    assert database.rows() == [ONE, TWO]


def test_a_server_that_stays_away_ends_the_run_and_what_is_staged_comes_later(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, spec = database.sink()
    output, attempts = staged(spec, 1, [ONE]), []
    connect = psycopg.connect

    def counted(*given: Any, **named: Any) -> Any:
        attempts.append(1)
        return connect(*given, **named)

    monkeypatch.setattr(psycopg, "connect", counted)
    database.server.kill()
    try:
        sink._table._open.clear()
        with pytest.raises(
            StoreUnavailable, match=r"the table totals in 127.* took nothing: OperationalError \(.*refused.*\). Nothing"
        ):
            sink.publish(spec, output, None)
        assert len(attempts) == sql_table.ATTEMPTS_MAX
    finally:
        database.server.start()
    sink.publish_again(spec, output, None)
    assert database.rows() == [ONE]


# --- two drivers ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("place", ["rows", "epoch"])
def test_two_drivers_of_one_writer_wait_for_each_other(
    database: Database, monkeypatch: pytest.MonkeyPatch, merge_on: Any, place: str
) -> None:
    """Both have looked, and the database had the epoch of neither. The second one waits at the first one's row, whether
    that one is at its rows or has written its epoch."""
    sink, spec = database.sink(merge_on=merge_on)
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    other, _ = database.sink(merge_on=merge_on)
    output, go_on, is_in = staged(spec, 2, [TWO]), threading.Event(), threading.Event()

    def hold() -> None:
        is_in.set()
        assert go_on.wait(60)

    reach, put = once(place, hold), sql_table._put
    monkeypatch.setattr(faults, "reach", lambda point: reach("epoch") if point == "sql-written" else None)
    monkeypatch.setattr(sql_table, "_put", lambda *given: (reach("rows"), put(*given)))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sink.publish, spec, output, None)
        assert is_in.wait(60)
        second = pool.submit(other.publish, spec, output, None)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: second.done() or bool(database.execute(waiting)))
        go_on.set()
        first.result(60), second.result(60)
    assert database.rows() == [ONE, TWO]


def test_a_driver_that_sleeps_in_its_transaction_does_not_hold_up_the_next_one(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends its session; when it wakes up it finds the epoch written."""
    monkeypatch.setattr(sql_table, "_SETTINGS", tuple(s.replace("60s", "100ms") for s in sql_table._SETTINGS))
    sink, spec = database.sink()
    other, _ = database.sink(wait_s=0.2)
    output = staged(spec, 1, [ONE])
    monkeypatch.setattr(faults, "reach", once("sql-written", lambda: other.publish(spec, output, None)))
    sink.publish(spec, output, None)
    assert database.rows() == [ONE]


def test_two_drivers_that_both_make_the_table_make_one(database: Database) -> None:
    """Two jobs that start at once. `IF NOT EXISTS` alone fails for the second one."""
    with ThreadPoolExecutor(8) as pool:
        sinks = [database.sink(uid=f"{number:032d}", merge_on=["k"]) for number in range(8)]
        epochs = [
            pool.submit(sink.publish, spec, staged(spec, 1, [{"k": f"k{number}", "n": number}]), None)
            for number, (sink, spec) in enumerate(sinks)
        ]
        for epoch in epochs:
            epoch.result(60)
    assert len(database.rows()) == 8


@pytest.mark.parametrize("isolation", ["read uncommitted", "repeatable read", "serializable"])
def test_the_servers_own_isolation_does_not_matter(database: Database, isolation: str) -> None:
    """What is read behind a lock must be the newest, and in higher levels it is what was there at the beginning."""
    database.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = '{isolation}'")
    database.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    sink, spec = database.sink()
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    assert database.rows() == [ONE]


# --- what passes by itself -----------------------------------------------------------------------------------------


def test_a_session_that_the_server_ends_costs_an_attempt_and_no_row(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, spec = database.sink()
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'stillstate'"
    monkeypatch.setattr(faults, "reach", once("sql-written", lambda: database.execute(ended)))
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    assert database.rows() == [ONE]


@pytest.mark.parametrize("code", ["40001", "40P01", "57P03", "53300"])
def test_what_the_server_says_to_try_again_is_tried_again(
    database: Database, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Serialization failures, deadlocks, a server that starts or is full."""
    sink, spec = database.sink()

    def fail() -> None:
        raise psycopg.errors.lookup(code)("now and then")

    monkeypatch.setattr(faults, "reach", once("sql-written", fail))
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    assert database.rows() == [ONE]


def test_a_table_that_somebody_has_locked_is_not_waited_for_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_table, "ATTEMPTS_MAX", 2)
    monkeypatch.setattr(sql_table, "_SETTINGS", tuple(s.replace("5s", "50ms") for s in sql_table._SETTINGS))
    sink, spec = database.sink()
    sink.publish(spec, staged(spec, 1, [ONE]), None)
    output = staged(spec, 2, [TWO])
    with psycopg.connect(database.server.dsn(database.name)) as other:
        other.execute("LOCK TABLE totals")
        with pytest.raises(StoreUnavailable, match="took nothing: LockNotAvailable"):
            sink.publish(spec, output, None)
    sink.publish(spec, output, None)
    assert database.rows() == [ONE, TWO]


# --- what is staged, and what is known -------------------------------------------------------------------------------


@BOTH
def test_a_staged_file_that_was_lost_is_named_and_nothing_of_its_epoch_is_there(
    database: Database, merge_on: Any
) -> None:
    """The first file is there, and was copied already."""
    sink, spec = database.sink(merge_on=merge_on)
    output = staged(spec, 5, [ONE], [TWO])
    (database.root / output.files[1].staged).unlink()
    with pytest.raises(MissingFile, match="does not have epoch 5"):
        sink.publish(spec, output, None)
    assert database.rows() == []


def test_staged_files_of_an_epoch_that_is_in_are_not_needed(database: Database) -> None:
    sink, spec = database.sink()
    output = staged(spec, 1, [ONE])
    sink.publish(spec, output, None)
    sink.settle(spec, output)
    assert not list(database.root.rglob("*.parquet"))
    again, spec = database.sink()
    again.publish_again(spec, output, None)
    assert database.rows() == [ONE]


def test_the_newest_epoch_is_the_databases_word(database: Database) -> None:
    """A root that was put back from a backup goes on above it."""
    sink, spec = database.sink()
    assert sink.newest_published_epoch(spec) == 0
    sink.publish(spec, staged(spec, 41, [ONE]), None)
    fresh, spec = database.sink()
    assert fresh.newest_published_epoch(spec) == 41
    other, spec = database.sink(uid="fedcba9876543210" * 2)
    assert other.newest_published_epoch(spec) == 0


def test_output_of_a_root_that_was_claimed_counts_under_the_id_of_the_one_that_staged_it(database: Database) -> None:
    """Its first driver may have published it already."""
    first, spec = database.sink()
    output = staged(spec, 5, [ONE])
    first.publish(spec, output, None)
    claimed, spec_of_claimed = database.sink(uid="fedcba9876543210" * 2)
    claimed.publish_again(spec_of_claimed, output, None)
    assert database.rows() == [ONE]
    claimed.publish(spec_of_claimed, staged(spec_of_claimed, 6, [TWO]), None)
    assert database.rows() == [ONE, TWO]
