"""A small part of `make soak-edges`, with a fixed seed: each row once, whatever is killed; and that the soak would see it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples.servers.kafka import KafkaBroker
from examples.servers.postgres import PostgresServer
from state_runtime.base.errors import Fenced
from tests.soak.edges_lives import Blow, Life, Server, deck, live, target_of
from tests.soak.edges_record import Manifest, Manifests, appended, difference, merged, rows_of
from tests.soak.edges_targets import DRIVER_POINTS, TARGETS

SEED = 20261129
EPOCHS = [(epoch, 1 + epoch // 4) for epoch in range(1, 30)]


def lived(target: str, blows: list[Blow], server: Server | None = None, address: str = "") -> Life:
    number = next(number for number, kind in enumerate(TARGETS) if kind.name == target)
    life = live(f"{SEED}-{number}", server, address, blows=blows)
    shutil.rmtree(life.place.folder)
    assert life.rows > 0
    return life


def test_a_delta_table_is_what_a_dict_keeps_whatever_step_a_driver_dies_or_sleeps_at() -> None:
    at = ("driver-named", "delta-before-commit", "delta-committed", "driver-published")
    life = lived("delta, merged", [*(Blow("driver", point) for point in at), Blow("zombie", "delta-before-commit")])
    assert life.kills.total() >= len(at)


def test_each_row_of_an_iceberg_table_is_there_once_whatever_step_a_driver_dies_or_sleeps_at() -> None:
    at = ("iceberg-written", "iceberg-before-commit", "iceberg-committed")
    life = lived("iceberg", [*(Blow("driver", point) for point in at), Blow("zombie", "iceberg-before-commit")])
    assert life.kills.total() >= len(at)


@pytest.mark.servers
def test_each_record_of_a_topic_is_there_once_and_in_order_whatever_dies(tmp_path: Path) -> None:
    blows = [
        Blow("server", "kafka-before-commit"),
        Blow("driver", "kafka-produced"),
        Blow("zombie", "kafka-before-commit"),
        Blow("driver", "kafka-committed"),
    ]
    with KafkaBroker(tmp_path / "broker") as broker:
        assert lived("kafka", blows, broker, broker.bootstrap).kills.total() == len(blows)


@pytest.mark.servers
def test_each_row_of_a_table_in_a_database_is_there_once_whatever_dies() -> None:
    server = PostgresServer()
    blows = [Blow(kind, point) for kind in ("server", "driver", "zombie") for point in ("sql-written", "sql-committed")]
    try:
        assert lived("postgres", blows, server, server.url()).kills.total() >= len(blows) - 1
    finally:
        server.close()


# --- the soak itself -----------------------------------------------------------------------------------------------


def test_each_target_meets_each_disturbance_at_each_step_before_any_comes_again() -> None:
    for target in TARGETS:
        drawn, seen = deck("7", target), set[Blow]()
        steps = {("driver", point) for point in (*DRIVER_POINTS, *target.points)}
        steps |= {("zombie", point) for point in target.points}
        if target.server:
            steps |= {(kind, point) for kind in ("server", "server and driver") for point in target.points}
        while len({(b.kind, b.point) for b in seen} & steps) < len(steps):
            before = len(seen)
            seen |= {next(drawn) for _ in range(60)}
            assert len(seen) > before, f"{target.name} never meets {steps}"


def test_a_life_is_the_same_by_its_name() -> None:
    assert [next(deck("7", TARGETS[0])) for _ in range(2)] == [next(deck("7", TARGETS[0])) for _ in range(2)]
    assert target_of("7-2") is TARGETS[2]
    assert target_of(f"7-{2 + len(TARGETS)}") is TARGETS[2]


def test_rows_that_are_lost_doubled_or_of_another_driver_are_seen() -> None:
    """What a driver has staged and no manifest names differs from what is named."""
    wanted = appended("a", EPOCHS)
    assert difference(wanted, wanted).is_none
    assert difference(wanted[1:], wanted).lost.total() == 1
    assert difference([*wanted, wanted[0]], wanted).doubled.total() == 1
    others = appended("a", [(epoch, term + 1) for epoch, term in EPOCHS])
    assert not difference(others, wanted).is_none
    late = merged("a", [*EPOCHS, EPOCHS[3]])
    assert not difference(late, merged("a", EPOCHS)).is_none, (
        "an old epoch behind a newer one is seen in what is merged"
    )


def test_rows_have_repeated_keys_nulls_and_removals() -> None:
    """Else a merge would have little to do."""
    rows = [row for epoch, term in EPOCHS for row in rows_of("a", epoch, term, 0)]
    assert {row["gone"] for row in rows} == {True, False}
    assert None in {row["k"] for row in rows}
    assert len(rows) > 3 * len({row["k"] for row in rows})


def test_a_manifest_is_made_once(tmp_path: Path) -> None:
    chain = Manifests(tmp_path, "uid")
    assert chain.newest() == Manifest(job_uid="uid")
    chain.create(Manifest(1, 1, 1, {1: 1}, (), "uid"))
    with pytest.raises(Fenced):
        chain.create(Manifest(1, 2, 1, {1: 2}, (), "uid"))
    assert chain.newest() == Manifest(1, 1, 1, {1: 1}, (), "uid")
    assert chain.epochs() == [(1, 1)]
