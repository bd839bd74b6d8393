"""Whether Flink's SQL gives what Spark's batch query gives, row by row, over a few thousand events."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import nexmark_data
from benchmarks.flink import events
from benchmarks.flink.cluster import Cluster
from benchmarks.flink.queries import QUERIES, SETTINGS, tables
from benchmarks.flink.rest import FlinkFailed, Row

__all__ = ["as_text", "check", "differences", "up_to"]

BATCHES = 4
ROWS = 5_000
# Where the late batches lie, in batches.
LATE = (100, 200)
TIMEOUT_S = 300.0


def check(cluster: Cluster, names: Sequence[str], folder: Path) -> None:
    """Compare the answers of queries.

    Raises:
        FlinkFailed: one is wrong; nothing should be timed.
    """
    files = events.write_flat(folder / "files", BATCHES, ROWS, then=LATE)
    events.write_streams(files, folder / "streams")
    right = _asked_of_spark(names, folder / "files")
    found = {name: _of_flink(cluster, name, folder / "streams") for name in names}
    wrong = [told for name in names if (told := differences(name, found[name], right[name]))]
    if wrong:
        raise FlinkFailed("Flink's answers differ from Spark's batch query: " + "; ".join(wrong))


def differences(name: str, found: Counter[Row], right: Counter[Row]) -> str:
    """What is wrong with an answer; empty if nothing. An answer without rows proves nothing."""
    if found == right and right:
        return ""
    some = [*(found - right)][:1], [*(right - found)][:1]
    return f"{name}: {found.total()} rows, should be {right.total()}; too many {some[0]}, missing {some[1]}"


def as_text(value: object) -> str:
    """A value as both engines' answers are compared: times to the millisecond, numbers to nine digits."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value)


def up_to(rows: Mapping[Row, int], time_column: int | None, until: str) -> Counter[Row]:
    """The rows whose time is not after `until`; all, if they have none. Times of the same length compare as text."""
    return Counter({row: n for row, n in rows.items() if time_column is None or row[time_column] <= until})


def _columns(name: str) -> list[tuple[str, str]]:
    """Name and type of each column of an answer."""
    return [
        (column.strip("`"), kind) for column, kind in (part.split(" ") for part in QUERIES[name].columns.split(", "))
    ]


def _of_flink(cluster: Cluster, name: str, folder: Path) -> Counter[Row]:
    cluster.gateway.open(SETTINGS)
    for statement in tables(folder):
        cluster.gateway.run(statement)
    columns = _columns(name)
    rows = {
        tuple(_value(text, kind) for text, (_, kind) in zip(row, columns, strict=True)): count
        for row, count in cluster.gateway.rows(QUERIES[name].select).items()
    }
    return up_to(rows, _time_column(name), _until())


def _value(text: str, kind: str) -> str:
    if kind.startswith("TIMESTAMP"):
        return as_text(datetime.fromisoformat(text).replace(tzinfo=UTC))
    return as_text(float(text)) if kind == "DOUBLE" else text


def _time_column(name: str) -> int | None:
    names = [column for column, _ in _columns(name)]
    return names.index("ends") if "ends" in names else None


def _until() -> str:
    return as_text(datetime.fromtimestamp(nexmark_data.FIRST_S + BATCHES * nexmark_data.BATCH_S, UTC))


def _asked_of_spark(names: Sequence[str], folder: Path) -> dict[str, Counter[Row]]:
    """In a process of its own: a session cannot be had twice in one.

    Raises:
        FlinkFailed: the process failed.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_answer, args=(list(names), folder, answers), daemon=False)
    process.start()
    try:
        found = answers.get(timeout=TIMEOUT_S)
    finally:
        process.join(TIMEOUT_S)
    if isinstance(found, str):
        raise FlinkFailed(f"Spark could not be asked: {found}")
    return dict(found)


def _answer(names: Sequence[str], folder: Path, answers: Any) -> None:
    from benchmarks.engines import COMMON_CONF, set_up_python
    from benchmarks.nexmark_queries import QUERIES as OURS
    from state_runtime.spark.session import build_session

    try:
        set_up_python()
        spark = build_session("flink-answers", master="local[2]", conf=dict(COMMON_CONF))
        spark.sparkContext.setLogLevel("ERROR")
        frame = events.as_events(spark.read.schema(events.SCHEMA).parquet(str(folder)))
        found: dict[str, Counter[Row]] = {}
        for name in names:
            chosen = OURS[name].answer(frame).select(*(column for column, _ in _columns(name)))
            rows = Counter(tuple(as_text(value) for value in row) for row in chosen.collect())
            found[name] = up_to(rows, _time_column(name), _until())
        spark.stop()
        answers.put(found)
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")
