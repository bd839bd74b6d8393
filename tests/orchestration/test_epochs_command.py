"""`stillstate epochs`: the one slow task is on the first line, and what is not known is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from job_roots import JobRoot
from typer.testing import CliRunner, Result

from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.epoch_tasks import EpochTasks, OtherTasks, RunEpochs, TaskNumbers
from state_runtime.snapshot.paths import epochs_path
from state_runtime.snapshot.term_files import write_epochs
from stillstate.orchestration.cli import app

AT = 1_700_000_000_000


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["epochs", *arguments])


def numbers(shard: int, took_ms: int, **more: Any) -> TaskNumbers:
    given: dict[str, Any] = {
        "operator": "legs",
        "shard": shard,
        "input_rows": 1_000,
        "processed_rows": 900,
        "left_rows": 100,
        "slices": 2,
        "began_at_ms": AT,
        "processed_at_ms": AT + took_ms,
        "changed_bytes": 2048,
        "uploaded_bytes": 0,
        "spilled_bytes": 0,
        "restored": "",
        "restore_ms": 0.0,
        "executor": "",
        **more,
    }
    return TaskNumbers(**given)


OTHERS = OtherTasks(tasks=7, input_rows=70, processed_rows=7, left_rows=3, changed_bytes=1024, took_ms=40)
SLOW = numbers(3, 61_000, restored="primary", restore_ms=2_500.0, executor="cb4f-77")
TOLD = RunEpochs(
    term=1,
    run_uid="r",
    epochs=(
        EpochTasks(epoch=12, batch_id=5, tasks=(SLOW, numbers(1, 900), numbers(0, 50)), others=OTHERS),
        EpochTasks(
            epoch=11, batch_id=5, tasks=(numbers(0, 500),), snapshot_id=9, durable_at_ms=AT, alignment_ms=7_300.0
        ),
    ),
)


@dataclass(frozen=True)
class Earlier:
    """The document as an earlier version has it."""

    term: int
    run_uid: str
    epochs: list[dict[str, Any]]


@pytest.fixture
def config(write_config: Callable[..., Path], flights: JobRoot) -> str:
    flights.start()
    assert flights.committer is not None
    write_epochs(flights.catalog.root, replace(TOLD, run_uid=flights.committer.term.run_uid))
    return str(write_config())


def test_the_slowest_shard_of_the_newest_epoch_comes_first(config: str) -> None:
    """Whoever asks at night reads one line: which shard, how long, what it restored from, and where it ran."""
    result = call("flights", "-c", config)
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if "legs/" in line]
    for part in ("legs/3", "1 min 1 s", "1,000", "900", "100", "2.0 KiB", "primary store", "2.5 s", "cb4f-77"):
        assert part in rows[0], part
    assert "Epoch 12 of flights" in result.stdout
    assert "7 more tasks, none above 0.0 s: 70 rows in, 7 processed, 3 in flight, 1.0 KiB changed" in result.stdout
    newest, before = (line for line in rows if ("legs/3" in line and line is not rows[0]) or "2023-11-14" in line)
    assert "not yet" in newest
    assert " 10 " in newest, "all tasks, those that are summed up too"
    assert "2,707" in newest
    assert "303" in newest
    assert "legs/0" in before
    assert " 9 " in before
    assert "7.3 s" in before, "for how long its checkpoint waited for rows"


def test_what_a_limit_cuts_off_is_in_the_line_below(config: str) -> None:
    """No row is unaccounted for, however few lines are shown."""
    text = call("flights", "-n", "1", "-c", config).stdout
    assert "legs/1" not in text
    assert "9 more tasks, none above 0.9 s: 2,070 rows in, 1,807 processed, 203 in flight, 5.0 KiB changed" in text
    assert "more tasks" not in call("flights", "-e", "11", "-c", config).stdout


def test_another_epoch_is_shown_by_its_number_and_one_that_is_not_known_is_refused(config: str) -> None:
    """With the numbers of those that are."""
    assert "Epoch 11 of flights" in call("flights", "--epoch", "11", "-c", config).stdout
    result = call("flights", "--epoch", "3", "-c", config)
    assert result.exit_code == 2
    assert "known are those of epochs 12, 11" in result.stderr


def test_json_has_all_that_is_known(config: str) -> None:
    """With what each task took, so that no program has to subtract."""
    found = json.loads(call("flights", "--json", "-c", config).stdout)
    assert (found["job"], found["term"]) == ("flights", 1)
    assert [e["epoch"] for e in found["epochs"]] == [12, 11]
    assert [(t["shard"], t["took_ms"]) for t in found["epochs"][0]["tasks"]] == [(3, 61_000), (1, 900), (0, 50)]
    assert found["epochs"][0]["others"]["tasks"] == 7
    one = json.loads(call("flights", "--json", "-e", "11", "-c", config).stdout)
    assert [(e["epoch"], e["others"]) for e in one["epochs"]] == [(11, None)]


def test_a_job_that_has_told_nothing_is_no_error_and_one_that_never_ran_is(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    """An idle job, and one whose driver is of an earlier version, are well."""
    config = str(write_config("flights", "trains"))
    flights.start()
    result = call("flights", "-c", config)
    assert result.exit_code == 0
    assert "its epochs have no task figures yet" in result.stdout
    assert json.loads(call("flights", "--json", "-c", config).stdout) == {"job": "flights", "term": None, "epochs": []}
    assert call("flights", "-e", "3", "-c", config).exit_code == 2
    assert call("trains", "-c", config).exit_code == 2


def test_a_document_of_an_earlier_version_says_nothing_of_what_checkpoints_waited(
    config: str, flights: JobRoot
) -> None:
    """Its epochs waited for nothing that anybody knows of."""
    body = flights.catalog.root.read(epochs_path(1), 1 << 20).splitlines()[1]
    told = json.loads(body)
    for epoch in told["epochs"]:
        del epoch["alignment_ms"]
    flights.catalog.root.put(epochs_path(1), encode_document("epochs", Earlier(**told)))
    found = json.loads(call("flights", "--json", "-c", config).stdout)
    assert [e["alignment_ms"] for e in found["epochs"]] == [0.0, 0.0]


def test_a_damaged_document_is_named(config: str, flights: JobRoot) -> None:
    """By its path, with the exit code of damage."""
    flights.catalog.root.put(epochs_path(1), b"{}\n{}\n")
    result = call("flights", "-c", config)
    assert result.exit_code == 5
    assert ".epochs.json is damaged" in result.stderr
