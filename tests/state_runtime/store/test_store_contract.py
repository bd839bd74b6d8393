"""The store contract on every adapter, and what is particular to each."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model import BUCKET, SECRET, DictStore, s3_options
from store_contract import StoreContract

from state_runtime.base.errors import InvalidConfiguration, OutcomeUnknown, StoreNotCapable, StoreUnavailable
from state_runtime.store import Created, FsspecStore, LocalStore, Store, StoredObject, local, open_store, shared_store


class TestDictStore(StoreContract):
    """The double that other tests use must itself keep the contract."""

    @pytest.fixture
    def store(self) -> Store:
        return DictStore()

    def test_child_is_a_folder_of_the_store(self, store: Store) -> None:
        """Its URL has no folder of its own."""
        store.child("job").put("x/y", b"1")
        assert store.read("job/x/y", 10) == b"1"


class TestLocalStore(StoreContract):
    """A local folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "root"))


class TestMemoryStore(StoreContract):
    """fsspec's memory file system."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        import fsspec

        name = uuid.uuid4().hex
        yield open_store(f"memory://{name}")
        fs = fsspec.filesystem("memory")
        if fs.exists(f"/{name}"):
            fs.rm(f"/{name}", recursive=True)


class TestS3Store(StoreContract):
    """The S3 protocol, through s3fs; one client for all tests, each in a folder of its own."""

    @pytest.fixture
    def store(self, s3_server: str) -> Store:
        return shared_store(f"s3://{BUCKET}", s3_options(s3_server)).child(uuid.uuid4().hex)

    def test_another_client_sees_new_objects_at_once(self, store: Store, s3_server: str) -> None:
        """s3fs's listing cache hides other writers' files; the store must be opened without it."""
        other = open_store(store.url, s3_options(s3_server))
        assert other.list_names("d") == []
        store.put("d/a", b"1")
        assert other.list_names("d") == ["a"]
        assert other.read("d/a", 10) == b"1"
        other.delete("d/a")
        assert not store.exists("d/a")


class TestS3StoreOfASingleWriter(StoreContract):
    """The same promises where a single writer is declared: the condition is sent all the same."""

    @pytest.fixture
    def store(self, s3_server: str) -> Store:
        options = {**s3_options(s3_server), "single_writer": True}
        return shared_store(f"s3://{BUCKET}", options).child(uuid.uuid4().hex)


class TestLocalStoreWithoutLinks(StoreContract):
    """A mount without hard links, for a declared single writer."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def refuse(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(local.os, "link", refuse)
        return open_store(str(tmp_path / "root"), {"single_writer": True})

    # Two at the same moment are what it cannot tell apart; everything else holds.
    test_many_creators_have_one_winner = None  # type: ignore[assignment]

    def test_it_is_refused_without_the_declaration(self, store: Store, tmp_path: Path) -> None:
        """The probe of a start says what to do."""
        with pytest.raises(StoreNotCapable, match=r"no hard links.*or declare `single_writer: true`"):
            open_store(str(tmp_path / "other")).probe()

    def test_the_probe_warns(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        """Whoever declared it reads what is lost."""
        with caplog.at_level(logging.WARNING):
            store.probe()
        assert "two writers within the same moment are not" in caplog.text


def _create_in_process(folder: str, number: int, together: Any, results: Any) -> None:
    store = open_store(folder)
    for round_number in range(25):
        together.wait()
        created = store.create(f"race/{round_number}", f"process {number}".encode())
        results.put((round_number, number, created is Created.MINE))


def test_processes_that_create_one_name_have_one_winner(tmp_path: Path) -> None:
    """Two drivers on one machine: os.link is atomic where fsspec's own create is not."""
    context = multiprocessing.get_context("fork")
    together, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_create_in_process, args=(str(tmp_path), n, together, results)) for n in range(4)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=30) for _ in range(100)]
    for process in processes:
        process.join()
    for round_number in range(25):
        winners = [n for r, n, mine in outcomes if r == round_number and mine]
        assert len(winners) == 1
        assert (tmp_path / "race" / str(round_number)).read_text() == f"process {winners[0]}"


def test_a_reader_of_a_replaced_file_sees_old_or_new_bytes(tmp_path: Path) -> None:
    """A half-written heartbeat would look like a damaged job root."""
    store = LocalStore(tmp_path)
    bodies = [b"a" * 40_000, b"b" * 50_000]
    store.put("h", bodies[0])
    done = threading.Event()

    def rewrite() -> None:
        for number in range(60):
            store.put("h", bodies[number % 2])
        done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not done.is_set():
        assert store.read("h", 1 << 20) in bodies
    writer.join()


def test_temporary_files_of_a_killed_writer_are_not_listed(tmp_path: Path) -> None:
    """A kill between write and link leaves a temporary file; it is nobody's snapshot."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".tmp-1234").write_bytes(b"half")
    LocalStore(tmp_path).put("d/a", b"1")
    assert LocalStore(tmp_path).list_names("d") == ["a"]


def test_writes_leave_no_temporary_file(tmp_path: Path) -> None:
    """Whether they win, lose or replace."""
    store = LocalStore(tmp_path)
    store.create("a", b"1")
    store.create("a", b"2")
    store.put("a", b"3")
    store.put_file(Path(__file__), "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("number", ["ENOSPC", "EROFS", "EACCES", "EDQUOT"])
def test_a_folder_that_cannot_be_written_is_unavailable_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """The reader of the message must know what to look at, and nothing half-written stays."""

    def refuse(descriptor: int) -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(local.os, "fsync", refuse)
    for call in (lambda: LocalStore(tmp_path).create("a", b"1"), lambda: LocalStore(tmp_path).put("a", b"1")):
        with pytest.raises(StoreUnavailable, match=f"{number}.*writable by this user and has space left"):
            call()
    assert os.listdir(tmp_path) == []


def test_a_store_below_a_file_is_unavailable_at_the_probe(tmp_path: Path) -> None:
    """A mistyped path is found when the run starts, not at its first checkpoint."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="Check that the folder exists"):
        LocalStore(tmp_path / "file" / "root").probe()


def test_a_create_that_landed_is_never_reported_as_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StoreUnavailable says "certainly not written"; after the name appeared a fault means that nobody knows."""

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(local, "_fsync_folder", fail)
    try:
        created = LocalStore(tmp_path).create("a", b"mine")
    except OutcomeUnknown:
        return
    except StoreUnavailable:
        assert not (tmp_path / "a").exists(), "reported as certainly not written, but everybody can read it"
    else:
        assert created is Created.MINE


class IgnoresCreate(DictStore):
    """A store that takes every create, as old S3 imitations do."""

    def create(self, path: str, body: bytes) -> Created:
        self.put(path, body)
        return Created.MINE


class RefusesButOverwrites(DictStore):
    """A store that says no and writes all the same."""

    def create(self, path: str, body: bytes) -> Created:
        taken = self.exists(path)
        self.put(path, body)
        return Created.LOST if taken else Created.MINE


class SaysNoTimes(DictStore):
    """A store whose listings do not say when objects were written."""

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        return (StoredObject(o.path, o.bytes, 0) for o in super().list_objects(path))


class ListsLate(DictStore):
    """A store whose listings lag."""

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        return iter(())


class RefusesEverything(DictStore):
    """A store on which no create ever wins."""

    def create(self, path: str, body: bytes) -> Created:
        return Created.LOST


@pytest.mark.parametrize("cls", [IgnoresCreate, RefusesButOverwrites])
def test_the_probe_refuses_a_store_without_create_if_absent(cls: type[DictStore]) -> None:
    """Two runs could both win there, so we do not start."""
    store = cls()
    with pytest.raises(StoreNotCapable, match=r"does not honour create-if-absent.*Use a store with conditional writes"):
        store.probe()
    assert store.objects == {}


@pytest.mark.parametrize(
    ("cls", "why"), [(SaysNoTimes, "do not say when"), (ListsLate, "does not show an object that was just written")]
)
def test_the_probe_refuses_a_store_whose_listings_cannot_be_used(cls: type[DictStore], why: str) -> None:
    """The newest snapshot is found by a listing, and garbage by its age."""
    store = cls()
    with pytest.raises(StoreNotCapable, match=why):
        store.probe()
    assert store.objects == {}


def test_the_probe_refuses_a_store_on_which_no_create_wins() -> None:
    """Whatever the reason, commits would never work there; the error must be one of ours."""
    with pytest.raises(StoreNotCapable):
        RefusesEverything().probe()


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAEXAMPLE:{SECRET}@bucket/prefix",
        "s3://AKIAEXAMPLE:s3cr3tsentinel@bucket/prefix",
        "s3://s3cr3tsentinel@bucket/prefix",
        "s3://bucket/prefix?X-Amz-Signature=s3cr3tsentinel",
        "gs://user:s3cr3tsentinel@bucket",
    ],
)
def test_urls_with_credentials_are_refused_without_repeating_them(url: str) -> None:
    """URLs end up in logs, manifests and Dagster metadata; secrets with a slash are the rule for AWS."""
    with pytest.raises(InvalidConfiguration) as caught:
        open_store(url)
    assert "s3cr3t" not in str(caught.value)
    assert "sentinel" not in str(caught.value)
    assert "storage_options" in str(caught.value)


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    """A typing error must not become a folder or a late failure."""
    with pytest.raises(InvalidConfiguration, match=r"'hdfs' is not known; use one of: .*s3"):
        open_store("hdfs://host/path")


def test_paths_and_file_urls_open_the_same_folder(tmp_path: Path) -> None:
    """Both spellings occur in configurations."""
    folder = tmp_path / "with space"
    open_store(str(folder)).put("a", b"1")
    assert open_store(folder.as_uri()).read("a", 10) == b"1"


def test_secrets_are_in_no_repr_url_or_message(closed_port: int) -> None:
    """Storage options may hold keys; a store that does not answer is when messages are read."""
    options = s3_options(f"http://127.0.0.1:{closed_port}", secret=SECRET)
    store = open_store("s3://bucket/prefix", options)
    assert isinstance(store, FsspecStore)
    shown = [repr(store), str(store), store.url, repr(store.child("job")), repr(vars(store))]
    store._fs.retries = 1
    store._retry_wait_max_s = 0.0
    with pytest.raises(StoreUnavailable) as caught:
        store.size("a")
    shown.append(str(caught.value))
    assert not [text for text in shown if SECRET in text]
    assert "Check the network" in str(caught.value)


@pytest.mark.parametrize("call", ["read", "create", "put", "list_names", "delete", "move"])
def test_a_server_that_does_not_answer_is_unavailable(closed_port: int, call: str) -> None:
    """A connection error of the client library is a passing fault, and must come as one of our types."""
    store = open_store("s3://bucket/prefix", s3_options(f"http://127.0.0.1:{closed_port}"))
    assert isinstance(store, FsspecStore)
    store._fs.retries = 1
    store._retry_wait_max_s = 0.0
    calls = {
        "read": lambda: store.read("a", 1),
        "create": lambda: store.create("a", b"1"),
        "put": lambda: store.put("a", b"1"),
        "list_names": lambda: store.list_names("a"),
        "delete": lambda: store.delete("a"),
        "move": lambda: store.move("a", "b"),
    }
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        calls[call]()
