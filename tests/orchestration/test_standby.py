"""The driver that stands by: when there is one, when it is called, and that it does nothing before and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stillstate.orchestration.running import memory
from stillstate.orchestration.running.standby import LINE_BYTES_MAX, Supervised, changed_since, code_files, fingerprints
from stillstate.orchestration.standby import AT_WORK, READY, Drivers, call_line, cause_of_call

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
PAUSE = threading.Event()

# A driver without Spark: it notes what it does in a file, and stands by, works and dies as files say. As a real one it
# decides itself what a signal does: where SIGINT is ignored (a job of a shell in the background) Dagster's jobs leave
# SIGTERM ignored, too, and processes inherit that.
DRIVER = f"""
import os, signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_DFL)
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from stillstate.orchestration.running.standby import Supervised

work = Path(sys.argv[1])
supervised = Supervised.of_environment(int(os.environ.pop("STILLSTATE_SUPERVISOR_PID")))

def note(*what):
    with open(work / "notes", "a") as file:
        file.write(" ".join(map(str, (*what, os.getpid(), *sys.argv[2:]))) + "\\n")

cause = os.environ.get("STILLSTATE_START_CAUSE", "")
if supervised.waits:
    note("waits")
    cause = supervised.wait()
    if (work / "changed").exists():
        (work / "changed").unlink()
        supervised.start_again(cause, "a test says so")
note("works:", cause or "-", "|")
note("supervised by", supervised.supervisor_pid)
looks = threading.Event()
while not (work / "checkpoint").exists():
    looks.wait(0.01)
supervised.at_work()
while not (work / "end").exists():
    looks.wait(0.01)
"""


class House:
    """Drivers of that kind, and what they noted."""

    def __init__(self, work: Path, *, keeps_one_waiting: bool = True) -> None:
        self.work = work
        (work / "driver.py").write_text(DRIVER)
        self.said: list[str] = []
        self.drivers = Drivers(
            lambda is_first: [
                sys.executable, str(work / "driver.py"), str(work), *(["--takeover"] if is_first else []),
            ],
            lambda cause: {**os.environ, "STILLSTATE_START_CAUSE": cause, "STILLSTATE_SUPERVISOR_PID": str(os.getpid())},
            keeps_one_waiting=lambda: keeps_one_waiting,
            say=self.said.append,
        )  # fmt: skip

    def notes(self) -> list[str]:
        path = self.work / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while not (found := look()):
            assert time.monotonic() < deadline_s, f"no {what}; {self.notes()}, {self.said}"
            PAUSE.wait(0.01)
        return found

    def one_stands_by(self) -> int:
        (self.work / "checkpoint").touch()
        said = self.until("driver that stands by", lambda: [line for line in self.said if line.endswith("stands by")])
        return int(said[-1].split()[1])


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    try:
        yield made
    finally:
        (tmp_path / "end").touch()
        (tmp_path / "checkpoint").touch()
        made.drivers.end()


def test_nobody_stands_by_before_the_first_checkpoint(house: House) -> None:
    """A job that has just come back needs the cores itself."""
    process = house.drivers.start("by hand")
    house.until("driver", lambda: [n for n in house.notes() if n.startswith("works: by hand")])
    assert [child.pid for child in psutil.Process().children()].count(process.pid) == 1
    assert not [n for n in house.notes() if n.startswith("waits")]
    assert house.one_stands_by() != process.pid


def test_who_stands_by_takes_the_place_of_one_that_died_and_another_one_stands_by(house: House) -> None:
    first = house.drivers.start("by hand")
    waiting = house.one_stands_by()
    first.kill()
    first.wait()
    second = house.drivers.start("it was killed")
    assert second.pid == waiting
    house.until("takeover", lambda: [n for n in house.notes() if n.startswith(f"works: it was killed | {waiting}")])
    house.until("the next one", lambda: [line for line in house.said if line.endswith("stands by")][1:])
    # Options of the first start are the first one's alone.
    starts = [n for n in house.notes() if not n.startswith("supervised")]
    assert [n.endswith("--takeover") for n in starts] == [True, False, False, False]


def test_who_stands_by_and_is_dead_is_replaced_by_an_ordinary_start(house: House) -> None:
    first = house.drivers.start("by hand")
    waiting = psutil.Process(house.one_stands_by())
    waiting.kill()
    house.until("its end", lambda: waiting.status() == psutil.STATUS_ZOMBIE)
    house.until("a word of it", lambda: [line for line in house.said if f"{waiting.pid}, which stood by, has" in line])
    first.kill()
    first.wait()
    second = house.drivers.start("it was killed")
    assert second.pid not in (first.pid, waiting.pid)
    house.until("driver", lambda: [n for n in house.notes() if n.startswith(f"works: it was killed | {second.pid}")])


def test_who_stands_by_with_what_was_changed_since_starts_again_in_place(house: House) -> None:
    """With its id, its cause, its pipes and its supervisor: the next one stands by after it has made a checkpoint."""
    first = house.drivers.start("by hand")
    waiting = house.one_stands_by()
    (house.work / "changed").touch()
    first.kill()
    first.wait()
    assert house.drivers.start("it was killed").pid == waiting
    house.until("driver", lambda: [n for n in house.notes() if n.startswith(f"works: it was killed | {waiting}")])
    house.until("its supervisor", lambda: f"supervised by {os.getpid()} {waiting}" in house.notes())
    house.until("the next one", lambda: [line for line in house.said if line.endswith("stands by")][1:])


def test_who_stands_by_ends_with_its_supervisor(tmp_path: Path) -> None:
    """Even if that is killed, and whatever else of it lives on."""
    (tmp_path / "checkpoint").touch()
    supervisor = subprocess.Popen(
        [
            sys.executable, "-c",
            f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
            "from pathlib import Path\n"
            "from tests.orchestration.test_standby import House\n"
            f"house = House(Path({str(tmp_path)!r}))\n"
            "house.drivers.start('by hand').wait()\n",
        ],
        cwd=ROOT,
    )  # fmt: skip
    deadline_s = time.monotonic() + WAIT_S
    notes = tmp_path / "notes"
    while "waits" not in (notes.read_text() if notes.exists() else ""):
        assert time.monotonic() < deadline_s
        PAUSE.wait(0.01)
    waiting = psutil.Process(int(next(n for n in notes.read_text().splitlines() if n.startswith("waits")).split()[1]))
    supervisor.kill()
    supervisor.wait()
    try:
        waiting.wait(WAIT_S)
    finally:
        (tmp_path / "end").touch()
    assert "works: -" not in notes.read_text()


def test_a_supervisor_that_ends_lets_the_one_that_waits_go(house: House) -> None:
    house.drivers.start("by hand")
    waiting = house.one_stands_by()
    house.drivers.end()
    assert not psutil.pid_exists(waiting)
    assert not [n for n in house.notes() if n.startswith("works") and f"| {waiting}" in n]


def test_without_the_setting_nobody_stands_by(tmp_path: Path) -> None:
    house = House(tmp_path, keeps_one_waiting=False)
    process = house.drivers.start("by hand")
    (tmp_path / "checkpoint").touch()
    (tmp_path / "end").touch()
    assert process.wait(WAIT_S) == 0
    house.drivers.end()
    assert [n.split()[0] for n in house.notes()] == ["works:", "supervised"]


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"null", b'{"cause": 7}', b"\xff\n", b"[" * 100_000])
def test_what_is_no_call_is_none(line: bytes) -> None:
    assert cause_of_call(line) is None


def test_a_call_is_read_whole_and_what_never_ends_is_not_read_for_ever() -> None:
    told, tells = os.pipe()
    assert cause_of_call(call_line("signal 9 „SIGKILL“\nnext")) == "signal 9 „SIGKILL“\nnext"
    for sent, called in ((call_line("x" * 30_000), "x" * 30_000), (b"x" * LINE_BYTES_MAX, None)):
        reads, writes = os.pipe()
        writer = subprocess.Popen(
            [sys.executable, "-c", f"import os, sys; os.write({writes}, sys.stdin.buffer.read())"],
            stdin=subprocess.PIPE,
            pass_fds=(writes,),
        )
        assert writer.stdin is not None
        writer.stdin.write(sent)
        writer.stdin.close()
        side = Supervised(reads, tells, True)
        if called is None:
            with pytest.raises(SystemExit):
                side.wait()
        else:
            assert side.wait() == called
        writer.wait()
        for pipe in (reads, writes):
            os.close(pipe)
    assert os.read(told, 10) == READY * 2  # of two sides, once each
    side.at_work()
    side.at_work()
    assert os.read(told, 10) == AT_WORK
    for pipe in (told, tells):
        os.close(pipe)


def test_what_a_process_has_loaded_is_watched_but_for_the_library_of_python(tmp_path: Path) -> None:
    """The job's code, our own and packages, wherever they are."""
    found = {str(path) for path in code_files()}
    assert __file__ in found
    assert any(name.endswith("orchestration/standby.py") for name in found)
    assert json.__file__ not in found
    assert psutil.__file__ in found
    file = tmp_path / "code.py"
    file.write_text("a")
    before = fingerprints([file, tmp_path / "gone"])
    assert list(before) == [file]
    file.write_text("ab")
    assert fingerprints([file]) != before


@pytest.mark.parametrize("upgraded", ["module", "list", "version"])
def test_code_that_was_installed_anew_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upgraded: str
) -> None:
    """A wheel with the job's code is upgraded while a driver stands by: its next takeover would run the old code, or old modules beside
    new ones. Packages may lie below Python's own library."""
    site, real = tmp_path / "site-packages", sysconfig.get_path
    folders = {"stdlib": tmp_path, "platstdlib": tmp_path, "purelib": site, "platlib": site}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folders.get(name) or real(name)))
    record, module = site / "acme-1.dist-info" / "RECORD", site / "acme_jobs.py"
    record.parent.mkdir(parents=True)
    record.write_text("acme_jobs.py")
    module.write_text("VERSION = 1")
    monkeypatch.setitem(sys.modules, "acme_jobs", SimpleNamespace(__file__=str(module)))  # type: ignore[misc]
    loaded = fingerprints(code_files())
    assert changed_since(loaded) is None
    if upgraded == "module":
        module.write_text("VERSION = 2.0")
    elif upgraded == "list":
        record.write_text("acme_jobs.py, acme_more.py")
    else:
        record.parent.rename(site / "acme-2.dist-info")
    assert changed_since(loaded) == (module if upgraded == "module" else record)


def test_a_signal_reaches_the_driver_that_works_and_none_stands_by_after_it(house: House) -> None:
    process = house.drivers.start("by hand")
    house.until("driver", lambda: [n for n in house.notes() if n.startswith("works")])
    house.drivers.signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == -signal.SIGTERM
    (house.work / "checkpoint").touch()
    assert not [n for n in house.notes() if n.startswith("waits")]


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "stands_by"), [(24, 12, True), (24, 11, False), (6, 4, True), (6, 3, False), (4, 4, True)]
)
def test_a_driver_stands_by_unasked_where_half_of_the_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total_gib: int, free_gib: int, stands_by: bool
) -> None:
    """Jobs that share a machine leave each other half of it; in a container its limit counts."""
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{total_gib << 30}\n")
    (tmp_path / "memory.current").write_text(f"{(total_gib - free_gib) << 30}\n")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30, total=64 << 30))
    assert memory.has_room_for_standby() is stands_by
