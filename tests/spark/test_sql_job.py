"""Jobs that write tables in PostgreSQL: exact over restarts, other shards, new roots, roots that were put back, and a
server that dies in their middle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from examples.servers.postgres import PostgresServer
from state_runtime.base import faults
from state_runtime.base.errors import InvalidPipeline, SnapshotInUse, StoreUnavailable
from state_runtime.driver import run as driver_run
from state_runtime.sinks import sql_table

from .jobs import DATABASE_ENV, ROWS_PER_FILE, assert_sql_equals_batch, sql_sinks, two_step_job, write_input

pytestmark = [pytest.mark.spark, pytest.mark.servers]
AVAILABLE = {"availableNow": True}


@pytest.fixture
def database(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    name = postgres_server.database()
    monkeypatch.setenv(DATABASE_ENV, postgres_server.url(name))
    return name


def run(spark: SparkSession, root: Path, **changes: Any) -> None:
    two_step_job(root, sinks=sql_sinks(), **changes).run(spark, trigger=AVAILABLE)


def test_sql_tables_are_exact_over_restarts_and_other_shards(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str
) -> None:
    """One table is appended to, the other has the newest row of each key."""
    for first, files, parallelism in ((0, 3, 2), (3, 2, 3)):
        write_input(tmp_path / "in", first, files)
        run(spark, tmp_path, parallelism=parallelism)
        assert_sql_equals_batch(spark, tmp_path, postgres_server, database)
    staged = list((tmp_path / "store").rglob("outputs/**/*.parquet"))
    assert 0 < len(staged) <= 2 * 3, "what is staged is kept for one more checkpoint at most"
    written = postgres_server.execute("SELECT table_name, epoch FROM stillstate_epochs ORDER BY 1", database)
    assert [name for name, _ in written] == ["buckets", "steps"]


def test_a_server_that_dies_in_the_middle_of_an_epoch_does_not_end_the_run(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the rows and their commit, and behind it; of three epochs with two tables."""
    write_input(tmp_path / "in", 0, 3)
    passed: list[str] = []
    restarts = {("sql-written", 2), ("sql-committed", 3), ("sql-written", 6)}

    def reach(point: str) -> None:
        passed.append(point)
        if (point, passed.count(point)) in restarts:
            postgres_server.restart()

    monkeypatch.setattr(faults, "reach", reach)
    run(spark, tmp_path)
    monkeypatch.undo()
    assert passed.count("sql-written") == 3 * 2 + 2, "two transactions were made twice"
    assert_sql_equals_batch(spark, tmp_path, postgres_server, database)


def test_a_server_that_stays_away_ends_the_run_and_the_next_start_writes_what_is_staged(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4: whoever looks after the job starts it again."""
    write_input(tmp_path / "in", 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(sql_table, "ATTEMPTS_MAX", 2)
        patch.setattr(driver_run, "_STOP_TIMEOUT_S", 1.0)
        patch.setattr(faults, "reach", lambda point: postgres_server.kill() if point == "sql-written" else None)
        with pytest.raises(StoreUnavailable, match="took nothing") as told:
            run(spark, tmp_path)
    assert told.value.exit_code == 4
    postgres_server.start()
    run(spark, tmp_path)
    assert_sql_equals_batch(spark, tmp_path, postgres_server, database)


def test_a_server_that_is_away_holds_up_no_epoch_and_gets_all_rows_when_it_is_back(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away from the second epoch to the fifth one's checkpoint."""
    write_input(tmp_path / "in", 0, 6)
    passed: list[str] = []

    def reach(point: str) -> None:
        passed.append(point)
        if (point, passed.count(point)) == ("sql-written", 3):
            postgres_server.kill()
        if (point, passed.count(point)) == ("manifest-written", 5):
            assert passed.count("sql-committed") <= 3, "four more checkpoints, and no more than one table of the second"
            postgres_server.start()

    monkeypatch.setattr(faults, "reach", reach)
    run(spark, tmp_path)
    monkeypatch.undo()
    assert "waiting-output-published" in passed
    assert_sql_equals_batch(spark, tmp_path, postgres_server, database)


def test_a_root_that_is_made_anew_is_not_taken_for_the_old_one(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str
) -> None:
    """Its epochs count from 1 again: by the epoch alone the database would skip them."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, tmp_path)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "local")
    run(spark, tmp_path)
    ((rows,),) = postgres_server.execute("SELECT count(*) FROM steps", database)
    assert rows == 2 * 3 * ROWS_PER_FILE, "it has read all of its input, and its rows come"


def test_a_root_that_was_put_back_from_an_older_copy_goes_on_above_what_the_database_has(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str
) -> None:
    """Its snapshots know less than the database. What it reads again comes again, and what is new is not skipped."""
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    write_input(tmp_path / "in", 1, 2)
    run(spark, tmp_path)
    for name in ("store", "local"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "copy").rename(tmp_path / "store")
    write_input(tmp_path / "in", 3, 1)
    run(spark, tmp_path)
    rows = [number for (number,) in postgres_server.execute("SELECT id FROM steps", database)]
    assert set(rows) == set(range(4 * ROWS_PER_FILE))
    assert len(rows) == 6 * ROWS_PER_FILE


def test_a_copy_of_a_root_is_refused_while_the_original_is_there(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str
) -> None:
    """Both have one id and count their epochs alike: what the one has written, the other would take for its own."""
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    write_input(tmp_path / "in", 1, 1)
    copied = {"store": str(tmp_path / "copy"), "local_dir": str(tmp_path / "local-of-copy")}
    with pytest.raises(SnapshotInUse, match=r"in steps in 127.*belongs to the job root .*store/steps"):
        run(spark, tmp_path, **copied)
    run(spark, tmp_path)
    assert_sql_equals_batch(spark, tmp_path, postgres_server, database)
    shutil.rmtree(tmp_path / "store")
    write_input(tmp_path / "in", 2, 1)
    run(spark, tmp_path, **copied)


def test_a_table_that_does_not_fit_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer, database: str
) -> None:
    write_input(tmp_path / "in", 0, 1)
    postgres_server.execute("CREATE TABLE steps (id text)", database)
    with pytest.raises(InvalidPipeline, match="column id is text there"):
        run(spark, tmp_path, name="other")
    assert not (tmp_path / "store" / "other").exists()
