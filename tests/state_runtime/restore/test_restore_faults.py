"""Whatever is wrong with the local side costs time and shows in a metric; it never changes a state, and never ends an epoch."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_job import LocalJob
from model import FakeClock, examples, seeds
from test_restore import changes

from state_runtime.base.errors import CorruptSegment, MissingFile
from state_runtime.base.settings import JobSettings, LocalRecoverySettings
from state_runtime.restore import objects
from state_runtime.restore.disk import LocalDisk
from state_runtime.restore.objects import WantedObject
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import manifest_path
from state_runtime.store import LocalStore, open_store
from state_runtime.task.shard_access import ShardAccess
from tests.job_settings import job_settings

SHAPES = ("value", "timers")


def small_job(tmp_path: Path, **settings: Any) -> LocalJob:
    return LocalJob(tmp_path, SHAPES, settings=job_settings(**settings))


@pytest.fixture
def job(tmp_path: Path) -> LocalJob:
    """A job after three epochs, about to be restarted."""
    job, rng = small_job(tmp_path), random.Random(11)
    for _ in range(3):
        job.epoch(changes(rng, job))
    job.restart()
    return job


def files(job: LocalJob) -> list[Path]:
    """Runs and version files of shard 0."""
    return sorted(p for p in job.shard_folder(0).iterdir() if p.is_file())


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(bytes(body))


def to_link(path: Path) -> None:
    real = path.with_suffix(".real")
    path.rename(real)
    path.symlink_to(real)


DAMAGE: dict[str, Callable[[LocalJob], Any]] = {
    "a missing folder": lambda job: shutil.rmtree(job.shard_folder(0)),
    "a missing run": lambda job: [p.unlink() for p in files(job) if p.suffix == ".arrow"],
    "missing version files": lambda job: [p.unlink() for p in files(job) if p.suffix == ".json"],
    "partial runs": lambda job: [os.truncate(p, p.stat().st_size // 2) for p in files(job) if p.suffix == ".arrow"],
    "partial version files": lambda job: [os.truncate(p, 20) for p in files(job) if p.suffix == ".json"],
    "a flipped bit in runs": lambda job: [flip(p) for p in files(job) if p.suffix == ".arrow"],
    "a flipped bit in version files": lambda job: [flip(p) for p in files(job) if p.suffix == ".json"],
    "runs that are links": lambda job: [to_link(p) for p in files(job) if p.suffix == ".arrow"],
    "a folder that is a link": lambda job: to_link(job.shard_folder(0)),
    "a folder that others may enter": lambda job: job.shard_folder(0).chmod(0o755),
    "a file in place of the folder": lambda job: (
        shutil.move(f := job.shard_folder(0), f"{f}.gone"),
        f.write_bytes(b""),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_falls_back_to_the_primary(job: LocalJob, damage: str) -> None:
    """The other shard is not touched by it."""
    DAMAGE[damage](job)
    kinds = job.epoch(changes(random.Random(1), job))
    assert kinds == {0: "primary", 1: "local"}
    assert job.numbers[0].local_failed
    assert not job.numbers[1].local_failed
    assert job.numbers[0].bytes > 0
    job.epoch(changes(random.Random(2), job))


@pytest.mark.parametrize("owner", [0, 12345])
def test_a_folder_of_another_user_is_not_used(job: LocalJob, monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    """On a shared host anybody could have put it there."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1 + owner)
    kinds = job.epoch(changes(random.Random(1), job))
    assert set(kinds.values()) == {"primary"}
    assert all(numbers.local_failed for numbers in job.numbers.values())
    assert job.failed, "and nothing is written to it"


def test_another_store_never_meets_these_copies(job: LocalJob, tmp_path: Path) -> None:
    """A copied job root has the job's uid and the snapshots' numbers, and may have gone on differently."""
    shutil.copytree(tmp_path / "store", tmp_path / "copied")
    job.store_url, job.root = str(tmp_path / "copied"), open_store(str(tmp_path / "copied")).child("job")
    assert set(job.epoch(changes(random.Random(1), job)).values()) == {"primary"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_disk_that_cannot_be_written_never_fails_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, backend: str
) -> None:
    """Full, read-only, broken: the state is held in memory for the epoch, and nothing is left of the attempt."""
    job, rng = LocalJob(tmp_path, SHAPES, settings=JobSettings(backend=backend)), random.Random(3)  # type: ignore[arg-type]
    job.epoch(changes(rng, job))
    shutil.rmtree(job.local())
    real = os.open

    def full(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & os.O_CREAT and "/host/" in str(path):
            raise OSError(number, os.strerror(number))
        return real(path, flags, *mode, **options)

    job.restart()
    monkeypatch.setattr(os, "open", full)
    for _ in range(2):
        assert set(job.epoch(changes(rng, job)).values()) == {"primary"}
        assert job.failed
        assert job.versions == ["-" * 16] * 2
    monkeypatch.undo()
    assert not [p for p in job.local().rglob("*") if p.is_file() and p.suffix in (".arrow", ".sst", ".part")]
    job.epoch(changes(rng, job))
    assert set(job.epoch(changes(rng, job)).values()) == {""}


def test_no_local_damage_changes_a_state(tmp_path: Path) -> None:
    """Random damage between random restarts and moves; every shard is compared with the plain history."""
    for number, rng in seeds(6):
        job = small_job(tmp_path / str(number))
        hosts = ["a", "b"]
        for _ in range(8):
            placed = {shard: rng.choice(hosts) for shard in range(8)}
            job.host_of = placed.__getitem__
            if rng.random() < 0.4:
                job.restart(rng.choice([job.parallelism, 1, 2, 3, 5]))
            for path in [p for p in tmp_path.glob(f"{number}/[ab]/state/**/*") if p.is_file() and rng.random() < 0.1]:
                rng.choice([flip, Path.unlink])(path)
            if rng.random() < 0.2:
                shutil.rmtree(job.local(rng.choice(hosts)), ignore_errors=True)
            # What this run wrote it maps without looking at every byte again; so only what is verified may be damaged.
            job.trusted = [False] * job.parallelism
            job.epoch(changes(rng, job), commit=rng.random() < 0.8)


# --- bounded disk ------------------------------------------------------------------------------------------------


def folders(job: LocalJob, host: str = "host") -> set[str]:
    return {p.name for p in job.local(host).glob("state/*/*/*")}


def test_earlier_parallelisms_go_once_every_shard_of_the_new_one_has_a_copy(tmp_path: Path) -> None:
    """Not before: a crash of the first epochs would find nothing left."""
    job, rng = small_job(tmp_path), random.Random(4)
    for _ in range(2):
        job.epoch(changes(rng, job))
    job.restart(4)
    job.epoch({}, visit=[0, 1])
    job.epoch({}, visit=[2])
    assert {"2-0", "2-1"} <= folders(job)
    assert job.epoch({}, visit=[3]) == {3: "stale"}
    for _ in range(2):
        job.epoch(changes(rng, job))
    assert folders(job) == {"4-0", "4-1", "4-2", "4-3"}


def test_another_backend_leaves_nothing_behind(tmp_path: Path) -> None:
    job, rng = LocalJob(tmp_path, SHAPES, 1, JobSettings(backend="rocksdb")), random.Random(5)
    job.epoch(changes(rng, job))
    for backend in ("arrow", "rocksdb"):
        job.settings = JobSettings(backend=backend)  # type: ignore[arg-type]
        job.restart()
        for _ in range(3):
            job.epoch(changes(rng, job))
        left = {p.suffix for p in job.shard_folder(0).rglob("*") if p.is_file()}
        assert (".arrow" in left) == (backend == "arrow")
        assert (".sst" in left) == (backend == "rocksdb")


def test_attempts_that_were_given_up_leave_nothing_that_grows(tmp_path: Path) -> None:
    """An epoch that fails again and again, from the same version."""
    job, rng = small_job(tmp_path), random.Random(6)
    job.epoch(changes(rng, job))
    job.epoch(changes(rng, job))
    counts = []
    for _ in range(6):
        job.epoch(changes(rng, job), commit=False)
        counts.append(len(files(job)))
    assert counts[1:] == counts[1:2] * 5, counts


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_outdated_files_that_cannot_be_removed_are_counted_and_cost_no_restore(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each epoch counts them; the log says it once."""
    job, rng = small_job(tmp_path, backend=backend), random.Random(6)
    job.epoch(changes(rng, job))
    assert not job.failed

    def refused(self: ShardAccess, before: str) -> None:
        raise PermissionError(errno.EPERM, "no")

    with monkeypatch.context() as patch:
        patch.setattr(ShardAccess, "_remove_outdated", refused)
        for _ in range(2):
            assert set(job.epoch(changes(rng, job)).values()) == {""}
            assert job.failed
    said = [message for message in caplog.messages if "outdated local files" in message]
    assert len(said) == 1
    assert set(job.epoch(changes(rng, job)).values()) == {""}
    assert not job.failed


def test_a_bound_on_disk_space_refuses_copies_and_no_epoch(tmp_path: Path) -> None:
    job, rng = small_job(tmp_path, local_bytes_max=0), random.Random(7)
    for _ in range(3):
        job.epoch(changes(rng, job))
        assert job.failed
    assert job.versions == ["-" * 16] * 2


def test_idle_copies_make_room_first(tmp_path: Path) -> None:
    """A shard that moved away long ago."""
    job, rng = small_job(tmp_path), random.Random(8)
    job.epoch(changes(rng, job))
    (operator,) = job.local().glob("state/*/*")
    moved = operator / "9-3"
    moved.mkdir(mode=0o700)
    (moved / "x").write_bytes(bytes(1 << 20))
    os.utime(moved, (1, 1))
    from state_runtime.task import shard_access

    shard_access._disk.cache_clear()
    job.settings = JobSettings(local_recovery=LocalRecoverySettings(bytes_max=1 << 20))
    job.epoch(changes(rng, job))
    assert not moved.exists()
    assert not job.failed


def test_the_copy_that_was_longest_unused_makes_room_and_no_more_than_is_needed(tmp_path: Path) -> None:
    """Of any operator and parallelism; neither the caller's own folder nor one that was written to within ten minutes."""
    clock, size = FakeClock(), 1 << 16
    now_s = clock.now_ms() / 1000
    folders = {"own": "one/2-0", "new": "one/2-1", "idle": "two/2-0", "longest": "two/4-3"}
    ages_s = {"own": 9_000, "new": 300, "idle": 700, "longest": 800}
    for name, folder in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x").write_bytes(bytes(size))
        os.utime(tmp_path / folder, (now_s - ages_s[name], now_s - ages_s[name]))

    def left() -> set[str]:
        return {name for name, folder in folders.items() if (tmp_path / folder).exists()}

    disk, own = LocalDisk(tmp_path, clock), tmp_path / folders["own"]
    assert disk.has_room(3 * size + 1, own)
    assert left() == {"own", "new", "idle"}
    assert not disk.has_room(2 * size, own)
    assert left() == {"own", "new"}


# --- the primary, once per host ----------------------------------------------------------------------------------


class Once(LocalStore):
    """A store whose objects may be opened once."""

    opened: Counter[str] = Counter()

    def get_file(self, path: str, local: Path) -> None:
        self._open(path)
        super().get_file(path, local)

    def read(self, path: str, bytes_max: int) -> bytes:
        self._open(path)
        return super().read(path, bytes_max)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        self._open(path)
        return super().read_range(path, offset, length)

    def child(self, name: str) -> Once:
        return Once(self._at(name))

    def _open(self, path: str) -> None:
        Once.opened[path] += 1
        assert Once.opened[path] == 1, f"{path} is opened again"


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    Once.opened.clear()
    monkeypatch.setattr("state_runtime.task.shard_access.shared_store", lambda url, options: Once(Path(url)))
    return Once.opened


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20])
def test_each_object_is_opened_once_per_host(tmp_path: Path, once: Counter[str], inline_bytes_max: int) -> None:
    """Ten shards of one log, rescaled, so that every segment and every direct object is needed by several of them."""
    job, rng = small_job(tmp_path, inline_bytes_max=inline_bytes_max), random.Random(9)
    for _ in range(5):
        job.epoch(changes(rng, job))
    shutil.rmtree(job.local())
    job.restart(10)
    once.clear()
    job.epoch({})
    segments = [s.path for s in job.manifest.segments]
    assert {path for path in once if path.endswith(".seg")} >= set(segments)
    assert set(once.values()) == {1}


def test_small_neighbours_are_one_file_on_the_host(tmp_path: Path, once: Counter[str]) -> None:
    """A long log of small segments: to make a file for each takes longer than to read all of them."""
    job, rng = small_job(tmp_path), random.Random(14)
    for _ in range(40):
        job.epoch(changes(rng, job), check=False)
    shutil.rmtree(job.local())
    job.restart(3)
    once.clear()
    job.epoch({})
    segments = {s.path for s in job.manifest.segments}
    assert len(segments) == 40
    assert segments <= set(once)
    assert set(once.values()) == {1}
    assert len(list(job.local().glob("objects/*/*.obj"))) == 2 + len(set(once) - segments)


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_file_of_small_neighbours_costs_a_second_read(tmp_path: Path, cut: bool) -> None:
    job, rng = small_job(tmp_path), random.Random(15)
    for _ in range(4):
        job.epoch(changes(rng, job))
    shutil.rmtree(job.local())
    job.restart(2)
    job.epoch({}, visit=[0])
    fetched = max(job.local().glob("objects/*/*.obj"), key=lambda path: path.stat().st_size)
    size = sum(s.bytes for s in job.manifest.segments[:4])
    assert fetched.stat().st_size == size
    if cut:
        os.truncate(fetched, size // 2)
    else:
        body = fetched.read_bytes()
        fetched.write_bytes(bytes(byte ^ 1 for byte in body))
    assert job.epoch({}, visit=[1]) == {1: "primary"}
    assert fetched.stat().st_size == size if cut else not fetched.exists()


@given(st.lists(st.tuples(st.integers(0, 2 * objects._SMALL_BYTES), st.booleans()), max_size=150))
@examples(60)
def test_neighbours_are_grouped_by_their_places_alone(drawn: list[tuple[int, bool]]) -> None:
    """So that a later log, which begins with the same segments, shares the whole groups of this one."""
    wanted = [WantedObject(f"{n}", size, "digest" if known else "") for n, (size, known) in enumerate(drawn)]
    groups = objects.small_neighbours(wanted)
    for group in groups:
        assert len(group) > 1
        assert sum(o.bytes for o in group) <= objects._TOGETHER * objects._SMALL_BYTES
        assert all(o.digest and 0 < o.bytes <= objects._SMALL_BYTES for o in group)
        assert {int(o.path) // objects._TOGETHER for o in group} == {int(group[0].path) // objects._TOGETHER}
    longer = objects.small_neighbours([*wanted, WantedObject("more", 1, "digest")])
    whole = [group for group in groups if int(group[0].path) // objects._TOGETHER < len(wanted) // objects._TOGETHER]
    assert longer[: len(whole)] == whole
    alone = len({o.path for o in wanted} - {o.path for group in groups for o in group})
    assert alone + sum(len(group) for group in groups) == len(wanted)


def test_what_was_fetched_goes_a_minute_after_its_last_use(tmp_path: Path) -> None:
    job, rng = small_job(tmp_path), random.Random(10)
    job.epoch(changes(rng, job))
    shutil.rmtree(job.local())
    job.restart()
    job.epoch(changes(rng, job))
    (fetched,) = job.local().glob("objects/*")
    assert list(fetched.glob("*.obj"))
    (fetched / "0.part-1-2").write_bytes(b"of a task that was killed")
    job.epoch(changes(rng, job))
    assert list(fetched.glob("*.obj")), "another shard may need them"
    for path in fetched.iterdir():
        os.utime(path, (1, 1))
    job.epoch(changes(rng, job))
    assert not list(fetched.iterdir()) if fetched.exists() else True


def test_objects_beyond_the_bound_are_read_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cache; and with one that is not ours, or full."""
    job, rng = small_job(tmp_path), random.Random(12)
    job.epoch(changes(rng, job))
    shutil.rmtree(job.local())
    job.restart()
    monkeypatch.setattr(objects.HostObjects, "_fetch", lambda *_: False)
    assert set(job.epoch(changes(rng, job)).values()) == {"primary"}
    assert not list(job.local().glob("objects/*/*.obj"))


# --- a damaged primary -------------------------------------------------------------------------------------------


def test_a_damaged_segment_is_named_and_nothing_is_guessed(job: LocalJob, tmp_path: Path) -> None:
    path = tmp_path / "store" / "job" / job.manifest.segments[-1].path
    shutil.rmtree(job.local())
    body = path.read_bytes()
    for at in (0, len(body) // 2, len(body) - 1):
        path.write_bytes(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
        with pytest.raises(CorruptSegment, match=path.name):
            job.epoch({})
    path.unlink()
    shutil.rmtree(job.local())
    with pytest.raises(MissingFile, match=path.name):
        job.epoch({})
    path.write_bytes(body)
    assert set(job.epoch({}).values()) == {"primary"}


def test_a_matching_copy_needs_no_primary_at_all(job: LocalJob, tmp_path: Path) -> None:
    """Not even the manifest: what the driver names is checked by its own digests."""
    for segment in job.manifest.segments:
        (tmp_path / "store" / "job" / segment.path).unlink()
    assert set(job.epoch({}).values()) == {"local"}


def test_a_stale_copy_without_its_manifest_proves_nothing(tmp_path: Path) -> None:
    """The snapshot at which it was the state was collected since."""
    job, rng = small_job(tmp_path), random.Random(13)
    job.epoch(changes(rng, job))
    stale = job.manifest
    job.host_of = lambda shard: "elsewhere"
    job.epoch(changes(rng, job))
    (tmp_path / "store" / "job" / manifest_path(stale.snapshot_id)).unlink()
    job.host_of = lambda shard: "host"
    assert isinstance(stale, Manifest)
    assert set(job.epoch(changes(rng, job)).values()) == {"primary"}
