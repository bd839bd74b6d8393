"""Files of one folder can be read as one table; what could not be is refused before it is written."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import InvalidPipeline, StoreUnavailable
from state_runtime.pipeline import sinks, staging
from state_runtime.pipeline.output_layout import OutputLayout, difference, refuse_layouts_beside
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.staged import staged_outputs
from state_runtime.snapshot.manifest import StagedFile
from state_runtime.store import LocalStore

LEAVES = [
    pa.int32(),
    pa.int64(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.float64(),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us", "Europe/Berlin"),
    pa.decimal128(10, 2),
    pa.duration("us"),
]
NAMES = st.sampled_from(["a", "b", "A"])


def structs(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.dictionaries(NAMES, inner, min_size=1, max_size=2).map(lambda fields: pa.struct(list(fields.items())))


TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: structs(inner) | inner.map(pa.list_) | inner.map(lambda t: pa.map_(pa.string(), t)),
    max_leaves=3,
)
SCHEMAS = (
    st.dictionaries(NAMES, TYPES, min_size=1, max_size=2)
    .filter(lambda fields: len(set(map(str.lower, fields))) == len(fields))
    .map(lambda fields: pa.schema(list(fields.items())))
)


def published(sink: ParquetSink, schema: pa.Schema, epoch: int = 1, job: str = "job") -> StagedFile:
    """One epoch of rows without values."""
    spec = sink.spec(job, "0" * 32, "out", ("", {}))
    task = spec.open(1, epoch, 0, "0" * 16)
    task.write(pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema))
    (output,) = staged_outputs([task.finish()], ["out"], epoch)
    sink.publish(spec, output, None)
    return output.files[0]


def begin(sink: ParquetSink, schema: pa.Schema, *pending: StagedFile) -> None:
    """What a run asks of a sink before it changes anything."""
    sink.check(schema, "sink 'out'")
    sink.check_place(sink.layout(schema), pending, "sink 'out'")


@given(SCHEMAS, SCHEMAS)
@examples(30)
def test_rows_are_written_beside_others_if_both_are_one_table(
    tmp_path_factory: pytest.TempPathFactory, one: pa.Schema, other: pa.Schema
) -> None:
    """What is let into a folder has the Parquet columns that are there; and the same rows are let in at each start."""
    sink = ParquetSink(str(tmp_path_factory.mktemp("out")))
    try:
        begin(sink, one)
    except InvalidPipeline:
        return
    first = published(sink, one)
    begin(sink, one)
    try:
        begin(sink, other)
    except InvalidPipeline:
        assert one != other
        return
    there, here = (leaves(Path(sink.path) / file.final) for file in (first, published(sink, other, epoch=2)))
    for path in there.keys() & here.keys():
        assert there[path] == here[path], path
    for path in there.keys() ^ here.keys():
        assert not any(each.startswith(f"{path}.") for each in there.keys() | here.keys()), path


def leaves(file: Path) -> dict[str, str]:
    """Parquet's own columns, by path."""
    schema = pq.ParquetFile(file).schema
    columns = [schema.column(number) for number in range(len(schema))]
    return {c.path: f"{c.physical_type} {c.logical_type} {c.max_repetition_level}" for c in columns}


@pytest.mark.parametrize("column", ["epoch", "Epoch", "EPOCH"])
def test_a_column_that_the_sink_adds_is_not_there_yet(tmp_path: Path, column: str) -> None:
    """No reader could tell the two apart; both ways out work."""
    schema = pa.schema([("k", pa.string()), (column, pa.int64())])
    with pytest.raises(InvalidPipeline, match=rf"sink 'out'.*column '{column}'.*epoch_column="):
        begin(ParquetSink(str(tmp_path)), schema)
    begin(ParquetSink(str(tmp_path), epoch_column=None), schema)
    begin(ParquetSink(str(tmp_path), epoch_column="round"), schema)


@pytest.mark.parametrize(
    "kind", [pa.struct([("a", pa.int32()), ("A", pa.int32())]), pa.list_(pa.struct([])), pa.map_(pa.string(), pa.struct([]))], ids=str
)  # fmt: skip
def test_a_struct_that_cannot_be_read_back_is_refused_when_the_job_is_built(tmp_path: Path, kind: pa.DataType) -> None:
    """Spark reads names without case, and Parquet has no struct without fields."""
    with pytest.raises(InvalidPipeline, match=r"sink 'out': the struct 's[^']*' has"):
        begin(ParquetSink(str(tmp_path)), pa.schema([("s", kind)]))


ROWS = pa.schema([("k", pa.string()), ("n", pa.int64()), ("s", pa.struct([("x", pa.int64())]))])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (ROWS.set(1, pa.field("n", pa.string())), "column n is int64 there and string in the new ones"),
        (ROWS.set(1, pa.field("n", pa.int32())), "column n is int64 there and int32"),
        (ROWS.set(2, pa.field("s", pa.struct([("x", pa.float64())]))), "column s.x is int64 there and double"),
        (ROWS.set(0, pa.field("K", pa.string())), "column K is written k there"),
        (ROWS.append(pa.field("more", pa.date32())), ""),
        (ROWS.remove(2), ""),
    ],
)
def test_a_column_of_another_type_is_refused_at_the_next_start(
    tmp_path: Path, changed: pa.Schema, message: str
) -> None:
    """Of what is published by this job or another one, and of what the newest snapshot names and nobody has published."""
    for case in ("own", "another", "pending"):
        sink = ParquetSink(str(tmp_path / case))
        pending: list[StagedFile] = []
        if case == "pending":
            spec = sink.spec("job", "0" * 32, "out", ("", {}))
            task = spec.open(1, 1, 0, "0" * 16)
            task.write(pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in ROWS], schema=ROWS))
            pending = list(task.finish().files)
        else:
            published(sink, ROWS, job="job" if case == "own" else "elsewhere")
        begin(sink, ROWS, *pending)
        if message:
            with pytest.raises(InvalidPipeline, match=rf"{case}.*{message}.*Give the sink a new folder"):
                begin(sink, changed, *pending)
        else:
            begin(sink, changed, *pending)


def test_folders_by_other_columns_are_refused_at_the_next_start(tmp_path: Path) -> None:
    """Readers refuse a mixture."""
    published(ParquetSink(str(tmp_path), partition_by=["k"]), pa.schema([("k", pa.string()), ("n", pa.int64())]))
    begin(ParquetSink(str(tmp_path), partition_by=["k"]), ROWS)
    for columns, named in (((), "no column"), (("n",), "n"), (("k", "n"), "k, n")):
        with pytest.raises(InvalidPipeline, match=f"partitioned by k, and the new ones by {named}"):
            begin(ParquetSink(str(tmp_path), partition_by=columns), ROWS)


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But a file that is gone, cut or overwritten by its readers says nothing."""
    sink, other = ParquetSink(str(tmp_path)), ROWS.set(1, pa.field("n", pa.string()))
    file = published(sink, ROWS)
    for body in (b"", b"PAR1", b"x" * file.bytes):
        (tmp_path / file.final).write_bytes(body)
        begin(sink, other)
    (tmp_path / file.final).unlink()
    begin(sink, other)
    (entry,) = tmp_path.rglob("*.json")
    whole = entry.read_bytes()
    for body in (b"", b"{", whole[:-2], whole):
        entry.write_bytes(body)  # of another job's commit log, cut or of another version
        begin(sink, other)

    def unavailable(*_: object) -> bytes:
        raise StoreUnavailable("away")

    monkeypatch.setattr(LocalStore, "read_range", unavailable)
    with pytest.raises(StoreUnavailable):
        begin(sink, other)


def layout(place: str, *columns: str, by: tuple[str, ...] = ()) -> OutputLayout:
    return OutputLayout(place, pa.schema([(name, pa.int64()) for name in columns]), by)


@pytest.mark.parametrize(
    ("one", "other", "fine"),
    [
        (layout("/out", "a", "b"), layout("/out", "b", "a"), True),
        (layout("/out", "a"), layout("/out", "a", "b"), False),
        (layout("/out", "a", "b"), layout("/out", "a", "b", by=("a",)), False),
        (layout("/out", "a"), OutputLayout("/out", pa.schema([("a", pa.string())])), False),
        (layout("/out", "a"), layout("/out-2", "b"), True),
        (layout("/out", "a"), layout("/out/late", "b"), True),
        (layout("/out", "a", "b", by=("a",)), layout("/out/late", "b"), False),
    ],
)
def test_two_sinks_of_a_job_have_a_folder_each_unless_they_write_one_table(
    one: OutputLayout, other: OutputLayout, fine: bool
) -> None:
    """Spark takes the columns from any one of the files: those of the other sink would be missing."""
    for layouts in ({"one": one, "other": other}, {"other": other, "one": one}):
        if fine:
            refuse_layouts_beside(layouts)
        else:
            with pytest.raises(InvalidPipeline, match=r"the sinks '\w+' and '\w+'.*a folder of its own"):
                refuse_layouts_beside(layouts)
    assert not difference(one, one)


class Watched(LocalStore):
    """Notes the folders that are listed; of the commit logs of other jobs, all are listed before one is answered."""

    def __init__(self, root: Path, together: threading.Barrier) -> None:
        super().__init__(root)
        self.listed: list[str] = []
        self._together = together

    def list_names(self, prefix: str) -> list[str]:
        self.listed.append(prefix)
        if "/commits/other" in prefix:
            self._together.wait(30)
        return super().list_names(prefix)


def test_a_start_lists_its_own_commit_log_once_and_those_of_others_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit log has a name for each epoch, and a folder may have many jobs: one after the other it is minutes."""
    sink = ParquetSink(str(tmp_path))
    spec = sink.spec("job", "0" * 32, "out", ("", {}))
    newest = published(sink, ROWS)
    for number in range(4):
        published(sink, ROWS, job=f"other{number}")
    store = Watched(tmp_path, threading.Barrier(4))
    monkeypatch.setattr(sinks, "shared_store", lambda *_: store)
    monkeypatch.setattr(staging, "shared_store", lambda *_: store)
    begin(sink, ROWS, newest)
    assert sink.newest_published_epoch(spec) == 1
    assert sorted(store.listed) == [
        "_stillstate/commits",
        "_stillstate/commits/job-00000000-out",
        *(f"_stillstate/commits/other{number}-00000000-out" for number in range(4)),
    ]
    store.listed.clear()
    with pytest.raises(InvalidPipeline, match="column n is int64 there and string"):
        begin(sink, ROWS.set(1, pa.field("n", pa.string())))
    assert "_stillstate/commits/job-00000000-out" in store.listed, (
        "nothing is pending, so its own log says what is there"
    )


def test_a_sink_has_one_client_of_its_store_in_a_process(tmp_path: Path) -> None:
    """A client of an object store takes a tenth of a second and megabytes."""
    sink = ParquetSink(str(tmp_path))
    assert sink._store() is sink.spec("job", "0" * 32, "out", ("", {})).store()
