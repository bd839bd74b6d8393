"""The comparison with Flink, as far as it needs no Flink: what its answers mean, statements, events, ratios, restarts."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks import nexmark_data
from benchmarks.flink import __main__ as command
from benchmarks.flink import answers, events, restart, throughput
from benchmarks.flink.cluster import configuration
from benchmarks.flink.distribution import FlinkMissing, found_distribution, memory_of
from benchmarks.flink.queries import QUERIES, SETTINGS, tables
from benchmarks.flink.rest import Checkpoints, FlinkFailed, checkpoints_of, folded, job_state
from benchmarks.flink.throughput import FlinkRun, rate_per_s

# --- answers of Flink's REST interfaces -----------------------------------------------------------------------------


def test_a_job_runs_once_its_last_task_does() -> None:
    """Its runtime is from there to the end; a job that waits for slots has none."""
    vertices = [{"start-time": 1_000}, {"start-time": 3_000}]
    state = job_state({"state": "FINISHED", "end-time": 10_500, "vertices": vertices})
    assert state.ended
    assert state.runtime_s == 7.5
    waiting = job_state({"state": "RUNNING", "end-time": -1, "vertices": [{"start-time": 1_000}, {"start-time": -1}]})
    assert (waiting.running_ms, waiting.ended_ms, waiting.ended) == (0, 0, False)


def _checkpoint(number: int, end_ms: int, status: str = "COMPLETED", *, savepoint: bool = False) -> dict[str, Any]:
    return {
        "id": number,
        "status": status,
        "is_savepoint": savepoint,
        "latest_ack_timestamp": end_ms,
        "end_to_end_duration": 40 + number,
    }


def _checkpoints(restored_ms: int = 0) -> Checkpoints:
    history = [
        _checkpoint(9, 9_000, "IN_PROGRESS"),
        _checkpoint(8, 8_000),
        _checkpoint(7, 7_000, "FAILED"),
        _checkpoint(6, 6_000, savepoint=True),
        _checkpoint(5, 5_000),
    ]
    latest = {
        "completed": {"id": 8, "latest_ack_timestamp": 8_000, "external_path": "file:/cp/chk-8"},
        "restored": {"restore_timestamp": restored_ms} if restored_ms else None,
    }
    return checkpoints_of({"counts": {"completed": 4}, "latest": latest, "history": history})


def test_only_completed_checkpoints_count() -> None:
    found = _checkpoints()
    assert found.by_end == ((5, 5_000), (8, 8_000))
    assert found.durations_ms == (48.0, 45.0)
    assert (found.completed, found.newest_id, found.newest_end_ms, found.path) == (4, 8, 8_000, "file:/cp/chk-8")


def test_a_job_without_checkpoints_has_none() -> None:
    found = checkpoints_of({"counts": {"completed": 0}, "latest": {"completed": None}, "history": []})
    assert (found.newest_id, found.restored_ms, found.first_after(0)) == (0, 0, 0)


def test_a_changelog_leaves_the_rows_that_were_not_taken_back() -> None:
    changes = [
        ("INSERT", ("1", "1")),
        ("UPDATE_BEFORE", ("1", "1")),
        ("UPDATE_AFTER", ("1", "2")),
        ("INSERT", ("2", "1")),
        ("DELETE", ("2", "1")),
    ]
    assert folded(changes) == {("1", "2"): 1}
    with pytest.raises(FlinkFailed, match="takes a row back"):
        folded([("DELETE", ("1",))])


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_memory_is_what_flinks_calculator_prints() -> None:
    printed = "INFO\nBASH_JAVA_UTILS_EXEC_RESULT:-Xmx1g -Xms1g\nBASH_JAVA_UTILS_EXEC_RESULT:-D a=1 -D b=2\n"
    assert memory_of(printed) == (["-Xmx1g", "-Xms1g"], ["-D", "a=1", "-D", "b=2"])
    with pytest.raises(FlinkMissing, match="not two"):
        memory_of("something else")


def test_every_address_is_loopback_and_settings_win(tmp_path: Path) -> None:
    text = configuration({"rpc": 1, "rest": 2, "gateway": 3}, tmp_path, {"taskmanager.numberOfTaskSlots": "7"})
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert {value for key, value in lines.items() if key.endswith(("host", "address"))} == {"127.0.0.1"}
    assert lines["taskmanager.numberOfTaskSlots"] == "7"
    assert (lines["jobmanager.rpc.port"], lines["rest.port"]) == ("1", "2")


def test_without_flink_the_message_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlinkMissing, match="make bench-flink"):
        found_distribution(tmp_path)

    def missing() -> None:
        raise FlinkMissing("`make bench-flink` puts it there")

    monkeypatch.setattr(command, "found_distribution", missing)
    done = CliRunner().invoke(command.app, ["--only", "q5"])
    assert done.exit_code == 2
    assert "`make bench-flink` puts it there" in done.output


# --- events and answers ---------------------------------------------------------------------------------------------


def test_both_engines_read_the_same_events(tmp_path: Path) -> None:
    """One file a batch for ours, one a reader for Flink: the same rows, and each of Flink's files is in the order of time."""
    files = events.write_flat(tmp_path / "in", 2, 1_000, then=(9,))
    events.write_streams(files, tmp_path / "streams")
    streams = [pq.read_table(path) for path in sorted((tmp_path / "streams").iterdir())]
    assert len(streams) == events.READERS
    rows = [Counter(map(tuple, (row.values() for row in pq.read_table(path).to_pylist()))) for path in files]
    given = [Counter(map(tuple, (row.values() for row in table.to_pylist()))) for table in streams]
    assert sum(rows, Counter()) == sum(given, Counter())
    for table in streams:
        times = table["date_time"].cast("int64").to_numpy()
        assert (times[1:] >= times[:-1]).all()


def test_the_flat_events_are_the_generators(tmp_path: Path) -> None:
    """Each has a time, to the millisecond; a bid has its columns, the others none."""
    nested = pq.read_table(nexmark_data.write_events(tmp_path / "nested", 1, 500)[0])
    flat = pq.read_table(events.write_flat(tmp_path / "flat", 1, 500)[0])
    assert flat["event_type"].equals(nested["event_type"])
    assert flat["date_time"].null_count == 0
    bids = pc.equal(flat["event_type"], 2)
    assert flat["price"].is_valid().equals(bids)
    kept = nested["bid"].combine_chunks().filter(bids.combine_chunks())
    assert flat["price"].filter(bids).combine_chunks().equals(kept.field("price"))
    micros = kept.field("date_time").cast("int64").to_numpy()
    assert (flat["date_time"].filter(bids).cast("int64").to_numpy() == micros // 1_000).all()


def test_each_query_declares_the_columns_that_it_selects() -> None:
    """By name, in order: the sink takes them by place."""
    for name, query in QUERIES.items():
        selected = query.select.partition("\nFROM")[0]
        places = [selected.find(column.strip("`")) for column, _ in answers._columns(name)]
        assert places == sorted(places)
        assert -1 not in places
        assert query.insert.startswith("INSERT INTO sink\nSELECT")
        assert "'blackhole'" in query.sink


def test_statements_read_the_folder_that_they_are_given() -> None:
    table, view = tables(Path("/some/folder"))
    assert "'path' = 'file:///some/folder'" in table
    assert "event_type = 2" in view
    assert SETTINGS["table.exec.mini-batch.enabled"] == "true"


def test_values_are_compared_as_the_same_text() -> None:
    there = timezone(timedelta(hours=5))
    assert answers.as_text(datetime(2024, 1, 2, 3, 4, 5, 678_000, UTC)) == "2024-01-02T03:04:05.678"
    assert answers.as_text(datetime(2024, 1, 2, 8, 4, 5, 678_000, there)) == "2024-01-02T03:04:05.678"
    assert answers._value("2024-01-02T03:04:05", "TIMESTAMP(3)") == "2024-01-02T03:04:05.000"
    assert answers._value("1.5E3", "DOUBLE") == answers.as_text(1500.0)


def test_an_answer_is_compared_up_to_the_end_of_the_events() -> None:
    rows = {("1", "2024-01-01T00:00:10.000"): 1, ("2", "2024-01-01T00:00:10.001"): 1}
    assert answers.up_to(rows, 1, "2024-01-01T00:00:10.000") == Counter({("1", "2024-01-01T00:00:10.000"): 1})
    assert answers.up_to(rows, None, "").total() == 2


def test_a_wrong_or_empty_answer_is_told() -> None:
    right = Counter({("1",): 2})
    assert answers.differences("q5", Counter({("1",): 2}), right) == ""
    assert "missing [('1',)]" in answers.differences("q5", Counter({("1",): 1}), right)
    assert answers.differences("q5", Counter(), Counter())


# --- figures --------------------------------------------------------------------------------------------------------


def _run(count: int, runtime_s: float, cpu_s: float = 1.0) -> dict[str, Any]:
    return {"events": count, "runtime_s": runtime_s, "cpu_s": cpu_s, "checkpoints": 3, "checkpoint_ms": (30.0, 50.0)}


def test_the_rate_is_that_of_the_events_beyond_the_few() -> None:
    """What a job takes whatever its input is taken off, in both."""
    whole, few = FlinkRun(**_run(1_100_000, 7.0, 12.0)), FlinkRun(**_run(100_000, 2.0, 2.0))
    assert rate_per_s(whole, few) == 200_000
    assert rate_per_s(whole, few, of="cpu_s") == 100_000
    with pytest.raises(FlinkFailed, match="quieter machine"):
        rate_per_s(FlinkRun(**_run(1_100_000, 2.0)), few)


def test_figures_are_medians_of_whole_turns() -> None:
    """The slow epoch of a turn counts: Flink's slow checkpoints are in its runs, too."""
    fast, slow = {"trigger_ms": 500.0}, {"trigger_ms": 1_500.0}
    piece = {
        "rows": 100_000,
        "ours": [{"cpu_ms": 2_000.0, "triggers": [fast, slow]}] * 3,
        "peer": [{"whole": _run(1_100_000, 12.0, 22.0), "few": _run(100_000, 2.0, 2.0)}] * 3,
    }
    rate, cpu, checkpoint = throughput.figures_of("q17", piece, throughput.TARGET)
    assert (rate.ours, rate.peer, rate.holds) == (100_000, 100_000, False)
    assert (cpu.ours, cpu.peer, cpu.target) == (100_000, 50_000, None)
    assert (checkpoint.ours, checkpoint.peer) == (1_000, 40)


def test_a_share_of_the_events_is_not_judged() -> None:
    workload = throughput.WORKLOADS["q18"]
    assert throughput.scaled(workload, 1.0) == workload
    small = throughput.scaled(workload, 0.02)
    assert small.rows < workload.rows
    assert small.target is None


# --- restarts -------------------------------------------------------------------------------------------------------


def test_a_restart_ends_with_the_first_checkpoint_after_its_restore() -> None:
    """One that ended before it does not count, be it after the kill."""
    made = restart.parts(4.0, 6.0, _checkpoints(restored_ms=6_500))
    assert made is not None
    assert (made.total_s, made.launch_s, made.restore_s, made.first_checkpoint_s) == (4.0, 2.0, 0.5, 1.5)
    assert made.seen_s == 2.5


def test_a_restart_is_not_over_before_restore_and_checkpoint() -> None:
    assert restart.parts(7.0, 7.5, _checkpoints(restored_ms=6_500)) is None
    assert restart.parts(8.1, 8.2, _checkpoints(restored_ms=8_500)) is None


@pytest.mark.parametrize("slots_s", [5.0, 7.0, 9.0])
def test_parts_add_up_whenever_slots_are_seen(slots_s: float) -> None:
    """Before the restore, after it (the JobManager stayed), or too late."""
    made = restart.parts(4.0, slots_s, _checkpoints(restored_ms=6_500))
    assert made is not None
    assert min(made.launch_s, made.restore_s, made.first_checkpoint_s) >= 0
    assert made.launch_s + made.restore_s + made.first_checkpoint_s == pytest.approx(made.total_s)


def test_figures_of_restarts_name_ours_only_where_it_was_measured() -> None:
    one = {"total_s": 4.0, "launch_s": 2.0, "restore_s": 0.5, "first_checkpoint_s": 1.5, "seen_s": 2.5}
    piece = {"restarts": [one, {**one, "total_s": 6.0}, {**one, "total_s": 5.0}]}
    whole, *inner = restart.figures_of("taskmanager", piece, {"restarts": [{"total_s": 7.5}]})
    assert (whole.ours, whole.peer) == (7.5, 5.0)
    assert [figure.ours for figure in inner] == [2.0, 0.5, 1.5]
    alone, *_ = restart.figures_of("cluster", piece, None)
    assert (alone.ours, alone.peer) == (5.0, None)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_table_is_made_of_the_pieces_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    done = CliRunner().invoke(command.app, ["--table"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "flink.json").exists()


def test_an_unknown_piece_is_refused() -> None:
    done = CliRunner().invoke(command.app, ["--only", "q99"])
    assert done.exit_code == 2
    assert "unknown piece q99" in done.output
