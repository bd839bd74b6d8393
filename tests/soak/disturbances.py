"""What is done to jobs under Dagster, in which order, and what it may leave in Dagster's record; pure.

A *round* plays every kind once, in an order that the seed says, and the next round does the same to the next job. So a
short soak has seen each kind before any comes twice, a longer one each kind on each job, and the same seed gives the
same order again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

__all__ = [
    "SHOWN_OF_A_TERM_MAX",
    "Disturbance",
    "EventBound",
    "Kind",
    "events_of_checkpoints_max",
    "events_of_checks_max",
    "events_of_the_overview_max",
    "plan",
    "who_brought_back",
]

Kind = Literal["kill driver", "kill worker", "kill executor", "kill daemon", "zombie", "full disk"]

SHOWN_OF_A_TERM_MAX: Final = 12
"""Verdicts of one check while a driver lives, is lost and is brought back: well, gone, being recovered, starting, with
a store that is slow in between. A check that is shown at each tick has as many within a minute."""


@dataclass(frozen=True)
class Disturbance:
    """One thing that is done.

    Attributes:
        job: to whom; empty: to all of them at once.
    """

    kind: Kind
    job: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.job}" if self.job else self.kind


def plan(seed: int, choices: Mapping[Kind, Sequence[str]]) -> Iterator[Disturbance]:
    """Rounds without end.

    Args:
        choices: the jobs that each kind can be done to.

    Raises:
        ValueError: there is nothing to choose from.
    """
    if not choices:
        raise ValueError("a plan needs at least one disturbance")
    drawn = random.Random(seed)
    first = {kind: drawn.randrange(len(jobs)) for kind, jobs in choices.items()}
    for number in count():
        for kind in drawn.sample(list(choices), len(choices)):
            yield Disturbance(kind, choices[kind][(first[kind] + number) % len(choices[kind])])


def who_brought_back(term_before: int, term: int, cause: str) -> str:
    """In one word or two, for counting: who started the run that goes on, by the cause in its heartbeat."""
    if term == term_before:
        return "itself"
    if cause.startswith("restarted by its supervisor"):
        return "its supervisor"
    return "Dagster" if cause.startswith("recovery of term") else "a takeover"


@dataclass(frozen=True, kw_only=True)
class EventBound:
    """Events of one kind: how many there are, and how many there may be."""

    what: str
    events: int
    most: int

    @property
    def holds(self) -> bool:
        return self.events <= self.most


def events_of_checkpoints_max(elapsed_s: float, interval_s: float, terms: int) -> int:
    """Of a job that is not rescaled, in `<job>/checkpoints` and `<job>/stream`: one an interval, and of each run its
    first checkpoint and itself (docs/operations.md, orchestration/sensors/publishing.py)."""
    return 1 + int(elapsed_s / interval_s) + 2 * terms


def events_of_checks_max(elapsed_s: float, terms: int, shown_every_s: float) -> int:
    """Of one check that is shown when its verdict changes, and now and then without a change."""
    return 1 + int(elapsed_s / shown_every_s) + SHOWN_OF_A_TERM_MAX * max(1, terms)


def events_of_the_overview_max(elapsed_s: float, changes_every_s: float) -> int:
    """The table of all jobs, which changes write no more often than this."""
    return 1 + int(elapsed_s / changes_every_s)
