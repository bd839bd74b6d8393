"""Which operators' rows Spark aggregates first: what the newest epochs showed decides."""

from __future__ import annotations

from state_runtime.driver.aggregated import PAUSE_EPOCHS, Aggregated
from state_runtime.task.acknowledgement import Acknowledgement


def epoch(choice: Aggregated, rows: int, keys: int, partial: int = 0) -> frozenset[str]:
    """Two tasks of operator `a`; what is chosen after them."""
    tasks = [
        Acknowledgement(
            epoch="e", stage=0, shard=shard, input_rows=rows // 2, changed_rows=keys // 2, partial_rows=partial // 2
        )
        for shard in range(2)
    ]
    choice.seen(("a", task) for task in tasks)
    return choice.chosen()


def able() -> Aggregated:
    return Aggregated("auto", frozenset({"a"}))


def test_many_rows_of_few_keys_are_aggregated_first_from_the_next_epoch_on() -> None:
    choice = able()
    assert choice.chosen() == frozenset()
    assert epoch(choice, 100_000, 20_000) == {"a"}
    assert epoch(choice, 100_000, 20_000, partial=30_000) == {"a"}


def test_few_rows_and_many_keys_are_not() -> None:
    choice = able()
    assert not epoch(choice, 10_000, 100)
    assert not epoch(choice, 100_000, 80_000)
    assert epoch(choice, 100_000, 20_000)
    assert not epoch(choice, 10_000, 100, partial=200), "an epoch that is small again"


def test_where_it_did_not_help_it_is_left_alone_for_some_epochs() -> None:
    """Many tasks that have each key: as many rows come as before."""
    choice = able()
    assert epoch(choice, 100_000, 40_000)
    assert not epoch(choice, 100_000, 40_000, partial=90_000)
    for _ in range(PAUSE_EPOCHS - 1):
        assert not epoch(choice, 100_000, 40_000)
    assert epoch(choice, 100_000, 40_000)


def test_the_setting_wins_and_only_where_it_can() -> None:
    always, never = Aggregated("on", frozenset({"a"})), Aggregated("off", frozenset({"a"}))
    assert (always.chosen(), never.chosen()) == ({"a"}, frozenset())
    assert (epoch(always, 10, 10), epoch(never, 100_000, 10)) == ({"a"}, frozenset())
    other = Aggregated("auto", frozenset({"b"}))
    assert not epoch(other, 100_000, 10), "an operator that needs its rows"
