"""Spark's scratch folder: whose it is, and what gives way when its disk is full."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError

from state_runtime.base.errors import (
    InvalidConfiguration,
    ScratchRemoved,
    StillstateError,
    StoreUnavailable,
    Unavailable,
    can_pass,
)
from state_runtime.base.settings import JobSettings
from state_runtime.driver import scratch as module
from state_runtime.driver.scratch import SCRATCH_FREE_BYTES_MIN, Scratch, is_full

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Disk:
    """A small disk: each copy of a shard takes so many bytes of it."""

    state: Path
    size: int
    copy_bytes: int = SCRATCH_FREE_BYTES_MIN
    written: list[str] = field(default_factory=list)

    def free(self, _: Path) -> int:
        return self.size - self.copy_bytes * len(list(self.state.glob("*/*/*")))

    def write(self) -> None:
        if self.free(self.state) <= 0:
            raise FULL
        self.written.append("x")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Full, by four copies of shards: shard 3 was written to longest ago."""
    found = Disk(tmp_path / "local" / "state", 4 * SCRATCH_FREE_BYTES_MIN)
    for age, shard in enumerate((0, 1, 2, 3)):
        folder = found.state / "root-job" / "op" / f"4-{shard}"
        folder.mkdir(parents=True)
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    monkeypatch.setattr(module, "_free_bytes", found.free)
    return found


def shards(disk: Disk) -> list[str]:
    return sorted(p.name for p in disk.state.glob("*/*/*"))


def test_local_copies_give_way_to_sparks_checkpoint_the_oldest_first(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy costs a restore; without its checkpoint directory Spark cannot plan a batch, and the job ends. What went is
    said: the next epoch takes longer."""
    scratch = Scratch(tmp_path / "spark", disk.state)
    scratch.retried(disk.write)
    assert disk.written == ["x"]
    assert shards(disk) == ["4-0", "4-1", "4-2"]
    assert "was full: 1 local copies of shards" in caplog.text


def test_room_is_made_before_the_disk_is_full(disk: Disk, tmp_path: Path) -> None:
    """Spark's own writes cannot be repeated by us, so its disk must not get there."""
    scratch = Scratch(tmp_path / "spark", disk.state)
    scratch.keep_room()
    assert shards(disk) == ["4-0", "4-1", "4-2"]
    scratch.keep_room()
    assert shards(disk) == ["4-0", "4-1", "4-2"], "nothing goes while there is room"


def test_copies_on_another_disk_stay(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To remove them would help nobody."""
    monkeypatch.setattr(Scratch, "_shares_the_disk", lambda _: False)
    with pytest.raises(OSError, match="No space left"):
        Scratch(tmp_path / "spark", disk.state).retried(disk.write)
    assert shards(disk) == ["4-0", "4-1", "4-2", "4-3"]


def test_a_write_is_repeated_once_and_only_for_a_full_disk(disk: Disk, tmp_path: Path) -> None:
    """Another error is not mended by removing copies."""
    scratch, calls = Scratch(tmp_path / "spark", disk.state), []

    def fails(error: OSError) -> None:
        calls.append(error)
        raise error

    with pytest.raises(PermissionError):
        scratch.retried(lambda: fails(PermissionError(errno.EACCES, "no")))
    assert (len(calls), len(shards(disk))) == (1, 4)
    with pytest.raises(OSError, match="No space left"):
        scratch.retried(lambda: fails(FULL))
    assert len(calls) == 3


JVM = (
    "[STREAM_FAILED] Query [id = 1] terminated with exception: java.io.IOException: No space left on device\n"
    + 120
    * ("\tat org.apache.spark.sql.execution.streaming.checkpointing.HDFSMetadataLog.write(HDFSMetadataLog.scala)\n")
)


@pytest.mark.parametrize("error", [FULL, RuntimeError(JVM)], ids=["ours", "Spark's"])
def test_a_full_disk_ends_the_run_with_one_short_message(tmp_path: Path, error: Exception) -> None:
    """Exit code 4, which a supervisor tries again; not 126 lines of Java."""
    scratch = Scratch(tmp_path / "spark", tmp_path / "state")
    with pytest.raises(Unavailable) as raised, scratch.explained():
        raise error
    assert raised.value.exit_code == 4
    assert str(tmp_path / "spark") in str(raised.value)
    assert "scratch_dir" in str(raised.value)
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    """A store that is full says so itself, and what nobody foresaw must not look harmless."""
    scratch = Scratch(tmp_path / "spark", tmp_path / "state")
    for error in (StoreUnavailable("No space left on device"), RuntimeError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, scratch.explained():
            raise error
        assert raised.value is error


SESSION = "4b1f0c9e-0d7a-4f5e-8f43-1f0b8a9d2c11"


@pytest.mark.parametrize(
    "name",
    [
        "{scratch}/steps-a05b8a5ceea44712-1/metadata",
        "{scratch}/steps-a05b8a5ceea44712-1/offsets/3",
        f"/tmp/spark-{SESSION}/pyspark-{SESSION}/tmpr__dq7b1",
        f"/var/tmp/a b/blockmgr-{SESSION}/0e",
    ],
)
def test_what_a_cleaner_of_temporary_folders_took_is_named_with_the_setting_that_avoids_it(
    tmp_path: Path, name: str
) -> None:
    """Exit code 4: the next start makes these files anew. It was "not foreseen … report it"."""
    scratch, name = Scratch(tmp_path / "spark", tmp_path / "state"), name.format(scratch=tmp_path / "spark")
    outer = RuntimeError("the query ended")
    outer.__cause__ = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    with pytest.raises(ScratchRemoved) as raised, scratch.explained():
        raise outer
    assert raised.value.exit_code == 4
    assert not can_pass(raised.value), "to run the epoch again in this run is in vain"
    assert not [word for word in (name, "scratch_dir", "spark.local.dir", "cleaner") if word not in str(raised.value)]
    other = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/home/me/spark/model.bin")
    with pytest.raises(FileNotFoundError), scratch.explained():
        raise other


def test_an_error_of_javas_outside_of_a_batch_is_typed_as_well(tmp_path: Path) -> None:
    """Spark's query may fail to start: its call is outside of what an epoch types."""
    scratch = Scratch(tmp_path / "spark", tmp_path / "state")
    with pytest.raises(StillstateError, match="Java process ended"), scratch.explained():
        raise Py4JNetworkError("Answer from Java side is empty")


def test_a_full_disk_is_found_behind_other_errors() -> None:
    """Spark's errors say it in the text of a cause."""
    outer = RuntimeError("the query ended")
    outer.__cause__ = RuntimeError("java.io.IOException: Disk quota exceeded")
    assert is_full(outer)
    assert not is_full(RuntimeError("the query ended"))
    circle = RuntimeError("a")
    circle.__cause__ = circle
    assert not is_full(circle)


def test_scratch_lies_in_a_private_folder_of_the_user_wherever_local_dir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full local_dir is no reason to end a job; what Spark writes there is nobody else's."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temp"))
    scratch = Scratch.of(JobSettings(local_dir=str(tmp_path / "local")), tmp_path / "local")
    assert scratch.folder == tmp_path / "temp" / f"stillstate-{os.getuid()}" / "spark"
    assert scratch.folder.stat().st_mode & 0o077 == 0
    assert scratch.folder.parent.stat().st_mode & 0o077 == 0
    own = Scratch.of(JobSettings(scratch_dir=str(tmp_path / "own")), tmp_path / "local")
    assert own.folder == tmp_path / "own" / "spark"


def test_a_scratch_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that everybody can write to, somebody may have been first."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "spark").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidConfiguration, match="is a link or belongs to another user"):
        Scratch.of(JobSettings(scratch_dir=str(tmp_path / "a")), tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"stillstate-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidConfiguration, match="is a link or belongs to another user"):
        Scratch.of(JobSettings(), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfiguration, match=r"scratch_dir .* cannot be used"):
        Scratch.of(JobSettings(scratch_dir=str(tmp_path / "file")), tmp_path)
