"""The S3 adapter before a server that answers badly: over real HTTP, since what a client library makes of an answer is half of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from model import CountingIds, FakeClock, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.base.errors import Fenced, OutcomeUnknown, StoreNotCapable, StoreRefused, StoreUnavailable
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.expiry_boundary import advance_boundary
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.paths import manifest_path
from state_runtime.store import Created, Store, open_store, s3, shared_store
from tests.s3_server import CountingServer, Fault

AFTER_STORING = ["500 InternalError", "503 SlowDown", "503 ServiceUnavailable", "reset", "hang"]
LIMITS = {"connect_timeout_s": 20, "attempts_max": 1}
BARE_412 = "412 PreconditionFailed"  # no Condition element, as old imitations answer


@pytest.fixture(scope="module")
def running() -> Iterator[CountingServer]:
    with CountingServer() as server:
        yield server


@pytest.fixture
def server(running: CountingServer) -> Iterator[CountingServer]:
    yield running
    running.fault, running.conditions_known = lambda method, path: None, True


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def opened(server: CountingServer, folder: str, **more: Any) -> Store:
    # One client for all tests with the same options: making one takes longer than most of them.
    more = {"read_timeout_s": 0.5 if "hang" in folder else 20, **more}
    bucket = shared_store("s3://lake", {**server.options, **LIMITS, **more})
    bucket._retry_wait_max_s = 0.0  # type: ignore[attr-defined]
    return bucket.child(folder)


def on(method: str, *faults: Fault | None, path: str = "") -> Callable[[str, str], Fault | None]:
    """The faults of the first requests of a method, one each."""
    left = list(faults)

    def fault(called: str, at: str) -> Fault | None:
        return left.pop(0) if left and called == method and path in at else None

    return fault


def always(method: str, fault: Fault) -> Callable[[str, str], Fault | None]:
    return lambda called, at: fault if called == method else None


def puts(server: CountingServer, since: int) -> int:
    return sum(method == "PUT" for method, _ in server.requests[since:])


# --- one create ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", AFTER_STORING)
@pytest.mark.parametrize("attempts_max", [1, 3])
def test_a_create_whose_answer_was_lost_is_mine(
    server: CountingServer, folder: str, how: str, attempts_max: int
) -> None:
    """The bytes are there; whether the library tries again by itself (and is refused by its own object) or not."""
    store = opened(server, folder, attempts_max=attempts_max)
    server.fault = on("PUT", Fault(how, stored=True))
    assert store.create("a", b"mine") is Created.MINE
    assert store.read("a", 10) == b"mine"


@pytest.mark.parametrize("how", [*AFTER_STORING, "409 ConditionalRequestConflict", "409 OperationAborted", BARE_412])
def test_a_create_that_was_not_stored_is_sent_again(server: CountingServer, folder: str, how: str) -> None:
    """409 says: two at once, and neither; a bare 412 of a name that is free then can only be passing."""
    since = len(server.requests)
    server.fault = on("PUT", Fault(how), Fault(how))
    assert opened(server, folder).create("a", b"mine") is Created.MINE
    assert puts(server, since) == 3


@pytest.mark.parametrize("how", ["409 ConditionalRequestConflict", BARE_412, "reset", "500 InternalError"])
def test_a_name_that_is_taken_is_lost_whatever_the_answer(server: CountingServer, folder: str, how: str) -> None:
    """Losing must never look like winning, nor like a passing fault."""
    store = opened(server, folder)
    store.create("a", b"theirs")
    server.fault = on("PUT", Fault(how))
    assert store.create("a", b"mine") is Created.LOST
    assert store.read("a", 10) == b"theirs"


def test_a_bare_412_after_my_own_write_is_mine(server: CountingServer, folder: str) -> None:
    """The first answer was lost, the library asked again, and an old imitation refused it in its own words."""
    server.fault = on("PUT", Fault("503 SlowDown", stored=True), Fault(BARE_412))
    assert opened(server, folder, attempts_max=2).create("a", b"mine") is Created.MINE


def test_a_create_that_never_ends_well_is_unknown_and_bounded(server: CountingServer, folder: str) -> None:
    """The end of all attempts is no certainty."""
    since = len(server.requests)
    server.fault = always("PUT", Fault("500 InternalError"))
    with pytest.raises(OutcomeUnknown, match=r"kept failing: .*injected; start again later"):
        opened(server, folder).create("a", b"mine")
    assert puts(server, since) == 5


def test_a_refused_create_is_refused_at_once(server: CountingServer, folder: str) -> None:
    """403 stays 403: one write, one look."""
    since = len(server.requests)
    server.fault = always("PUT", Fault("403 AccessDenied"))
    with pytest.raises(
        StoreRefused, match=r"cannot create a in s3://lake/.*check the credentials, the bucket's policy"
    ):
        opened(server, folder).create("a", b"mine")
    assert puts(server, since) == 1


@pytest.mark.parametrize(("first", "certain"), [("503 SlowDown", False), (None, True)])
def test_credentials_that_end_in_the_middle_leave_the_outcome_open(
    server: CountingServer, folder: str, first: str | None, certain: bool
) -> None:
    """A first attempt may have landed; then neither writing nor reading is allowed any more. Without a first attempt it is refused."""
    left = [Fault(first, stored=True)] if first else []

    def fault(method: str, path: str) -> Fault:
        return left.pop() if left else Fault("403 ExpiredToken")

    server.fault = fault
    with pytest.raises(StoreRefused if certain else OutcomeUnknown):
        opened(server, folder, attempts_max=2).create("a", b"mine")


def test_a_missing_bucket_is_said_by_every_operation(server: CountingServer) -> None:
    """An empty listing would look like a job that never ran."""
    store = open_store("s3://no-such-bucket/x", {**server.options, **LIMITS})
    for call in (lambda: store.create("a", b""), lambda: store.put("a", b""), lambda: store.list_names("")):
        with pytest.raises(StoreRefused, match="There is no such bucket"):
            call()


# --- what a store can do ---------------------------------------------------------------------------------------------


def test_a_store_that_does_not_know_conditions_is_refused(server: CountingServer, folder: str) -> None:
    """501: to go on would mean that two runs can both win."""
    server.conditions_known = False
    with pytest.raises(StoreNotCapable, match="or declare `single_writer: true`"):
        opened(server, folder).probe()


def test_a_store_that_passes_over_conditions_is_refused_by_the_probe(server: CountingServer, folder: str) -> None:
    """It answers 200 to both writers; only reading back tells. Nothing is left of the probe."""
    store = opened(server, folder)
    server.fault = always("PUT", Fault("unconditional"))
    with pytest.raises(StoreNotCapable, match="does not honour create-if-absent"):
        store.probe()
    assert store.list_names("") == []


def test_a_listing_that_lags_is_refused_by_the_probe(server: CountingServer, folder: str) -> None:
    """The newest snapshot is found by a listing."""
    store = opened(server, folder)
    inside = store._pages  # type: ignore[attr-defined]

    def stale(path: str, prefix: str, **more: Any) -> Iterator[dict[str, Any]]:
        return ({**page, "Contents": []} for page in inside(path, prefix, **more))

    store._pages = stale  # type: ignore[attr-defined]
    with pytest.raises(StoreNotCapable, match="does not show an object that was just written"):
        store.probe()


@pytest.mark.parametrize("how", ["ignored", "501"])
def test_a_declared_single_writer_runs_with_a_warning_and_what_can_be_seen_is_seen(
    server: CountingServer, folder: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One writer after the other is still told apart: terms, the fencing snapshot and the boundary work."""
    if how == "ignored":
        server.fault = always("PUT", Fault("unconditional"))
    else:
        server.conditions_known = False
    root = opened(server, folder, single_writer=True).child("job")
    with caplog.at_level(logging.WARNING):
        root.probe()
    assert "single_writer is declared" in caplog.text
    assert root.list_names("") == []
    first = started(root, 1)
    first.commit(first.last)
    second = started(root, 2)
    assert second.term.term == 2
    with pytest.raises(Fenced, match="committed by another run"):
        first.commit(first.last)
    newest = second.commit(second.last)
    advance_boundary(
        root, lambda b: replace(b, snapshot_id=newest.snapshot_id - 1), clock=FakeClock(), ids=CountingIds(7)
    )
    assert Catalog.of_root(root).snapshot_ids() == [newest.snapshot_id]


def test_a_declared_single_writer_on_a_capable_store_is_as_safe_as_without(
    server: CountingServer, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The condition is sent all the same."""
    root = opened(server, folder, single_writer=True)
    with caplog.at_level(logging.WARNING):
        root.probe()
    assert caplog.text == ""
    looked = root._reads_as  # type: ignore[attr-defined]
    answers = iter([None])  # the first look, before somebody else was there
    root._reads_as = lambda path, body: next(answers, None) or looked(path, body)  # type: ignore[attr-defined]
    opened(server, folder).create("a", b"theirs")
    assert root.create("a", b"mine") is Created.LOST
    assert root.read("a", 10) == b"theirs"


# --- commits -------------------------------------------------------------------------------------------------------


def started(root: Store, prefix: int) -> Committer:
    clock, ids = FakeClock(), CountingIds(prefix)
    info = open_job_root(root, "job", clock=clock, ids=ids)
    catalog = Catalog.of_root(root, clock)
    return open_run(catalog, info, empty_manifest(info.uid, 2), actor=Actor(clock, ids, "h", prefix))


@pytest.mark.parametrize("how", AFTER_STORING)
def test_a_commit_whose_answer_was_lost_goes_on_and_its_zombie_is_fenced(
    server: CountingServer, folder: str, how: str
) -> None:
    """The commit id in the manifest is the writer's own; another's is not."""
    root = opened(server, folder).child("job")
    run = started(root, 1)
    server.fault = on("PUT", Fault(how, stored=True), path="manifest.json")
    committed = run.commit(run.last)
    assert Catalog.of_root(root).manifest(committed.snapshot_id) == committed
    other = started(root, 2)
    server.fault = on("PUT", Fault(how), path="manifest.json")
    with pytest.raises(Fenced, match="committed by another run"):
        run.commit(run.last)
    assert Catalog.of_root(root).latest() == other.last


@pytest.mark.parametrize("stored", [True, False])
def test_an_unconfirmed_commit_is_read_back_by_the_next_run(server: CountingServer, folder: str, stored: bool) -> None:
    """Nobody cleans up; the next run goes on from whatever is there."""
    root = opened(server, folder).child("job")
    run = started(root, 1)
    before = run.last
    left = [Fault("500 InternalError", stored=stored)]

    def fault(method: str, path: str) -> Fault | None:
        # From the create on: what the commit stands on was looked at before it.
        if "manifest.json" not in path or (left and method != "PUT"):
            return None
        return left.pop() if left else Fault("503 SlowDown")

    server.fault = fault
    with pytest.raises(OutcomeUnknown, match="Nothing was cleaned up; start again"):
        run.commit(run.last)
    server.fault = lambda method, path: None
    assert root.exists(manifest_path(before.snapshot_id + 1)) == stored
    assert started(root, 2).last.snapshot_id == before.snapshot_id + (2 if stored else 1)


# --- reading and listing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["500 InternalError", "502 BadGateway", "503 SlowDown", "429 TooManyRequests", "reset", "cut", "hang"])  # fmt: skip
def test_a_read_that_fails_for_a_while_succeeds_later(server: CountingServer, folder: str, how: str) -> None:
    """Bursts of faults are no news."""
    store = opened(server, folder)
    store.put("a", b"0123456789" * 1000)
    server.fault = on("GET", Fault(how), Fault(how))
    assert store.read("a", 1 << 20) == b"0123456789" * 1000
    server.fault = on("GET", Fault(how), Fault(how))
    assert store.read_range("a", 10, 10) == b"0123456789"


@pytest.mark.parametrize("how", ["503 SlowDown", "cut"])
def test_a_transport_fault_is_never_called_damage(server: CountingServer, folder: str, how: str) -> None:
    """ "Try again" and "restore from a copy" are two answers."""
    store = opened(server, folder)
    store.put("a", b"0123456789" * 1000)
    since = len(server.requests)
    server.fault = always("GET", Fault(how))
    with pytest.raises(StoreUnavailable, match="try again"):
        store.read("a", 1 << 20)
    gets = sum(method == "GET" for method, _ in server.requests[since:])
    assert gets <= 5


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of ten objects has several pages."""
    inside = s3.S3Store._call

    def few(self: s3.S3Store, method: str, **arguments: Any) -> dict[str, Any]:
        return inside(self, method, **{**arguments, **({"MaxKeys": 3} if method == "list_objects_v2" else {})})

    monkeypatch.setattr(s3.S3Store, "_call", few)


@pytest.mark.usefixtures("small_pages")
def test_a_listing_of_many_pages_is_whole_or_an_error(server: CountingServer, folder: str) -> None:
    """A shorter listing of manifests would make live data look dead."""
    store = opened(server, folder)
    names = [f"d/{n}/x" for n in range(10)]
    for name in names:
        store.put(name, b"1")
    assert sorted(o.path for o in store.list_objects("d")) == names
    assert store.list_names("d") == [str(n) for n in range(10)]
    server.fault = on("LIST", None, None, *[Fault("500 InternalError")] * 5)
    with pytest.raises(StoreUnavailable):
        list(store.list_objects("d"))
    server.fault = on("LIST", None, None, Fault("500 InternalError"))
    assert len(list(store.list_objects("d"))) == 10


def test_a_listing_that_does_not_say_how_it_goes_on_is_an_error(
    server: CountingServer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that drops the token would otherwise cut the listing, or make it endless."""
    store = opened(server, folder)
    store.put("a", b"1")
    for token in ({}, {"NextContinuationToken": "again"}):
        page = {"IsTruncated": True, "Contents": [], **token}
        monkeypatch.setattr(s3.S3Store, "_call", lambda self, method, page=page, **arguments: page)
        with pytest.raises(StoreUnavailable, match="cut off and does not say how it goes on"):
            store.list_names("")


# --- large objects ---------------------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of three parts, where parts are as small as S3 takes them."""
    monkeypatch.setattr(s3, "_COPY_WHOLE_MAX", 6 * MIB)
    monkeypatch.setattr(s3, "_COPY_PART_BYTES", 5 * MIB)
    monkeypatch.setattr(s3, "_UPLOAD_PART_BYTES", 5 * MIB)
    file = tmp_path / "large"
    file.write_bytes(bytes(range(256)) * (11 * 4096))
    return file


def uploads(server: CountingServer) -> list[Any]:
    options = server.options
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )
    return list(client.list_multipart_uploads(Bucket="lake").get("Uploads", []))


def test_a_large_file_goes_up_and_is_copied_in_parts(server: CountingServer, folder: str, large: Path) -> None:
    """Copies of objects above 5 GiB have to; the smaller ones so that no request waits for minutes."""
    store = opened(server, folder)
    since = len(server.requests)
    store.put_file(large, "a")
    store.copy("a", "b")
    store.copy("a", "b")  # again: the same end
    assert store.read("b", 1 << 30) == large.read_bytes()
    methods = [method for method, path in server.requests[since:] if path.startswith(folder)]
    assert methods.count("PUT") == 3 + 3 + 3
    assert uploads(server) == []


@pytest.mark.parametrize("how", ["500 InternalError", "reset"])
def test_a_copy_of_which_a_part_fails_is_repeated_and_leaves_no_parts(
    server: CountingServer, folder: str, large: Path, how: str
) -> None:
    """Parts of unfinished uploads cost money and are in no listing."""
    store = opened(server, folder)
    store.put_file(large, "a")
    server.fault = on("PUT", None, Fault(how))
    store.copy("a", "b")
    assert store.size("b") == large.stat().st_size
    server.fault = always("PUT", Fault("403 AccessDenied"))
    with pytest.raises(StoreRefused):
        store.copy("a", "c")
    assert uploads(server) == []
    assert not store.exists("c")


def test_a_large_copy_whose_last_answer_was_lost_is_done(server: CountingServer, folder: str, large: Path) -> None:
    """The upload is gone because it was completed."""
    store = opened(server, folder)
    store.put_file(large, "a")
    server.fault = on("POST", None, Fault("reset", stored=True))
    store.copy("a", "b")
    assert store.read("b", 1 << 30) == large.read_bytes()


def test_a_copy_of_nothing_is_file_not_found(server: CountingServer, folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        opened(server, folder).copy("a", "b")
