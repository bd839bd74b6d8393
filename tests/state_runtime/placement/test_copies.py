"""What a disk holds is found, and what is not a shard's folder is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from state_runtime.placement.assignment import CopyFound
from state_runtime.placement.copies_on_host import find_copies
from state_runtime.snapshot.shard_versions import UNKNOWN_VERSIONS, ShardVersions
from state_runtime.spark.executor import executor_id

WANTED = ShardVersions.of(f"{shard:016x}" for shard in (10, 11, 12))


def put(folder: Path, *names: str, at_s: int = 0) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    os.utime(folder, (at_s, at_s))


def test_copies_are_found_by_shard_over_all_operators(tmp_path: Path) -> None:
    """Of both backends: a version is a file or a folder that begins with its id."""
    put(tmp_path / "a" / "3-0", f"{10:016x}.json", at_s=100)
    put(tmp_path / "b" / "3-0", f"{99:016x}.rocksdb", at_s=200)
    put(tmp_path / "a" / "3-2", f"{11:016x}.json", at_s=300)
    assert find_copies(tmp_path, 3, {"a": WANTED, "b": WANTED}) == [
        CopyFound(3, 0, 1, 200_000),
        CopyFound(3, 2, 0, 300_000),
    ]


def test_what_is_no_copy_is_not_found(tmp_path: Path) -> None:
    """Another parallelism, an empty folder, a link, a file, an operator that is not asked for, no folder at all."""
    put(tmp_path / "a" / "4-0", f"{10:016x}.json")
    put(tmp_path / "a" / "3-0")
    put(tmp_path / "elsewhere" / "3-1", f"{11:016x}.json")
    (tmp_path / "a" / "3-1").symlink_to(tmp_path / "elsewhere" / "3-1")
    (tmp_path / "a" / "3-2").touch()
    assert find_copies(tmp_path, 3, {"a": WANTED, "missing": WANTED}) == []


def test_a_shard_without_a_wanted_version_still_has_a_stale_copy(tmp_path: Path) -> None:
    put(tmp_path / "a" / "3-1", f"{11:016x}.json", at_s=7)
    assert find_copies(tmp_path, 3, {"a": UNKNOWN_VERSIONS}) == [CopyFound(3, 1, 0, 7_000)]


def test_an_executor_is_named_by_its_block_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/one/executor-1/blockmgr-0a1b-2c,/two/blockmgr-other")
    assert executor_id() == "0a1b-2c"
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert executor_id() == ""
