"""What the tests compare with: state as a plain dictionary, a clock and ids that only move when told to, a dictionary store."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from state_runtime.base.errors import CorruptData
from state_runtime.base.settings import MaterializationMode
from state_runtime.materialize import Record, apply, materialize
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import StateSchema, hashes_of, slice_hash_range
from state_runtime.store import Body, Created, Store, StoredObject
from state_runtime.store.paths import check_relative_path
from tests.stored import write_segment, write_task_changes

SECRET = "s3cr3t/sentinel+7f1e"  # must never be seen anywhere; real keys hold / and + too
ALL_HASHES = (0, (1 << 64) - 1)

Key = tuple[Any, ...]
Value = tuple[Any, ...]
Changes = Mapping[Key, Value | None]
HashOf = Callable[[Key], int]


def examples(count: int) -> settings:
    """Settings of a property test: so many examples, no deadline (the machine is shared)."""
    return settings(
        max_examples=count,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def seeds(count: int) -> Iterator[tuple[int, random.Random]]:
    """Seeded generators; STILLSTATE_TEST_SEED replays one seed, and a failing test prints its seed in the message.

    STILLSTATE_SOAK multiplies how many there are (`make soak`).
    """
    wanted = os.environ.get("STILLSTATE_TEST_SEED")
    for seed in [int(wanted)] if wanted else range(count * int(os.environ.get("STILLSTATE_SOAK", "1"))):
        yield seed, random.Random(seed)


@dataclass
class FakeBroadcast:
    """Stands for Spark's: the value goes to nobody any more once it was destroyed."""

    _value: Any
    destroyed: bool = False

    @property
    def value(self) -> Any:
        assert not self.destroyed, "a task looked it up after its action had ended"
        return self._value

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True


@dataclass
class FakeClock:
    """A clock that moves only when told to."""

    at_ms: int = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_s(self) -> float:
        return self.at_ms / 1000

    def advance_s(self, seconds: float) -> None:
        self.at_ms += int(seconds * 1000)


@dataclass
class CountingIds:
    """Unique ids in a fixed order; `prefix` tells several sources apart."""

    prefix: int = 0
    count: int = 0

    def _next(self) -> int:
        self.count += 1
        return (self.prefix << 40) + self.count

    def uid(self) -> str:
        return f"{self._next():032x}"

    def short(self) -> str:
        return f"{self._next():016x}"


class DictStore(Store):
    """A store in a dictionary: the simplest thing that keeps the port's promises. Children share the dictionary.

    Args:
        clock: what tells when objects are written; without one it is always the same moment.
        times: when they were, shared as `objects` are.
    """

    def __init__(
        self,
        objects: dict[str, bytes] | None = None,
        root: str = "",
        clock: FakeClock | None = None,
        times: dict[str, int] | None = None,
    ) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.clock = clock if clock is not None else FakeClock()
        self.times: dict[str, int] = {} if times is None else times
        self._root = root

    @property
    def url(self) -> str:
        return f"dict://{self._root}"

    def _at(self, path: str) -> str:
        return self._root + check_relative_path(path)

    def create(self, path: str, body: Body) -> Created:
        body = bytes(body)
        if self.objects.setdefault(self._at(path), body) is body:
            self.times[self._at(path)] = self.clock.now_ms()
        return Created.MINE if self.objects[self._at(path)] == body else Created.LOST

    def put(self, path: str, body: Body) -> None:
        self.objects[self._at(path)] = bytes(body)
        self.times[self._at(path)] = self.clock.now_ms()

    def put_file(self, local: Path, path: str) -> None:
        self.put(path, local.read_bytes())

    def read(self, path: str, bytes_max: int) -> bytes:
        if self._at(path) not in self.objects:
            raise FileNotFoundError(path)
        body = self.objects[self._at(path)]
        if len(body) > bytes_max:
            raise CorruptData(f"{path} in {self.url} is larger than {bytes_max:,} bytes")
        return body

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        body = self.read(path, 1 << 60)[offset : offset + length]
        if len(body) != length:
            raise CorruptData(f"{path} was cut off")
        return body

    def size(self, path: str) -> int:
        return len(self.read(path, 1 << 60))

    def list_names(self, path: str) -> list[str]:
        below = f"{self._at(path)}/" if path else self._root
        return sorted({name[len(below) :].split("/")[0] for name in self.objects if name.startswith(below)})

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        below = f"{self._at(path)}/" if path else self._root
        for name in sorted(self.objects):
            if name.startswith(below):
                modified_ms = self.times.get(name, self.clock.now_ms())
                yield StoredObject(name[len(self._root) :], len(self.objects[name]), modified_ms)

    def copy(self, source: str, target: str) -> None:
        check_relative_path(target)
        self.put(target, self.read(source, 1 << 60))

    def move(self, source: str, target: str) -> None:
        if self._at(source) in self.objects:
            self.put(target, self.objects.pop(self._at(source)))
        elif self._at(target) not in self.objects:
            raise FileNotFoundError(source)

    def delete(self, path: str) -> None:
        self.objects.pop(self._at(path), None)

    def child(self, name: str) -> DictStore:
        return DictStore(self.objects, f"{self._at(name)}/", self.clock, self.times)


BUCKET = "stillstate-tests"


def s3_options(endpoint: str, secret: str = SECRET) -> dict[str, Any]:
    """Storage options for the server; quick to give up."""
    return {
        "key": "testing",
        "secret": secret,
        "endpoint_url": endpoint,
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5},
    }


# --- state -------------------------------------------------------------------------------------------------------

OPERATOR, STATE = "op", "count"
KEY_DDL, VALUE_DDL = "`name` string, `score` double", "`n` bigint, `s` string"
SCHEMA = StateSchema(
    pa.schema([("name", pa.string()), ("score", pa.float64())]), pa.schema([("n", pa.int64()), ("s", pa.string())])
)
NAMES = (None, "", "a", "b", "ab")
SCORES = (None, "nan", 0.0, 1.5, -2.0)  # "nan" stands for NaN, 0.0 also for -0.0: grouping equality
ALL_KEYS: tuple[Key, ...] = tuple((name, score) for name in NAMES for score in SCORES)


def first_hash_of_shard(shard: int, parallelism: int) -> int:
    """The hash in a row that wakes a shard, signed as Spark's hashes are."""
    first, _ = hash_range_of_shard(shard, parallelism)
    return first - (1 << 64) if first >= 1 << 63 else first


def spread(key: Key) -> int:
    """A hash as good as xxhash64."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


def colliding(key: Key) -> int:
    """A hash that gives many keys the same value, at both ends of the range too."""
    return (0, 1, 1 << 49, 1 << 63, (1 << 64) - 1)[spread(key) % 5]


keys = st.sampled_from(ALL_KEYS)
values = st.tuples(st.none() | st.integers(-(1 << 63), (1 << 63) - 1), st.none() | st.text(max_size=3))
changes = st.dictionaries(keys, st.none() | values, max_size=14)
epochs = st.lists(changes, min_size=1, max_size=9)
hash_functions = st.sampled_from([spread, colliding])
parallelisms = st.sampled_from([1, 2, 3, 5, 16, 32768])


def actual_score(score: Any, *, negative_zero: bool) -> Any:
    """The value behind a model key's score; zero in either of its two forms."""
    if score == "nan":
        return float("nan")
    return -0.0 if score == 0.0 and negative_zero else score


def key_columns(wanted: list[Key], *, negative_zero: bool = False) -> list[pa.Array]:
    """Model keys as key columns."""
    return [
        pa.array([name for name, _ in wanted], pa.string()),
        pa.array([actual_score(s, negative_zero=negative_zero) for _, s in wanted], pa.float64()),
    ]


def batch_of(
    changed: Changes, hash_of: HashOf = spread, schema: StateSchema = SCHEMA, *, negative_zero: bool = False
) -> pa.RecordBatch:
    """Changes as a state batch; None is a tombstone."""
    order = sorted(changed, key=hash_of)
    rows = [changed[key] for key in order]
    return schema.batch(
        np.array([hash_of(key) for key in order], dtype=np.uint64),
        np.array([row is None for row in rows], dtype=np.bool_),
        key_columns(order, negative_zero=negative_zero),
        [pa.array([None if row is None else row[i] for row in rows], f.type) for i, f in enumerate(schema.values)],
    )


def canonical_key(name: Any, score: Any) -> Key:
    """The model's key for stored values."""
    return (name, "nan" if score is not None and score != score else None if score is None else score + 0.0)


def rows_of(batch: pa.RecordBatch) -> dict[Key, Value | None]:
    """A state batch as changes; fails if a key is there twice or the batch is not sorted."""
    hashes = hashes_of(batch)
    assert bool(np.all(hashes[:-1] <= hashes[1:])), "not sorted by hash"
    found: dict[Key, Value | None] = {}
    for row in batch.to_pylist():
        key = canonical_key(row["key.name"], row["key.score"])
        assert key not in found, f"key {key} twice"
        found[key] = None if row["deleted"] else (row["value.n"], row["value.s"])
    return found


def after(all_epochs: list[Changes]) -> dict[Key, Value]:
    """The model: what a dictionary holds after the epochs."""
    live: dict[Key, Value] = {}
    for changed in all_epochs:
        for key, value in changed.items():
            if value is None:
                live.pop(key, None)
            else:
                live[key] = value
    return live


# --- a job root with state, without Spark ------------------------------------------------------------------------


_FOLD_IDS = CountingIds(prefix=77)


def recorded(root: Store, manifest: Manifest, mode: MaterializationMode = "auto", **options: Any) -> Record:
    """Materialize a snapshot whose manifest may not be in the store yet."""
    if not root.exists(manifest_path(manifest.snapshot_id)):
        root.put(manifest_path(manifest.snapshot_id), manifest.encode())
    return materialize(root, manifest, mode, **{"clock": FakeClock(), "ids": _FOLD_IDS, **options})


def folded(root: Store, manifest: Manifest, mode: MaterializationMode = "auto", **options: Any) -> Manifest:
    """The manifest after a materialization that its driver adopted."""
    return apply(manifest, recorded(root, manifest, mode, **options))


def empty_manifest(job_uid: str = "job-1", parallelism: int = 4) -> Manifest:
    """The content of a job that has no snapshot yet."""
    return Manifest(1, job_uid, 0, 0, "", "checkpoint", 0, parallelism)


@dataclass
class StateWriter:
    """Plays driver and tasks for one operator: each epoch becomes one segment of the manifest."""

    root: Store = field(default_factory=DictStore)
    hash_of: HashOf = spread
    parallelism: int = 4
    inline_bytes_max: int = 1 << 20
    ids: CountingIds = field(default_factory=CountingIds)
    manifest: Manifest = field(default_factory=empty_manifest)

    def epoch(self, changed: Changes) -> Manifest:
        """Write what every shard changed, and the segment."""
        whole = batch_of(changed, self.hash_of, negative_zero=self.ids.count % 2 == 0)
        tasks = []
        for shard in range(min(self.parallelism, 64)):
            low, high = hash_range_of_shard(shard, min(self.parallelism, 64))
            part = slice_hash_range(whole, low, high)
            tasks.append(
                write_task_changes(
                    self.root,
                    term=1,
                    operator=OPERATOR,
                    hash_range=(low, high),
                    changes={STATE: part},
                    inline_bytes_max=self.inline_bytes_max,
                    ids=self.ids,
                )
            )
        snapshot_id = self.manifest.snapshot_id + 1
        segment = write_segment(
            self.root, tasks, job_uid=self.manifest.job_uid, term=1, snapshot_id=snapshot_id, ids=self.ids
        )
        self.manifest = replace(
            self.manifest,
            snapshot_id=snapshot_id,
            operators=(OperatorEntry(OPERATOR, "test", KEY_DDL, (StateEntry(STATE, "value", VALUE_DDL),)),),
            segments=(*self.manifest.segments, *([segment] if segment is not None else [])),
        )
        return self.manifest
