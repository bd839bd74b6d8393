"""Output in folders by value: what readers make of the folders is what the rows had."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.pipeline import staging
from state_runtime.pipeline.partitions import NAME_BYTES_MAX, check_partition_columns, in_folders
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.staged import staged_outputs
from state_runtime.store.paths import check_relative_path

SCHEMA = pa.schema(
    [("n", pa.int64()), ("town", pa.string()), ("day", pa.date32()), ("late", pa.bool_()), ("shop", pa.int32())]
)
NULL = "__HIVE_DEFAULT_PARTITION__"
COLUMNS = ("town", "day", "late", "shop")
ASCII = "".join(map(chr, range(0x21, 0x7F)))
TOWNS = st.one_of(
    st.none(),
    st.text(ASCII + " \t\n\x00\x7f", max_size=6),
    st.text(max_size=6),
    st.sampled_from(["", NULL, "Köln", "東京", "..", ".", "a/b", "%2e", "İ"]),
)
ROWS = st.lists(
    st.tuples(
        TOWNS,
        st.none() | st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31)),
        st.none() | st.booleans(),
        st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
    ),
    min_size=1,
    max_size=12,
)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(SCHEMA.names, (number, *row), strict=True)) for number, row in enumerate(rows)], schema=SCHEMA
    )


@given(rows=ROWS, columns=st.permutations(COLUMNS), count=st.integers(1, 4))
@examples(200)
def test_a_reader_takes_from_the_folders_what_the_rows_had(rows: list[Any], columns: list[str], count: int) -> None:
    """Arrow's own reader of Hive's names as the judge. An empty text is read as null, as Spark's writer has it."""
    chosen = columns[:count]
    reader = ds.partitioning(pa.schema([SCHEMA.field(name) for name in chosen]), flavor="hive")
    read: list[dict[str, Any]] = []
    folders = []
    for folder, part in in_folders(batch_of(rows), chosen, "sink 'out'"):
        check_relative_path(f"{folder}/part-0.parquet")
        folders.append(folder)
        told = ds.get_partition_keys(reader.parse(f"/{folder}/part-0.parquet"))
        assert set(part.schema.names) == set(SCHEMA.names) - set(chosen)
        numbers = part.column("n").to_pylist()
        assert numbers == sorted(numbers), "the order of the rows"
        read += [row | told for row in part.to_pylist()]
    assert len(folders) == len(set(folders)), "one part for each folder"
    expected = batch_of(rows).to_pylist()
    if "town" in chosen:
        expected = [row | {"town": None if row["town"] in ("", NULL) else row["town"]} for row in expected]
    assert sorted(read, key=lambda row: row["n"]) == expected


def test_rows_without_partitions_pass_as_they_are() -> None:
    """No copy, no folder."""
    batch = batch_of([("a", None, None, None)])
    [(folder, part)] = in_folders(batch, (), "sink 'out'")
    assert folder == ""
    assert part is batch


@given(st.text(max_size=20))
@examples(200)
def test_any_text_makes_a_folder_that_hive_and_spark_read_as_the_text(text: str) -> None:
    """Else one row ends the job, and it stays in the input. Spark's own rule: each `%XX` is the character of that number."""
    [(folder, _)] = in_folders(batch_of([(text, None, None, None)]), ["town"], "sink 'out'")
    check_relative_path(f"{folder}/part-0.parquet")
    told = re.sub("%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), folder.removeprefix("town="))
    assert told == (text if text not in ("", NULL) else NULL)
    assert not set(folder) & set("/\\?#*[]{}\"' \t\n")


@pytest.mark.parametrize("text", ["x" * NAME_BYTES_MAX, "ö" * (NAME_BYTES_MAX // 2), "?" * 79])
def test_a_text_that_is_too_long_for_a_name_is_refused(text: str) -> None:
    """Before the file system does, in the middle of publishing."""
    with pytest.raises(InvalidData, match="partition by a shorter text"):
        list(in_folders(batch_of([(text, None, None, None)]), ["town"], "sink 'out'"))


def test_a_folder_of_many_levels_stays_within_a_path() -> None:
    """Each of its names may be short enough."""
    names = ["a", "b", "c"]
    batch = pa.RecordBatch.from_pydict({name: ["x" * 220] for name in names} | {"n": [1]})
    with pytest.raises(InvalidData, match="fewer or shorter columns"):
        list(in_folders(batch, names, "sink 'out'"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["Town"], r"no column 'Town' to partition by; it has n, town"),
        (["town", "town"], "names a column twice"),
        (["at"], r"'at' of type timestamp\[us\].*to_date\(at\)"),
        (["price"], "of type double"),
        (["tags"], "of type list"),
        (["_hidden"], "rename it"),
        (["a b"], "rename it"),
        (["x" * 81], "rename it"),
    ],
)
def test_what_cannot_name_a_folder_is_refused_when_the_job_is_built(columns: list[str], message: str) -> None:
    """Not by the first row."""
    others = {"at": pa.timestamp("us"), "price": pa.float64(), "tags": pa.list_(pa.string())}
    texts = ("_hidden", "a b", "x" * 81)
    schema = pa.schema([*SCHEMA, *others.items(), *((name, pa.string()) for name in texts)])
    with pytest.raises(InvalidPipeline, match=message):
        check_partition_columns(columns, schema, "sink 'out'")


def test_files_have_a_column_at_least() -> None:
    """Parquet without columns has no rows for readers."""
    with pytest.raises(InvalidPipeline, match="leave one for the files"):
        check_partition_columns(["town"], pa.schema([("town", pa.string())]), "sink 'out'")


def staged(sink: ParquetSink, *batches: pa.RecordBatch, epoch: int = 1) -> Any:
    spec = sink.spec("job", "0" * 32, "out", ("", {}))
    task = spec.open(1, epoch, 0, "0" * 16)
    for batch in batches:
        task.write(batch)
    return spec, staged_outputs([task.finish()], ["out"], epoch)[0]


def test_a_partitioned_output_is_published_at_once_and_once(tmp_path: Path) -> None:
    """A file for each folder, whatever the number of batches; a repetition changes nothing."""
    sink = ParquetSink(str(tmp_path / "out"), partition_by="town")
    some = [("Köln", None, None, 1), (None, None, None, 2), ("a/b c", None, None, 3)]
    spec, output = staged(sink, batch_of(some), batch_of(some[:1]))
    assert len(output.files) == 3
    assert not [p for p in (tmp_path / "out").iterdir() if p.name != "_stillstate"]
    for _ in range(2):
        sink.publish(spec, output, None)
        folders = sorted(p.name for p in (tmp_path / "out").iterdir() if p.name != "_stillstate")
        assert folders == ["town=Köln", "town=__HIVE_DEFAULT_PARTITION__", "town=a%2Fb%20c"]
        reader = ds.partitioning(pa.schema([SCHEMA.field("town")]), flavor="hive")
        table = ds.dataset(tmp_path / "out", format="parquet", partitioning=reader).to_table()
        rows = sorted((row["shop"], row["town"], row["epoch"]) for row in table.to_pylist())
        assert rows == [(1, "Köln", 1), (1, "Köln", 1), (2, None, 1), (3, "a/b c", 1)]
    assert sink.newest_published_epoch(spec) == 1


def test_large_output_is_cut_by_what_all_folders_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bound is one of memory, so it is of the task and not of a folder."""
    monkeypatch.setattr(staging, "_FILE_BYTES_MAX", 1)
    sink = ParquetSink(str(tmp_path / "out"), partition_by=["shop"])
    batches = [batch_of([("a", None, None, shop) for shop in range(4)])] * 3
    spec, output = staged(sink, *batches)
    assert len(output.files) == 12
    sink.publish(spec, output, None)
    assert ds.dataset(tmp_path / "out", format="parquet", partitioning="hive").count_rows() == 12


def test_too_many_folders_are_refused_whether_or_not_their_files_are_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Millions of small files help nobody, and manifests name each."""
    monkeypatch.setattr(staging, "FOLDERS_MAX", 4)
    sink = ParquetSink(str(tmp_path / "out"), partition_by=["shop"])
    four = batch_of([("a", None, None, shop) for shop in range(4)])
    staged(sink, four, four)
    for size in (1, 1 << 20):
        monkeypatch.setattr(staging, "_FILE_BYTES_MAX", size)
        with pytest.raises(InvalidData, match="more than 4 folders by shop; partition by columns with fewer values"):
            staged(sink, four, batch_of([("a", None, None, 5)]))


def test_rows_are_cut_into_folders_once_whatever_batches_they_came_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cut batch by batch, a million rows for 900 folders took 106 seconds instead of 6."""
    cut: list[int] = []

    def noting(batch: pa.RecordBatch, *others: Any) -> Any:
        cut.append(batch.num_rows)
        return in_folders(batch, *others)

    monkeypatch.setattr(staging, "in_folders", noting)
    sink = ParquetSink(str(tmp_path / "out"), partition_by=["shop"])
    four = batch_of([("a", None, None, shop) for shop in range(4)])
    _, output = staged(sink, *[four] * 25)
    assert cut == [100]
    assert [file.rows for file in output.files] == [25] * 4


def test_a_file_that_cannot_be_stored_ends_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the manifest would name a file that is not there."""
    sink = ParquetSink(str(tmp_path / "out"), partition_by=["shop"])
    store = sink.spec("job", "0" * 32, "out", ("", {})).store()
    puts: list[str] = []

    def full(path: str, body: Any) -> None:
        puts.append(path)
        if len(puts) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(store), "put", lambda _, path, body: full(path, body))
    with pytest.raises(OSError, match="No space left"):
        staged(sink, batch_of([("a", None, None, shop) for shop in range(4)]))
