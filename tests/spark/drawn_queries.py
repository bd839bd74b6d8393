"""Plain queries that are drawn: sources, filters, deduplicates, joins, unions, windows, in any order that Spark takes; and
what each gives, over a restart, on ours and on Spark's own streaming."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from .plain_queries import ONCE, Batches, Running, plain_job, sparks, stream, write_rows

__all__ = ["RECORDED", "Drawn", "Play", "digests_of", "drawn_play", "drawn_query"]

RECORDED = Path(__file__).with_name("recorded_queries.json")
"""What Spark's own streaming gave for drawn queries: the digests of its batches (`tests/soak/queries.py --record`)."""

_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"

Frame = Callable[[SparkSession], DataFrame]

_FILTERS = (
    "amount > 30",
    "shop IS NOT NULL",
    "customer % 3 <> 0",
    "at IS NOT NULL AND amount IS NOT NULL",
    "order > 40",
)
_FUNCTIONS = (
    "count(*)", "count(amount)", "sum(amount)", "min(order)", "max(shop)", "avg(amount)", "sum(amount + customer) * 2",
    "count(*) FILTER (WHERE amount > 50)", "max_by(order, order)", "round(stddev(amount), 6)", "collect_list(1)",
    "sort_array(collect_set(amount % 5))", "max_by(order, struct(amount, order))",
    "bool_or(amount > 90)", "sum(CAST(amount AS DECIMAL(10, 2)))", "count_if(shop = 'a')",
)  # fmt: skip
_KEYS = ("customer", "shop", "upper(shop)", "customer % 4")


@dataclass(frozen=True)
class Drawn:
    """A query, and how it came to be.

    Attributes:
        text: its steps, for people.
    """

    query: Frame
    mode: str
    text: str


def drawn_query(draw: random.Random, root: Path) -> Drawn:
    """Draw one; the same of the same draws."""
    frame, text, operators = _rows(draw, root)
    kind = draw.choice(
        [
            "windows",
            "windows",
            "windows",
            "sessions",
            "sessions of own gaps",
            "windows of windows",
            "rows",
            "deduplicate",
            "processor",
        ]
    )
    if kind == "rows":
        return Drawn(lambda spark: frame(spark).select("order", "customer", "amount", "at"), "append", text)
    if kind == "deduplicate":
        by = draw.choice([["customer", "at"], ["customer", "shop"]])
        told = f"{text}, deduplicate by {by}"
        return Drawn(lambda spark: frame(spark).dropDuplicates(by).select(*by), "append", told)
    if kind == "processor":
        schema = "customer long, n long, total long"
        return Drawn(
            lambda spark: frame(spark).groupBy("customer").transformWithState(Running(), schema, "Append", "None"),
            "append",
            f"{text}, processor",
        )
    mode = draw.choice(["append", "update"]) if kind == "windows" and not operators else "append"
    functions = draw.sample(_FUNCTIONS, draw.randint(1, 3))
    keys = draw.sample(_KEYS, draw.choice([1, 2] if "sessions" in kind else [0, 1, 1, 2]))
    length_s = draw.choice([3, 5, 10, 20])
    slide_s = draw.choice([length_s, length_s, max(1, length_s // 2)])
    having = draw.choice([None, None, "f0 IS NOT NULL"])

    def windowed(spark: SparkSession) -> DataFrame:
        gap = {
            "sessions": F.lit(f"{length_s} seconds"),
            "sessions of own gaps": F.expr(f"concat(customer % {length_s}, ' seconds')"),
        }.get(kind)
        time = F.session_window("at", gap) if gap is not None else _window("at", length_s, slide_s)
        by = [F.expr(key).alias(f"k{number}") for number, key in enumerate(keys)]
        made = [F.expr(function).alias(f"f{number}") for number, function in enumerate(functions)]
        grouped = frame(spark).groupBy(time.alias("w"), *by).agg(*made)
        grouped = grouped.where(having) if having else grouped
        if kind != "windows of windows":
            return grouped
        outer = grouped.groupBy(_window(F.window_time("w"), length_s * 2, length_s * 2))
        return outer.agg(F.count("*").alias("n"), F.max("f0").alias("most"))

    return Drawn(
        windowed, mode, f"{text}, {kind} of {length_s}/{slide_s} s by {keys}: {functions} {having or ''} ({mode})"
    )


@dataclass(frozen=True)
class Play:
    """A drawn query with its input: some files, a restart, some more.

    Attributes:
        files: of each run, the first file, how many, and how many of their rows are late.
        shards: of each of our runs.
        policy: of several watermarks.
    """

    drawn: Drawn
    files: tuple[tuple[int, int, float], ...]
    rows: int
    shards: tuple[int, ...]
    policy: str

    def on_ours(self, spark: SparkSession, root: Path) -> Batches:
        """Return the rows of each of our epochs that has any; the second run has other shards and no local copies."""
        given: Batches = []
        with self._begun(spark, root):
            for (first, count, late), parallelism in zip(self.files, self.shards, strict=True):
                write_rows(root, range(first, first + count), self.rows, late)
                shutil.rmtree(root / "local", ignore_errors=True)
                plain_job(root, self.drawn.query, self.drawn.mode, given, parallelism=parallelism).run(
                    spark, trigger=ONCE
                )
        return given

    def on_sparks(self, spark: SparkSession, root: Path) -> Batches:
        """Return the rows of each of Spark's batches that has any."""
        given: Batches = []
        with self._begun(spark, root):
            for first, count, late in self.files:
                write_rows(root, range(first, first + count), self.rows, late)
                sparks(spark, root, self.drawn.query, self.drawn.mode, given)
        return given

    @contextmanager
    def _begun(self, spark: SparkSession, root: Path) -> Iterator[None]:
        for folder in ("orders", "payments"):
            shutil.rmtree(root / folder, ignore_errors=True)
        spark.conf.set(_POLICY, self.policy)
        try:
            yield
        finally:
            spark.conf.unset(_POLICY)


def drawn_play(name: str, root: Path) -> Play:
    """Draw a query and its input; the same of the same name."""
    draw = random.Random(name)
    drawn = drawn_query(draw, root)
    files = tuple((first, draw.choice([2, 3]), draw.choice([0.05, 0.4])) for first in (0, 3))
    rows = draw.choice([20, 60])
    shards = tuple(draw.sample([1, 2, 3, 4], 2))
    return Play(drawn, files, rows, shards, draw.choice(["min", "min", "min", "max"]))


def digests_of(batches: Batches) -> list[str]:
    """Return how many rows each batch has, and a digest of them."""
    return [f"{len(rows)} {hashlib.sha256(chr(10).join(rows).encode()).hexdigest()[:16]}" for rows in batches]


def _window(time: object, length_s: int, slide_s: int) -> object:
    return F.window(time, f"{length_s} seconds", f"{slide_s} seconds")  # type: ignore[arg-type]


def _rows(draw: random.Random, root: Path) -> tuple[Frame, str, int]:
    """Rows with the columns of orders, what was done to them, and how many operators they went through."""
    delay_s = draw.choice([1, 5, 15])
    condition = draw.choice([None, *_FILTERS])

    def frame(spark: SparkSession) -> DataFrame:
        rows = stream(spark, root, "orders", f"{delay_s} seconds")
        return rows.where(condition) if condition else rows

    text, operators = f"orders ({delay_s} s) where {condition or 'true'}", 0
    made: Frame = frame
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        step = draw.choice([*_STEPS])
        made, told, stateful = _STEPS[step](draw, root, made)
        text, operators = f"{text}, {told}", operators + stateful
        if "join" in step:
            break  # rows of a join have two columns with event time, of which the next operators take one
    return made, text, operators


Step = Callable[[random.Random, Path, Frame], tuple[Frame, str, int]]


def _deduplicated(draw: random.Random, root: Path, frame: Frame) -> tuple[Frame, str, int]:
    # By what tells rows apart: which of several rows comes first is Spark's to choose.
    keys = [*draw.choice([(), ("at",)]), "order", "customer", "amount", "shop"]
    return lambda spark: frame(spark).dropDuplicates(keys), f"deduplicate {keys}", 1


def _within(draw: random.Random, root: Path, frame: Frame) -> tuple[Frame, str, int]:
    keys = ["order", "customer", "amount", "shop"]
    return lambda spark: frame(spark).dropDuplicatesWithinWatermark(keys), "deduplicate within watermark", 1


def _filtered(draw: random.Random, root: Path, frame: Frame) -> tuple[Frame, str, int]:
    condition = draw.choice(_FILTERS)
    return lambda spark: frame(spark).where(condition), f"where {condition}", 0


def _united(draw: random.Random, root: Path, frame: Frame) -> tuple[Frame, str, int]:
    delay_s = draw.choice([1, 8])

    def united(spark: SparkSession) -> DataFrame:
        other = stream(spark, root, "payments", f"{delay_s} seconds")
        columns = ("order", "order % 20 AS customer", "paid AS amount", "'p' AS shop", "paid_at AS at")
        return frame(spark).select("order", "customer", "amount", "shop", "at").union(other.selectExpr(*columns))

    return united, f"union payments ({delay_s} s)", 0


def _joined(how: str) -> Step:
    def join(draw: random.Random, root: Path, frame: Frame) -> tuple[Frame, str, int]:
        delay_s, before_s, after_s = draw.choice([1, 8]), draw.choice([0, 5]), draw.choice([0, 3, 12])
        low, high = draw.choice([">=", ">"]), draw.choice(["<=", "<"])
        condition = (
            f"o.order = p.order AND paid_at {low} at - INTERVAL {before_s} SECONDS "
            f"AND paid_at {high} at + INTERVAL {after_s + 1} SECONDS"
        )
        if draw.random() < 0.4:
            # A number compared with a column is a bound in time to Spark (`SPARKS_WAY`).
            condition += draw.choice([" AND paid <> amount", " AND (paid > amount OR shop = 'a')", " AND shop <=> 'b'"])

        def joined(spark: SparkSession) -> DataFrame:
            other = stream(spark, root, "payments", f"{delay_s} seconds").alias("p")
            rows = frame(spark).alias("o").join(other, F.expr(condition), how)
            if how == "left_semi":
                return rows
            time = "at" if how in ("inner", "left") else "paid_at AS at"
            return rows.selectExpr("o.order", "customer", "coalesce(paid, amount) AS amount", "shop", time)

        return joined, f"{how} join payments ({delay_s} s) on {condition}", 1

    return join


_STEPS: dict[str, Step] = {
    "deduplicate": _deduplicated,
    "within watermark": _within,
    "join": _joined("inner"),
    **{f"{how} join": _joined(how) for how in ("left", "right", "full", "left_semi")},
    "union": _united,
    "filter": _filtered,
}
