"""Text that is not UTF-8 stops the task that reads it: what a task accepts every reader of a snapshot reads.

Spark's strings are bytes (`spark.read.text` of any file, `CAST(binary AS STRING)`); Arrow, Parquet and Python take
UTF-8 only. What is looked for after the commit is found by the restore, and then no snapshot can be read any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_stage_task import Gather, job, stage_task  # noqa: F401 - a fixture

from state_runtime import VectorizedProcessor
from state_runtime.base.errors import InvalidData
from state_runtime.changelog.parts import PartEntry, decode_part, encode_part, sha256
from state_runtime.changelog.rows import rows_batch
from state_runtime.changelog.versions import StateVersions
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.processors.columns import fit_column
from state_runtime.processors.user.frames import frames_to_batches
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.reading.tables import TableWriter
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.snapshot.shard_versions import ShardVersions
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.table import StateSchema
from state_runtime.state.text import broken_text, is_readable
from state_runtime.store import open_store
from state_runtime.task.shard_access import TaskJob

# Plain, two bytes, their halves, a byte that begins nothing, a surrogate, four bytes, too long a form of "/".
TEXTS = [None, b"", b"ok", b"\xc3\xa9", b"\xc3", b"\xa9", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xc0\xaf"]
KEY, VALUE = pa.field("k", pa.string()), "v"


def texts(values: Sequence[bytes | None]) -> pa.Array:
    """Bytes as text, as Spark hands them over: nobody looks at them."""
    return pa.array(values, pa.binary()).view(pa.string())


def of_kind(kind: str, values: Sequence[bytes | None]) -> pa.Array:
    """A row for each text, somewhere inside a value."""
    inner = texts(values)
    each = pa.array(np.arange(len(values) + 1), pa.int32())
    numbers = pa.array(range(len(values)), pa.int64())
    if kind == "list":
        return pa.ListArray.from_arrays(each, inner)
    if kind == "map-value":
        return pa.MapArray.from_arrays(each, numbers, inner)
    if kind == "map-key":
        return pa.MapArray.from_arrays(each, texts([b"" if v is None else v for v in values]), numbers)
    if kind == "struct":
        return pa.StructArray.from_arrays([numbers, inner], ["n", "s"])
    if kind == "structs":
        return pa.ListArray.from_arrays(each, pa.StructArray.from_arrays([inner, numbers], ["s", "n"]))
    return inner


KINDS = ("text", "list", "map-value", "map-key", "struct", "structs")


def first_bad(values: Sequence[bytes | None]) -> int | None:
    for number, value in enumerate(values):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return number
    return None


class Last(VectorizedProcessor):
    """Keeps each key's last value, and emits it."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind

    def states(self) -> dict[str, Any]:
        return {}

    def process(self, batch: KeyedBatch) -> pa.Table:
        last = batch.last_rows()[VALUE]
        batch.update("last", {VALUE: last})
        return pa.table({"k": batch.keys["k"], VALUE: last})


def last_of(kind: pa.DataType) -> VectorizedOperator:
    values = pa.schema([(VALUE, kind)])
    keys = pa.schema([KEY])
    return VectorizedOperator(
        uid="last",
        key_columns=("k",),
        key_ddl="`k` string",
        key_schema=keys,
        output_schema=pa.schema([KEY, (VALUE, kind)]),
        state_schemas={"last": StateSchema(keys, values)},
        state_ddl={"last": ""},
        kind="vectorized",
        processor=Last(kind),
        output_rows_per_batch=1_000,
    )


def rows(keys: pa.Array, column: pa.Array, partition: int = 3) -> pa.RecordBatch:
    places = pa.array([(partition << 33) + number for number in range(len(keys))], pa.int64())
    return pa.RecordBatch.from_arrays(
        [keys, column, pa.array(hash_rows([keys]).view("int64")), places],
        names=["k", VALUE, HASH_COLUMN, SEQUENCE_COLUMN],
    )


def read_back(batch: pa.RecordBatch) -> None:
    """What all readers come down to: a part of the log, a table, Python."""
    body = encode_part(batch)
    part = PartEntry("state", "op", "s", "", 0, len(body), sha256(body), batch.num_rows, batch.nbytes, 0, 0)
    assert decode_part(body, part, "here").to_pylist() == batch.to_pylist()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([batch]), sink)
    assert pq.read_table(pa.BufferReader(sink.getvalue())).num_rows == batch.num_rows


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from(TEXTS)), min_size=1, max_size=6),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_whatever_a_task_accepts_every_reader_reads(
    job: TaskJob,  # noqa: F811 - the fixture
    kind: str,
    given_rows: list[tuple[bytes | None, bytes | None]],
    before: int,
    after: int,
) -> None:
    """As key, as value of any form, in the state, the output and the rows in flight; batches are slices of larger ones.
    What is refused is named by column and by the row's place in the input, and nothing was acknowledged."""
    padded = [(b"\xff", b"\xff")] * before + given_rows + [(b"\xff", b"\xff")] * after
    keys, values = (list(column) for column in zip(*padded, strict=True))
    batch = rows(texts(keys), of_kind(kind, values)).slice(before, len(given_rows))
    gather = Gather()
    operator = last_of(batch.schema.field(VALUE).type)
    task = stage_task(job, operator, ShardVersions.none(1), gather, trusted=[0])
    bad_key, bad_value = (first_bad(column) for column in zip(*given_rows, strict=True))
    if bad_key is None and bad_value is None:
        for output in task([batch]):
            read_back(output)
        (acknowledged,) = gather.got
        for part, body in zip(acknowledged.changes.parts, acknowledged.changes.inline, strict=True):
            read_back(decode_part(body, part, "here"))
        hashes = np.sort(hash_rows([batch.column("k")]))
        read_back(rows_batch(hashes, np.zeros(len(hashes), np.int64), batch.select(["k", VALUE])))
        return
    row, column = (bad_key, "k") if bad_key is not None else (bad_value, VALUE)
    assert row is not None
    with pytest.raises(
        InvalidData, match=f"operator 'last': column '{column}(.s)?' .*row {before + row} of partition 3"
    ):
        list(task([batch]))
    assert gather.got == []


def test_a_broken_text_of_the_initial_state_is_named_as_such(job: TaskJob) -> None:  # noqa: F811
    """It comes in a column of its own, beside the input's."""
    batch = rows(texts([None]), texts([None]))
    initial = pa.StructArray.from_arrays([texts([b"a"]), texts([b"\xff"])], ["k", VALUE])
    batch = batch.append_column(INITIAL_COLUMN, initial)
    task = stage_task(job, last_of(pa.string()), ShardVersions.none(1), Gather(), trusted=[0])
    with pytest.raises(InvalidData, match="column 'v' of the initial state"):
        list(task([batch]))


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6), st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_what_user_code_makes_is_text_too(values: list[bytes | None], kind: str) -> None:
    """Columns of Arrow and frames on them are taken as they are: outputs and states are looked at like the input."""
    column = of_kind(kind, values)
    field = pa.field(VALUE, column.type)
    frame = pd.DataFrame({VALUE: pd.Series(pd.arrays.ArrowExtensionArray(texts(values)))})
    text = pa.schema([(VALUE, pa.string())])
    if first_bad(values) is None:
        assert fit_column(column, field, lambda: "here") is column
        assert next(frames_to_batches([frame], text, "here")).column(0).equals(texts(values))
        return
    with pytest.raises(InvalidData, match="here: column 'v' holds text whose bytes are not UTF-8"):
        fit_column(column, field, lambda: "here")
    with pytest.raises(InvalidData, match="here: column 'v'"):
        list(frames_to_batches([frame], text, "here"))


def test_text_of_python_that_has_no_bytes_is_refused() -> None:
    """Half a surrogate pair, which `json.loads` gives, is a str and no UTF-8."""
    from state_runtime.processors.columns import from_python

    with pytest.raises(InvalidData, match="value 2 of 2 is a str that does not fit"):
        from_python(["a", "\ud800"], pa.field(VALUE, pa.string()), lambda: "here")


def test_tables_of_a_new_snapshot_hold_no_broken_text(tmp_path: Any) -> None:
    """Bootstrap and import write what Spark hands over without an operator that looks at it."""
    state = StateEntry("s", "value", "`v` string")
    entry = OperatorEntry("op", "test", "`k` string", (state,))
    schema = StateVersions(entry, state).declared
    key = texts([b"a"])
    writer = TableWriter(open_store(str(tmp_path)), entry, state, snapshot_id=1, writer="w", ids=_Ids(), schema=schema)
    batch = schema.batch(hash_rows([key]), None, [key], [texts([b"\xff"])])
    with pytest.raises(InvalidData, match=r"column 'value\.v' holds text whose bytes are not UTF-8"):
        writer.write([batch])


class _Ids:
    def short(self) -> str:
        return "id"


def test_a_folder_is_not_named_by_broken_text(tmp_path: Any) -> None:
    """Other columns of a stateless job's output go through as Spark's do."""
    spec = SinkSpec("out", str(tmp_path), {}, staging_prefix="staging", partition_by=("day",))
    batch = pa.RecordBatch.from_arrays([texts([b"a", b"\xff"]), texts([b"\xff", b"a"])], names=["day", "other"])
    with pytest.raises(InvalidData, match="sink 'out': row 1 of a batch has text in 'day' whose bytes are not UTF-8"):
        spec.open(1, 1, 0, "a").write(batch)
    staging = replace(spec, partition_by=("other",)).open(1, 1, 0, "a")
    staging.write(batch.slice(1))
    (file,) = staging.finish().files
    body = open_store(str(tmp_path)).read(file.staged, 1 << 20)
    assert pc.equal(pq.read_table(pa.BufferReader(body))["day"].cast(pa.binary(), safe=False), b"\xff").to_pylist() == [
        True
    ]


@given(st.sampled_from(KINDS), st.lists(st.sampled_from(TEXTS), max_size=8), st.integers(0, 8), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_a_column_is_readable_if_and_only_if_arrow_finds_nothing(
    kind: str, values: list[bytes | None], start: int, length: int
) -> None:
    """The short way by ASCII decides as the full check does, for slices too."""
    column = of_kind(kind, values)
    cut = column.slice(min(start, len(values)), length)
    assert is_readable(cut) == (first_bad(values[start : start + length]) is None)
    whole = pa.RecordBatch.from_arrays([pa.array(range(len(values))), column], names=["n", VALUE])
    found, at = broken_text(whole), first_bad(values)
    assert (found is None) == (at is None)
    assert found is None or found[1] == at
