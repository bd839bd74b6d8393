"""What every adapter of the store port must do. A test class inherits `StoreContract` and supplies the fixture `store`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from state_runtime.base.errors import CorruptData
from state_runtime.store import Created, Store

HOSTILE = [
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../x",
    "a/..",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "/",
    "s3://other/x",
    "file:///x",
    "C:\\x",
    "a\\b",
    "a\0b",
    "a b",
    " a",
    "a ",
    "a\n",
    "ä",
    "a%2e%2e",
    "a%2E%2E",
    "k=%2e",
    "k=%",
    "k=a b",
    "k=v=ä",
    "~",
    "x" * 1025,
]


def in_threads(count: int, call: Callable[[int], object]) -> list[object]:
    """Run `call(number)` in so many threads that start together."""
    together = threading.Barrier(count)
    results: list[object] = [None] * count

    def run(number: int) -> None:
        together.wait()
        results[number] = call(number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class StoreContract:
    """The promises of `state_runtime.store.Store`."""

    def test_create_of_a_free_name_is_mine_and_readable(self, store: Store) -> None:
        """The simplest path."""
        assert store.create("a/b.json", b"one") is Created.MINE
        assert store.read("a/b.json", 10) == b"one"
        assert store.size("a/b.json") == 3
        assert store.exists("a/b.json")

    def test_create_of_a_taken_name_changes_nothing(self, store: Store) -> None:
        """Snapshots are immutable: whoever comes second must learn it and leave the bytes alone."""
        store.create("a", b"one")
        assert store.create("a", b"two") is Created.LOST
        assert store.read("a", 10) == b"one"

    def test_create_with_equal_bytes_is_mine(self, store: Store) -> None:
        """A repeated attempt whose answer was lost recognises its own object."""
        store.create("a", b"one")
        assert store.create("a", b"one") is Created.MINE

    def test_create_of_an_empty_body_is_refused_by_a_taken_name(self, store: Store) -> None:
        """s3fs's open("xb") overwrites with an empty object; the port must not go that way."""
        store.create("a", b"one")
        assert store.create("a", b"") is Created.LOST
        assert store.read("a", 10) == b"one"

    def test_many_creators_have_one_winner(self, store: Store) -> None:
        """One committer per snapshot id, whatever the timing."""
        for round_number in range(4):
            path = f"race/{round_number}"
            results = in_threads(8, lambda n, path=path: store.create(path, f"writer {n}".encode()))
            winners = [n for n, result in enumerate(results) if result is Created.MINE]
            assert len(winners) == 1
            assert store.read(path, 100) == f"writer {winners[0]}".encode()

    def test_put_replaces(self, store: Store) -> None:
        """Heartbeats are rewritten."""
        store.put("h/beat", b"old and longer")
        store.put("h/beat", b"new")
        assert store.read("h/beat", 100) == b"new"

    def test_any_buffer_is_written_as_its_bytes(self, store: Store) -> None:
        """Arrow's buffers go to the store without a copy; bytes above 127 are negative in a view of one."""
        body = bytes(range(256))
        for name, buffer in {"bytes": body, "view": memoryview(body), "arrow": pa.py_buffer(body)}.items():
            store.put(f"put/{name}", buffer)
            assert store.read(f"put/{name}", 1000) == body
            assert store.create(f"create/{name}", memoryview(buffer)) is Created.MINE
            assert store.create(f"create/{name}", buffer) is Created.MINE, "equal bytes are ours"
            assert store.read(f"create/{name}", 1000) == body

    def test_put_file_publishes_the_whole_file(self, store: Store, tmp_path: Path) -> None:
        """Large objects are written to disk first."""
        local = tmp_path / "body"
        local.write_bytes(bytes(range(256)) * 100)
        store.put_file(local, "x/y/z.bin")
        assert store.read("x/y/z.bin", 1 << 20) == local.read_bytes()

    def test_read_is_bounded(self, store: Store) -> None:
        """A file that someone blew up must not fill the memory."""
        store.put("a", b"12345")
        assert store.read("a", 5) == b"12345"
        with pytest.raises(CorruptData, match=r"a in .* more than|larger than"):
            store.read("a", 4)

    def test_read_range_gives_exactly_the_bytes(self, store: Store) -> None:
        """Parts of a segment are read by range."""
        store.put("a", b"0123456789")
        assert store.read_range("a", 0, 10) == b"0123456789"
        assert store.read_range("a", 3, 4) == b"3456"
        assert store.read_range("a", 9, 1) == b"9"

    @pytest.mark.parametrize(("offset", "length"), [(8, 5), (10, 1), (50, 5)])
    def test_read_range_beyond_the_end_is_corrupt_data(self, store: Store, offset: int, length: int) -> None:
        """A truncated object is damaged, not "try again later"."""
        store.put("a", b"0123456789")
        with pytest.raises(CorruptData, match="cut off"):
            store.read_range("a", offset, length)

    def test_missing_objects_are_file_not_found(self, store: Store) -> None:
        """Callers know what a missing object means for them; the store does not."""
        for call in (lambda: store.read("no", 1), lambda: store.read_range("no", 0, 1), lambda: store.size("no")):
            with pytest.raises(FileNotFoundError):
                call()
        assert not store.exists("no")

    def test_a_deleted_name_is_free_again(self, store: Store) -> None:
        """Why the boundary exists: a store forgets, and lets a sleeper create an old name anew."""
        store.create("a", b"one")
        store.delete("a")
        assert not store.exists("a")
        assert store.create("a", b"two") is Created.MINE

    def test_deleting_what_is_not_there_is_fine(self, store: Store) -> None:
        """Clean-up is repeated after crashes."""
        store.delete("no/such/thing")
        store.put("a", b"1")
        store.delete("a")
        store.delete("a")

    def test_move_is_idempotent(self, store: Store) -> None:
        """Publishing is repeated after a crash between any two moves."""
        store.put("from/a", b"1")
        store.move("from/a", "to/b")
        store.move("from/a", "to/b")
        assert store.read("to/b", 10) == b"1"
        assert not store.exists("from/a")

    def test_move_over_a_copy_of_itself_ends_the_same(self, store: Store) -> None:
        """Where a rename is copy and delete, a crash leaves both names."""
        store.put("from/a", b"1")
        store.put("to/b", b"1")
        store.move("from/a", "to/b")
        assert (store.read("to/b", 10), store.exists("from/a")) == (b"1", False)

    def test_move_of_nothing_is_file_not_found(self, store: Store) -> None:
        """Neither name exists: output was lost, and that must be said."""
        with pytest.raises(FileNotFoundError):
            store.move("from/a", "to/b")

    def test_list_names_shows_files_and_folders_sorted(self, store: Store) -> None:
        """The catalog and the terms live from listings, and a new object must be in them at once."""
        assert store.list_names("d") == []
        store.put("d/b/x", b"1")
        assert store.list_names("d") == ["b"]
        store.put("d/a", b"1")
        store.put("d/c", b"1")
        assert store.list_names("d") == ["a", "b", "c"]
        assert store.list_names("") == ["d"]
        assert store.list_names("no/such") == []

    def test_list_objects_shows_everything_below_with_size_and_time(self, store: Store) -> None:
        """What garbage collection decides by: nothing is missing, and nothing of a neighbour is in it."""
        assert list(store.list_objects("d")) == []
        for path in ("d/a", "d/b/c", "d/b/d/e", "dd/f", "g"):
            store.put(path, path.encode())
        found = list(store.list_objects("d"))
        assert sorted((o.path, o.bytes) for o in found) == [("d/a", 3), ("d/b/c", 5), ("d/b/d/e", 7)]
        assert all(o.modified_ms > 1_000_000_000_000 for o in found)
        assert sorted(o.path for o in store.list_objects("")) == ["d/a", "d/b/c", "d/b/d/e", "dd/f", "g"]
        assert sorted(o.path for o in store.child("d").list_objects("")) == ["a", "b/c", "b/d/e"]

    def test_copy_leaves_the_source_and_is_idempotent(self, store: Store) -> None:
        """Savepoints are copies; the source goes on being used, and may be deleted later."""
        store.put("a/x", b"1")
        store.copy("a/x", "b/y")
        store.copy("a/x", "b/y")
        assert (store.read("a/x", 10), store.read("b/y", 10)) == (b"1", b"1")
        store.delete("a/x")
        assert store.read("b/y", 10) == b"1"

    def test_copy_of_nothing_is_file_not_found(self, store: Store) -> None:
        with pytest.raises(FileNotFoundError):
            store.copy("no", "b")
        assert not store.exists("b")

    def test_child_is_a_folder_of_the_store(self, store: Store) -> None:
        """A job root is a child of its store."""
        store.child("job").put("x/y", b"1")
        assert store.read("job/x/y", 10) == b"1"
        assert store.child("job").child("x").read("y", 10) == b"1"
        assert store.child("job").url == f"{store.url}/job"

    def test_probe_passes_and_leaves_nothing(self, store: Store) -> None:
        """Called at every start of a run."""
        store.probe()
        assert store.list_names("") == []

    @pytest.mark.parametrize("value", ["a%2Fb", "%2E%2E", "..", "Köln", "東京", "a%3Db", "%25%3F%23"])
    def test_a_folder_named_by_a_value_is_a_folder_like_any_other(self, store: Store, value: str) -> None:
        """No store undoes the codes, and none takes them for a path of its own."""
        folder = f"out/town={value}"
        store.put("staged/x", b"rows")
        store.move("staged/x", f"{folder}/x")
        assert store.read(f"{folder}/x", 10) == b"rows"
        assert store.list_names("out") == [f"town={value}"]
        assert store.list_names(folder) == ["x"]
        assert [found.path for found in store.list_objects("out")] == [f"{folder}/x"]
        store.delete(f"{folder}/x")
        assert list(store.list_objects("out")) == []

    @pytest.mark.parametrize("path", HOSTILE, ids=repr)
    def test_hostile_paths_reach_no_file(self, store: Store, path: str) -> None:
        """Paths come out of manifests that anybody may have altered; one parser refuses before any I/O."""
        calls = [
            lambda: store.create(path, b"x"),
            lambda: store.put(path, b"x"),
            lambda: store.put_file(Path(__file__), path),
            lambda: store.read(path, 10),
            lambda: store.read_range(path, 0, 1),
            lambda: store.size(path),
            lambda: store.delete(path),
            lambda: store.move(path, "ok"),
            lambda: store.copy(path, "ok"),
            lambda: store.copy("ok", path),
            lambda: store.child(path),
        ]
        if path:
            calls.append(lambda: store.list_names(path))
            calls.append(lambda: list(store.list_objects(path)))
        for call in calls:
            with pytest.raises(CorruptData, match="not a plain relative path"):
                call()
