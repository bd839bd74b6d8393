"""Shards on real executors: they stay where they are; a lost executor's shards move, come back, and nothing is lost."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .conftest import HOSTS, Driver
from .jobs import SHARDS, assert_exact, output, places
from .standalone import Standalone

# One cluster for all: they stay in one process.
pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]
PER_HOST = SHARDS // HOSTS
ALL_HOSTS = f"spark.cores.max={HOSTS}"
EPOCHS_TO_RECOVER_MAX = 80
MEETING_TIMEOUT_S = 120.0


def restored(numbers: dict[str, Any]) -> dict[str, int]:
    return {kind: numbers[f"{kind}_restores"] for kind in ("local", "stale", "primary")}


def test_a_killed_executor_moves_only_its_own_shards_and_they_come_back(
    cluster: Standalone, start_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """One of three executors dies by SIGKILL, another one in the middle of an epoch.

    The keys of the others never leave them. Its shards are rebuilt from the primary store elsewhere, and once the host has an
    executor again, from its old copies and the changelog since. Between that they may move: if both went to one of the two
    others they are evened out, and an executor that has only just started may be late for one of them.
    """
    driver = start_driver(cluster.url, ALL_HOSTS)
    steady = [driver.epoch() for _ in range(3)]
    assert [numbers["moved_shards"] for numbers in steady] == [0, 0, 0]
    assert len(set(map(len, shards_by_disk(tmp_path).values()))) == 1, "each host has as many shards"

    cluster.kill_executor(0)
    hit = driver.epoch()
    assert hit["moved_shards"] == PER_HOST
    assert restored(hit) == {"local": 0, "stale": 0, "primary": PER_HOST}
    assert hit["restore_ms"] > 0
    first, lost = owners(places(tmp_path, "disk"), range(hit["epoch"])), str(cluster.disk(0))
    own = {key for key, disk in first.items() if disk == lost}
    stale = 0
    for _ in range(EPOCHS_TO_RECOVER_MAX):
        back = driver.epoch()
        stale += back["stale_restores"]
        now = places(tmp_path, "disk")[back["epoch"]]
        if {now[key] for key in own & now.keys()} == {lost}:
            break
        assert back["moved_shards"] <= PER_HOST, driver.moves()
    else:
        pytest.fail(f"the shards did not come back: {driver.moves()}")
    assert stale > 0, f"old copies serve: {driver.moves()}"
    recovered = back["epoch"]

    driver.give()
    cluster.kill_executor(1)
    driver.take()
    driver.epoch()
    driver.stop()
    assert_exact(tmp_path)
    assert sum("restored from stale in" in line for line in driver.log()) >= PER_HOST, "where each shard came from"

    disks, executors = places(tmp_path, "disk"), places(tmp_path, "executor")
    before = owners(executors, range(hit["epoch"]))
    for epoch in range(hit["epoch"], recovered + 1):
        for key, disk in disks[epoch].items():
            if first[key] != lost:
                assert disk == first[key], f"epoch {epoch}: {key} was moved without need"
                assert executors[epoch][key] == before[key]
    assert lost not in disks[hit["epoch"]].values(), "nobody was there"


def test_after_two_of_three_hosts_and_the_driver_died_every_shard_is_where_it_was(
    cluster: Standalone, start_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Flink's LocalRecoveryITCase: three hosts with a disk each; two are killed and started again, with a new driver."""
    driver = start_driver(cluster.url, ALL_HOSTS)
    last = [driver.epoch() for _ in range(2)][-1]
    driver.kill()
    for host in (0, 1):
        cluster.kill_host(host)
    for host in (0, 1):
        cluster.start_host(host)
    for host in (0, 1):
        cluster.workers[host].said()
    driver = start_driver(cluster.url, ALL_HOSTS)
    first = driver.epoch()
    driver.stop()
    assert restored(first) == {"local": SHARDS, "stale": 0, "primary": 0}
    assert first["restored_bytes"] == 0
    assert_exact(tmp_path)
    disks = places(tmp_path, "disk")
    before = owners(disks, range(last["epoch"] + 1))
    after = owners(disks, range(last["epoch"] + 1, first["epoch"] + 2))
    common = before.keys() & after.keys()
    assert len(common) > SHARDS
    assert {key: after[key] for key in common} == {key: before[key] for key in common}


def test_an_executor_that_dies_while_rows_are_in_flight_loses_none_of_them(
    cluster: Standalone, start_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Its tasks are repeated elsewhere, and stop at other rows: what an epoch says is of one attempt each. Then the driver dies
    too, and the next one begins with the rows of its snapshot."""
    rows = write_large_input(tmp_path / "in")
    driver = start_driver(cluster.url, ALL_HOSTS, "rounds=1000")
    assert waiting(driver.line()) > 0
    cluster.kill_executor(0)
    assert waiting(driver.line()) > 0, "there is more to do than an epoch can"
    driver.kill()
    driver = start_driver(cluster.url, ALL_HOSTS, "rounds=1000")
    epochs = [driver.line()]
    while waiting(epochs[-1]):
        epochs.append(driver.line())
    driver.stop()
    assert sum((numbers.get("inflight") or {}).get("processed_rows", 0) for numbers in epochs) < rows, "it went on"
    assert_exact(tmp_path)


def test_tasks_that_disagree_fail_their_epoch_which_is_run_again(
    cluster: Standalone, start_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """An executor dies while tasks of the second operator read what its tasks of the first one made: those are repeated, later
    and slower, so that they leave other rows. One task of the second operator has read the first attempts' output, others read
    the second attempts': nothing of that epoch counts."""
    # Few rows a key, so that a task has many slices: one is processed whatever the time.
    rows = write_large_input(tmp_path / "in", keys=2_000)
    driver = start_driver(cluster.url, ALL_HOSTS, "rounds=1000", "meets=yes", "spark.shuffle.io.retryWait=1s")
    assert waiting(driver.line()) > 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(MEETING_TIMEOUT_S)
        (tmp_path / "meet.new").write_text(str(server.getsockname()[1]))
        (tmp_path / "meet.new").rename(tmp_path / "meet")
        connection, _ = server.accept()
        with connection, connection.makefile() as told:
            where = Path(told.readline().strip())
            (tmp_path / "slow").touch()
            cluster.kill_executor(next(host for host in range(HOSTS) if cluster.disk(host) != where))
            connection.sendall(b"!")
    driver.line()
    (tmp_path / "slow").unlink()
    disagreed = [line for line in driver.log() if "is run again" in line and "TasksDisagree" in line]
    assert disagreed, "both attempts came to the same row: the test proves nothing"
    while waiting(driver.line()):
        pass
    driver.stop()
    assert_exact(tmp_path)
    met = output(tmp_path, "met")
    assert sorted(row["id"] for row in met) == sorted(row["id"] for row in output(tmp_path))
    assert sorted((row["bucket"], row["n"]) for row in met) == [
        (bucket, n) for bucket in range(40) for n in range(1, rows // 40 + 1)
    ]


def write_large_input(inbox: Path, rows: int = 12_000, keys: int = 40) -> int:
    """One file of some seconds of work for all hosts."""
    inbox.mkdir(parents=True)
    ids = list(range(rows))
    names = [f"n{n * 7 % keys}" for n in ids]
    pq.write_table(pa.table({"id": ids, "name": names, "amount": [n % 9 for n in ids]}), inbox / "00000.parquet")
    return rows


def waiting(numbers: dict[str, Any]) -> int:
    """Rows in flight after an epoch."""
    return (numbers.get("inflight") or {"rows": 0})["rows"]


def test_shards_stay_on_a_local_cluster(
    start_driver: Callable[..., Driver], own_spark_home: Path, tmp_path: Path
) -> None:
    """Two executors, as Spark starts them by itself."""
    environment = {"SPARK_HOME": str(own_spark_home), "SPARK_SCALA_VERSION": "2.13"}
    driver = start_driver("local-cluster[2,1,1024]", "spark.cores.max=2", environment=environment)
    epochs = [driver.epoch() for _ in range(4)]
    driver.stop()
    assert [numbers["moved_shards"] for numbers in epochs] == [0] * 4
    assert [sum(restored(numbers).values()) for numbers in epochs] == [0] * 4
    executors = owners(places(tmp_path, "executor"), range(epochs[-1]["epoch"] + 1))
    assert len(set(executors.values())) == 2
    assert_exact(tmp_path)


def owners(found: dict[int, dict[Any, str]], epochs: range) -> dict[Any, str]:
    """Per key where it was; in these epochs never more than one place."""
    owner: dict[Any, str] = {}
    for epoch in epochs:
        for key, place in found.get(epoch, {}).items():
            assert owner.setdefault(key, place) == place, f"epoch {epoch}: {key} is on {place}, not on {owner[key]}"
    return owner


def shards_by_disk(root: Path) -> dict[str, list[str]]:
    """Per host the folders that hold a shard's state."""
    found: dict[str, list[str]] = {}
    cluster_folders = Counter(disk for held in places(root, "disk").values() for disk in held.values())
    for disk in cluster_folders:
        found[disk] = sorted(str(p) for p in Path(disk).glob(f"state/*/steps/{SHARDS}-*"))
    return found
