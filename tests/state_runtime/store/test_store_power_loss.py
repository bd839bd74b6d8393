"""Loss of power on a local store: what a call has promised is there afterwards, whenever the power goes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from power_loss import Disk

from state_runtime.base.errors import OutcomeUnknown
from state_runtime.store import Created, LocalStore, folders

FOLDERS = ("a", "a/b", "a/b/c", "d/e", "snapshots/1", "snapshots/2")


class Killed(BaseException):
    """The process is gone, and the machine lives on."""


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path, monkeypatch)
    yield disk
    disk.close()


def test_a_new_snapshot_survives_a_loss_of_power(disk: Disk) -> None:
    """The folder of a snapshot is made with it: without its own name on the disk the manifest in it is lost too."""
    store = LocalStore(disk.top / "store" / "job")
    assert store.create("snapshots/1/manifest.json", b"{}") is Created.MINE
    assert disk.survivors()["store/job/snapshots/1/manifest.json"] == b"{}"


def test_a_name_that_is_taken_is_durable_before_anybody_is_told(disk: Disk) -> None:
    """Another process has linked it and not synced yet. Whoever is told that he lost acts on what the winner wrote."""
    (disk.top / "snapshots" / "1").mkdir(parents=True)
    theirs = disk.top / "snapshots" / "1" / "manifest.json"
    with theirs.open("xb") as file:
        file.write(b"theirs")
        file.flush()
        os.fsync(file.fileno())
    assert LocalStore(disk.top).create("snapshots/1/manifest.json", b"mine") is Created.LOST
    assert disk.survivors()["snapshots/1/manifest.json"] == b"theirs"


def test_a_taken_name_that_cannot_be_synced_is_an_unknown_outcome(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither "it is yours" nor "it is another's" would hold after a loss of power."""
    store = LocalStore(disk.top)
    store.create("a/x", b"mine")

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("state_runtime.store.local._fsync_folder", fail)
    with pytest.raises(OutcomeUnknown, match="could not be synced"):
        store.create("a/x", b"mine")


def test_a_move_that_finds_only_the_target_makes_it_durable(disk: Disk) -> None:
    """The process that moved it was killed before it synced; the repetition is what says that it is done."""
    store = LocalStore(disk.top)
    store.put("from/x", b"1")
    (disk.top / "to").mkdir()
    os.replace(disk.top / "from" / "x", disk.top / "to" / "x")
    LocalStore(disk.top).move("from/x", "to/x")
    assert disk.survivors()["to/x"] == b"1"


def test_folders_that_are_known_to_be_on_the_disk_are_not_synced_again(disk: Disk) -> None:
    """Each sync of a folder waits for the disk: a write into a known folder waits for its own name only, and a new
    snapshot for its folder's besides."""
    store = LocalStore(disk.top / "job")
    store.create("snapshots/1/manifest.json", b"1")
    before = disk.syncs_of_folders
    store.put("snapshots/1/more", b"1")
    assert disk.syncs_of_folders - before == 1
    before = disk.syncs_of_folders
    store.child("snapshots").create("2/manifest.json", b"2")
    assert disk.syncs_of_folders - before == 2


def test_a_process_that_makes_folders_for_ever_remembers_a_bounded_number(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snapshot has a folder of its own: 900 bytes of the driver's memory each were 11 MiB after 12,000 epochs. What
    was forgotten is on the disk all the same."""
    monkeypatch.setattr(folders, "_KNOWN_MAX", 8)
    known = folders.DurableFolders(disk.top / "job")
    store = LocalStore(disk.top / "job", folders=known)
    for number in range(50):
        store.create(f"snapshots/{number}/manifest.json", b"1")
        assert len(known._known) <= 8
    assert len(disk.survivors()) == 50


def test_a_known_folder_that_was_removed_and_made_again_is_synced_again(disk: Disk) -> None:
    """Another process removed the folder and made a new one of the same name, which nobody has synced."""
    store = LocalStore(disk.top / "job")
    store.put("a/b/x", b"1")
    store.delete("a/b/x")
    LocalStore(disk.top / "job").remove_empty_folders("a")
    (disk.top / "job" / "a" / "b").mkdir(parents=True)
    store.put("a/b/y", b"2")
    assert disk.survivors()["job/a/b/y"] == b"2"


def test_a_root_below_a_folder_that_nobody_may_list_can_be_used(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a folder cannot be opened, so it cannot be synced alone: everything is."""
    closed, opened, synced = disk.top, os.open, []

    def refuse(path: str, *args: int, **named: int) -> int:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *args, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "sync", lambda: synced.append(True))
    store = LocalStore(disk.top / "job")
    assert store.create("a/x", b"1") is Created.MINE
    assert store.create("a/y", b"1") is Created.MINE
    assert synced == [True]


def run_one(store: LocalStore, rng: random.Random, source: Path, allowed: dict[str, set[bytes]], number: int) -> str:
    """One random call; what its target may hold from its beginning on is noted. Returns the path that is promised."""
    path = f"{rng.choice(FOLDERS)}/{rng.randrange(3)}"
    body = f"{number} {path}".encode()
    full = f"{store.url}/{path}"
    kind = rng.choice(("create", "put", "put_file", "copy", "move"))
    taken = store.read(path, 1000) if store.exists(path) else None
    may = allowed.setdefault(full, set())
    if kind == "create":
        may.add(body if taken is None else taken)
        store.create(path, body)
    elif kind == "put":
        may.add(body)
        store.put(path, body)
    elif kind == "put_file":
        may.add(body)
        source.write_bytes(body)
        store.put_file(source, path)
    else:
        # A fresh source, as all of ours: what is moved or copied was written under a name of its own.
        fresh = f"fresh/{number}"
        store.put(fresh, body)
        may.add(body)
        (store.copy if kind == "copy" else store.move)(fresh, path)
    allowed[full] = {body if taken is None or kind != "create" else taken}
    return full


@pytest.mark.parametrize("seed", range(25))
def test_what_was_promised_survives_a_loss_of_power_at_any_moment(disk: Disk, seed: int) -> None:
    """Processes come, are killed at any call of the operating system, and come again; the power may go after every
    one of these calls. What a finished call has promised is there, with its bytes or with those of a call that came
    later."""
    rng = random.Random(seed)
    root, source = disk.top / "deep" / "er" / "store", disk.top / "source"
    promised: set[str] = set()
    allowed: dict[str, set[bytes]] = {}
    left = [0]

    def look() -> None:
        there = disk.survivors()
        for path in promised:
            body = there.get(str(Path(path).relative_to(disk.top)))
            assert body in allowed[path], f"seed {seed}: {path} was promised and is {body!r} after a loss of power"
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    disk.after = look
    store, killed = LocalStore(root), 0
    for number in range(60):
        left[0] = rng.choice((-1, -1, rng.randrange(1, 12)))
        try:
            full = run_one(store, rng, source, allowed, number)
            promised.add(full)
        except Killed:
            killed += 1
            store = LocalStore(root)
    left[0] = -1
    assert killed > 3
    assert len(promised) > 5
