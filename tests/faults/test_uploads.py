"""Uploads with rivals: who wins, what is deleted, what is bounded. The scenarios of Flink's RetryingExecutorTest and
FsStateChangelogWriterTest, as ours."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from model import ALL_HASHES, ALL_KEYS, OPERATOR, STATE, CountingIds, DictStore, batch_of, rows_of, seeds

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StoreRefused, StoreUnavailable
from state_runtime.base.limits import GIB, KIB, MIB
from state_runtime.base.settings import JobSettings, UploadSettings
from state_runtime.changelog.changes import UploadTotals
from state_runtime.changelog.parts import decode_part
from state_runtime.changelog.parts_writer import PartsWriter, WrittenParts
from state_runtime.changelog.upload import Upload, Uploader
from state_runtime.changelog.writer import begin_task_changes, task_writer
from state_runtime.store import Store
from tests.faults.virtual import FaultPlan, FaultyFs, VirtualTime, store_on
from tests.job_settings import job_settings
from tests.stored import write_segment

POLICY = UploadSettings.model_construct(timeout_s=1.0, attempts_max=3, deadline_s=20.0, in_flight_bytes_max=100)
FOREVER_S = 10_000.0
BODY = b"x" * 10


@dataclass
class Script(DictStore):
    """Each put in turn ends as written: None stores, an error is raised before it does, `lost` after it did."""

    outcomes: list[Exception | None] = field(default_factory=list)
    lost: bool = False
    puts: int = 0

    def __post_init__(self) -> None:
        DictStore.__init__(self)

    def put(self, path: str, body: bytes) -> None:
        self.puts += 1
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is None or self.lost:
            super().put(path, body)
        if outcome is not None:
            raise outcome


class Watched(Uploader):
    """Counts beside it, from what begins and what ends, how many bytes are in flight.

    Attributes:
        most_in_flight: at once.
    """

    bytes_in_flight = most_in_flight = 0

    def begin(self, root: Store, name: Callable[[], str], body: bytes) -> Upload:
        upload = super().begin(root, name, body)
        with self.run.lock:
            self.bytes_in_flight += len(body)
            self.most_in_flight = max(self.most_in_flight, self.bytes_in_flight)
        return upload

    def leave(self, size: int) -> None:
        self.bytes_in_flight -= size
        super().leave(size)


def named() -> Callable[[], str]:
    """a-1, a-2, …"""
    ids = CountingIds()
    return lambda: f"a-{int(ids.uid(), 16)}"


def taking(*durations_s: float) -> Callable[[], float]:
    """The attempts in turn take so long; further ones the last."""
    left = list(durations_s)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def down() -> StoreUnavailable:
    return StoreUnavailable("the store is down")


def test_without_retries_there_is_one_attempt() -> None:
    """attempts_max is a count of attempts."""
    time, store = VirtualTime(), Script([down(), None])
    uploader = Uploader(UploadSettings(attempts_max=1), time, time)
    upload = uploader.begin(store, named(), BODY)
    with pytest.raises(StoreUnavailable, match="is down"):
        upload.result()
    assert (store.puts, upload.totals.attempts) == (1, 1)


def test_so_many_attempts_are_made_and_the_last_error_is_told() -> None:
    """Three failures of three."""
    time, store = VirtualTime(), Script([down(), down(), StoreUnavailable("and the third time"), None])
    with pytest.raises(StoreUnavailable, match="and the third time"):
        Uploader(POLICY, time, time).begin(store, named(), BODY).result()
    assert store.puts == 3


def test_the_third_attempt_succeeds_at_once() -> None:
    """A failure does not wait for the timeout."""
    time, store = VirtualTime(), Script([down(), down(), None])
    before_s = time.now_s
    upload = Uploader(POLICY, time, time).begin(store, named(), BODY)
    assert upload.result() == "a-3"
    assert time.now_s - before_s < 0.1
    assert upload.totals == UploadTotals(uploads=1, attempts=3, bytes=10)


@pytest.mark.parametrize("error", [StoreRefused("AccessDenied"), ValueError("a bug")], ids=repr)
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    """Permission, quota, our own mistakes."""
    time, store = VirtualTime(), Script([error, None])
    with pytest.raises(type(error)):
        Uploader(POLICY, time, time).begin(store, named(), BODY).result()
    time.drain()
    assert (store.puts, store.objects) == (1, {})


def test_a_slow_attempt_gets_a_rival_and_its_late_object_is_deleted() -> None:
    """The second is quick; the first ends later and leaves nothing."""
    time, store = VirtualTime(taking(5.0, 0.1)), Script()
    before_s = time.now_s
    upload = Uploader(POLICY, time, time).begin(store, named(), BODY)
    assert upload.result() == "a-2"
    assert 1.0 <= time.now_s - before_s < 1.2
    time.drain()
    assert store.puts == 2
    assert list(store.objects) == ["a-2"]


def test_a_slow_attempt_that_is_first_nevertheless_wins() -> None:
    """It is not given up when its rival begins."""
    time, store = VirtualTime(taking(1.5, 5.0)), Script()
    assert Uploader(POLICY, time, time).begin(store, named(), BODY).result() == "a-1"
    time.drain()
    assert list(store.objects) == ["a-1"]


def test_a_large_object_has_more_time() -> None:
    """Else every large upload would be sent three times."""
    policy = UploadSettings.model_construct(timeout_s=1.0, bytes_per_s=10)
    time, store = VirtualTime(taking(1.9)), Script()
    Uploader(policy, time, time).begin(store, named(), BODY).result()
    assert store.puts == 1


def test_attempts_that_hang_end_at_the_deadline() -> None:
    """The task fails with a typed error instead of hanging with them."""
    time, store = VirtualTime(taking(FOREVER_S)), Script()
    before_s = time.now_s
    with pytest.raises(StoreUnavailable, match=r"3 attempts to upload 10 bytes .* did not end within 20 s"):
        Uploader(POLICY, time, time).begin(store, named(), BODY).result()
    assert time.now_s - before_s == pytest.approx(20.0)
    time.drain()
    assert store.objects == {}, "they ended after all, and deleted what they had written"


def test_the_deadline_leaves_room_for_all_attempts() -> None:
    """attempts × timeout is never cut short."""
    policy = UploadSettings(timeout_s=30, attempts_max=5, deadline_s=10)
    assert policy.upload_s(0) == 150


def test_an_object_whose_answer_was_lost_is_deleted_by_its_attempt() -> None:
    """Nobody else knows its name."""
    time, store = VirtualTime(), Script([down(), None], lost=True)
    assert Uploader(POLICY, time, time).begin(store, named(), BODY).result() == "a-2"
    time.drain()
    assert list(store.objects) == ["a-2"]


def test_bytes_in_flight_are_bounded_and_the_wait_is_counted() -> None:
    """Two of 60 bytes do not fit below 100: the second begins when the first has ended."""
    time, store = VirtualTime(taking(0.5)), Script()
    uploader = Watched(POLICY, time, time)
    first = uploader.begin(store, named(), b"x" * 60)
    second = uploader.begin(store, lambda: "b", b"y" * 60)
    assert second.totals.wait_ms == pytest.approx(500)
    assert (first.result(), second.result()) == ("a-1", "b")
    assert uploader.most_in_flight == 60
    assert uploader.totals.wait_ms == pytest.approx(500)


def test_what_fits_together_goes_together() -> None:
    """The bound is no queue."""
    time = VirtualTime(taking(0.5))
    uploader = Watched(POLICY, time, time)
    uploads = [uploader.begin(Script(), named(), b"x" * 50) for _ in range(2)]
    assert [u.totals.wait_ms for u in uploads] == [0, 0]
    assert uploader.most_in_flight == 100


def test_an_object_above_the_bound_goes_alone() -> None:
    """It would wait for ever otherwise."""
    time, store = VirtualTime(), Script()
    uploader = Watched(POLICY, time, time)
    uploader.begin(store, lambda: "small", b"x")
    assert uploader.begin(store, lambda: "large", b"x" * 1000).result() == "large"
    assert uploader.most_in_flight == 1000


def test_hanging_uploads_do_not_keep_others_waiting_for_ever() -> None:
    """Their bytes are still held; whoever needs the room is told why there is none."""
    time = VirtualTime(taking(FOREVER_S))
    uploader = Uploader(POLICY, time, time)
    uploader.begin(Script(), named(), b"x" * 80)
    with pytest.raises(StoreUnavailable, match="uploads of 80 bytes do not end"):
        uploader.begin(Script(), named(), b"x" * 80)
    time.drain()
    assert uploader.begin(Script(), named(), b"x" * 80).totals.wait_ms == 0


@pytest.mark.parametrize("arrived", [False, True], ids=["under way", "arrived"])
def test_an_upload_that_nobody_needs_is_deleted(arrived: bool) -> None:
    """The task failed for another reason."""
    time, store = VirtualTime(), Script()
    upload = Uploader(POLICY, time, time).begin(store, named(), BODY)
    if arrived:
        upload.result()
    upload.abandon()
    time.drain()
    assert (store.puts, store.objects) == (1, {})


def test_a_writer_that_is_abandoned_takes_back_all_of_its_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that arrived and those under way: the epoch failed before anybody could name them."""
    monkeypatch.setattr("state_runtime.changelog.parts_writer._OBJECT_BYTES", 1)
    time, store = VirtualTime(), Script()
    uploader = Uploader(UploadSettings.model_construct(timeout_s=1, attempts_max=1, deadline_s=9), time, time)
    writer = PartsWriter(
        lambda: store, uploader, term=1, name="direct", settings=job_settings(inline_bytes_max=0), ids=CountingIds()
    )
    for key in ALL_KEYS[:2]:
        writer.add("state", OPERATOR, STATE, batch_of({key: (1, "x")}), ALL_HASHES)
    time.drain()
    writer.add("state", OPERATOR, STATE, batch_of({ALL_KEYS[2]: (1, "x")}), ALL_HASHES)
    assert len(store.objects) == 2
    writer.abandon()
    time.drain()
    assert (store.puts, store.objects) == (3, {})


class Gate(DictStore):
    """The first put waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.ended = threading.Event()
        self.calls = 0

    def put(self, path: str, body: bytes) -> None:
        self.calls += 1
        if self.calls == 1:
            self.open.wait()
        super().put(path, body)

    def delete(self, path: str) -> None:
        super().delete(path)
        self.ended.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    store = Gate()
    yield store
    store.open.set()


def test_with_real_threads_a_hanging_request_loses_to_its_rival(gate: Gate) -> None:
    """What the virtual tests promise holds on the machine's clock and threads."""
    uploader = Uploader(UploadSettings(timeout_s=0.02), SYSTEM_CLOCK)
    assert uploader.begin(gate, named(), BODY).result() == "a-2"
    gate.open.set()
    assert gate.ended.wait(30)
    assert list(gate.objects) == ["a-2"]


def test_with_real_threads_the_bound_holds_back_and_lets_through(gate: Gate) -> None:
    """The second upload waits for the first one's room."""
    uploader = Watched(UploadSettings.model_construct(timeout_s=60, in_flight_bytes_max=15), SYSTEM_CLOCK)
    first = uploader.begin(gate, named(), BODY)
    results: list[str] = []
    second = threading.Thread(target=lambda: results.append(uploader.begin(gate, lambda: "b", BODY).result()))
    second.start()
    gate.open.set()
    second.join(30)
    assert (first.result(), results) == ("a-1", ["b"])
    assert uploader.most_in_flight == 10


def test_whatever_the_schedule_one_object_stays_or_none() -> None:
    """A thousand seeds of failures, lost answers, slowness and hangs, several uploads at once."""
    seen: set[str] = set()
    for seed, rng in seeds(1000):
        chance = rng.choice([0.0, 0.3, 0.6])
        # The adapter tries five times itself, so it takes a lot to make an attempt fail.
        plan = FaultPlan(before=chance, after=chance, refused=rng.choice([0.0, 0.05]))
        durations = random.Random(seed + 1)
        time = VirtualTime(lambda draw=durations: draw.choice([0.01, 0.3, 1.5, 4.0, FOREVER_S]))  # type: ignore[misc]
        fs = FaultyFs({}, rng, plan)
        store = store_on(fs)
        policy = UploadSettings.model_construct(
            timeout_s=1, attempts_max=rng.randint(1, 4), deadline_s=rng.choice([3, 30]), in_flight_bytes_max=40
        )
        uploader = Watched(policy, time, time)
        name = named()
        kept: list[str] = []
        for _ in range(6):
            try:
                upload = uploader.begin(store, name, b"x" * rng.randint(1, 30))
                if rng.random() < 0.2:
                    upload.abandon()
                    seen.add("abandoned")
                else:
                    kept.append(upload.result())
            except StoreRefused:
                seen.add("refused")
            except StoreUnavailable:
                seen.add("unavailable")
            assert upload.totals.attempts <= policy.attempts_max, f"seed {seed}"
        time.drain()
        left = {path.removeprefix("/bucket/") for path in fs.objects}
        assert set(kept) <= left, f"seed {seed}: an upload that succeeded is gone"
        assert len(left) - len(kept) <= uploader.totals.left_behind, f"seed {seed}: {left - set(kept)} was not deleted"
        assert uploader.most_in_flight <= 40, f"seed {seed}"
        assert uploader.begin(DictStore(), name, b"").totals.wait_ms == 0, f"seed {seed}: room was not given back"
        seen |= {"kept"} if kept else set()
    assert seen == {"abandoned", "refused", "unavailable", "kept"}


# --- what a task does with it ----------------------------------------------------------------------------------------

CHANGES = {STATE: batch_of(dict.fromkeys(ALL_KEYS, (1, "x" * 50)))}


def begin(uploader: Uploader, store: DictStore | None, **settings: object) -> WrittenParts:
    def root() -> DictStore:
        assert store is not None, "the store must not be opened"
        return store

    chosen = job_settings(**settings)  # type: ignore[arg-type]
    writer = task_writer(root, uploader, term=1, snapshot_id=1, operator=OPERATOR, settings=chosen, ids=CountingIds())
    return begin_task_changes(writer, operator=OPERATOR, hash_range=ALL_HASHES, changes=CHANGES)


def test_small_changes_do_not_even_open_the_store() -> None:
    """They ride in the acknowledgement; opening a connection alone would cost more than they do."""
    time = VirtualTime()
    changes = begin(Uploader(POLICY, time, time), None).result()
    assert [len(body) for body in changes.inline] == [p.length for p in changes.parts]
    assert changes.uploads == UploadTotals()


def test_large_changes_are_on_their_way_before_the_result_is_asked_for() -> None:
    """The local version is written meanwhile; the segment then names the object and uploads nothing again."""
    time, store = VirtualTime(), Script()
    uploader = Uploader(UploadSettings(), time, time)
    pending = begin(uploader, store, inline_bytes_max=0)
    time.advance_s(0.5)
    assert store.puts == 1
    changes = pending.result()
    assert pending.result() == changes
    assert changes.uploads.attempts == 1
    segment = write_segment(store, [changes], job_uid="j", term=1, snapshot_id=1, ids=CountingIds(9), uploader=uploader)
    assert segment is not None
    assert store.puts == 2
    assert segment.direct_bytes == sum(p.length for p in changes.parts)
    assert segment.bytes < segment.direct_bytes, "the segment holds the index, not the changes"


def test_a_failed_upload_fails_the_task_and_a_later_attempt_of_it_has_other_names() -> None:
    """Nothing of the failed one is named by anybody."""
    time, store = VirtualTime(), Script([down(), down(), down()], lost=True)
    uploader = Uploader(UploadSettings(), time, time)
    with pytest.raises(StoreUnavailable):
        begin(uploader, store, inline_bytes_max=0).result()
    time.drain()
    assert store.objects == {}


def test_a_segment_that_hangs_is_written_under_another_name() -> None:
    """The driver's own upload is hedged too; the manifest names the one that won."""
    time, store = VirtualTime(taking(FOREVER_S, 0.1)), Script()
    uploader = Uploader(UploadSettings(), time, time)
    changes = begin(uploader, None).result()
    segment = write_segment(store, [changes], job_uid="j", term=1, snapshot_id=1, ids=CountingIds(), uploader=uploader)
    time.drain()
    assert segment is not None
    assert list(store.objects) == [segment.path]
    assert store.size(segment.path) == segment.bytes


@pytest.mark.parametrize("compression", ["lz4", "zstd", "none"])
def test_any_compression_is_read_back(compression: str) -> None:
    """The stream says itself how it is compressed; a job may change the setting at any restart."""
    time = VirtualTime()
    changes = begin(Uploader(POLICY, time, time), None, compression=compression).result()
    (part,), (body,) = changes.parts, changes.inline
    assert rows_of(decode_part(body, part, "here")) == dict.fromkeys(ALL_KEYS, (1, "x" * 50))


def test_compression_is_what_the_setting_says() -> None:
    """Repeated text gets smaller with either codec, and not with none."""
    time = VirtualTime()
    uploader = Uploader(POLICY, time, time)
    sizes = {c: begin(uploader, None, compression=c).result().bytes for c in ("lz4", "zstd", "none")}
    assert sizes["zstd"] < sizes["none"]
    assert sizes["lz4"] < sizes["none"]
    assert sizes["zstd"] != sizes["lz4"]


def test_the_settings_of_a_job_are_its_upload_policy() -> None:
    """A thin line and a slow store are the user's to describe; a shard of 1 GiB has the time that it needs."""
    settings = JobSettings(
        upload=UploadSettings(
            timeout_s=2, attempts_max=4, in_flight_bytes_max=MIB, deadline_s=300, bytes_per_s=64 * KIB
        )
    )
    policy = settings.upload
    assert policy.upload_s(0) == 300
    assert policy.upload_s(GIB) == 4 * (2 + GIB / (64 * KIB))
    assert JobSettings().upload == UploadSettings()
