"""Which epochs are one task for all shards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from state_runtime.changelog.changes import TaskChanges, UploadTotals
from state_runtime.changelog.inflight import RowsLeft
from state_runtime.driver.single_task import (
    LIMITS,
    PAUSE_EPOCHS,
    PAUSE_EPOCHS_MAX,
    ROWS_MAX,
    SHARDS_MAX,
    TASKS_MS_MAX,
    SingleTask,
    may_be_single_task,
)
from state_runtime.store import open_store
from state_runtime.task.acknowledgement import Acknowledgement

STAGES: Any = (SimpleNamespace(operator="one", sinks=("out",)), SimpleNamespace(operator=None, sinks=("far",)))
SMALL = Acknowledgement(epoch="e", stage=0, shard=0, input_rows=100)


def after(narrow: SingleTask, *acknowledged: Acknowledgement, ms: float = 10.0) -> bool:
    narrow.seen(acknowledged, STAGES, ms)
    return narrow.choose(None, goes_on=False)


def test_an_epoch_after_a_small_one_is_narrow_and_the_first_of_a_run_is_not() -> None:
    """The first restores each shard, and may have all that came while the job was down."""
    narrow = SingleTask(allowed=True)
    assert not narrow.choose(None, goes_on=False)
    assert not after(narrow), "a clock that moved restores nothing"
    assert after(narrow, SMALL)
    assert after(narrow)


def test_where_epochs_may_not_be_narrow_none_is() -> None:
    assert not after(SingleTask(allowed=False), SMALL)


@pytest.mark.parametrize(
    ("acknowledged", "ms"),
    [
        (replace(SMALL, input_rows=ROWS_MAX + 1), 10.0),
        (replace(SMALL, input_rows=ROWS_MAX + 1, partial_rows=5), 10.0),
        (replace(SMALL, changes=TaskChanges(uploads=UploadTotals(uploads=1))), 10.0),
        (replace(SMALL, left={1: (RowsLeft(0, 1, 1, 1),)}), 10.0),
        (SMALL, TASKS_MS_MAX + 1),
    ],
    ids=["rows", "rows that Spark aggregated", "uploads", "rows in flight", "time"],
)
def test_after_one_that_was_not_small_all_cores_work(acknowledged: Acknowledgement, ms: float) -> None:
    """By one task it would take longer; the rows of a sink alone are nobody's concern here."""
    narrow = SingleTask(allowed=True)
    assert not after(narrow, acknowledged, ms=ms)
    assert after(narrow, SMALL, replace(SMALL, stage=1, input_rows=ROWS_MAX * 9))


def test_an_epoch_that_goes_on_with_rows_in_flight_is_never_narrow() -> None:
    """It has a backlog, and the rows of many epochs."""
    narrow = SingleTask(allowed=True)
    assert after(narrow, SMALL)
    assert not narrow.choose(None, goes_on=True)


def test_a_deadline_before_one_task_would_be_refused_wants_all_cores() -> None:
    """Shards beside each other get further until then: the batch takes fewer epochs."""
    narrow = SingleTask(allowed=True)
    assert after(narrow, SMALL)
    assert narrow.choose(LIMITS.time_max_s, goes_on=False)
    assert not narrow.choose(LIMITS.time_max_s - 0.1, goes_on=False)


def test_each_refusal_in_a_row_makes_a_longer_pause() -> None:
    """Each is an epoch that ran twice: a job whose batches are now small and now large must not pay for half of them."""
    narrow = SingleTask(allowed=True)
    pauses = []
    for _ in range(12):
        while not after(narrow, SMALL):
            pass
        narrow.refused()
        epochs = 0
        while not after(narrow, SMALL):
            epochs += 1
        pauses.append(epochs)
    assert pauses[0] == PAUSE_EPOCHS - 1
    assert pauses[1] == 2 * PAUSE_EPOCHS - 1
    assert pauses[-1] == PAUSE_EPOCHS_MAX - 1


def test_one_that_was_slow_by_one_task_is_taken_for_a_refusal() -> None:
    """All cores are done with it in time, one is not: by the newest epoch alone every second one would be narrow."""
    narrow = SingleTask(allowed=True)
    assert after(narrow, SMALL)
    assert not after(narrow, SMALL, ms=TASKS_MS_MAX + 1)
    assert not after(narrow, SMALL)


def context(tmp_path: Any, **changed: Any) -> Any:
    values = {
        "changelog": "on",
        "parallelism": SHARDS_MAX,
        "stages": STAGES,
        "stages_with_new_rows": {0},
        "store": open_store(str(tmp_path)),
        **changed,
    }
    near, far = SimpleNamespace(store=lambda: values["store"]), SimpleNamespace(store=object)
    return SimpleNamespace(
        pipeline=SimpleNamespace(stages=values["stages"], stages_with_new_rows=values["stages_with_new_rows"]),
        settings=SimpleNamespace(changelog=values["changelog"]),
        parallelism=values["parallelism"],
        sinks={"out": near, "far": far},
    )


@pytest.mark.parametrize(
    ("changed", "has_executors"),
    [
        ({"changelog": "off"}, False),
        ({"parallelism": SHARDS_MAX + 1}, False),
        ({"store": object()}, False),
        ({"stages": STAGES[::-1]}, False),
        ({"stages_with_new_rows": {0, 1}}, False),
        ({"stages": (), "stages_with_new_rows": ()}, False),
        ({}, True),
    ],
    ids=[
        "changelog off",
        "many shards",
        "a far sink",
        "a sink above the operator",
        "a sink beside the operator",
        "no operator",
        "executors",
    ],
)
def test_only_where_one_process_has_everything_near_it_may_be_narrow(
    tmp_path: Any, changed: dict[str, Any], has_executors: bool
) -> None:
    """Executors have their own shards; what is sent for each shard is sent side by side; and a sink above an operator would
    have several tasks in one, whose acknowledgements have one name."""
    assert may_be_single_task(context(tmp_path), has_executors=False)
    assert not may_be_single_task(context(tmp_path, **changed), has_executors=has_executors)
