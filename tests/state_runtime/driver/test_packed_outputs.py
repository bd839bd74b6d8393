"""Few rows of many tasks travel with acknowledgements, and are one file for each sink."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_runtime.base.errors import InvalidData, StoreUnavailable
from state_runtime.driver.packed_outputs import pack_outputs
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.staged import StagedFiles, staged_outputs
from state_runtime.pipeline.staging import FOLDERS_MAX, SinkSpec, Staging
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.store.local import LocalStore
from state_runtime.task.acknowledgement import Acknowledgement
from tests.state_runtime.model import CountingIds

SCHEMA = pa.schema([("task", pa.int64()), ("n", pa.int64()), ("city", pa.string())])
EPOCH, TERM = 7, 3
SENT_BYTES = 400
"""About twelve rows of SCHEMA."""


def rows_of(task: int, count: int) -> pa.RecordBatch:
    made = [{"task": task, "n": n, "city": "ab"[n % 2]} for n in range(count)]
    return pa.RecordBatch.from_pylist(made, schema=SCHEMA)


def parquet_sink(folder: Path, name: str = "out", **options: object) -> tuple[ParquetSink, SinkSpec]:
    sink = ParquetSink(str(folder / name), **options)  # type: ignore[arg-type]
    return sink, sink.spec("job", "0123456789abcdef", name, ("unused", {}))


def acknowledged(specs: Sequence[SinkSpec], counts: Sequence[int], *, sent: int = SENT_BYTES) -> list[Acknowledgement]:
    """A task for each count of rows, which it writes a few at a time, to each sink."""
    made = []
    for task, count in enumerate(counts):
        stagings = [spec.open(TERM, EPOCH, task, f"{task:016x}", sent_bytes_max=sent) for spec in specs]
        batch = rows_of(task, count)
        for start in range(0, count, 5):
            for staging in stagings:
                staging.write(batch.slice(start, 5))
        made.append(Acknowledgement(epoch="e", stage=0, shard=task, staged=tuple(s.finish() for s in stagings)))
    return made


def outputs_of(specs: Sequence[SinkSpec], tasks: Sequence[Acknowledgement]) -> tuple[StagedOutput, ...]:
    packed = pack_outputs(tasks, {spec.name: spec for spec in specs}, TERM, EPOCH, CountingIds())
    assert [(a.shard, [s.sink for s in a.staged]) for a in packed] == [
        (a.shard, [s.sink for s in a.staged]) for a in tasks
    ]
    assert not any(s.rows for a in packed for s in a.staged)
    return staged_outputs([s for a in packed for s in a.staged], [spec.name for spec in specs], EPOCH)


def rows_in_order(spec: SinkSpec, output: StagedOutput) -> list[tuple[int, int]]:
    tables = [pq.read_table(pa.BufferReader(spec.store().read(f.staged, f.bytes))) for f in output.files]
    assert [f.rows for f in output.files] == [table.num_rows for table in tables]
    return [(row["task"], row["n"]) for table in tables for row in table.to_pylist()]


def test_few_rows_of_many_tasks_are_one_file_for_each_sink(tmp_path: Path) -> None:
    (_, one), (_, two) = parquet_sink(tmp_path, "one"), parquet_sink(tmp_path, "two", epoch_column=None)
    for output, spec in zip(outputs_of([one, two], acknowledged([one, two], [3] * 200)), [one, two], strict=True):
        (file,) = output.files
        assert file.rows == 600
        assert rows_in_order(spec, output) == [(task, n) for task in range(200) for n in range(3)]


@given(
    counts=st.lists(st.integers(0, 40), max_size=12),
    sent=st.sampled_from([0, 1, SENT_BYTES, 10_000]),
    partitioned=st.booleans(),
)
def test_what_tasks_wrote_is_what_is_published_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], sent: int, partitioned: bool
) -> None:
    sink, spec = parquet_sink(tmp_path_factory.mktemp("out"), partition_by=["city"] if partitioned else [])
    tasks = acknowledged([spec], counts, sent=sent)
    (output,) = outputs_of([spec], tasks)
    found = rows_in_order(spec, output)
    wanted = [(task, n) for task, count in enumerate(counts) for n in range(count)]
    if partitioned:
        for city in (0, 1):
            in_folder = [f for f in output.files if f"city={'ab'[city]}/" in f.final]
            found = rows_in_order(spec, StagedOutput("out", EPOCH, tuple(in_folder)))
            assert found == [row for row in wanted if row[1] % 2 == city]
    else:
        assert found == wanted
    # Between two tasks that stored files of their own there is one file at most.
    stored = sum(bool(s.files) for a in tasks for s in a.staged)
    sets = {f.staged.rpartition("-")[0] for f in output.files}
    assert len(sets) <= 2 * stored + 1
    sink.publish(spec, output, None)
    table = pq.read_table(spec.store_url) if wanted else pa.table({"epoch": []})
    assert table.num_rows == len(wanted)
    assert set(table["epoch"].to_pylist()) <= {EPOCH}


def test_a_task_without_rows_sends_nothing_and_an_epoch_without_rows_has_no_file(tmp_path: Path) -> None:
    _, spec = parquet_sink(tmp_path)
    assert outputs_of([spec], acknowledged([spec], [0, 0])) == (StagedOutput("out", EPOCH, ()),)
    assert not (tmp_path / "out").exists()


def test_a_file_that_must_exist_is_stored_by_the_task_itself(tmp_path: Path) -> None:
    """An epoch without rows of a sink that wants every epoch."""
    _, spec = parquet_sink(tmp_path)
    staging = spec.open(TERM, EPOCH, 0, "a", sent_bytes_max=SENT_BYTES)
    staging.begin(SCHEMA)
    assert len(staging.finish().files) == 1


def test_rows_are_checked_by_the_task_that_has_them(tmp_path: Path) -> None:
    """The driver cannot say which row it was."""
    spec = SinkSpec("db", str(tmp_path), {}, staging_prefix="staging", is_for_sql=True)
    staging = spec.open(TERM, EPOCH, 0, "a", sent_bytes_max=SENT_BYTES)
    with pytest.raises(InvalidData, match="row 1 of a batch has text in 'city'"):
        staging.write(pa.RecordBatch.from_pylist([{"city": "x"}, {"city": "a\0b"}]))


def test_folders_are_counted_for_each_task(tmp_path: Path) -> None:
    """Tasks that may have so many folders each may have them together, as with files of their own."""
    _, spec = parquet_sink(tmp_path, partition_by=["city"])

    def sent_by(task: int) -> Acknowledgement:
        staging: Staging = spec.open(TERM, EPOCH, task, f"{task:016x}", sent_bytes_max=1 << 20)
        cities = [f"{task}-{n}" for n in range(FOLDERS_MAX * 3 // 4)]
        staging.write(pa.RecordBatch.from_pylist([{"task": task, "n": 0, "city": c} for c in cities], schema=SCHEMA))
        return Acknowledgement(epoch="e", stage=0, shard=task, staged=(staging.finish(),))

    (output,) = outputs_of([spec], [sent_by(0), sent_by(1)])
    assert len(output.files) == 2 * (FOLDERS_MAX * 3 // 4)


def test_a_store_that_takes_no_file_fails_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = parquet_sink(tmp_path)
    tasks = acknowledged([spec], [2, 2])

    def put(self: LocalStore, path: str, body: object) -> None:
        raise StoreUnavailable(f"{path}: the disk is full")

    monkeypatch.setattr(LocalStore, "put", put)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        outputs_of([spec], tasks)


def test_sinks_of_several_stages_are_packed_each_for_itself(tmp_path: Path) -> None:
    """Acknowledgements of several stages stand one behind the other, each with its own sinks."""
    (_, one), (_, two) = parquet_sink(tmp_path, "one"), parquet_sink(tmp_path, "two")
    tasks = [*acknowledged([one], [2, 30, 2]), *acknowledged([two], [1, 1])]
    first, second = outputs_of([one, two], tasks)
    assert rows_in_order(one, first) == [(t, n) for t, count in enumerate([2, 30, 2]) for n in range(count)]
    assert rows_in_order(two, second) == [(0, 0), (1, 0)]
    assert [len(first.files), len(second.files)] == [3, 1]


def test_the_bytes_that_travel_are_in_no_representation() -> None:
    assert "secret" not in repr(StagedFiles("out", (), b"secret"))
