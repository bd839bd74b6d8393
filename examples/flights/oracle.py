"""The right answer, computed another way: plain Spark SQL over the whole year, compared row for row.

Nothing here is shared with the processor: its rules are written again as window functions, from the
definitions in the documentation of ``planes``. An error in one of the two shows as a difference.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Figures = dict[str, Any]
"""One row of the second output: a carrier and an airport, and its figures."""

EXAMPLES_MAX: Final = 5
"""Differences of each kind that a report shows; the counts are always complete."""

RELATIVE_TOLERANCE: Final = 1e-9
"""For averages only: a sum of doubles depends on its order in the last bits. Everything else must be equal."""

KEYS: Final = ("carrier", "origin")
AVERAGES: Final = ("mean_dep_delay",)

LEGS_SQL: Final = """
WITH departed AS (
    SELECT flight_id,
           LAG(flight_date) OVER plane AS last_date,
           LAG(arr_min) OVER plane AS last_arr_min,
           LAG(arr_delay) OVER plane AS last_arr_delay
    FROM {year}
    WHERE tailnum IS NOT NULL AND dep_min IS NOT NULL
    WINDOW plane AS (PARTITION BY tailnum ORDER BY flight_id)
), followed AS (
    SELECT y.*,
           COUNT(y.dep_min) OVER (PARTITION BY y.tailnum ORDER BY y.flight_id ROWS UNBOUNDED PRECEDING) AS
           departures, d.last_date <=> y.flight_date AS same_day,
           d.last_arr_min,
           d.last_arr_delay
    FROM {year} y LEFT JOIN departed d ON y.flight_id = d.flight_id
), judged AS (
    SELECT *,
           CASE WHEN tailnum IS NULL THEN 'no_tail_number'
                WHEN dep_min IS NULL THEN 'cancelled'
                WHEN same_day AND last_arr_min > dep_min THEN 'out_of_order'
                WHEN arr_delay IS NULL THEN 'diverted'
                ELSE 'flown'
           END AS status
    FROM followed
)
SELECT flight_id, tailnum, carrier, origin, dest, flight_date AS day, status, dep_delay, arr_delay,
       CAST(CASE WHEN tailnum IS NOT NULL THEN departures END AS INT) AS flights_so_far,
       CAST(CASE WHEN status IN ('flown', 'diverted') AND same_day THEN dep_min - last_arr_min END AS INT)
           AS turnaround_min,
       CAST(CASE WHEN status IN ('cancelled', 'no_tail_number') THEN NULL
                 WHEN status <> 'out_of_order' AND same_day AND last_arr_delay > 0 AND dep_delay > 0
                     THEN LEAST(last_arr_delay, dep_delay)
                 ELSE 0
            END AS INT) AS inherited_delay
FROM judged
"""

BY_CARRIER_SQL: Final = """
SELECT carrier, origin,
       COUNT(*) AS flights,
       COUNT_IF(status = 'flown') AS flown,
       COUNT_IF(status = 'diverted') AS diverted,
       COUNT_IF(status = 'out_of_order') AS out_of_order,
       COUNT_IF(status = 'cancelled') AS cancelled,
       COUNT_IF(status = 'no_tail_number') AS no_tail_number,
       MAX(dep_delay) AS worst_dep_delay,
       MIN(arr_delay) AS best_arr_delay,
       AVG(dep_delay) AS mean_dep_delay,
       SUM(inherited_delay) AS inherited_min,
       COUNT(turnaround_min) AS turnarounds,
       SUM(turnaround_min) AS turnaround_total_min
FROM {legs}
GROUP BY carrier, origin
"""

# A key changes at most once in an epoch; RANK, not ROW_NUMBER, so that a key written twice shows as two rows.
NEWEST_SQL: Final = """
SELECT * FROM (
    SELECT *, RANK() OVER (PARTITION BY carrier, origin ORDER BY epoch DESC) AS age FROM {by_carrier}
) WHERE age = 1
"""


@dataclass(frozen=True)
class OracleReport:
    """What the comparison found.

    Attributes:
        legs_expected: rows of the recomputation, one per flight.
        legs_found: rows that the job wrote.
        legs_missing: expected rows that the job did not write (a changed row is missing once and surplus
        once).
        legs_surplus: rows that the job wrote and that were not expected, duplicates included.
        keys_expected: carriers and airports of the recomputation.
        keys_found: rows of the newest epoch of each key that the job wrote.
        keys_missing: expected keys whose newest figures differ or do not exist.
        keys_surplus: newest figures that were not expected.
        differences: some of the differences, as text.
    """

    legs_expected: int
    legs_found: int
    legs_missing: int
    legs_surplus: int
    keys_expected: int
    keys_found: int
    keys_missing: int
    keys_surplus: int
    differences: tuple[str, ...] = ()

    @property
    def legs_equal(self) -> bool:
        """Whether the first operator's output is the expected one, row for row: no loss, no duplicate, no change."""
        return self.legs_expected == self.legs_found and self.legs_missing == self.legs_surplus == 0

    @property
    def keys_equal(self) -> bool:
        """Whether the newest figures of every key are the expected ones."""
        return self.keys_expected == self.keys_found and self.keys_missing == self.keys_surplus == 0

    @property
    def equal(self) -> bool:
        """Whether everything is as expected. An empty year proves nothing, so it is not equal."""
        return self.legs_expected > 0 and self.legs_equal and self.keys_equal

    def table(self) -> Table:
        """The report as a table for the terminal."""
        table = Table(title="Output of the job against a recomputation with Spark SQL")
        for column in ("output", "expected", "found", "missing", "surplus", "verdict"):
            table.add_column(column, justify="left" if column in ("output", "verdict") else "right")
        for name, counts, equal in (
            (
                "legs, one row a flight",
                (self.legs_expected, self.legs_found, self.legs_missing, self.legs_surplus),
                self.legs_equal,
            ),
            (
                "figures per carrier and airport",
                (self.keys_expected, self.keys_found, self.keys_missing, self.keys_surplus),
                self.keys_equal,
            ),
        ):
            verdict = "[green]equal[/]" if equal else "[red]different[/]"
            table.add_row(name, *(f"{count:,}" for count in counts), verdict)
        return table


def expected_legs(spark: SparkSession, year: DataFrame) -> DataFrame:
    """Recompute what the processor should have written for these flights."""
    return spark.sql(LEGS_SQL, year=year)


def expected_by_carrier(spark: SparkSession, legs: DataFrame) -> DataFrame:
    """Recompute the final figures per carrier and airport from the legs."""
    return spark.sql(BY_CARRIER_SQL, legs=legs)


def compare_frames(spark: SparkSession, year: DataFrame, legs: DataFrame, by_carrier: DataFrame) -> OracleReport:
    """Compare the two outputs of the job (``by_carrier`` with its column ``epoch``) with the recomputation."""
    want = expected_legs(spark, year).cache()
    try:
        # By name: a column that is missing is an error of Spark's, loudly.
        counts, leg_differences = _compare_legs(spark, want, legs.select(*want.columns))
        wanted_keys = [row.asDict() for row in expected_by_carrier(spark, want).collect()]
    finally:
        want.unpersist()
    newest = spark.sql(NEWEST_SQL, by_carrier=by_carrier)
    found_keys = [row.asDict() for row in newest.drop("epoch", "age").collect()]
    missing, surplus = unmatched(wanted_keys, found_keys), unmatched(found_keys, wanted_keys)
    return OracleReport(
        legs_expected=counts["expected"],
        legs_found=counts["found"],
        legs_missing=counts["missing"],
        legs_surplus=counts["surplus"],
        keys_expected=len(wanted_keys),
        keys_found=len(found_keys),
        keys_missing=len(missing),
        keys_surplus=len(surplus),
        differences=(
            *leg_differences,
            *(f"missing figures: {row}" for row in missing[:EXAMPLES_MAX]),
            *(f"surplus figures: {row}" for row in surplus[:EXAMPLES_MAX]),
        ),
    )


def _compare_legs(spark: SparkSession, want: DataFrame, have: DataFrame) -> tuple[dict[str, int], list[str]]:
    """Compare two bags of rows, duplicates counted, nulls equal: ``exceptAll`` in both directions, in one pass."""
    columns = ", ".join(want.columns)
    compared = spark.sql(
        f"""
        SELECT {columns}, COUNT_IF(side = 'want') AS wanted, COUNT_IF(side = 'have') AS had
        FROM (SELECT *, 'want' AS side FROM {{want}} UNION ALL SELECT *, 'have' AS side FROM {{have}})
        GROUP BY {columns}
        """,
        want=want,
        have=have,
    )
    totals = spark.sql(
        """
        SELECT COALESCE(SUM(wanted), 0) AS expected, COALESCE(SUM(had), 0) AS found,
               COALESCE(SUM(GREATEST(wanted - had, 0)), 0) AS missing,
               COALESCE(SUM(GREATEST(had - wanted, 0)), 0) AS surplus
        FROM {compared}
        """,
        compared=compared,
    )
    (row,) = totals.collect()
    counts = {name: int(value) for name, value in row.asDict().items()}
    differences: list[str] = []
    for kind, condition in (("missing", "wanted > had"), ("surplus", "had > wanted")):
        if counts[kind]:
            shown = compared.where(condition).orderBy("flight_id").limit(EXAMPLES_MAX).select(*want.columns)
            differences += (f"{kind} leg: {leg.asDict()}" for leg in shown.collect())
    return counts, differences


def unmatched(left: list[Figures], right: list[Figures]) -> list[Figures]:
    """Rows of ``left`` without an equal row in ``right``, a row of ``right`` serving once (pure, small lists)."""
    candidates: dict[tuple[Any, ...], list[Figures]] = {}
    for row in right:
        candidates.setdefault(tuple(row[name] for name in KEYS), []).append(row)
    alone = []
    for row in left:
        same_key = candidates.get(tuple(row[name] for name in KEYS), [])
        match = next((index for index, other in enumerate(same_key) if _equal(row, other)), None)
        if match is None:
            alone.append(row)
        else:
            same_key.pop(match)
    return alone


def _equal(one: Figures, other: Figures) -> bool:
    if one.keys() != other.keys():
        return False
    return all(_close(one[n], other[n]) if n in AVERAGES else one[n] == other[n] for n in one)


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE)


def compare(
    spark: SparkSession,
    legs_path: str | Path,
    by_carrier_path: str | Path,
    year_parquet: str | Path,
    console: Console | None = None,
) -> OracleReport:
    """Compare what the job wrote with the recomputation of the whole year, and print a small table.

    Args:
        spark: A session.
        legs_path: Output of the sink ``legs``.
        by_carrier_path: Output of the sink ``by-carrier``, with the column ``epoch``.
        year_parquet: The year as ``data.year_parquet`` made it.
        console: Where to print; standard output if not given.

    Returns:
        The report; ``report.equal`` is the verdict.
    """
    report = compare_frames(
        spark,
        year=spark.read.parquet(str(year_parquet)),
        legs=spark.read.parquet(str(legs_path)),
        by_carrier=spark.read.parquet(str(by_carrier_path)),
    )
    console = console or Console()
    console.print(report.table())
    for difference in report.differences:
        console.print(difference, style="red", highlight=False, markup=False)
    return report


def main(argv: list[str] | None = None) -> int:
    """Compare the outputs of a run with the recomputation; exit code 0 if they are equal, else 1."""
    from state_runtime.spark.session import build_session

    parser = argparse.ArgumentParser(prog="python -m examples.flights.oracle", description=main.__doc__)
    parser.add_argument("--year", type=Path, required=True, help="the year's Parquet file")
    parser.add_argument("--legs", type=Path, required=True, help="output folder of the sink `legs`")
    parser.add_argument("--by-carrier", type=Path, required=True, help="output folder of the sink `by-carrier`")
    arguments = parser.parse_args(argv)
    spark = build_session("flights-oracle", master="local[2]")
    try:
        return 0 if compare(spark, arguments.legs, arguments.by_carrier, arguments.year).equal else 1
    finally:
        spark.stop()


if __name__ == "__main__":
    raise SystemExit(main())
