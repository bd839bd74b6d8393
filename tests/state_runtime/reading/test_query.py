"""Point queries: any snapshot of any state equals a dictionary, and one key costs little. The hash is Spark's own."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    ALL_HASHES,
    ALL_KEYS,
    OPERATOR,
    STATE,
    Changes,
    CountingIds,
    DictStore,
    HashOf,
    Key,
    StateWriter,
    Value,
    actual_score,
    after,
    batch_of,
    canonical_key,
    colliding,
    epochs,
    examples,
    folded,
    key_columns,
)
from pyspark.sql import types as T

from state_runtime import query_state, reading
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import (
    CorruptData,
    CorruptManifest,
    CorruptSegment,
    InvalidConfiguration,
    InvalidData,
    JobNotFound,
    MissingFile,
    MissingSnapshot,
    StillstateError,
)
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.reading.building import SnapshotBuilder
from state_runtime.reading.query import StateView, open_state
from state_runtime.reading.rows import RowLayout
from state_runtime.reading.spark_source import StillstateDataSource
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.spark.arrow import arrow_schema_of, spark_schema_of
from state_runtime.spark.sql import ddl
from state_runtime.state.ddl import default_clause, parse_ddl
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import SEED, hash_key, hash_rows, xxh64
from state_runtime.state.table import StateSchema
from state_runtime.store import open_store
from tests.stored import write_segment, write_task_changes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOB = "flights"
KEY_DDL, VALUE_DDL = "`name` string, `score` double", "`n` bigint, `s` string"


def real_hash(key: Key) -> int:
    return hash_key(key_columns([key]))


def as_key(key: Key, *, negative_zero: bool = False) -> dict[str, Any]:
    """A model key as a user gives it."""
    return {"name": key[0], "score": actual_score(key[1], negative_zero=negative_zero)}


def found(table: pa.Table) -> dict[Key, Value]:
    """A result as the model; fails if a key is there twice."""
    assert table.column_names == ["name", "score", "n", "s"]
    rows = [(canonical_key(r["name"], r["score"]), (r["n"], r["s"])) for r in table.to_pylist()]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


class CountingStore(DictStore):
    """Remembers what was read: path, offset, length."""

    def __init__(self, objects: dict[str, bytes] | None = None, root: str = "", log: list[Any] | None = None) -> None:
        super().__init__(objects, root)
        self.log: list[tuple[str, int, int]] = [] if log is None else log

    def child(self, name: str) -> CountingStore:
        return CountingStore(self.objects, f"{self._at(name)}/", self.log)

    def read(self, path: str, bytes_max: int) -> bytes:
        body = super().read(path, bytes_max)
        self.log.append((path, 0, len(body)))
        return body

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        body = super().read(path, 1 << 60)[offset : offset + length]
        self.log.append((path, offset, length))
        if len(body) != length:
            raise CorruptData(f"{path} was cut off")
        return body


@dataclass
class Job:
    """A job root without Spark: every epoch commits a manifest, and tables are folded when told to."""

    hash_of: HashOf = real_hash
    parallelism: int = 4
    inline_bytes_max: int = 1 << 20
    store: CountingStore = field(default_factory=CountingStore)

    def __post_init__(self) -> None:
        self.writer = StateWriter(
            root=self.store.child(JOB),
            hash_of=self.hash_of,
            parallelism=self.parallelism,
            inline_bytes_max=self.inline_bytes_max,
        )
        info = JobInfo(self.writer.manifest.job_uid, JOB, 32768, 1, 0)
        self.writer.root.put(JOB_FILE, encode_document("job", info))

    def commit(self, manifest: Manifest) -> Manifest:
        self.writer.manifest = manifest
        self.writer.root.put(manifest_path(manifest.snapshot_id), manifest.encode())
        return manifest

    def epoch(self, changed: Changes, fold: str = "") -> Manifest:
        """One checkpoint; `fold` first folds the log before it: "major", or "minor" on top of the layers."""
        manifest = self.writer.manifest
        if fold and manifest.segments:
            manifest = folded(self.writer.root, manifest, "major" if fold == "major" else "minor")
            self.writer.manifest = manifest
        operators = (OperatorEntry(OPERATOR, "test", KEY_DDL, (StateEntry(STATE, "value", VALUE_DDL),)),)
        return self.commit(replace(self.writer.epoch(changed), operators=operators))

    def view(self, **options: Any) -> StateView:
        return open_state(self.store, JOB, STATE, **options)


def described(view: StateView, keys: str, values: str) -> StateView:
    """The view with another description of its columns."""
    state = replace(view.state, schema=values)
    return replace(view, operator=replace(view.operator, key_schema=keys, states=(state,)), state=state)


def small_job(folded: bool = False) -> Job:
    """Two epochs over all keys: in the second the first key is gone and the others are new."""
    job = Job()
    job.epoch(dict.fromkeys(ALL_KEYS, (1, "old")))
    job.epoch({key: None if key == ALL_KEYS[0] else (2, "new") for key in ALL_KEYS}, "major" if folded else "")
    return job


# --- the hash ----------------------------------------------------------------------------------------------------


def test_xxh64_gives_the_published_vectors() -> None:
    """Of the algorithm's own documentation: every length class."""
    assert xxh64(b"", 0) == 0xEF46DB3751D8E999
    assert xxh64(b"a", 0) == 0xD24EC4F1A98C6E5B
    assert xxh64(b"abc", 0) == 0x44BC2CF5AD770999
    assert xxh64(b"Nobody inspects the spammish repetition", 0) == 0xFBCEA83C8A378BF1


def signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def one(value: Any, kind: pa.DataType) -> pa.Array:
    return pa.array([value], kind)


NTZ, UTC_TIME = pa.timestamp("us"), pa.timestamp("us", "UTC")
# What Spark 4.3 answers to `SELECT xxhash64(…)`.
SPARK_SAYS: list[tuple[list[pa.Array], int]] = [
    # The example of Spark's documentation, xxhash64('Spark', array(123), 2): an array is hashed element by element.
    ([one("Spark", pa.string()), one(123, pa.int32()), one(2, pa.int32())], 5602566077635097486),
    ([one("a", pa.string()), one(None, pa.string()), one(7, pa.int32())], -3997527857389255009),
    ([one(None, pa.int32())], 42),
    ([one(True, pa.bool_())], -6698625589789238999),
    ([one(-5, pa.int8())], 9201179564109417620),
    ([one(-5, pa.int16())], 9201179564109417620),
    ([one(-5, pa.int32())], 9201179564109417620),
    ([one(-5, pa.int64())], -5259934538394028452),
    ([one(1.5, pa.float32())], 6163473420726370430),
    ([one(float("nan"), pa.float32())], 2692338816207849720),
    ([one(-1.5, pa.float64())], -1519168156472177911),
    ([one(float("nan"), pa.float64())], -3127944061524951246),
    ([one(Decimal("-12.34"), pa.decimal128(5, 2))], -1614697014534150208),
    ([one(Decimal("-12.34"), pa.decimal128(20, 2))], -5902959860576184235),
    ([one(Decimal("-12345678901234567890123456789012345678"), pa.decimal128(38, 0))], -1094212970759588400),
    ([one("", pa.string())], -7444071767201028348),
    ([one("N14228", pa.string())], 2818031054348419725),
    ([one("é€" * 20, pa.string())], 3220977114891550720),
    ([one(b"\x00\xff", pa.binary())], 879945414100663330),
    ([one(date(2013, 1, 31), pa.date32())], -2397725477404839249),
    ([one(datetime(2013, 1, 31, 12, 0, 0, 1, tzinfo=UTC), UTC_TIME)], -2599261056420307789),
    ([one(-1_000_000, NTZ)], -3302326838082710953),
]


@pytest.mark.parametrize(
    ("columns", "expected"), SPARK_SAYS, ids=lambda v: ", ".join(str(c.type) for c in v) if isinstance(v, list) else ""
)
def test_a_key_hashes_as_spark_says(columns: list[pa.Array], expected: int) -> None:
    assert signed(hash_key(columns)) == expected


def test_null_leaves_the_hash_and_equal_keys_have_one() -> None:
    """Grouping equality: zeros are equal, all NaNs are, and null is a value."""
    nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    f64, f32, text = pa.float64(), pa.float32(), pa.string()
    assert hash_key([one(None, text)]) == SEED
    assert hash_key([one(None, text), one("a", text)]) == hash_key([one("a", text), one(None, text)])
    assert hash_key([one(-0.0, f64)]) == hash_key([one(0.0, f64)])
    assert hash_key([one(-0.0, f32)]) == hash_key([one(0.0, f32)])
    assert hash_key([one(nan, f64)]) == hash_key([one(float("nan"), f64)])
    assert hash_key([one(True, pa.bool_())]) == hash_key([one(1, pa.int8())]) != hash_key([one(1, pa.int64())])


def test_a_type_that_no_key_has_is_refused() -> None:
    for kind, value in ((pa.uint8(), 1), (pa.map_(pa.int8(), pa.int8()), [(1, 1)]), (pa.timestamp("ns"), 1)):
        with pytest.raises(InvalidData, match="no hash"):
            hash_key([one(value, kind)])


def random_decimal(rng: random.Random, digits: int, scale: int) -> Decimal:
    return Decimal((rng.randrange(2), tuple(map(int, str(rng.randrange(10 ** rng.randint(1, digits))))), -scale))


INTS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
MAKERS: dict[str, Callable[[random.Random], Any]] = {
    "boolean": lambda r: r.random() < 0.5,
    **{
        name: lambda r, bits=bits: r.choice([0, -1, -(1 << bits - 1), (1 << bits - 1) - 1, r.getrandbits(bits - 1)])
        for name, bits in INTS.items()
    },
    "float": lambda r: struct.unpack("<f", struct.pack("<f", r.choice([0.0, -0.0, float("nan"), float("inf"), -1.5, r.gauss(0, 1e9)])))[0],
    "double": lambda r: r.choice([0.0, -0.0, float("nan"), float("-inf"), 5e-324, r.gauss(0, 1e99), r.random()]),
    "decimal(5,2)": lambda r: random_decimal(r, 5, 2),
    "decimal(18,0)": lambda r: random_decimal(r, 18, 0),
    "decimal(19,4)": lambda r: random_decimal(r, 19, 4),
    "decimal(38,18)": lambda r: r.choice([Decimal("127e-18"), Decimal("-128e-18"), Decimal("128e-18"), random_decimal(r, 38, 18)]),
    "string": lambda r: "".join(r.choice("aé€😀\0 ") for _ in range(r.choice([0, 1, 3, 4, 7, 8, 11, 31, 32, 33, 64, 100]))),
    "binary": lambda r: r.randbytes(r.choice([0, 1, 3, 4, 5, 8, 12, 31, 32, 33, 70])),
    "date": lambda r: date.fromordinal(r.randint(1, 3_652_059)),
    "timestamp": lambda r: datetime.fromtimestamp(r.randint(-(10**9), 4 * 10**9), UTC).replace(microsecond=r.randrange(10**6)),
    "timestamp_ntz": lambda r: datetime.fromtimestamp(r.randint(-(10**9), 4 * 10**9), UTC).replace(microsecond=r.randrange(10**6), tzinfo=None),
    "struct<a:int,b:string>": lambda r: {"a": r.choice([None, 0, 7]), "b": r.choice([None, "", "x" * r.randrange(40)])},
    "struct<s:struct<d:double>,t:array<string>>": lambda r: {
        "s": r.choice([None, {"d": r.choice([None, 0.0, 1.5])}]),
        "t": r.choice([None, [], ["a", None, "b"], ["ab"]]),
    },
    "array<bigint>": lambda r: [r.choice([None, 0, r.getrandbits(63)]) for _ in range(r.randrange(4))],
    "array<struct<a:int>>": lambda r: [r.choice([None, {"a": r.choice([None, 1])}]) for _ in range(r.randrange(4))],
}  # fmt: skip


@pytest.mark.spark
def test_every_key_hashes_as_in_spark(spark: SparkSession) -> None:
    """All key types, 200 rows with nulls: each column alone, all at once, and in reverse."""
    rng = random.Random(20130101)
    names = list(MAKERS)
    types = [parse_ddl(f"c {name}")[0].type for name in names]
    rows = [[None if rng.random() < 0.15 else make(rng) for make in MAKERS.values()] for _ in range(200)]
    arrays = [pa.array(column, kind) for column, kind in zip(zip(*rows), types)]
    table = pa.table([pa.array(range(len(rows))), *arrays], names=["id", *(f"c{i}" for i in range(len(names)))])
    frame = spark.createDataFrame(table, schema=spark_schema_of(table.schema))
    assert [f.dataType.simpleString() for f in frame.schema][1:] == names
    orders = [[i] for i in range(len(names))] + [list(range(len(names))), list(reversed(range(len(names))))]
    # Behind a shuffle, so that Spark compiles the hash as it does in a job instead of folding constants.
    expressions = (f"xxhash64({', '.join(f'c{i}' for i in order)})" for order in orders)
    hashed = frame.repartition(2).selectExpr("id", *expressions).collect()
    hashes = [tuple(row)[1:] for row in sorted(hashed, key=lambda row: row.id)]
    stored = frame.sort("id").drop("id").toArrow()  # what Spark itself holds, as state would store it
    columns = [stored.column(i).combine_chunks().cast(types[i]) for i in range(len(names))]
    for position, order in enumerate(orders):
        at_once = hash_rows([columns[i] for i in order]).view(np.int64).tolist()
        assert at_once == [row[position] for row in hashes], [names[i] for i in order]
    for row in range(table.num_rows):
        for order, expected in zip(orders, hashes[row], strict=True):
            assert signed(hash_key([columns[i].slice(row, 1) for i in order])) == expected, [
                (names[i], stored.column(i)[row]) for i in order
            ]


# --- DDL ---------------------------------------------------------------------------------------------------------

NESTED = [
    "array<int>",
    "map<string,array<double>>",
    "struct<a:int,b:struct<c:decimal(10,2),d:timestamp>>",
    "array<struct<x:map<int,binary>>>",
]


NAMES = st.text("ab`'\":,<>() .\té日\u2028🙂", min_size=0, max_size=5) | st.text(max_size=3)


def _structs(inner: st.SearchStrategy[T.DataType]) -> st.SearchStrategy[T.DataType]:
    fields = st.lists(st.tuples(NAMES, inner), min_size=1, max_size=3, unique_by=lambda field: field[0])
    return fields.map(lambda named: T.StructType([T.StructField(name, kind) for name, kind in named]))


SPARK_TYPES = st.recursive(
    st.sampled_from([T.LongType(), T.StringType(), T.DecimalType(10, 2), T.TimestampType()]),
    lambda inner: _structs(inner) | inner.map(T.ArrayType) | st.tuples(inner, inner).map(lambda pair: T.MapType(*pair)),
    max_leaves=5,
)


@given(_structs(SPARK_TYPES))
@examples(300)
def test_a_schema_written_is_a_schema_read_whatever_its_names(schema: T.StructType) -> None:
    """Columns and fields of structs, in arrays and maps too: JSON names its fields as it likes. What is compared with
    stored schemas, and shown, is what earlier versions wrote."""
    columns = parse_ddl(ddl(schema))
    assert [(c.name, c.type) for c in columns] == [(f.name, f.type) for f in arrow_schema_of(schema)]
    assert [c.type_text for c in columns] == [f.dataType.simpleString() for f in schema.fields]


@pytest.mark.parametrize("name", ["l'été", "back`tick", "''", "with space", "a-b", "weight (kg)", "été"])
def test_a_schema_that_an_earlier_version_wrote_is_read_as_what_it_meant(name: str) -> None:
    """Names of fields stood as they are: an apostrophe in one made each start end with a damaged manifest."""
    for kind in (f"struct<{name}:int>", f"struct<a:array<struct<{name}:int>>,{name}:int>"):
        first, second = parse_ddl(f"`k` {kind}, `n` bigint DEFAULT 7")
        assert (first.name, first.type_text, second.name, second.type_text) == ("k", kind, "n", "bigint")
        assert first.type is not None
        assert first.type.field(first.type.num_fields - 1).name == name


ODD = pa.struct([("l'été", pa.string()), ("a:b", pa.int64()), ("x,y", pa.list_(pa.struct([("`z`", pa.int64())])))])


def test_rows_under_odd_names_are_found_by_key_and_shown_to_spark(tmp_path: Path) -> None:
    """The whole way: manifest, plain reader, JSON of `query --key`, and the schema that Spark's reader gives."""
    keys = pa.schema([("it's", ODD)])
    operator = OperatorEntry(
        "u", "aggregate", ddl(spark_schema_of(keys)), (StateEntry("aggregate", "value", "`n` bigint"),)
    )
    store = open_store(str(tmp_path / "job"))
    builder = SnapshotBuilder.create(store, "job", [operator], mode="IMPORT", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
    (built,) = builder.operators
    values = [{"l'été": f"k{n}", "a:b": n, "x,y": [{"`z`": n}]} for n in range(20)]
    rows = pa.table({"it's": pa.array(values, ODD), "n": list(range(20))})
    builder.write("u", "aggregate", [RowLayout(built, built.states[0]).stored(rows)], in_order=False, bits=1)
    builder.commit()
    state = reading.open(str(tmp_path / "job")).state("u", "aggregate")
    assert state.to_arrow().schema.field("it's").type == ODD
    view = open_state(str(tmp_path), "job", "aggregate", operator="u")
    text = json.dumps(values[7], ensure_ascii=False)
    assert view.read(key=view.parse_key([f"it's={text}"])).column("n").to_pylist() == [7]
    source = StillstateDataSource({"place": str(tmp_path / "job"), "operator": "u", "state": "aggregate"})
    assert source.schema()["it's"].dataType.fieldNames() == [f.name for f in ODD]


@pytest.mark.spark
def test_ddl_is_read_as_the_pipeline_writes_it(spark: SparkSession) -> None:
    """The reader has no Spark; what it makes of a type must be what Spark stores."""
    names = [*MAKERS, *NESTED]
    odd = ["a", "with space", "com,ma", "back`tick", "co:lon", "br<ack(et"]
    schema = T.StructType(
        [T.StructField(odd[i] if i < len(odd) else f"c{i}", T.DataType.fromDDL(n)) for i, n in enumerate(names)]
    )
    stored = arrow_schema_of(schema)
    columns = parse_ddl(ddl(schema))
    assert [c.name for c in columns] == schema.names
    assert [c.type for c in columns] == stored.types


@pytest.mark.parametrize(
    ("kind", "literal", "value"),
    [
        ("int", "-7", -7),
        ("bigint", "5L", 5),
        ("double", "1e3", 1000.0),
        ("float", "0.5", 0.5),
        ("decimal(5,2)", "1.5", Decimal("1.50")),
        ("boolean", "true", True),
        ("string", "'it''s, ok DEFAULT 1'", "it's, ok DEFAULT 1"),
        ("string", "''", ""),
        ("binary", "X'00ff'", b"\x00\xff"),
        ("date", "DATE '2020-02-29'", date(2020, 2, 29)),
        ("timestamp", "TIMESTAMP '2020-01-01 00:00:00'", datetime(2020, 1, 1, tzinfo=UTC)),
        ("int", "NULL", None),
    ],
)
def test_a_default_in_a_columns_metadata_is_read_back_from_ddl(kind: str, literal: str, value: Any) -> None:
    """As Spark keeps defaults; the literal needs no Spark to be understood."""
    for metadata in ({"CURRENT_DEFAULT": literal}, {"EXISTS_DEFAULT": literal, "CURRENT_DEFAULT": "1+1"}):
        clause = default_clause(metadata, kind)
        first, second = parse_ddl(f"`a` {kind}{clause}, `b c` array<int>")
        assert (first.name, first.type_text, second.name) == ("a", kind, "b c")
        assert (None if first.default is None else first.default.as_py()) == value
    assert default_clause({"comment": "x"}, kind) == ""


@pytest.mark.parametrize(
    ("kind", "literal"),
    [
        ("int", "'1'"), ("int", "1+1"), ("int", "1.5"), ("tinyint", "300"), ("string", "5"), ("string", "'a'b'"),
        ("string", "current_user()"), ("date", "'2020-01-01'"), ("binary", "X'0'"), ("array<int>", "array()"),
        ("int", 5), ("variant", "1"), ("timestamp", "TIMESTAMP 'noon'"), ("int", ""),
    ],
)  # fmt: skip
def test_a_default_that_is_no_literal_of_its_column_is_refused(kind: str, literal: Any) -> None:
    """Before it is stored: a reader would find a manifest that it cannot read."""
    with pytest.raises(ValueError, match="literal"):
        default_clause({"EXISTS_DEFAULT": literal}, kind)


def test_ddl_that_no_writer_writes_is_an_error_and_an_unknown_type_is_not() -> None:
    for text in ("", "a", "a int, a int", "a int,", "`a int", "a array<int", "a int)", "`a` "):
        with pytest.raises(ValueError):
            parse_ddl(text)
    for kind in ("interval day to second", "variant", "array<variant>", "struct<a:>", "decimal(40,2)", "array<" * 99 + "int" + ">" * 99):  # fmt: skip
        assert parse_ddl(f"a {kind}, b int")[0].type is None
    assert not parse_ddl("a string collate UNICODE_CI")[0].binary_equality
    assert parse_ddl("a string collate UTF8_BINARY")[0].binary_equality


# --- what is read ------------------------------------------------------------------------------------------------

folds = st.lists(st.sampled_from(["", "", "minor", "major"]), min_size=9, max_size=9)


@given(epochs, folds, st.sampled_from([1, 3, 16]), st.sampled_from([0, 1 << 20]))
@examples(40)
def test_every_snapshot_is_the_dictionary_of_its_time(
    all_epochs: list[Changes], when: list[str], parallelism: int, inline_bytes_max: int
) -> None:
    """Over segments, direct objects, layers and deltas; tombstones are absent, and older snapshots stay as they were."""
    job = Job(parallelism=parallelism, inline_bytes_max=inline_bytes_max)
    for changed, fold in zip(all_epochs, when):
        job.epoch(changed, fold)
    for snapshot in range(1, len(all_epochs) + 1):
        expected = after(all_epochs[:snapshot])
        view = job.view(snapshot=snapshot)
        assert found(view.read()) == expected
        for key in ALL_KEYS:
            wanted = as_key(key, negative_zero=snapshot % 2 == 0)
            assert found(view.read(key=wanted)) == ({key: expected[key]} if key in expected else {})
    assert found(query_state(job.store, JOB, None, STATE)) == after(all_epochs)


@given(epochs, folds)
@examples(25)
def test_keys_of_one_hash_are_told_apart(all_epochs: list[Changes], when: list[str]) -> None:
    """A hash that collides all the time: only the key itself decides."""
    job = Job(hash_of=colliding)
    for changed, fold in zip(all_epochs, when):
        job.epoch(changed, fold)
    expected = after(all_epochs)

    def forced(columns: list[pa.Array]) -> int:
        return colliding(canonical_key(*(column[0].as_py() for column in columns)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("state_runtime.reading.lookup.hash_key", forced)
        for key in ALL_KEYS:
            assert found(job.view().read(key=as_key(key))) == ({key: expected[key]} if key in expected else {})


@given(epochs, folds, st.integers(0, 30), st.integers(1, 7), st.integers(0, 6))
@examples(40)
def test_limits_and_hash_ranges_are_slices_of_the_whole(
    all_epochs: list[Changes], when: list[str], limit: int, shards: int, shard: int
) -> None:
    job = Job()
    for changed, fold in zip(all_epochs, when):
        job.epoch(changed, fold)
    view = job.view()
    whole = view.read()
    assert list(found(view.read(limit=limit)).items()) == list(found(whole).items())[:limit]
    low, high = hash_range_of_shard(shard % shards, shards)
    inside = found(view.read(hash_range=(low, high)))
    assert inside == {key: value for key, value in after(all_epochs).items() if low <= real_hash(key) <= high}


@given(epochs, st.sampled_from(ALL_KEYS))
@examples(40)
def test_where_is_a_filter_with_grouping_equality(all_epochs: list[Changes], key: Key) -> None:
    """Null finds null, NaN finds NaN; an Arrow expression does what Arrow does."""
    job = Job()
    for changed in all_epochs:
        job.epoch(changed)
    expected = after(all_epochs)
    by_score = job.view().read(where={"score": as_key(key)["score"]})
    assert found(by_score) == {k: v for k, v in expected.items() if k[1] == key[1]}
    by_value = job.view().read(where={"n": None})
    assert found(by_value) == {k: v for k, v in expected.items() if v[0] is None}
    positive = job.view().read(where=pc.field("n") > 0)
    assert found(positive) == {k: v for k, v in expected.items() if v[0] is not None and v[0] > 0}
    assert found(job.view().read(key=as_key(key), where={"s": "no such text"})) == {}


def test_a_point_query_reads_only_what_overlaps_its_hash() -> None:
    """Found in the newest epoch: one manifest, one index, one part. Else one part per epoch, and one table per layer."""
    job = Job(parallelism=16, inline_bytes_max=0)
    everything: Changes = dict.fromkeys(ALL_KEYS, (1, "x"))
    key, other = ALL_KEYS[7], next(k for k in ALL_KEYS if real_hash(k) >> 60 != real_hash(ALL_KEYS[7]) >> 60)
    job.epoch(everything)
    job.epoch({key: (2, "y"), other: (2, "y")})
    job.epoch({other: (3, "z")})

    def parts_read() -> int:
        view = job.view()
        job.store.log.clear()
        view.read(key=as_key(key))
        return sum("direct-" in path for path, _, _ in job.store.log)

    assert parts_read() == 1, "the third epoch has no part there, the second one has, the first is not looked at"
    job.epoch({key: (4, "w")})
    assert parts_read() == 1
    assert sum(path.endswith(".seg") for path, _, _ in job.store.log) == 2, "one index, one part"

    job.epoch({other: (5, "v")}, "major")
    view = job.view()
    table = view.manifest.layers[0].tables[0]
    halves = tuple(
        replace(table, path=f"tables/op/half-{n}.parquet", hash_low=n << 63, hash_high=((n + 1) << 63) - 1)
        for n in range(2)
    )
    view = replace(view, manifest=replace(view.manifest, layers=(replace(view.manifest.layers[0], tables=halves),)))
    with pytest.raises(MissingFile) as caught:
        view.read(key=as_key(key))
    assert f"half-{real_hash(key) >> 63}" in str(caught.value), "the other half is not touched"


@given(epochs, st.sampled_from(["", "minor"]))
@examples(15)
def test_more_files_than_steps_are_read_in_fewer_steps(all_epochs: list[Changes], fold: str) -> None:
    """A scan has a bound on its steps, whatever number of ranges the files have."""
    job = Job(parallelism=16)
    for changed in all_epochs:
        job.epoch(changed, fold)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("state_runtime.reading.lookup._RANGES_MAX", 3)
        assert found(job.view().read()) == after(all_epochs)


def test_a_limited_scan_ends_early() -> None:
    """Sixteen shards of one epoch: the first row needs the first part only."""
    job = Job(parallelism=16, inline_bytes_max=0)
    job.epoch(dict.fromkeys(ALL_KEYS, (1, "x")))
    view = job.view()
    job.store.log.clear()
    assert view.read(limit=1).num_rows == 1
    assert sum("direct-" in path for path, _, _ in job.store.log) == 1


def test_a_state_without_rows_has_its_columns() -> None:
    """With the types that the manifest declares, and null where only the stored file would know."""
    job = Job()
    job.epoch({})
    for table in (job.view().read(), job.view().read(key=as_key(ALL_KEYS[0]))):
        assert table.num_rows == 0
        assert table.schema.types == [pa.string(), pa.float64(), pa.int64(), pa.string()]


def test_columns_are_chosen_by_name_and_kept_apart() -> None:
    job = small_job()
    assert job.view().read(columns=["s", "name"]).column_names == ["s", "name"]
    view = job.view()

    def shown(keys: str, values: str) -> tuple[str, ...]:
        return described(view, keys, values).columns

    assert shown("a int, b int", "b int, c int") == ("a", "key.b", "value.b", "c")
    assert shown("x int, `value.x` int", "x int") == ("key.x", "key.value.x", "value.x")
    assert shown("`key.a` int", "a int") == ("key.a", "a")


def test_a_key_with_a_collation_is_looked_for_everywhere() -> None:
    """Spark hashes a collation key that only it knows; the row is found by its bytes."""
    job = Job(hash_of=colliding)
    job.epoch(dict.fromkeys(ALL_KEYS, (1, "x")))
    view = described(job.view(), "name string collate UNICODE_CI, score double", VALUE_DDL)
    for key in ALL_KEYS:
        assert found(view.read(key=as_key(key))) == {key: (1, "x")}


# --- values as text ----------------------------------------------------------------------------------------------

TEXTS = [
    ("boolean", "true", True),
    ("int", "-5", -5),
    ("bigint", "9223372036854775807", (1 << 63) - 1),
    ("double", "nan", float("nan")),
    ("float", "0.1", struct.unpack("<f", struct.pack("<f", 0.1))[0]),
    ("decimal(10,2)", "1.5", Decimal("1.50")),
    ("string", "", ""),
    ("string", "a=b", "a=b"),
    ("binary", "0x00fF", b"\x00\xff"),
    ("date", "2013-01-31", date(2013, 1, 31)),
    ("timestamp", "2013-01-31 12:00:00", datetime(2013, 1, 31, 12, tzinfo=UTC)),
    ("timestamp", "2013-01-31T12:00:00.000001+02:00", datetime(2013, 1, 31, 10, 0, 0, 1, tzinfo=UTC)),
    ("timestamp_ntz", "2013-01-31", datetime(2013, 1, 31, tzinfo=UTC).replace(tzinfo=None)),
]


def view_with_key(kind: str) -> StateView:
    return described(small_job().view(), f"`a=b` {kind}, a {kind}", VALUE_DDL)


@pytest.mark.parametrize(("kind", "text", "value"), TEXTS)
def test_text_is_read_by_the_columns_type(kind: str, text: str, value: Any) -> None:
    """Also where a column's name holds the sign that ends it; no sign is null."""
    parsed = view_with_key(kind).parse_key([f"a=b={text}", "a"])
    assert parsed["a"] is None
    got = parsed["a=b"].as_py()
    assert got == value or (got != got and value != value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("boolean", "maybe"),
        ("int", "1.5"),
        ("int", "3000000000"),
        ("int", ""),
        ("double", "1,5"),
        ("decimal(10,2)", "1.555"),
        ("decimal(10,2)", "nan"),
        ("string", "\udcff"),
        ("binary", "xyz"),
        ("date", "31.1.2013"),
        ("timestamp", "noon"),
        ("timestamp_ntz", "2013-01-31 12:00:00Z"),
        ("interval day to second", "1"),
    ],
)
def test_text_that_does_not_fit_names_operator_state_column_and_type(kind: str, text: str) -> None:
    """And never the value: messages end up in logs."""
    with pytest.raises(InvalidData) as caught:
        view_with_key(kind).parse_key([f"a={text}"])
    for part in ("'op'", "'count'", "'a'", kind):
        assert part in str(caught.value)
    assert not text or repr(text) not in str(caught.value)


@pytest.mark.parametrize(
    "key", [{"name": 5, "score": 1.0}, {"name": "a", "score": "1.0"}, {"name": b"\xff", "score": 1}]
)
def test_a_value_of_another_type_is_refused(key: dict[str, Any]) -> None:
    """A number is not the text of it; a silent conversion would look for another key."""
    with pytest.raises(InvalidData, match=r"'op', state 'count': key column '(name|score)' is (string|double)"):
        small_job().view().read(key=key)


# --- wrong calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"key": {"name": "a"}}, "the key lacks score; a key has all of name, score"),
        ({"key": {"name": "a", "score": 1.0, "n": 1}}, "no key column 'n'; it has: name, score"),
        ({"key": {}}, "the key lacks name, score"),
        ({"where": {"m": 1}}, "no column 'm'; it has: name, score, n, s"),
        ({"where": pc.field("m") > 1}, "the condition does not fit"),
        ({"columns": ["m"]}, "no column 'm'"),
        ({"limit": -1}, "0 or more"),
        ({"hash_range": (5, 4)}, "the lower one first"),
        ({"hash_range": (0, 1 << 64)}, "2\\^64"),
        ({"hash_range": ALL_HASHES, "key": {"name": "a", "score": 1.0}}, "not both"),
    ],
)
def test_a_wrong_call_says_what_exists(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        small_job().view().read(**arguments)


def test_texts_for_no_column_or_one_twice_are_refused() -> None:
    view = small_job().view()
    with pytest.raises(InvalidConfiguration, match=r"no key column 'N14228'; it has: name, score\. Write name=VALUE"):
        view.parse_key(["N14228"])
    with pytest.raises(InvalidConfiguration, match="'name' was given twice"):
        view.parse_key(["name=a", "name"])
    assert view.parse_where(["n=5"])["n"].as_py() == 5


def test_unknown_names_list_what_exists() -> None:
    job = small_job()
    with pytest.raises(InvalidConfiguration, match="has no operator 'legs'; it has: op"):
        job.view(operator="legs")
    with pytest.raises(InvalidConfiguration, match="operator 'op' has no state 'seen'; it has: count"):
        open_state(job.store, JOB, "seen", operator="op")
    with pytest.raises(InvalidConfiguration, match=r"no state 'seen'; it has: count \(of op\)"):
        open_state(job.store, JOB, "seen")
    with pytest.raises(MissingSnapshot, match="no snapshot 9"):
        job.view(snapshot=9)
    with pytest.raises(JobNotFound):
        open_state(job.store, "trains", STATE)
    with pytest.raises(MissingSnapshot, match="no snapshot yet"):
        Job().view()


def test_the_operator_may_be_left_out_only_if_it_is_clear() -> None:
    job = small_job()
    manifest = job.writer.manifest
    assert job.view().operator.uid == OPERATOR
    twin = replace(manifest.operators[0], uid="twin")
    job.commit(replace(manifest, operators=(*manifest.operators, twin)))
    with pytest.raises(InvalidConfiguration, match="several operators have a state 'count'; name one of: op, twin"):
        job.view()
    assert job.view(operator="twin").read().num_rows == 0
    assert job.view(operator="op").read().num_rows == len(ALL_KEYS) - 1


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folded", [False, True])
def test_no_flipped_byte_is_believed(folded: bool) -> None:
    """A result is the state of the snapshot, or a typed error; never another result, never a bare exception."""
    job = small_job(folded)
    key, whole = as_key(ALL_KEYS[3]), found(job.view().read())
    kinds: set[str] = set()
    for name, body in list(job.store.objects.items()):
        for at in range(0, len(body), max(1, len(body) // 25)):
            job.store.objects[name] = body[:at] + bytes([body[at] ^ 0x41]) + body[at + 1 :]
            for read, expected in (
                (lambda: found(job.view().read()), whole),
                (lambda: found(job.view().read(key=key)), {ALL_KEYS[3]: whole[ALL_KEYS[3]]}),
            ):
                try:
                    got = read()
                except StillstateError as error:
                    kinds.add(error.kind)
                else:
                    assert got == expected, (name, at)
        job.store.objects[name] = body
    assert kinds <= {"corrupt", "unsupported"}


@pytest.mark.parametrize("folded", [False, True])
def test_a_missing_file_is_named(folded: bool) -> None:
    job = small_job(folded)
    for path in [name for name in job.store.objects if "/changelog/" in name or "/tables/" in name]:
        body = job.store.objects.pop(path)
        if folded and "/changelog/" in path and path.split("/")[-1].startswith(f"{1:020d}"):
            job.view().read()  # folded into a table: nobody needs it
        else:
            with pytest.raises(MissingFile, match=path.split("/")[-1]):
                job.view().read()
        job.store.objects[path] = body


def damaged(operators: Callable[[OperatorEntry], OperatorEntry]) -> StateView:
    job = small_job()
    manifest = job.writer.manifest
    job.commit(replace(manifest, operators=tuple(map(operators, manifest.operators))))
    return job.view()


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("`name` string, `score` float", VALUE_DDL),
        ("`name` string", VALUE_DDL),
        ("`nam` string, `score` double", VALUE_DDL),
        (KEY_DDL, "`n` int, `s` string"),
        (KEY_DDL, "`n` bigint"),
    ],
)
def test_columns_other_than_the_manifests_are_not_read(keys: str, values: str) -> None:
    """A file of another state, or another job's: by its digest it may well be whole."""
    view = damaged(lambda o: replace(o, key_schema=keys, states=(replace(o.states[0], schema=values),)))
    with pytest.raises(CorruptSegment, match="where the manifest says"):
        view.read()


def test_columns_that_cannot_be_read_are_a_damaged_manifest() -> None:
    with pytest.raises(CorruptManifest, match="operator 'op', state 'count' cannot be read"):
        damaged(lambda o: replace(o, key_schema="array<"))


def test_a_manifest_of_another_job_is_refused() -> None:
    job = small_job()
    job.commit(replace(job.writer.manifest, job_uid="job-2"))
    with pytest.raises(CorruptManifest, match="files were swapped"):
        job.view()


@pytest.mark.parametrize("claimed", [(0, 1 << 40), (5, 4), (-1, 5), (0, 1 << 70)])
def test_a_part_with_keys_outside_of_its_range_is_damaged(claimed: tuple[int, int]) -> None:
    """Its range decides who reads it, so rows outside of it would be seen by some readers only."""
    job = small_job()
    batch = batch_of(dict.fromkeys(ALL_KEYS, (9, "x")), real_hash)
    ids = CountingIds(prefix=9)
    task = write_task_changes(
        job.writer.root,
        term=1,
        operator=OPERATOR,
        hash_range=claimed,
        changes={STATE: batch},
        inline_bytes_max=1 << 20,
        ids=ids,
    )
    manifest = job.writer.manifest
    segment = write_segment(job.writer.root, [task], job_uid=manifest.job_uid, term=1, snapshot_id=3, ids=ids)
    assert segment is not None
    job.commit(replace(manifest, snapshot_id=3, segments=(*manifest.segments, segment)))
    with pytest.raises(CorruptSegment, match=r"hash range|out of bounds|damaged index"):
        job.view().read()


def test_text_that_is_no_text_is_damaged() -> None:
    """A part with a right digest and bytes that are no UTF-8: written by something else than our writer."""
    job = small_job()
    batch = batch_of({ALL_KEYS[-1]: (9, "x")}, real_hash)
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("<2i", 0, 1)), pa.py_buffer(b"\xff")]
    )
    batch = batch.set_column(batch.schema.get_field_index("value.s"), "value.s", broken)
    ids = CountingIds(prefix=9)
    task = write_task_changes(
        job.writer.root,
        term=1,
        operator=OPERATOR,
        hash_range=ALL_HASHES,
        changes={STATE: batch},
        inline_bytes_max=1 << 20,
        ids=ids,
    )
    manifest = job.writer.manifest
    segment = write_segment(job.writer.root, [task], job_uid=manifest.job_uid, term=1, snapshot_id=3, ids=ids)
    assert segment is not None
    job.commit(replace(manifest, snapshot_id=3, segments=(*manifest.segments, segment)))
    with pytest.raises(CorruptSegment, match=r"another type than its own|cannot be decoded"):
        job.view().read(key=as_key(ALL_KEYS[-1]))


def test_values_that_only_arrow_knows_are_read_as_stored() -> None:
    """A type that this reader cannot name is no reason to refuse: the file has its own schema."""
    schema = StateSchema(pa.schema([("name", pa.string())]), pa.schema([("d", pa.duration("us"))]))
    job = small_job()
    hashed = hash_key([one("a", pa.string())])
    batch = schema.batch(
        np.array([hashed], dtype=np.uint64), None, [one("a", pa.string())], [one(5, pa.duration("us"))]
    )
    ids = CountingIds(prefix=9)
    task = write_task_changes(
        job.writer.root,
        term=1,
        operator="other",
        hash_range=ALL_HASHES,
        changes={"wait": batch},
        inline_bytes_max=1 << 20,
        ids=ids,
    )
    manifest = job.writer.manifest
    segment = write_segment(job.writer.root, [task], job_uid=manifest.job_uid, term=1, snapshot_id=3, ids=ids)
    assert segment is not None
    entry = OperatorEntry("other", "test", "name string", (StateEntry("wait", "value", "d interval day to second"),))
    job.commit(replace(manifest, snapshot_id=3, operators=(*manifest.operators, entry), segments=(segment,)))
    view = open_state(job.store, JOB, "wait")
    assert view.read(key={"name": "a"}).schema.types == [pa.string(), pa.duration("us")]
    assert view.read(key={"name": "b"}).num_rows == 0
    with pytest.raises(InvalidConfiguration, match="cannot be compared"):
        view.read(where={"d": 5})
