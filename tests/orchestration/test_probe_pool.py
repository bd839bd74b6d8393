"""Looks in threads: deadlines, budgets, what hangs and what is shared. Stores that hang are events that the test holds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from black_holes import black_hole, refused

from state_runtime.base.errors import CorruptData, StoreRefused, StoreUnavailable
from state_runtime.snapshot.catalog import read_job_info
from state_runtime.store import open_store, open_watched_store
from stillstate.orchestration.probes.admission import Admission
from stillstate.orchestration.probes.look import patience_of
from stillstate.orchestration.probes.pool import NoLook, ProbePool, Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def task(key: str, read: Callable[[], object], store: str = "s", *, is_shared: bool = False) -> Task[object]:
    return Task(key=key, store=store, shown=f"the store {store}", read=read, is_shared=is_shared)


def why(outcome: object) -> str:
    return outcome.why if isinstance(outcome, NoLook) else "seen"


def raising(error: Exception) -> Callable[[], object]:
    def read() -> object:
        raise error

    return read


def test_a_look_that_hangs_is_given_up_and_the_others_are_seen(released: threading.Event) -> None:
    tasks = [task("hangs", released.wait, "black"), *(task(f"job-{n}", object) for n in range(50))]
    outcomes = ProbePool().look(tasks, timeout_s=0.3, budget_s=60)
    assert why(outcomes["hangs"]) == "away"
    assert [why(outcomes[f"job-{n}"]) for n in range(50)] == ["seen"] * 50


def test_a_black_hole_gets_few_threads_and_is_left_alone_then(released: threading.Event) -> None:
    begun: list[int] = []

    def hang() -> object:
        begun.append(1)
        return released.wait()

    lookout = ProbePool(traffic=Admission(per_store_max=3))
    for _ in range(5):
        outcomes = lookout.look([task(f"job-{n}", hang, "black") for n in range(20)], timeout_s=0.2, budget_s=60)
        assert {why(outcome) for outcome in outcomes.values()} == {"away"}
    assert len(begun) == 3
    assert lookout.away_s("black") > 0
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("look "))


def test_a_store_that_is_away_is_left_alone_and_the_others_are_told_why() -> None:
    lookout = ProbePool()
    for _ in range(2):
        gone = task("job-1", raising(StoreUnavailable("gone")))
        assert why(lookout.look([gone], timeout_s=9, budget_s=60)["job-1"]) == "away"
    skipped = lookout.look([task("job-3", lambda: 1)], timeout_s=9, budget_s=60)["job-3"]
    assert isinstance(skipped, NoLook)
    assert "it is asked again at 20" in str(skipped.error)


@pytest.mark.parametrize("error", [StoreRefused("not yours"), CorruptData("half of it"), ValueError("a bug")])
def test_an_answer_that_is_an_error_says_nothing_against_the_store(error: Exception) -> None:
    lookout = ProbePool()
    for _ in range(5):
        outcome = lookout.look([task("job", raising(error))], timeout_s=9, budget_s=60)["job"]
        assert why(outcome) == "failed"
    assert lookout.away_s("s") == 0


def test_what_a_surprise_says_is_not_shown() -> None:
    outcome = ProbePool().look([task("job", raising(ValueError("hunter2")))], timeout_s=9, budget_s=60)["job"]
    assert isinstance(outcome, NoLook)
    assert "ValueError" in str(outcome.error)
    assert "hunter2" not in str(outcome.error)


def test_a_budget_ends_a_round_and_what_was_not_reached_is_named(released: threading.Event) -> None:
    lookout = ProbePool(traffic=Admission(side_by_side_max=1, slow_s=100))
    outcomes = lookout.look([task("slow", released.wait), task("next", lambda: 1)], timeout_s=30, budget_s=0.2)
    assert (why(outcomes["slow"]), why(outcomes["next"])) == ("not-reached", "not-reached")
    assert lookout.away_s("s") == 0, "nobody knows yet whether it answers"
    released.set()
    again = lookout.look([task("slow", lambda: "a second read"), task("next", lambda: 1)], timeout_s=30, budget_s=60)
    assert again == {"slow": True, "next": 1}, "the look that went on is found, not begun again"


def test_sensors_that_tick_together_share_a_look(released: threading.Event) -> None:
    lookout, read = ProbePool(), []

    def look() -> object:
        read.append(1)
        released.wait()
        return len(read)

    seen: list[object] = []

    def sensor() -> None:
        seen.append(lookout.look([task("job", look, is_shared=True)], timeout_s=30, budget_s=60)["job"])

    threads = [threading.Thread(target=sensor) for _ in range(3)]
    for thread in threads:
        thread.start()
    released.set()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


def test_what_depends_on_a_cursor_is_not_shared() -> None:
    lookout = ProbePool()
    assert [lookout.look([task("job", lambda n=n: n)], timeout_s=9, budget_s=9)["job"] for n in range(2)] == [0, 1]  # type: ignore[misc]


def test_a_hanging_look_does_not_keep_the_interpreter_from_ending() -> None:
    """A process of its own, for its end is what is looked at; `communicate` would run into its limit."""
    code = (
        "import threading\n"
        "from stillstate.orchestration.probes.pool import ProbePool, Task\n"
        "hangs = Task(key='a', store='s', shown='s', read=threading.Event().wait)\n"
        "print(ProbePool().look([hangs], timeout_s=0.1, budget_s=5)['a'].why)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=40, check=False
    )
    assert (done.stdout, done.returncode) == ("away\n", 0), done.stderr


S3 = {"key": "k", "secret": "s3cr3t-7f1e", "region": "us-east-1"}


def s3_task(key: str, endpoint: str, timeout_s: float) -> Task[object]:
    def read() -> object:
        store = open_watched_store("s3://bucket/state", {**S3, "endpoint_url": endpoint}, patience_of(timeout_s))
        return read_job_info(store.child(key))

    return task(key, read, endpoint)


def test_s3_that_accepts_and_never_answers_is_one_short_look() -> None:
    """The requests end by themselves, long before the look is given up: no thread is left behind."""
    with black_hole() as endpoint:
        outcome = ProbePool().look([s3_task("flights", endpoint, 2.0)], timeout_s=120, budget_s=240)["flights"]
    assert isinstance(outcome, NoLook)
    assert outcome.why == "away"
    assert "cannot read" in str(outcome.error)
    assert not [thread for thread in threading.enumerate() if thread.name == "look flights"]
    assert S3["secret"] not in str(outcome.error)


def test_s3_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import aiohttp.connector

    tried: list[int] = []
    whole = aiohttp.connector.TCPConnector.connect

    async def counted(self: object, *args: object, **kwargs: object) -> object:
        tried.append(1)
        return await whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(aiohttp.connector.TCPConnector, "connect", counted)
    outcome = ProbePool().look([s3_task("flights", refused(), 5.0)], timeout_s=5, budget_s=60)["flights"]
    assert why(outcome) == "away"
    assert len(tried) == 1


def test_the_patience_of_watchers_is_not_the_drivers() -> None:
    options = {**S3, "endpoint_url": "http://127.0.0.1:1", "config_kwargs": {"connect_timeout": 1}}
    watched = open_watched_store("s3://bucket/state", options, patience_of(5))
    drivers = open_store("s3://bucket/state", options)

    def limits(store: object) -> tuple[float, float, int]:
        config = vars(store)["_fs"].config_kwargs
        return config["connect_timeout"], config["read_timeout"], config["retries"]["total_max_attempts"]

    assert limits(watched) == (1, 3.0, 1), "a shorter limit of the user's own stays"
    assert limits(drivers) == (1, 20.0, 3)


def test_watched_stores_of_one_account_share_their_connections() -> None:
    options = {**S3, "endpoint_url": "http://127.0.0.1:1"}
    one, other = (open_watched_store(f"s3://{bucket}/state", options, patience_of(5)) for bucket in ("a", "b"))
    assert vars(one)["_fs"] is vars(other)["_fs"]
    assert vars(open_store("s3://a/state", options))["_fs"] is not vars(one)["_fs"]
