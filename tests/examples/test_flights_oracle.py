"""The oracle agrees with the processor on real data, and notices every kind of damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from examples.flights import oracle, planes

pytestmark = pytest.mark.spark

Flights = list[Row]
RunProcessor = Callable[[Iterable[Flights]], list[Row]]


@pytest.fixture(scope="module")
def week(year: pa.Table) -> pa.Table:
    """A week in February with a snow storm: cancelled flights, missing tail numbers, diversions."""
    days = pc.and_(pc.equal(year["month"], 2), pc.and_(pc.greater(year["day"], 5), pc.less(year["day"], 13)))
    return year.filter(days)


@pytest.fixture(scope="module")
def outputs(
    spark: SparkSession,
    week: pa.Table,
    as_flights: Callable[[pa.Table], Flights],
    run_plane_day: RunProcessor,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[DataFrame, DataFrame, DataFrame]:
    """The week, the legs as the processor writes them in two epochs, and figures of two epochs."""
    folder = tmp_path_factory.mktemp("oracle")
    pa.parquet.write_table(week, folder / "week.parquet")
    flights = as_flights(week)
    rows = run_plane_day([flights[:3000], flights[3000:]])
    pa.parquet.write_table(_table(rows), folder / "legs.parquet")
    frame = spark.read.parquet(str(folder / "week.parquet"))
    legs = spark.read.parquet(str(folder / "legs.parquet"))
    early = oracle.expected_by_carrier(spark, legs.where(F.col("flight_id") <= flights[2999].flight_id))
    final = oracle.expected_by_carrier(spark, legs)
    by_carrier = early.withColumn("epoch", F.lit(1)).unionByName(final.withColumn("epoch", F.lit(2)))
    by_carrier.write.parquet(str(folder / "by-carrier"))
    return frame, legs.withColumn("epoch", F.lit(1)), spark.read.parquet(str(folder / "by-carrier"))


def _table(rows: list[Row]) -> pa.Table:
    types = {"long": pa.int64(), "int": pa.int32(), "date": pa.date32(), "string": pa.string()}
    schema = pa.schema([(name, types[kind]) for name, kind in (c.split() for c in planes.LEG_SCHEMA.split(", "))])
    return pa.Table.from_pylist([row.asDict() for row in rows], schema=schema)


def test_the_processor_and_the_recomputation_agree(
    spark: SparkSession, outputs: tuple[DataFrame, DataFrame, DataFrame]
) -> None:
    """Two independent statements of the same rules, on real data."""
    year, legs, by_carrier = outputs
    report = oracle.compare_frames(spark, year, legs, by_carrier)
    assert report.differences == ()
    assert report.equal
    assert report.legs_expected == year.count() > 6_000
    assert {row.status for row in legs.select("status").distinct().collect()} >= {
        "flown",
        "diverted",
        "cancelled",
        "no_tail_number",
    }


# A flight from the middle of the week, and what a broken pipeline could do to it.
Damage = Callable[[DataFrame, int], DataFrame]
LEG_DAMAGE: dict[str, tuple[Damage, tuple[int, int]]] = {
    "a lost row": (lambda legs, victim: legs.where(F.col("flight_id") != victim), (1, 0)),
    "a duplicated row": (
        lambda legs, victim: legs.unionByName(legs.where(F.col("flight_id") == victim)),
        (0, 1),
    ),
    "a changed value": (
        lambda legs, victim: legs.withColumn(
            "flights_so_far", F.col("flights_so_far") + (F.col("flight_id") == victim).cast("int")
        ),
        (1, 1),
    ),
    "a value where none should be": (
        lambda legs, victim: legs.withColumn(
            "turnaround_min",
            F.when(F.col("flight_id") == victim, F.lit(-1)).otherwise(F.col("turnaround_min")).cast("int"),
        ),
        (1, 1),
    ),
    "one row replaced by a copy of another": (
        lambda legs, victim: legs.where(F.col("flight_id") != victim).unionByName(
            legs.where(F.col("flight_id") == victim + 1)
        ),
        (1, 1),
    ),
}


@pytest.mark.parametrize("damage", LEG_DAMAGE)
def test_damage_to_one_leg_is_noticed_and_shown(
    spark: SparkSession, outputs: tuple[DataFrame, DataFrame, DataFrame], damage: str
) -> None:
    """One row in thousands is enough."""
    year, legs, by_carrier = outputs
    victim = int(
        year.where("dep_min IS NOT NULL")
        .selectExpr("CAST(PERCENTILE_DISC(0.5) WITHIN GROUP (ORDER BY flight_id) AS BIGINT) AS id")
        .first()["id"]
    )  # type: ignore[index]
    change, (missing, surplus) = LEG_DAMAGE[damage]
    report = oracle.compare_frames(spark, year, change(legs, victim), by_carrier)
    assert not report.equal
    assert not report.legs_equal
    assert report.keys_equal, "the figures were not touched"
    assert (report.legs_missing, report.legs_surplus) == (missing, surplus)
    assert str(victim) in " ".join(report.differences) or str(victim + 1) in " ".join(report.differences)


KEY_DAMAGE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "a lost last epoch": lambda figures: figures.where("NOT (epoch = 2 AND carrier = 'B6' AND origin = 'JFK')"),
    "a lost key": lambda figures: figures.where("NOT (carrier = 'B6' AND origin = 'JFK')"),
    "a key written twice in the last epoch": lambda figures: figures.unionByName(
        figures.where("epoch = 2 AND carrier = 'B6' AND origin = 'JFK'")
    ),
    "a count that is one off": lambda figures: figures.withColumn(
        "flights", F.expr("flights + IF(epoch = 2 AND carrier = 'B6' AND origin = 'JFK', 1, 0)")
    ),
    "an average that is off by a millionth": lambda figures: figures.withColumn(
        "mean_dep_delay",
        F.expr("mean_dep_delay * IF(epoch = 2 AND carrier = 'B6' AND origin = 'JFK', 1.000001, 1)"),
    ),
    "a figure that is null": lambda figures: figures.withColumn(
        "worst_dep_delay", F.expr("IF(carrier = 'B6' AND origin = 'JFK', NULL, worst_dep_delay)")
    ),
}


@pytest.mark.parametrize("damage", KEY_DAMAGE)
def test_damage_to_one_figure_is_noticed(
    spark: SparkSession, outputs: tuple[DataFrame, DataFrame, DataFrame], damage: str
) -> None:
    """Only the newest epoch of a key counts, and it must be there once."""
    year, legs, by_carrier = outputs
    report = oracle.compare_frames(spark, year, legs, KEY_DAMAGE[damage](by_carrier))
    assert report.legs_equal
    assert not report.keys_equal
    assert not report.equal


def test_an_average_that_differs_in_its_last_bit_is_equal(
    spark: SparkSession, outputs: tuple[DataFrame, DataFrame, DataFrame]
) -> None:
    """The order of a sum of doubles is not part of the result."""
    year, legs, by_carrier = outputs
    nudged = by_carrier.withColumn("mean_dep_delay", F.expr("mean_dep_delay * (1 + 2e-16)"))
    assert oracle.compare_frames(spark, year, legs, nudged).equal


def test_nothing_compared_is_not_equal(spark: SparkSession, outputs: tuple[DataFrame, DataFrame, DataFrame]) -> None:
    """An empty year and an empty output prove nothing."""
    year, legs, by_carrier = outputs
    assert not oracle.compare_frames(spark, year.limit(0), legs.limit(0), by_carrier.limit(0)).equal


def test_the_printed_table_says_which_output_differs(
    spark: SparkSession, outputs: tuple[DataFrame, DataFrame, DataFrame], tmp_path: Path
) -> None:
    """`compare` reads what a run wrote and prints; a person sees the verdict and an example."""
    from rich.console import Console

    year, legs, by_carrier = outputs
    year.write.parquet(str(tmp_path / "year"))
    legs.where("flight_id % 1000 <> 0").write.parquet(str(tmp_path / "legs"))
    by_carrier.write.parquet(str(tmp_path / "by-carrier"))
    console = Console(record=True, width=200)
    report = oracle.compare(spark, tmp_path / "legs", tmp_path / "by-carrier", tmp_path / "year", console)
    text = console.export_text()
    assert not report.equal
    assert "different" in text
    assert "equal" in text
    assert "missing leg: {'flight_id': " in text
