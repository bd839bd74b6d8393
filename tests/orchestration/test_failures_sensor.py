"""The sensor `failures`: each trouble is told once, and once that it has passed, whatever becomes of the receiver, the
command or the daemon."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster_world import World
from job_roots import SECRET, JobRoot
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from state_runtime.base.errors import InvalidConfiguration
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.notify import NotifySpec
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.jobs.tags import recovery_run_tags
from stillstate.orchestration.notify.outbox import TROUBLES_MAX, Book, Trouble, read_book
from stillstate.orchestration.notify.receiver import NotTold, tell
from stillstate.orchestration.sensors.failures import book_key, build_failures_sensor

SENSOR = "stillstate_failures"
TOKEN = "t0ken-of-the-receiver"


class Receiver:
    """A real server: what it got, and what it answers."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 204
        self.release = threading.Event()
        self.hangs = self.drips = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.hangs:
                    outer.release.wait(30)
                    return
                if outer.drips:
                    with contextlib.suppress(OSError):  # the other side has hung up
                        while not outer.release.wait(0.1):
                            self.wfile.write(b"H")  # a status line that never ends: no read takes long
                    return
                if outer.status < 300:
                    outer.got.append(json.loads(body))
                    outer.headers.append(dict(self.headers))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hooks/{TOKEN}"

    def said(self) -> list[tuple[str, str]]:
        return [(message["state"], message["trouble"]) for message in self.got]


@contextlib.contextmanager
def serving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.release.set()
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving() as found:
        yield found


@pytest.fixture
def house(world: Callable[..., World], receiver: Receiver) -> World:
    return world("flights", "trains", house=f"notify: {{webhook: '{receiver.url}', timeout_s: 2}}")


ALIVE = dg.AssetKey(["flights", "stream"])
CHECKPOINTS = dg.AssetKey(["flights", "checkpoints"])


def evaluate(
    house: World,
    passed: bool,
    *,
    key: dg.AssetKey = CHECKPOINTS,
    name: str = "intact",
    text: str = "an object is gone",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> None:
    house.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=key, check_name=name, passed=passed, severity=severity, description=text)
    )


def ended(house: World, job: str, failed: bool, tags: dict[str, str] | None = None) -> str:
    request = dg.RunRequest(run_key=None, job_name=job, tags=tags or {})
    status = dg.DagsterRunStatus.FAILURE if failed else dg.DagsterRunStatus.SUCCESS
    return house.submit(request, status).run_id


def skip_text(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    return str(result.skip_reason.skip_message)


# --- told once, and once that it has passed --------------------------------------------------------------------------


def test_a_red_check_is_told_once_and_once_that_it_is_green_again(house: World, receiver: Receiver) -> None:
    evaluate(house, False)
    for _ in range(3):
        house.tick(SENSOR)
    evaluate(house, False, text="still gone")
    house.tick(SENSOR)
    assert receiver.said() == [("failed", "check flights/checkpoints:intact")]
    (told,) = receiver.got
    assert (told["version"], told["stream"], told["what"]) == (1, "flights", "intact")
    assert (told["where"], told["text"]) == ("flights/checkpoints", "an object is gone")
    evaluate(house, True)
    for _ in range(3):
        house.tick(SENSOR)
    assert receiver.said()[1:] == [("passed", "check flights/checkpoints:intact")]
    evaluate(house, False)
    house.tick(SENSOR)
    assert receiver.said()[2:] == [("failed", "check flights/checkpoints:intact")], "another trouble"


def test_a_warning_is_no_trouble_and_no_end_of_one(house: World, receiver: Receiver) -> None:
    """A driver that is being recovered is not well again."""
    warn = dg.AssetCheckSeverity.WARN
    evaluate(house, False, key=ALIVE, name="driver_alive", severity=warn)
    house.tick(SENSOR)
    assert receiver.got == []
    evaluate(house, False, key=ALIVE, name="driver_alive", text="dead: gave up")
    house.tick(SENSOR)
    evaluate(house, False, key=ALIVE, name="driver_alive", severity=warn)
    house.tick(SENSOR)
    assert receiver.said() == [("failed", "check flights/stream:driver_alive")]


def test_a_failed_run_of_ours_is_told_and_passes_with_one_that_succeeds(house: World, receiver: Receiver) -> None:
    ended(house, "verify_flights", True)
    house.tick(SENSOR)
    assert receiver.got == [], "what failed before it looked for the first time"
    run_id = ended(house, "verify_flights", True)
    house.tick(SENSOR)
    ended(house, "verify_flights", True)
    house.tick(SENSOR)
    assert receiver.said() == [("failed", "run verify flights")]
    assert (receiver.got[0]["what"], receiver.got[0]["where"]) == ("verify_flights", run_id)
    ended(house, "verify_trains", False)
    house.tick(SENSOR)
    assert len(receiver.got) == 1, "of another stream"
    ended(house, "verify_flights", False)
    house.tick(SENSOR)
    assert receiver.said()[1:] == [("passed", "run verify flights")]


def test_a_recovery_that_failed_is_told_by_the_check_of_the_driver_alone(house: World, receiver: Receiver) -> None:
    house.tick(SENSOR)
    evaluate(house, False, key=ALIVE, name="driver_alive", text="dead: gave up")
    ended(house, "recover_flights", True, recovery_run_tags("flights", 1, 1, 1, 0))
    house.tick(SENSOR)
    assert receiver.said() == [("failed", "check flights/stream:driver_alive")]


def test_a_failed_start_has_passed_when_the_driver_is_alive_whoever_started_it(
    house: World, receiver: Receiver
) -> None:
    evaluate(house, True, key=ALIVE, name="driver_alive", text="stopped")
    house.tick(SENSOR)
    ended(house, "start_flights", True, {"stillstate/job": "flights", "stillstate/action": "start"})
    for _ in range(2):
        house.tick(SENSOR)
    assert receiver.said() == [("failed", "run start flights")], "it was well before, too"
    evaluate(house, True, key=ALIVE, name="driver_alive", text="running")
    house.tick(SENSOR)
    assert receiver.said()[1:] == [("passed", "run start flights")]


def matches(house: World, passed: bool) -> None:
    evaluate(house, passed, key=ALIVE, name="matches_configuration", severity=dg.AssetCheckSeverity.WARN)


MIGRATE = {"stillstate/job": "flights", "stillstate/action": "migrate"}


def test_a_migration_that_was_taken_back_has_passed_when_the_job_is_well_and_as_the_file_says(
    house: World, receiver: Receiver
) -> None:
    """It runs, as it was: nobody has to migrate it again for the trouble to end."""
    evaluate(house, True, key=ALIVE, name="driver_alive")
    matches(house, True)
    house.tick(SENSOR)
    ended(house, "migrate_flights", True, MIGRATE)
    for _ in range(2):
        house.tick(SENSOR)
    assert receiver.said() == [("failed", "run migrate flights")], "that it matched before says nothing"
    matches(house, False)
    house.tick(SENSOR)
    assert len(receiver.got) == 1, "the file still wants what was taken back"
    evaluate(house, False, key=ALIVE, name="driver_alive")
    matches(house, True)
    house.tick(SENSOR)
    assert receiver.said()[1:] == [("failed", "check flights/stream:driver_alive")], "and it must be well"
    evaluate(house, True, key=ALIVE, name="driver_alive")
    house.tick(SENSOR)
    house.tick(SENSOR)
    assert ("passed", "run migrate flights") in receiver.said()


def test_a_migration_that_was_taken_back_has_passed_when_a_person_acknowledges_it(
    house: World, receiver: Receiver
) -> None:
    """The file may go on wanting what cannot be now."""
    house.tick(SENSOR)
    ended(house, "migrate_flights", True, MIGRATE)
    house.tick(SENSOR)
    done = house.defs.resolve_job_def("migrate_flights").execute_in_process(
        run_config={"ops": {"migrate_flights_driver": {"config": {"acknowledge": True}}}}, instance=house.instance
    )
    assert done.output_for_node("migrate_flights_driver")["outcome"] == "acknowledged"
    house.tick(SENSOR)
    assert receiver.said() == [("failed", "run migrate flights"), ("passed", "run migrate flights")]


def test_a_job_that_runs_otherwise_than_the_file_says_is_no_trouble(house: World, receiver: Receiver) -> None:
    matches(house, False)
    house.tick(SENSOR)
    assert receiver.got == []


def test_a_plan_that_is_not_safe_is_one_trouble(
    world: Callable[..., World], receiver: Receiver, flights: JobRoot
) -> None:
    house = world(house=f"notify: {{webhook: '{receiver.url}'}}", extra="retention: {keep_last: 2}")
    house.tick(SENSOR)
    flights.start()
    assert flights.committer is not None
    for _ in range(4):
        flights.committer.commit(flights.committer.last)
    flights.beat("stopped")
    job = house.defs.resolve_job_def("retain_flights")
    result = job.execute_in_process(instance=house.instance, raise_on_error=False)
    assert not result.success
    house.tick(SENSOR)
    assert receiver.said() == [("failed", "check flights/retained_snapshots:retention_plan_is_safe")]
    assert "3 of 5 snapshots" in receiver.got[0]["text"]


def test_what_failed_says_why_and_no_secret(world: Callable[..., World], receiver: Receiver) -> None:
    """A driver's own words may hold anything."""
    house = world(
        house=f"notify: {{webhook: '{receiver.url}', headers: {{X-Token: {TOKEN}}}}}",
        extra=f"storage_options: {{secret: {SECRET}}}",
    )
    evaluate(house, False, text=f"cannot read with {SECRET} and {TOKEN}")
    house.tick(SENSOR)
    assert receiver.got[0]["text"].startswith("cannot read with ")
    stored = house.instance.daemon_cursor_storage.get_cursor_values({SENSOR})[SENSOR]
    for text in (json.dumps(receiver.got), stored):
        assert SECRET not in text
        assert TOKEN not in text
    assert receiver.headers[0]["X-Token"] == TOKEN


def test_a_stream_that_is_no_longer_in_the_file_ends_its_troubles(house: World, receiver: Receiver) -> None:
    evaluate(house, False)
    house.tick(SENSOR)
    mount = Mount()
    sensor = build_failures_sensor(mount, [load_spec(house.resource.config_file).job("trains")])
    with dg.build_sensor_context(instance=house.instance, resources={"stillstate": house.resource}) as context:
        sensor(context)
    assert receiver.said() == [(state, "check flights/checkpoints:intact") for state in ("failed", "passed")]


# --- receivers that are down, slow, or refuse ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["refuses", "hangs", "drips", "is gone"])
def test_a_receiver_that_is_down_gets_it_later_and_costs_a_tick_one_time_out(
    world: Callable[..., World], how: str
) -> None:
    with serving() as receiver:
        house = world("flights", "trains", house=f"notify: {{webhook: '{receiver.url}', timeout_s: 0.5}}")
        for job in ("flights", "trains"):
            evaluate(house, False, key=dg.AssetKey([job, "checkpoints"]))
        receiver.status, receiver.hangs, receiver.drips = 503, how == "hangs", how == "drips"
        if how == "is gone":
            receiver.server.server_close()
            receiver.server.shutdown()
        calls = []
        for _ in range(2):
            calls.append(skip_text(house.tick(SENSOR)))
        assert all("it is tried again; 2 troubles, 2 messages to be told" in text for text in calls)
        assert [text.count("the webhook at") for text in calls] == [1, 1], "the next would wait as long"
        assert not any(TOKEN in text for text in calls), "a webhook's path is its password"
        assert receiver.got == []
        if how == "is gone":
            return
        receiver.status, receiver.hangs, receiver.drips = 200, False, False
        house.tick(SENSOR)
        assert [state for state, _ in receiver.said()] == ["failed", "failed"]
        house.tick(SENSOR)
        assert len(receiver.got) == 2


def test_a_trouble_that_came_and_went_while_nobody_heard_is_told_both_times(house: World, receiver: Receiver) -> None:
    receiver.status = 500
    evaluate(house, False)
    house.tick(SENSOR)
    evaluate(house, True)
    house.tick(SENSOR)
    receiver.status = 200
    house.tick(SENSOR)
    house.tick(SENSOR)
    assert [state for state, _ in receiver.said()] == ["failed", "passed"]


def test_a_tick_makes_a_bounded_number_of_calls(world: Callable[..., World], receiver: Receiver) -> None:
    names = [f"job-{n}" for n in range(7)]
    house = world(*names, house=f"notify: {{webhook: '{receiver.url}', per_tick_max: 3}}")
    for name in names:
        evaluate(house, False, key=dg.AssetKey([name, "checkpoints"]))
    counts = []
    for _ in range(4):
        house.tick(SENSOR)
        counts.append(len(receiver.got))
    assert counts == [3, 6, 7, 7]


def test_a_daemon_that_dies_in_a_tick_repeats_the_call_under_way_at_most(
    world: Callable[..., World], receiver: Receiver
) -> None:
    """It dies after the third call has arrived and before that is written down; its cursor is never stored."""
    names = [f"job-{n}" for n in range(5)]
    house = world(*names, house=f"notify: {{webhook: '{receiver.url}'}}")
    for name in names:
        evaluate(house, False, key=dg.AssetKey([name, "checkpoints"]))

    class Died(BaseException):
        pass

    def dies(*given: Any) -> None:
        tell(*given)
        if len(receiver.got) == 3:
            raise Died

    jobs = list(load_spec(house.resource.config_file).jobs.values())
    with dg.build_sensor_context(instance=house.instance, resources={"stillstate": house.resource}) as context:
        with pytest.raises(Died):
            build_failures_sensor(Mount(), jobs, dies)(context)
    house.tick(SENSOR)
    assert sorted(receiver.said()) == sorted([*{*receiver.said()}, receiver.said()[2]])
    assert len(receiver.got) == 6


# --- a command -------------------------------------------------------------------------------------------------------


def command_house(world: Callable[..., World], code: str, timeout_s: float = 10) -> World:
    command = json.dumps([sys.executable, "-c", code])
    return world("flights", "trains", house=f"notify: {{command: {command}, timeout_s: {timeout_s}}}")


def test_a_command_gets_the_message_on_its_standard_input_in_the_files_folder(
    world: Callable[..., World], tmp_path: Path
) -> None:
    house = command_house(world, "import sys; open('told.json', 'a').write(sys.stdin.read() + chr(10))")
    evaluate(house, False)
    house.tick(SENSOR)
    evaluate(house, True)
    house.tick(SENSOR)
    lines = [json.loads(line) for line in (tmp_path / "told.json").read_text().splitlines()]
    assert [line["state"] for line in lines] == ["failed", "passed"]


def test_a_commands_failure_is_told_in_the_ticks_log_and_it_is_tried_again(
    world: Callable[..., World], capfd: pytest.CaptureFixture[str]
) -> None:
    house = command_house(world, "import sys; sys.exit('no route to the pager')")
    evaluate(house, False)
    said = skip_text(house.tick(SENSOR))
    assert "the command of notify ended with 1: no route to the pager" in said
    assert "1 message to be told" in said
    assert "no route to the pager" in capfd.readouterr().err
    assert "ended with 1" in skip_text(house.tick(SENSOR))


def test_a_command_that_hangs_is_ended_with_its_children(world: Callable[..., World], tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import os; os.read(os.pipe()[0], 1)']); "  # nobody writes
        "open('child', 'w').write(str(child.pid)); child.wait()"
    )
    house = command_house(world, code, timeout_s=2)
    evaluate(house, False)
    assert "took longer than 2 s, and was ended" in skip_text(house.tick(SENSOR))
    child = int((tmp_path / "child").read_text())
    is_gone = retry(retry=retry_if_result(lambda gone: not gone), stop=stop_after_delay(30), wait=wait_fixed(0.05))(
        lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    )
    assert is_gone(), "a signal takes a moment"


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotTold, match="cannot be started: No such file"):
        tell(NotifySpec(command=["./not-there"]), {}, tmp_path)


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "needs either `webhook` or `command`"),
        ("{webhook: 'http://h', command: [x]}", "needs either `webhook` or `command`"),
        ("{webhook: 'ftp://h/x'}", "must be a URL"),
        ("{webhook: 'http://a:b@h/x'}", "put them into `headers`"),
        ("{command: [x], headers: {A: b}}", "which only a `webhook` gets"),
        ("{webhook: 'http://h', headers: {A: 7}}", "not printable text"),
        ("{webhook: 'http://h', timeout_s: 60}", "less than or equal to 15"),
        ("{webhok: 'http://h'}", "did you mean `webhook`"),
        ("{webhook: '${NOT_SET_ANYWHERE}'}", "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_what_cannot_work_is_refused_with_file_and_line(write_config: Callable[..., Path], text: str, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"stillstate\.yaml:\d+: notify") as caught:
        load_spec(write_config(house=f"notify: {text}"))
    assert why in str(caught.value)


def test_the_receiver_comes_from_the_environment_and_is_shown_nowhere(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", f"https://hooks.example/{TOKEN}")
    house = "notify: {webhook: '${HOOK}', headers: {Authorization: 'Bearer ${HOOK}'}}"
    spec = load_spec(write_config(house=house))
    assert spec.notify is not None
    assert spec.notify.webhook.endswith(TOKEN)
    assert TOKEN not in repr(spec)


def test_without_the_section_there_is_no_sensor(world: Callable[..., World]) -> None:
    names = {sensor.name for sensor in world().defs.get_repository_def().sensor_defs}
    assert SENSOR not in names


# --- the book --------------------------------------------------------------------------------------------------------


def trouble(key: str) -> Trouble:
    return Trouble(key=key, stream="s", what="w", where="x", text="t", at_ms=7)


def test_a_book_reads_back_and_one_that_is_not_understood_begins_anew() -> None:
    book = Book(read_id=12).with_seen([trouble("a"), trouble("b")], {})
    book = book.after(book.due()[0]).with_seen([], {"a": 9})
    assert read_book(book.text()) == book
    for text in (None, "", "{", "[]", '{"version":2}', book.text()[:-3], '{"version":1,"read":null,"entries":[[1]]}'):
        assert read_book(text) == Book()


def test_the_book_does_not_grow_without_end() -> None:
    book = Book().with_seen((trouble(str(n)) for n in range(TROUBLES_MAX + 100)), {})
    assert len(book.entries) == TROUBLES_MAX


def test_a_trouble_that_comes_back_before_its_end_was_told_is_the_same_trouble() -> None:
    book = Book().with_seen([trouble("a")], {})
    book = book.after(book.due()[0]).with_seen([], {"a": 9})
    assert [message.state for message in book.due()] == ["passed"]
    assert book.with_seen([trouble("a")], {}).due() == []


def test_a_mount_has_a_book_of_its_own() -> None:
    assert book_key(Mount()) != book_key(Mount(key_prefix=("north",)))
