"""The contract on both backends, what is particular to RocksDB, and moving between them."""

from __future__ import annotations

import builtins
import hashlib
import shutil
import sys
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backend_contract import Backend, BackendContract, Epoch, Shard, damaged, one_change, plain_epoch
from memory_reader import MemoryReader
from model import (
    ALL_HASHES,
    ALL_KEYS,
    OPERATOR,
    SCHEMA,
    STATE,
    CountingIds,
    DictStore,
    FakeClock,
    StateWriter,
    batch_of,
    spread,
)
from shapes import SHAPES, Change, batch_of_change, check_same

from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.state import rocksdb, rocksdb_database, rocksdb_reader
from state_runtime.state.backend import LocalCopyUnusable, ShardStore
from state_runtime.state.backends import open_backend
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.local import LocalShard
from state_runtime.state.rocksdb import RocksShard
from state_runtime.state.rocksdb_reader import RocksReader
from state_runtime.state.table import StateSchema
from tests.stored import read_states

MANY = ALL_KEYS[2:14]


class TestArrow(BackendContract):
    """state/local.py; small merges, so that they happen."""

    @pytest.fixture
    def backend(self) -> Backend:
        return Backend(lambda folder, schemas, clock: LocalShard(folder, schemas, clock, merge_rows_min=6), True)


class TestRocksDB(BackendContract):
    """state/rocksdb.py."""

    @pytest.fixture
    def backend(self) -> Backend:
        return Backend(RocksShard, False)

    @pytest.fixture
    def shard(self, backend: Backend, folder: Path) -> Shard:
        return Shard(backend, folder)

    def tables(self, shard: Shard, version: str = "") -> list[Path]:
        """The table files of a version."""
        return sorted((shard.folder / f"{version or shard.version}.rocksdb" / "db").glob("*.sst"))

    def test_a_damaged_block_that_nobody_verified_is_unusable_when_it_is_read(self, shard: Shard) -> None:
        """In every method: a scan must not take a damaged block for the end of the table."""
        rows = Change(rows={(key, "a"): (1, "x", 5) for key in MANY})
        shard.epoch(Epoch({**one_change(1), "rows-due": rows}, 0, False, None, False, False))
        for path in self.tables(shard):
            body = bytearray(path.read_bytes())
            body[: len(body) // 3] = bytes(len(body) // 3)
            damaged(path, bytes(body))
        rocksdb_database.block_cache.cache_clear()  # as another process: this one has read the blocks whole
        opened = shard.open(verify=False)
        with pytest.raises(LocalCopyUnusable):
            shard.open(verify=True)
        batch = batch_of_change("rows-due", rows, spread)
        schema = SHAPES["rows-due"]
        keys, hashes = schema.keys_of(batch), np.asarray(batch.column(0))
        entries = np.asarray(batch.column(2))
        reads = {
            "find": lambda: opened.find("value", hashes, keys),
            "find_entries": lambda: opened.find_entries(
                "rows-due", hashes, keys, entries, schema.entry_columns_of(batch)
            ),
            "entry_bounds": lambda: opened.entry_bounds("rows-due", hashes),
            "read_entries": lambda: opened.read_entries("rows-due", hashes, keys),
            "iter_entries": lambda: list(opened.iter_entries("rows-due", int(hashes[0]), [k[:1] for k in keys], 1)),
            "due": lambda: opened.due("rows-due", 99),
            "next_due": lambda: opened.next_due("rows-due"),
        }
        answered = []
        for name, read in reads.items():
            try:
                read()
                answered.append(name)
            except LocalCopyUnusable:
                continue
        assert answered == []

    @pytest.mark.parametrize(("pattern", "verify"), [("*.sst", True), ("MANIFEST-*", False), ("CURRENT", False)])
    def test_a_flipped_bit_is_found_before_anything_is_read(self, shard: Shard, pattern: str, verify: bool) -> None:
        """Tables when verified, and always what says which tables count."""
        shard.commit(one_change(1))
        for path in (shard.folder / f"{shard.version}.rocksdb" / "db").glob(pattern):
            body = path.read_bytes()
            for position in range(0, len(body) * 8, 101):
                flipped = bytearray(body)
                flipped[position // 8] ^= 1 << position % 8
                damaged(path, bytes(flipped))
                with pytest.raises(LocalCopyUnusable, match="has another digest"):
                    shard.open(verify=verify)
            damaged(path, body)
        shard.open(verify=verify)

    def test_no_flipped_bit_of_a_version_file_is_believed(self, shard: Shard) -> None:
        """One bit in a state's name, and the state would look empty."""
        shard.commit(one_change(1))
        path = shard.folder / f"{shard.version}.rocksdb" / "version.json"
        body = path.read_bytes()
        for position in range(0, len(body) * 8, 7):
            flipped = bytearray(body)
            flipped[position // 8] ^= 1 << position % 8
            path.write_bytes(flipped)
            with pytest.raises(LocalCopyUnusable):
                shard.open(verify=False)

    def test_a_version_of_a_foreign_name_is_not_opened(self, shard: Shard) -> None:
        """Ids come out of a manifest, and become part of a path."""
        folder = shard.folder / f"{shard.version}.rocksdb"
        _, _, body = (folder / "version.json").read_bytes().partition(b"\n")
        body = body.replace(shard.version.encode(), b"../x")
        (folder / "version.json").write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        folder.rename(shard.folder.parent / "x.rocksdb")
        with pytest.raises(LocalCopyUnusable, match="not a version id"):
            shard.open("../x", verify=False)

    def test_a_base_that_is_damaged_is_a_failed_write(self, shard: Shard) -> None:
        """The sweep for expired rows reads it; the task goes on without a local copy, and no scratch folder stays."""
        rows = Change(rows={(key, None): (1, "x", 5) for key in MANY})
        shard.epoch(Epoch({"value-expires": rows}, 0, False, None, False, False))
        for path in self.tables(shard):
            body = path.read_bytes()
            damaged(path, bytes(64) + body[64:])
        rocksdb_database.block_cache.cache_clear()  # as another process: this one has read the blocks whole
        opened = shard.open(verify=False)
        before = sorted(path.name for path in shard.folder.iterdir())
        with pytest.raises(OSError, match="Corruption"):
            shard.attempt(opened, {}, {})
        assert sorted(path.name for path in shard.folder.iterdir()) == before

    def test_a_planted_log_is_not_replayed(self, shard: Shard) -> None:
        """RocksDB reads any write-ahead log that it finds."""
        shard.epoch(plain_epoch(0))
        folder = shard.folder / f"{shard.version}.rocksdb" / "db"
        (folder / "000099.log").write_bytes(b"")
        with pytest.raises(LocalCopyUnusable, match="other files"):
            shard.open(verify=False)

    @pytest.mark.parametrize(
        "config", [b'{"raw_mode":false}', b'{"raw_mode":true,"prefix_extractors":{"default":{"Fixed":2}}}']
    )
    def test_no_other_way_of_reading_keys_is_taken_from_the_disk(self, shard: Shard, config: bytes) -> None:
        """Without raw mode the library would load pickles."""
        shard.epoch(plain_epoch(0))
        path = shard.folder / f"{shard.version}.rocksdb" / "db" / "rocksdict-config.json"
        path.write_bytes(config)
        with pytest.raises(
            LocalCopyUnusable, match=r"rocksdict-config\.json has another digest than when it was written"
        ):
            shard.open(verify=False)
        path.unlink()
        path.symlink_to(shard.folder / "elsewhere")
        with pytest.raises(LocalCopyUnusable):
            shard.open(verify=False)
        assert not (shard.folder / "elsewhere").exists()

    def test_another_attempt_may_be_opening_the_same_version(self, shard: Shard) -> None:
        """The library writes its note in place whenever a database is opened: half of it may be there."""
        shard.epoch(plain_epoch(0))
        path = shard.folder / f"{shard.version}.rocksdb" / "db" / "rocksdict-config.json"
        shard.open()
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            shard.check(shard.open(), shard.model(), one_change(0))

    def test_an_epoch_shares_the_tables_it_did_not_change(self, shard: Shard) -> None:
        """A version costs what the epoch changed, not the state."""
        shard.runs_max = 9
        shard.epoch(plain_epoch(0))
        before = {path.stat().st_ino for path in self.tables(shard)}
        shard.epoch(plain_epoch(1))
        after = {path.stat().st_ino for path in self.tables(shard)}
        assert before & after

    def test_tables_are_compacted_and_what_was_removed_goes(self, shard: Shard) -> None:
        """The wait for compaction works: tables do not pile up, however soon a database is closed again."""
        shard.runs_max = 3
        counts = []
        for number in range(16):
            shard.commit(one_change(number))
            counts.append(len(self.tables(shard)))
        # A table of marks, those of the last epochs, and the compacted one.
        assert max(counts) <= 3 + 2, counts
        assert min(counts[4:]) < max(counts), counts

    def test_expired_rows_are_removed_a_bounded_number_at_a_time(
        self, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From where the last epoch stopped, round and round; what has not expired stays."""
        monkeypatch.setattr(rocksdb, "_SWEEP_ROWS_MIN", 5)
        rows = {(key, None): (1, "x", 5 if number % 2 else None) for number, key in enumerate(MANY)}
        shard.epoch(Epoch({"value-expires": Change(rows=rows)}, 0, False, None, False, False))
        shard.now_ms = 5
        stored = []
        for _ in range(4):
            shard.version = shard.attempt(shard.open(), {}, {})
            opened = shard.open()
            assert isinstance(opened, RocksReader)
            # As they are stored: at a batch time at which nothing has expired.
            early = shard.store.open(shard.version, -9, verify=False)
            hashes = np.array(sorted(spread(key) for key in MANY), dtype=np.uint64)
            stored.append(int(early.entry_bounds("value-expires", hashes).sum()))
            shard.check(opened, shard.model(), ["value-expires"])
        live = len(MANY) - len(MANY) // 2
        assert stored[0] > live
        assert stored[-1] == live
        assert stored == sorted(stored, reverse=True)

    def test_two_attempts_may_prune_at_once(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        """One finds a folder gone that it has just listed."""
        first = shard.version
        shard.commit(one_change(1))
        remove = shutil.rmtree

        def beaten(folder: Path) -> None:
            remove(folder)
            remove(folder)

        monkeypatch.setattr(shutil, "rmtree", beaten)
        shard.store.prune(shard.version)
        monkeypatch.undo()
        with pytest.raises(LocalCopyUnusable):
            shard.open(first)
        shard.check(shard.open(), shard.model(), one_change(1))

    def test_handled_times_leave_the_index(self, shard: Shard) -> None:
        """So that the next epoch does not look at them again, although the operator kept the rows."""
        rows = Change(rows={(key, None): (1, "x", number) for number, key in enumerate(MANY)})
        shard.epoch(Epoch({"value-due": rows}, 0, False, None, False, False))
        shard.version = shard.attempt(shard.open(), {}, {"value-due": 4})
        opened = shard.open()
        assert sorted(opened.due("value-due", 9).column("due").to_pylist()) == [5, 6, 7, 8, 9]
        assert opened.next_due("value-due") == 5
        found, _ = opened.find("value-due", *hashed_keys())
        assert found.all()

    def test_next_due_looks_past_removed_rows_but_not_without_end(
        self, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A bound that is too early wakes the shard once in vain, and is then forgotten."""
        monkeypatch.setattr(rocksdb_reader, "_STALE_ROWS_FIRST", 2)
        rows = {(key, number): (None, None, None) for number, key in enumerate(MANY)}
        shard.epoch(Epoch({"timers": Change(rows=rows)}, 0, False, None, False, False))
        gone = Change(rows=dict.fromkeys(list(rows)[:7], None))
        shard.epoch(Epoch({"timers": gone}, 0, False, None, False, False))
        assert shard.open().next_due("timers") == 7
        monkeypatch.setattr(rocksdb_reader, "_STALE_ROWS_MAX", 4)
        assert shard.open().next_due("timers") == 3
        shard.version = shard.attempt(shard.open(), {}, {"timers": 3})
        assert shard.open().next_due("timers") == 7

    def test_nested_and_decimal_columns_are_kept(self, folder: Path) -> None:
        """A struct is a key too, as Spark's window column is."""
        window = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])
        values = pa.schema(
            [("tags", pa.list_(pa.string())), ("sums", pa.map_(pa.string(), pa.decimal128(30, 2))), ("b", pa.binary())]
        )
        schema = StateSchema(pa.schema([("window", window), ("s", pa.large_string())]), values)
        store = RocksShard(folder, {"s": schema}, FakeClock())
        keys = [
            pa.array([{"start": n, "end": None} if n else None for n in range(4)], window),
            pa.array(["a"] * 4, pa.large_string()),
        ]
        columns = [
            pa.array([["x", None], [], None, ["y"]], values.field("tags").type),
            pa.array([[("k", Decimal("1.50")), ("l", None)], None, [], []], values.field("sums").type),
            pa.array([b"\x80\x05", None, b"", b"x" * 5000], pa.binary()),
        ]
        hashes = hash_rows(keys)
        order = pa.array(np.argsort(hashes))
        batch = schema.batch(np.sort(hashes), None, [k.take(order) for k in keys], [c.take(order) for c in columns])
        reader = store.write_restored("0" * 16, {"s": batch}, 0)
        found, got = reader.find("s", np.sort(hashes), [k.take(order) for k in keys])
        assert found.all()
        assert all(g.equals(c.take(order)) for g, c in zip(got, columns, strict=True))


def hashed_keys() -> tuple[Any, list[pa.Array]]:
    """All keys with their hashes, sorted."""
    batch = batch_of_change("value", one_change(0, MANY)["value"], spread)
    return np.asarray(batch.column(0)), SHAPES["value"].keys_of(batch)


# --- the choice --------------------------------------------------------------------------------------------------


def test_a_backend_is_chosen_by_name(tmp_path: Path) -> None:
    assert isinstance(open_backend("arrow", tmp_path, SHAPES, FakeClock()), LocalShard)
    assert isinstance(open_backend("rocksdb", tmp_path, SHAPES, FakeClock()), RocksShard)
    with pytest.raises(InvalidConfiguration, match="choose arrow or rocksdb"):
        open_backend("rocks", tmp_path, SHAPES, FakeClock())


@pytest.mark.parametrize(("missing", "error"), [("rocksdict", InvalidConfiguration), ("numpy", ModuleNotFoundError)])
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, error: type[Exception]
) -> None:
    """The library is an extra; only that one may be missing."""
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "state_runtime.state.rocksdb":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "state_runtime.state.rocksdb")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(error, match=r"stillstate\[rocksdb\]" if missing == "rocksdict" else "numpy"):
        open_backend("rocksdb", tmp_path, SHAPES, FakeClock())


def test_backends_in_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    """A job whose setting changes restores from the primary; neither finds or removes the other's files."""
    arrow, rocks = (open_backend(kind, tmp_path, SHAPES, FakeClock()) for kind in ("arrow", "rocksdb"))
    batch = batch_of_change("value", one_change(1)["value"], spread)
    for number, store in enumerate((arrow, rocks)):
        store.write_restored(f"{number:016x}", {"value": batch}, 0)
    for number, store in enumerate((arrow, rocks)):
        store.prune(f"{number:016x}")
    model = MemoryReader(SHAPES, {"value": [batch]}, 0)
    for number, store in enumerate((arrow, rocks)):
        check_same(store.open(f"{number:016x}", 0, verify=True), model, "value", spread)
        with pytest.raises(LocalCopyUnusable):
            store.open(f"{1 - number:016x}", 0, verify=False)


@pytest.mark.parametrize("kind", ["arrow", "rocksdb"])
def test_a_backend_takes_rows_below_others_if_it_says_so(tmp_path: Path, kind: str) -> None:
    """A restore asks the port, and knows no backend."""
    store = open_backend(kind, tmp_path, SHAPES, FakeClock())
    bottom, top = (batch_of_change("value", one_change(n)["value"], spread) for n in (1, 2))
    lay = partial(store.write_restored, "0" * 16, {"value": top}, 0, below={"value": [(0, iter([bottom]))]})
    if store.lays_below:
        check_same(lay(), MemoryReader(SHAPES, {"value": [top, bottom]}, 0), "value", spread)
    else:
        with pytest.raises(StillstateError, match="no runs that could lie below"):
            lay()
        assert store.versions() == [], "nothing was written"


@pytest.mark.parametrize(("writer", "restorer"), [("arrow", "rocksdb"), ("rocksdb", "arrow")])
def test_a_snapshot_written_with_one_backend_restores_with_the_other(
    tmp_path: Path, writer: str, restorer: str
) -> None:
    """The primary store holds the changes, which are Arrow batches whatever the backend."""
    job = StateWriter(DictStore())
    schemas = {STATE: SCHEMA}
    stores: Mapping[str, ShardStore] = {
        kind: open_backend(kind, tmp_path / kind, schemas, FakeClock()) for kind in (writer, restorer)
    }
    ids = CountingIds()
    version = ids.short()
    stores[writer].write_restored(version, {}, 0)
    for number in range(6):
        changed = {key: None if (number + at) % 4 == 0 else (number, "x" * at) for at, key in enumerate(MANY)}
        before, version = stores[writer].open(version, 0, verify=False), ids.short()
        change = {STATE: batch_of(changed)}
        stores[writer].write(version, before, change, now_ms=0, due_taken={}, runs_max=2)
        job.epoch(changed)
    states = read_states(job.root, job.manifest, OPERATOR, schemas, *ALL_HASHES)
    restored = stores[restorer].write_restored(ids.short(), states, 0)
    hashes, keys = hashed_keys()
    found, columns = restored.find(STATE, hashes, keys)
    expected, expected_columns = stores[writer].open(version, 0, verify=True).find(STATE, hashes, keys)
    assert found.tolist() == expected.tolist()
    assert [c.to_pylist() for c in columns] == [c.to_pylist() for c in expected_columns]
    assert 0 < found.sum() < len(found)
