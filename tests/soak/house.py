"""A house of many jobs under a real Dagster daemon, with stores that hang and stores that refuse.

    python -m tests.soak.house [--jobs 200] [--hanging 20] [--refused 20] [--watch-s 90]

No Spark: the healthy jobs are roots on a local store whose runs say that they live. One driver is a process that is
killed. Writes tests/soak/reports/house.json: how long until every healthy job was published, how long from the kill to
the recovery run, how long a tick took, and whether a tick ever failed or the code location went away.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "orchestration"))

from black_holes import black_hole, refused  # noqa: E402
from house import House, write_house  # noqa: E402

from state_runtime.base.clock import SYSTEM_CLOCK  # noqa: E402
from state_runtime.base.process_space import process_space  # noqa: E402
from stillstate.orchestration.jobs.tags import ACTION_TAG, JOB_TAG  # noqa: E402
from stillstate.orchestration.starter import instance_settings  # noqa: E402

REPORT = ROOT / "tests" / "soak" / "reports" / "house.json"
INTERVAL_S = 20
OFTEN = ("stillstate_progress", "stillstate_recovery")
"""Sensors that tick every few seconds while the code location is loaded."""
POLL = threading.Event()


def wait_until(what: str, true: Callable[[], bool], timeout_s: float) -> float:
    """Wall clock when it was seen to be true."""
    ends_s = time.time() + timeout_s
    while not true():
        if time.time() > ends_s:
            raise SystemExit(f"waited {timeout_s:g} s for: {what}")
        POLL.wait(0.25)
    return time.time()


def published(instance: dg.DagsterInstance, house: House, at_least: int) -> int:
    """How many healthy jobs have a materialization of that snapshot or a newer one."""
    keys = [dg.AssetKey([name, "checkpoints"]) for name in house.healthy]
    found = instance.get_latest_materialization_events(keys)
    return sum(
        event is not None
        and event.asset_materialization is not None
        and int((event.asset_materialization.tags or {})["dagster/data_version"]) >= at_least
        for event in found.values()
    )


def ticks(instance: dg.DagsterInstance) -> dict[str, list[Any]]:
    """Of each sensor, newest first."""
    states = instance.all_instigator_state()
    return {state.name: list(instance.get_ticks(state.instigator_origin_id, state.selector_id)) for state in states}


def seconds_of(found: dict[str, list[Any]]) -> dict[str, Any]:
    """Durations of the ticks that have ended."""
    report = {}
    for name, of_sensor in sorted(found.items()):
        took = sorted(t.end_timestamp - t.timestamp for t in of_sensor if t.end_timestamp)
        report[name] = {
            "ticks": len(of_sensor),
            "median_s": round(took[len(took) // 2], 2) if took else None,
            "max_s": round(took[-1], 2) if took else None,
            "failures": [str(t.error.message)[:200] for t in of_sensor if t.error is not None],
        }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--hanging", type=int, default=20)
    parser.add_argument("--refused", type=int, default=20)
    parser.add_argument("--watch-s", type=float, default=90)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made, black_hole() as hole:
        folder = Path(made)
        extra = f"observation: {{interval_s: {INTERVAL_S}}}"
        house = write_house(
            folder,
            SYSTEM_CLOCK,
            jobs=asked.jobs,
            hanging=asked.hanging,
            refused=asked.refused,
            hole=hole,
            closed=refused(),
            extra=extra,
            defaults="recovery: {heartbeat_timeout_s: 3600}",
            host="elsewhere",
        )
        report = run(house, folder, asked.watch_s)
    report = {"jobs": asked.jobs, "hanging": asked.hanging, "refused": asked.refused, **report}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["location_stayed"] else 1


def run(house: House, folder: Path, watch_s: float) -> dict[str, Any]:
    home = folder / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(instance_settings())
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "STILLSTATE_CONFIG": str(house.file),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "orchestration")]),
    }
    os.environ["DAGSTER_HOME"] = str(home)
    victim = house.healthy[len(house.healthy) // 2]
    # It stands for a driver: it is there until it is killed, or until we are gone and its input ends.
    driver = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    root = house.roots[victim]
    root.host, root.pid = socket.gethostname(), driver.pid
    root.start()
    root.checkpoint()
    daemon = subprocess.Popen(
        [
            Path(sys.executable).with_name("dagster-daemon"),
            "run",
            "-m",
            "stillstate.orchestration.definitions",
            "-a",
            "defs",
        ],
        env=environment,
        cwd=folder,
        stdout=(folder / "daemon.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        with dg.DagsterInstance.get() as instance:
            return watch(instance, house, victim, driver, watch_s)
    except SystemExit:
        print((folder / "daemon.log").read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        os.killpg(daemon.pid, signal.SIGTERM)
        daemon.wait(30)
        driver.kill()


def watch(
    instance: dg.DagsterInstance, house: House, victim: str, driver: subprocess.Popen[bytes], watch_s: float
) -> dict[str, Any]:
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(1):
            house.roots[victim].beat(process_space=process_space())

    threading.Thread(target=beat, daemon=True).start()
    began_s = wait_until("the first tick", lambda: any(ticks(instance).values()), 120)
    everyone = len(house.healthy)
    first_s = wait_until("every healthy job published", lambda: published(instance, house, 2) == everyone, 300)
    for name in house.healthy:
        if name != victim:
            house.roots[name].checkpoint()
    again_from_s = time.time()
    again_s = wait_until(
        "every healthy job published again", lambda: published(instance, house, 3) >= everyone - 1, 300
    )
    beating.set()
    driver.kill()
    driver.wait()
    killed_s = time.time()
    tags = {JOB_TAG: victim, ACTION_TAG: "recover"}
    wanted = dg.RunsFilter(tags=tags)
    requested_s = wait_until("a recovery run", lambda: instance.get_runs_count(wanted) > 0, 300)
    POLL.wait(watch_s)
    found = ticks(instance)
    others = instance.get_runs_count() - instance.get_runs_count(wanted)
    lately = time.time() - 30
    alive = all(any(t.timestamp > lately for t in found[name]) for name in OFTEN)
    failures = [message for sensor in seconds_of(found).values() for message in sensor["failures"]]
    return {
        "all_published_after_first_tick_s": round(first_s - began_s, 1),
        "interval_s": INTERVAL_S,
        "all_published_again_after_s": round(again_s - again_from_s, 1),
        "kill_to_recovery_run_s": round(requested_s - killed_s, 1),
        "recovery_runs_of_others": others,
        "location_stayed": alive and not failures,
        "sensors": seconds_of(found),
    }


if __name__ == "__main__":
    sys.exit(main())
