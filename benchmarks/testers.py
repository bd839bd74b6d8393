"""How long a test of a processor takes: `ProcessorTester` beside Spark's own `TwsTester`, in turns, without Java.

python -m benchmarks.testers
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from stillstate.testing import ProcessorTester

TURNS = 15
KEYS, ROWS_PER_KEY = 200, 5


class Counts(StatefulProcessor):
    """Counts the rows of a key."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (n,) = self.n.get() or (0,)
        n += sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(user=key[0], n=n)

    def close(self) -> None:
        pass


def one_row_of_ours() -> None:
    tester = ProcessorTester(Counts(), "user string, what string", "user string, n long", key="user")
    assert tester.send([("ann", "a")]) == [("ann", 1)]


def one_row_of_sparks() -> None:
    assert TwsTester(Counts()).test("ann", [Row(user="ann", what="a")]) == [Row(user="ann", n=1)]


def many_keys_of_ours() -> None:
    tester = ProcessorTester(Counts(), "user string, what string", "user string, n long", key="user")
    rows = [(f"user {key}", "a") for key in range(KEYS) for _ in range(ROWS_PER_KEY)]
    assert len(tester.send(rows)) == KEYS


def many_keys_of_sparks() -> None:
    tester = TwsTester(Counts())
    given = {f"user {key}": [Row(user=f"user {key}", what="a")] * ROWS_PER_KEY for key in range(KEYS)}
    assert len([row for key, rows in given.items() for row in tester.test(key, rows)]) == KEYS


def took_ms(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1000


def main() -> None:
    """Print medians of both, in turns."""
    print(f"{'':34} {'ours':>8} {'TwsTester':>10}   ms, medians of {TURNS} in turns")
    for name, ours, sparks in (
        ("a tester and one row", one_row_of_ours, one_row_of_sparks),
        (f"a tester and {KEYS * ROWS_PER_KEY} rows of {KEYS} keys", many_keys_of_ours, many_keys_of_sparks),
    ):
        ours(), sparks()
        turns = [(took_ms(ours), took_ms(sparks)) for _ in range(TURNS)]
        medians = [statistics.median(column) for column in zip(*turns, strict=True)]
        print(f"{name:34} {medians[0]:8.2f} {medians[1]:10.2f}")


if __name__ == "__main__":
    main()
