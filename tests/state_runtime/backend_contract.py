"""What every backend of a shard's local state must do. A test class inherits `BackendContract` and supplies `backend`."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import CountingIds, FakeClock, HashOf, colliding, examples, hash_functions, spread
from shapes import KEYS, SHAPES, Change, batch_of_change, both, changes_of, check_same, handled

from state_runtime.state.backend import LocalCopyUnusable, ShardStore
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema, fold

Folders = Callable[[], Path]
Make = Callable[[Path, Mapping[str, StateSchema], FakeClock], ShardStore]


@dataclass(frozen=True)
class Backend:
    """A backend under test.

    Attributes:
        make: opens the shard in a folder.
        exact_next_due: whether `next_due` looks past removed rows also under an overlay.
    """

    make: Make
    exact_next_due: bool


@dataclass(frozen=True)
class Epoch:
    """What happens in one epoch.

    Attributes:
        later_ms: how far the batch time moves on.
        take: whether what is due by the batch time is handled.
        again_ms: handled rows get this time, None removes them.
        twin: another attempt of the epoch, with other changes, that is not committed.
    """

    changes: Mapping[str, Change]
    later_ms: int
    take: bool
    again_ms: int | None
    twin: bool
    prune: bool


def on_each(count: int) -> settings:
    """`examples` of a law that several classes inherit: what fails one backend is worth a try on the others."""
    base = examples(count)
    return settings(base, suppress_health_check=[*base.suppress_health_check, HealthCheck.differing_executors])


def epochs_of(shapes: tuple[str, ...]) -> st.SearchStrategy[list[Epoch]]:
    changes = st.fixed_dictionaries({shape: changes_of(shape) for shape in shapes})
    one = st.builds(
        Epoch,
        changes,
        st.integers(0, 3),
        st.booleans(),
        st.none() | st.integers(-3, 12),
        st.booleans(),
        st.booleans(),
    )
    return st.lists(one, min_size=1, max_size=6)


class Shard:
    """A folder of versions beside the plain reader of the same history."""

    def __init__(self, backend: Backend, folder: Path, hash_of: HashOf = spread, runs_max: int = 4) -> None:
        self.backend, self.folder, self.hash_of, self.runs_max = backend, folder, hash_of, runs_max
        self.clock = FakeClock()
        self.store = backend.make(folder, SHAPES, self.clock)
        self.ids = CountingIds()
        self.now_ms = -1
        self.history: dict[str, list[pa.RecordBatch]] = {shape: [] for shape in SHAPES}
        self.version = self.ids.short()
        self.store.write_restored(self.version, {}, self.now_ms)

    def open(self, version: str = "", *, verify: bool = True) -> StateReader:
        return self.store.open(version or self.version, self.now_ms, verify=verify)

    def model(self, now_ms: int | None = None) -> MemoryReader:
        return MemoryReader(SHAPES, self.history, self.now_ms if now_ms is None else now_ms)

    def check(self, real: StateReader, model: MemoryReader, shapes: Any, *, overlaid: bool = False) -> None:
        bound_only = overlaid and not self.backend.exact_next_due
        for shape in shapes:
            check_same(real, model, shape, self.hash_of, bound_only=bound_only)
            for after_ms in (-10, 0, 4, 20) if SHAPES[shape].time == "due" else ():
                bound, earliest = real.next_due(shape, after_ms), model.next_due(shape, after_ms)
                assert bound is None or bound > after_ms
                assert bound == earliest or (
                    bound_only and bound is not None and (earliest is None or bound < earliest)
                )

    def attempt(self, base: StateReader, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int]) -> str:
        version = self.ids.short()
        self.store.write(version, base, changes, now_ms=self.now_ms, due_taken=due_taken, runs_max=self.runs_max)
        return version

    def commit(self, changes: Mapping[str, Change]) -> None:
        """A committed epoch, not looked at."""
        batches = {shape: batch_of_change(shape, change, self.hash_of) for shape, change in changes.items()}
        self.version = self.attempt(self.open(verify=False), batches, {})
        for shape, batch in batches.items():
            self.history[shape].insert(0, batch)

    def epoch(self, epoch: Epoch) -> None:
        """One committed epoch; what the operator sees is compared on the way."""
        self.now_ms += epoch.later_ms
        base, model = self.open(), self.model()
        if epoch.prune:
            self.store.prune(self.version)
        self.check(base, model, epoch.changes)
        batches, due_taken = {}, {}
        for shape, asked in epoch.changes.items():
            change = asked
            if epoch.take and SHAPES[shape].time == "due":
                change = both(asked, handled(shape, base.due(shape, self.now_ms), epoch.again_ms))
                due_taken[shape] = self.now_ms
            batches[shape] = batch_of_change(shape, change, self.hash_of)
        self.check(base.overlaid(batches, due_taken), model.overlaid(batches), epoch.changes, overlaid=True)
        before = self.version
        if epoch.twin:
            # It takes what is due and writes nothing; and the committed one must not notice.
            twin = self.attempt(self.open(), {}, due_taken)
        self.version = self.attempt(base, batches, due_taken)
        self.check(self.open(before), model, epoch.changes)
        for shape, batch in batches.items():
            self.history[shape].insert(0, batch)
        if epoch.prune:
            self.store.prune(before)
        self.check(self.open(), self.model(), epoch.changes)
        if epoch.twin:
            for shape in epoch.changes:
                if shape not in due_taken:
                    check_same(self.open(twin), model, shape, self.hash_of)


def one_change(number: int, keys: Any = KEYS) -> dict[str, Change]:
    """A change of every kind of state: some rows put, some removed."""
    rows = dict.fromkeys(keys, (number, "x" * number, None))
    return {
        "value": Change(rows={(key, None): row for key, row in rows.items()}),
        "list": Change(rows={(key, number + 1): row for key, row in rows.items()}),
        "timers": Change(rows={(key, number): row for key, row in rows.items()}),
    }


def plain_epoch(number: int) -> Epoch:
    return Epoch(one_change(number), 0, False, None, False, False)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def damaged(path: Path, body: bytes) -> None:
    """Another file of this name: of a hard link, only this one."""
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    path.write_bytes(body)
    path.chmod(mode)


class BackendContract:
    """The promises of `state_runtime.state.backend.ShardStore`, and of the `StateReader` it opens."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise AssertionError("a test class supplies it")

    @pytest.fixture
    def folders(self, tmp_path: Path) -> Iterator[Folders]:
        """New folders, in memory where the machine has that: RocksDB waits for the disk with every version."""
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as parent:
            numbers = itertools.count()
            yield lambda: Path(tempfile.mkdtemp(prefix=f"{next(numbers)}-", dir=parent))

    @pytest.fixture
    def folder(self, folders: Folders) -> Path:
        return folders()

    @pytest.mark.parametrize("shape", SHAPES)
    @given(data=st.data(), hash_of=hash_functions, runs_max=st.integers(2, 5))
    @on_each(8)
    def test_a_version_is_the_history_of_its_changes(
        self,
        backend: Backend,
        folders: Folders,
        shape: str,
        data: Any,
        hash_of: HashOf,
        runs_max: int,
    ) -> None:
        """After every epoch, in every method: reopened, overlaid, pruned, beside a twin, with expiry and handled times."""
        shard = Shard(backend, folders(), hash_of, runs_max)
        for epoch in data.draw(epochs_of((shape,))):
            shard.epoch(epoch)

    @given(data=st.data(), hash_of=hash_functions)
    @on_each(4)
    def test_states_of_one_version_do_not_mix(
        self, backend: Backend, folders: Folders, data: Any, hash_of: HashOf
    ) -> None:
        shapes = ("value", "map-expires", "rows-due", "timers")
        shard = Shard(backend, folders(), hash_of, 2)
        for epoch in data.draw(epochs_of(shapes)):
            shard.epoch(epoch)

    @pytest.mark.parametrize("shape", SHAPES)
    @given(data=st.data(), hash_of=hash_functions, now_ms=st.integers(-3, 12))
    @on_each(8)
    def test_a_restored_version_is_what_was_restored(
        self,
        backend: Backend,
        folders: Folders,
        shape: str,
        data: Any,
        hash_of: HashOf,
        now_ms: int,
    ) -> None:
        history = [batch_of_change(shape, c, hash_of) for c in data.draw(st.lists(changes_of(shape), max_size=4))]
        model = MemoryReader(SHAPES, {shape: history}, now_ms)
        table = fold(history, SHAPES[shape], drop_deleted=True)
        store = backend.make(folders(), SHAPES, FakeClock())
        check_same(store.write_restored("0" * 16, {shape: table}, now_ms), model, shape, hash_of)
        check_same(store.open("0" * 16, now_ms, verify=True), model, shape, hash_of)

    def test_expiry_follows_the_batch_time_of_the_reader(self, backend: Backend, folder: Path) -> None:
        """The same version, opened later: no version needs to be written for a row to be gone."""
        shard = Shard(backend, folder)
        change = Change(rows={(key, None): (1, "x", number) for number, key in enumerate(KEYS)})
        shard.epoch(Epoch({"value-expires": change}, 0, False, None, False, False))
        for now_ms in (-5, 0, 4, 5, 100):
            opened = shard.store.open(shard.version, now_ms, verify=False)
            check_same(opened, shard.model(now_ms), "value-expires", spread)

    @pytest.mark.parametrize("shape", ["value-due", "rows-due"])
    def test_a_row_is_due_at_its_newest_time_only(self, backend: Backend, folder: Path, shape: str) -> None:
        """Given a later or an earlier time, none, one again; and removed."""
        shard = Shard(backend, folder)
        part = None if shape == "value-due" else "a"
        for times in ((3, 5, None, 4), (9, 1, 2, None), (3, None, 2, 8)):
            rows = {(key, part): (1, "x", time) for key, time in zip(KEYS, times, strict=False)}
            shard.epoch(Epoch({shape: Change(rows=rows)}, 0, False, None, False, False))
        shard.epoch(Epoch({shape: Change(rows={(KEYS[0], part): None})}, 0, False, None, False, False))

    def test_a_reader_outlives_its_files(self, backend: Backend, folder: Path) -> None:
        """A slow attempt reads on while the next epoch prunes what it began from."""
        shard = Shard(backend, folder)
        shard.epoch(plain_epoch(0))
        slow, model = shard.open(), shard.model()
        for number in range(1, 9):
            shard.store.prune(shard.version)
            shard.commit(one_change(number))
        shard.check(slow, model, one_change(0))

    def test_disk_space_follows_the_state_and_not_the_epochs(self, backend: Backend, folder: Path) -> None:
        shard = Shard(backend, folder, runs_max=3)
        sizes = []
        for number in range(24):
            before = shard.version
            shard.commit(one_change(number % 3))
            shard.store.prune(before)
            sizes.append(len(files_of(folder)))
        assert max(sizes[12:]) <= max(sizes[:12]) + 2, sizes

    def test_prune_keeps_what_follows_from_the_committed_version(self, backend: Backend, folder: Path) -> None:
        """A twin of this epoch opened the same version; everything else goes."""
        shard = Shard(backend, folder)
        first = shard.version
        shard.epoch(plain_epoch(0))
        committed = shard.version
        batches = {s: batch_of_change(s, c, spread) for s, c in one_change(1).items()}
        twins = [shard.attempt(shard.open(), batches, {}) for _ in range(2)]
        grandchild = shard.attempt(shard.open(twins[0]), batches, {})
        shard.store.prune(committed)
        for kept in (committed, *twins):
            shard.open(kept)
        for gone in (first, grandchild):
            with pytest.raises(LocalCopyUnusable):
                shard.open(gone)

    @pytest.mark.parametrize("verify", [True, False])
    def test_a_missing_or_foreign_version_is_unusable(self, backend: Backend, folder: Path, verify: bool) -> None:
        shard = Shard(backend, folder)
        for version in ("f" * 16, "-" * 16, "../../../etc/x", "0" * 15, "0" * 17, "G" * 16, shard.version + "\n"):
            with pytest.raises(LocalCopyUnusable):
                shard.open(version, verify=verify)
        with pytest.raises(LocalCopyUnusable):
            backend.make(folder / "never", SHAPES, FakeClock()).open(shard.version, 0, verify=verify)

    def test_a_state_with_other_columns_is_unusable(self, backend: Backend, folder: Path) -> None:
        """A processor that changed its schema must not read old columns as new ones."""
        shard = Shard(backend, folder)
        shard.epoch(plain_epoch(0))
        value = SHAPES["value"]
        others = [
            replace(value, values=pa.schema([("n", pa.int32()), ("s", pa.string())])),
            replace(value, values=pa.schema([("m", pa.int64()), ("s", pa.string())])),
            replace(value, entries=pa.schema([])),
            replace(value, time="expires"),
        ]
        for other in others:
            with pytest.raises(LocalCopyUnusable):
                backend.make(folder, {**SHAPES, "value": other}, FakeClock()).open(shard.version, 0, verify=False)

    def test_a_new_state_is_empty_and_an_old_one_stays(self, backend: Backend, folder: Path) -> None:
        """Which states an operator has may change between runs of a job."""
        shard = Shard(backend, folder)
        few = {"value": SHAPES["value"]}
        shard.store = backend.make(folder, few, shard.clock)
        base = shard.store.write_restored("a" * 16, {}, 0)
        batches = {s: batch_of_change(s, c, spread) for s, c in one_change(2).items()}
        shard.store.write("b" * 16, base, {"value": batches["value"]}, now_ms=0, due_taken={}, runs_max=4)
        shard.store = backend.make(folder, SHAPES, shard.clock)
        shard.version = "b" * 16
        model = MemoryReader(SHAPES, {"value": [batches["value"]]}, 0)
        shard.check(shard.open(), model, SHAPES)
        shard.version = shard.attempt(shard.open(), {"list": batches["list"]}, {})
        model = MemoryReader(SHAPES, {"value": [batches["value"]], "list": [batches["list"]]}, 0)
        shard.check(shard.open(), model, SHAPES)

    # --- damage --------------------------------------------------------------------------------------------------

    @pytest.fixture
    def written(self, backend: Backend, folder: Path) -> Shard:
        """Three epochs, and a folder in which nothing is left of the first."""
        shard = Shard(backend, folder / "shard")
        for number in range(3):
            before = shard.version
            shard.commit(one_change(number, KEYS[:4]))
        shard.store.prune(before)
        return shard

    def answer(self, shard: Shard, *, verify: bool) -> bool:
        """Whether the version serves; a wrong answer fails the test, and any error but ours."""
        try:
            shard.check(shard.open(verify=verify), shard.model(), one_change(0))
        except LocalCopyUnusable:
            return False
        return True

    def test_a_flipped_bit_in_any_file_gives_no_wrong_answer(self, written: Shard) -> None:
        """A disk that lies costs a restore, never a result."""
        unusable = 0
        for path in files_of(written.folder):
            body = path.read_bytes()
            for position in range(0, len(body) * 8, max(1, len(body) * 8 // 16) | 1):
                flipped = bytearray(body)
                flipped[position // 8] ^= 1 << position % 8
                damaged(path, bytes(flipped))
                unusable += not self.answer(written, verify=True)
            damaged(path, body)
        assert unusable
        assert self.answer(written, verify=True)

    @pytest.mark.parametrize("verify", [True, False])
    def test_a_file_cut_anywhere_gives_no_wrong_answer(self, written: Shard, verify: bool) -> None:
        for path in files_of(written.folder):
            body = path.read_bytes()
            for length in {0, 1, len(body) // 2, len(body) - 1} - {len(body)}:
                damaged(path, body[: max(0, length)])
                self.answer(written, verify=verify)
            path.unlink()
            self.answer(written, verify=verify)
            path.write_bytes(body)
            path.chmod(0o600)
        assert self.answer(written, verify=verify)

    @pytest.mark.parametrize("verify", [True, False])
    def test_every_file_of_a_version_is_missed(self, written: Shard, verify: bool) -> None:
        """Of the newest version and its parent, that is: what is not theirs may go."""
        written.store.prune(written.version)
        for path in files_of(written.folder):
            body = path.read_bytes()
            path.unlink()
            if self.answer(written, verify=verify):
                # Only a file that the library makes anew whenever it opens the database.
                assert path.read_bytes() == body, path.name
                path.unlink()
            path.symlink_to(written.folder.parent / "real")
            (written.folder.parent / "real").write_bytes(body)
            assert not self.answer(written, verify=verify), f"{path.name} is a link"
            path.unlink()
            path.mkdir()
            assert not self.answer(written, verify=verify), f"{path.name} is a folder"
            path.rmdir()
            path.write_bytes(body)
            path.chmod(0o600)
        assert self.answer(written, verify=verify)

    @pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
    def test_a_folder_that_others_may_enter_is_not_used(self, written: Shard, mode: int) -> None:
        """State is private to the user: neither read nor written."""
        opened = written.open()
        written.folder.chmod(mode)
        assert not self.answer(written, verify=False)
        with pytest.raises(PermissionError, match="not a private folder of this user"):
            written.attempt(opened, {}, {})

    def test_a_folder_that_is_a_link_is_not_used(self, written: Shard) -> None:
        real = written.folder.with_name("real")
        written.folder.rename(real)
        written.folder.symlink_to(real, target_is_directory=True)
        assert not self.answer(written, verify=False)

    def test_prune_survives_damaged_neighbours(self, written: Shard) -> None:
        """Clean-up runs before the write of an epoch; what it cannot read must not end the task."""
        for path in files_of(written.folder):
            if written.version not in str(path) and path.suffix == ".json":
                damaged(path, b"[" * 200_000)
        written.store.prune(written.version)
        assert self.answer(written, verify=True)

    # --- crashes ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("call", ["rename", "replace"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
    def test_an_attempt_that_cannot_finish_leaves_the_committed_version(
        self, written: Shard, monkeypatch: pytest.MonkeyPatch, number: int, call: str
    ) -> None:
        """The last step fails: the attempt's version does not exist, and the one before it serves."""

        def fail(*paths: Any) -> None:
            raise OSError(number, os.strerror(number))

        opened = written.open()
        batches = {s: batch_of_change(s, c, spread) for s, c in one_change(7).items()}
        attempt = written.ids.short()
        monkeypatch.setattr(os, "rename", fail)
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            written.store.write(attempt, opened, batches, now_ms=0, due_taken={}, runs_max=4)
        with pytest.raises(OSError, match=os.strerror(number)):
            written.store.write_restored(written.ids.short(), batches, 0)
        monkeypatch.undo()
        assert self.answer(written, verify=True)
        with pytest.raises(LocalCopyUnusable):
            written.open(attempt)
        written.epoch(plain_epoch(3))

    def test_leavings_of_killed_attempts_go_after_an_hour(
        self, written: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A live attempt needs its files for minutes; nobody else ever removes them."""
        import shutil

        def killed(*paths: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        opened = written.open()
        kept = files_of(written.folder)
        batches = {s: batch_of_change(s, c, spread) for s, c in one_change(7).items()}
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, killed)
        monkeypatch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            written.attempt(opened, batches, {})
        monkeypatch.undo()
        left = sorted(
            set(written.folder.rglob("*")) - set(kept) - {p.parent for p in kept} - {p.parent.parent for p in kept}
        )
        assert left
        for path in left:
            os.utime(path, (written.clock.at_ms / 1000, written.clock.at_ms / 1000))
        written.store.prune(written.version)
        assert any(path.exists() for path in left)
        written.clock.advance_s(3601)
        written.store.prune(written.version)
        assert not [path for path in left if path.exists()]
        assert self.answer(written, verify=True)

    def test_a_version_is_written_once(self, written: Shard) -> None:
        """An id that is there already is an error, and what is there stays."""
        batches = {s: batch_of_change(s, c, spread) for s, c in one_change(7).items()}
        with pytest.raises(OSError, match=r"exist|not empty"):
            written.store.write(written.version, written.open(), batches, now_ms=0, due_taken={}, runs_max=4)
        assert self.answer(written, verify=True)

    def test_a_base_of_another_backend_is_refused(self, written: Shard) -> None:
        with pytest.raises(TypeError, match="a version follows one that this backend opened"):
            written.attempt(MemoryReader(SHAPES), {}, {})

    def test_keys_whose_hashes_collide_are_told_apart(self, backend: Backend, folder: Path) -> None:
        """Cleared, removed, overwritten: always one of several keys of one hash."""
        shard = Shard(backend, folder, colliding)
        shard.epoch(plain_epoch(1))
        for number, key in enumerate(itertools.chain(KEYS[::2])):
            change = one_change(2, [key])
            changes = {
                "value": Change(rows={(key, None): None}) if number % 2 else change["value"],
                "list": replace(change["list"], cleared=frozenset({key})),
                "timers": Change(cleared=frozenset({key})),
            }
            shard.epoch(Epoch(changes, 0, False, None, False, True))
