"""Spark's StreamingJoinSuite, that is four suites: their inputs, and the rows that they expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .stream_test import Add, AllRows, Case, NewRows, Query, Start, Step, Stop, Streams, Suite

__all__ = ["FULL_OUTER_JOIN", "INNER_JOIN", "LEFT_SEMI_JOIN", "OUTER_JOIN"]

SOURCE = "LuciferYang/spark@1a3051b418c32fb3f8abbefc61a681382574fd9f"
CHECKPOINT = "it goes on from a checkpoint that an older Spark wrote"
STORE = "it looks into Spark's state store"
SIDES = {"left": "value int", "right": "value int"}
KEYED = {"left": "key int, time int", "right": "key int, time int"}
SELF = {"input": "_1 int, _2 long"}
PAIRS = {"left": "_1 int, _2 int", "right": "_1 int, _2 int"}
NAMED = {"left": "key string, time int", "right": "key string, time int"}
DATED = {
    "left": "eventTime timestamp, id string, comment string",
    "right": "eventTime timestamp, id string, name string",
}
THREE = {"first": "_1 long, _2 int", "second": "_1 long, _2 int", "third": "_1 long, _2 int"}


# --- what the suites share -----------------------------------------------------------------------------------------


def _stream(streams: Streams, side: str, times: int, delay: str | None = "10 seconds") -> DataFrame:
    value = F.col("value")
    named = streams[side].select(
        value.alias("key"), F.timestamp_seconds(value).alias(f"{side}Time"), (value * times).alias(f"{side}Value")
    )
    return named if delay is None else named.withWatermark(f"{side}Time", delay)


def _windowed(
    streams: Streams, left_delay: str | None = "10 seconds", right_delay: str | None = "10 seconds"
) -> tuple[DataFrame, DataFrame]:
    left, right = _stream(streams, "left", 2, left_delay), _stream(streams, "right", 3, right_delay)
    return (
        left.select("key", F.window("leftTime", "10 second"), "leftValue"),
        right.select("key", F.window("rightTime", "10 second"), "rightValue"),
    )


def _end(frame: DataFrame, name: str = "end") -> Column:
    return frame["window.end"].cast("long").alias(name)


def _windowed_join(how: str, left_delay: str | None = "10 seconds", right_delay: str | None = "10 seconds") -> Query:
    def query(streams: Streams) -> DataFrame:
        left, right = _windowed(streams, left_delay, right_delay)
        values = ["leftValue"] if how == "left_semi" else ["leftValue", "rightValue"]
        joined = left.join(right, ["key", "window"], how)
        return joined.select("key", F.col("window.end").cast("long").alias("end"), *values)

    return query


def _conditional_join(how: str, condition: str) -> Query:
    """With a condition of one side. The right value is a text, so that nulls come from the side that they should."""

    def query(streams: Streams) -> DataFrame:
        left, right = _windowed(streams)
        right = right.withColumn("rightValue", F.col("rightValue").cast("string"))
        same = (left["key"] == right["key"]) & (left["window"] == right["window"]) & F.expr(condition)
        joined = left.join(right, same, how)
        if how == "left_semi":
            return joined.select(left["key"], _end(left), "leftValue")
        if how == "full_outer":
            keys = right["key"].alias("rightKey"), _end(right, "rightEnd")
            return joined.select(left["key"], _end(left), "leftValue", *keys, "rightValue")
        side = right if how == "right_outer" else left
        return joined.select(side["key"], _end(side), "leftValue", "rightValue")

    return query


OF_LEFT, OF_RIGHT = "leftValue > 4", "CAST(rightValue AS INT) > 7"


def _range_join(how: str, delay: str = "10 seconds", bound: str = "interval 5 seconds") -> Query:
    near = f"leftKey = rightKey AND leftTime BETWEEN rightTime - {bound} AND rightTime + {bound}"
    return _join_where(near, how, delay, delay)


def _join_where(condition: str, how: str, left_delay: str, right_delay: str, times_only: bool = False) -> Query:
    def query(streams: Streams) -> DataFrame:
        left = streams["left"].select(F.col("key").alias("leftKey"), F.timestamp_seconds("time").alias("leftTime"))
        right = streams["right"].select(F.col("key").alias("rightKey"), F.timestamp_seconds("time").alias("rightTime"))
        joined = left.withWatermark("leftTime", left_delay).join(
            right.withWatermark("rightTime", right_delay), F.expr(condition), how
        )
        left_time, right_time = (F.col(name).cast("int").alias(name) for name in ("leftTime", "rightTime"))
        if how == "left_semi":
            return joined.select("leftKey", left_time)
        return joined.select("leftKey", *([] if times_only else ["rightKey"]), left_time, right_time)

    return query


def _self_join(how: str, flipped: bool = False) -> Query:
    """Of all rows with those of even numbers; flipped, the even ones are on the left."""

    def query(streams: Streams) -> DataFrame:
        rows = streams["input"].select(F.col("_1").alias("value"), F.timestamp_seconds("_2").alias("timestamp"))
        even = rows.where("value % 2 = 0")
        left = (even if flipped else rows).selectExpr("value AS leftId", "timestamp AS leftTime")
        right = (rows if flipped else even).selectExpr("value AS rightId", "timestamp AS rightTime")
        earlier, later = ("rightTime", "leftTime") if flipped else ("leftTime", "rightTime")
        near = f"leftId = rightId AND {later} >= {earlier} AND {later} <= {earlier} + interval 5 seconds"
        joined = left.withWatermark("leftTime", "5 seconds").join(
            right.withWatermark("rightTime", "5 seconds"), F.expr(near), how
        )
        sides = ["left"] if how == "left_semi" else ["left", "right"]
        return joined.select(
            *(
                column
                for side in sides
                for column in (f"{side}Id", F.col(f"{side}Time").cast("int").alias(f"{side}Time"))
            )
        )

    return query


def _numbers(first: int) -> Add:
    return Add({"input": [(number, number) for number in range(first, first + 5)]})


def _same(*numbers: int) -> list[tuple[int, ...]]:
    return [(number, number, number, number) for number in numbers]


# --- inner ---------------------------------------------------------------------------------------------------------


def _by_key(streams: Streams) -> DataFrame:
    left = streams["left"].select(F.col("value").alias("key"), (F.col("value") * 2).alias("leftValue"))
    right = streams["right"].select(F.col("value").alias("key"), (F.col("value") * 3).alias("rightValue"))
    return left.join(right, "key")


def _by_greater_key(streams: Streams) -> DataFrame:
    left = streams["left"].selectExpr("value AS leftKey", "value * 2 AS leftValue")
    right = streams["right"].selectExpr("value AS rightKey", "value * 3 AS rightValue")
    return left.join(right, F.expr("leftKey < rightKey"))


def _with_itself(streams: Streams) -> DataFrame:
    rows = streams["input"]
    keyed = [rows.select((F.col("value") % 5).alias("key"), F.col("value").alias(name)) for name in ("a", "b")]
    return keyed[0].join(keyed[1], "key")


def _of_three(streams: Streams) -> DataFrame:
    first, second, third = (
        streams[name].selectExpr(f"value AS {name}Key", f"value * {times} AS {name}Value")
        for name, times in (("left", 2), ("middle", 3), ("right", 5))
    )
    return first.join(second, F.expr("leftKey = middleKey")).join(third, F.expr("rightKey = middleKey"))


def _by_two_columns(streams: Streams) -> DataFrame:
    left, right = (streams[name].selectExpr("value AS a", "value * 2 AS b") for name in ("left", "right"))
    return left.join(right.repartition("b"), ["a", "b"]).select("a")


def _null_safe(streams: Streams) -> DataFrame:
    left = streams["left"].selectExpr("value AS leftKey", "value * 2 AS leftValue")
    right = streams["right"].selectExpr("value AS rightKey", "value * 3 AS rightValue")
    joined = left.join(right, F.expr("leftKey <=> rightKey"))
    return joined.select("leftKey", "rightKey", "leftValue", "rightValue")


WITH_WATERMARK: list[Step] = [
    Add({"left": [1]}), AllRows(),
    Add({"right": [1]}), AllRows([(1, 10, 2, 3)]),
]  # fmt: skip
AT_25: list[Step] = [
    Add({"left": [25]}), NewRows(),
    Add({"right": [25]}), NewRows([(25, 30, 50, 75)]),
]  # fmt: skip
ONE_SIDE = "leftKey = rightKey AND leftTime < rightTime - interval 5 seconds"
TWO_SIDES = "leftKey = rightKey AND leftTime BETWEEN rightTime - interval 10 seconds AND rightTime + interval 5 seconds"

INNER_JOIN = Suite(
    "StreamingInnerJoinSuite",
    SOURCE,
    [
        Case("stream stream inner join on non-time column", _by_key, [
            Add({"left": [1]}), AllRows(),
            Add({"right": [1, 10]}), NewRows([(1, 2, 3)]),
            Add({"left": [10]}), NewRows([(10, 20, 30)]),
            Add({"right": [1]}), NewRows([(1, 2, 3)]),
            Stop(), Start(),
            Add({"left": [1]}), NewRows([(1, 2, 3), (1, 2, 3)]),
            Stop(), Start(),
            Add({"left": [100]}), Add({"right": [100]}), NewRows([(100, 200, 300)]),
        ], schemas=SIDES),
        Case("stream stream inner join on windows - without watermark", _windowed_join("inner", None, None), [
            Add({"left": [1]}), NewRows(),
            Add({"right": [1]}), NewRows([(1, 10, 2, 3)]),
            Stop(), Start(),
            Add({"left": [25]}), NewRows(),
            Stop(), Start(),
            Add({"right": [25]}), NewRows([(25, 30, 50, 75)]),
            Add({"left": [1]}), NewRows([(1, 10, 2, 3)]),
            Stop(), Start(),
            Add({"left": [5]}), NewRows(),
            Add({"right": [5]}), NewRows([(5, 10, 10, 15)]),
        ], schemas=SIDES),
        Case("stream stream inner join on windows - with watermark", _windowed_join("inner", "10 seconds", None), [
            *WITH_WATERMARK, Stop(), Start(),
            *AT_25, Stop(), Start(),
            Add({"right": [1]}), NewRows(),
            Add({"left": [5]}), NewRows(),
        ], schemas=SIDES),
        Case("stream stream inner join with time range - with watermark - one side condition",
             _join_where(ONE_SIDE, "inner", "10 seconds", "10 seconds", times_only=True), [
            Add({"left": [(1, 5)]}), AllRows(),
            Add({"right": [(1, 11)]}), NewRows([(1, 5, 11)]),
            Add({"right": [(1, 10)]}), NewRows(),
            Add({"left": [(1, 3), (1, 30)]}), NewRows([(1, 3, 10), (1, 3, 11)]),
            Add({"right": [(0, 30)]}), NewRows(),
            Add({"right": [(1, 20), (1, 21), (1, 28)]}), NewRows([(1, 3, 21), (1, 5, 21), (1, 3, 28), (1, 5, 28)]),
            Add({"left": [(1, 20), (1, 21)]}), NewRows([(1, 21, 28)]),
        ], schemas=KEYED),
        Case("stream stream inner join with time range - with watermark - two side conditions",
             _join_where(TWO_SIDES, "inner", "20 seconds", "30 seconds", times_only=True), [
            Add({"left": [(1, 20)]}), AllRows(),
            Add({"right": [(1, second) for second in (14, 15, 25, 26, 30, 31)]}),
            NewRows([(1, 20, 15), (1, 20, 25), (1, 20, 26), (1, 20, 30)]),
            Add({"right": [(1, 60)]}), NewRows(),
            Add({"left": [(1, 49), (1, 50), (1, 65), (1, 66)]}), NewRows([(1, 50, 60), (1, 65, 60)]),
            Add({"left": [(1, 30), (1, 31)]}), NewRows([(1, 31, 26), (1, 31, 30), (1, 31, 31)]),
            Add({"right": [(1, 80)]}), NewRows(),
            Add({"right": [(1, 46), (1, 50)]}), NewRows([(1, 49, 50), (1, 50, 50)]),
        ], schemas=KEYED, quick=True),
        Case("stream stream inner join without equality predicate", _by_greater_key, [Add({"left": [1]})],
             schemas=SIDES, says=["equal"]),
        Case("stream stream self join", _with_itself, [
            Add({"input": [1, 2]}), AllRows([(1, 1, 1), (2, 2, 2)]),
            Stop(), Start(),
            Add({"input": [3, 6]}),
            AllRows([(3, 3, 3), (1, 1, 1), (1, 1, 6), (2, 2, 2), (1, 6, 1), (1, 6, 6)]),
        ]),
        Case("join between three streams", _of_three, [
            Add({"left": [1, 5]}), Add({"middle": [1, 5, 10]}), Add({"right": [5, 10]}),
            NewRows([(5, 10, 5, 15, 5, 25)]),
        ], schemas={**SIDES, "middle": "value int"}),
        Case("streaming join should require StatefulOpClusteredDistribution from children", _by_two_columns, [
            Add({"left": range(1, 1001)}), Add({"right": range(1, 1001)}), AllRows(range(1, 1001)),
        ], schemas=SIDES),
        Case("SPARK-35896: metrics in StateOperatorProgress are output correctly",
             _windowed_join("inner", "10 seconds", None), [*WITH_WATERMARK, *AT_25], schemas=SIDES),
        Case("joining non-nullable left join key with nullable right join key", _null_safe, [
            Add({"left": [1, 5]}), Add({"right": [1, 5, 10, None]}), NewRows([(1, 1, 2, 3), (5, 5, 10, 15)]),
        ], schemas=SIDES),
        Case("joining nullable left join key with non-nullable right join key", _null_safe, [
            Add({"left": [1, 5, 10, None]}), Add({"right": [1, 5]}), NewRows([(1, 1, 2, 3), (5, 5, 10, 15)]),
        ], schemas=SIDES),
        Case("joining nullable left join key with nullable right join key", _null_safe, [
            Add({"left": [1, 5, 10, None]}), Add({"right": [1, 5, None]}),
            NewRows([(1, 1, 2, 3), (5, 5, 10, 15), (None, None, None, None)]),
        ], schemas=SIDES),
        Case("SPARK-51779 Restart streaming join query with virtual column families", _by_key, [
            Add({"left": [1, 2]}), AllRows(),
            Add({"right": [1, 10]}), NewRows([(1, 2, 3)]),
            Stop(), Start(),
            Add({"left": [2, 10]}), NewRows([(10, 20, 30)]),
            Add({"right": [2]}), NewRows([(2, 4, 6), (2, 4, 6)]),
        ], schemas=SIDES),
    ],
    {
        "locality preferences of StateStoreAwareZippedRDD": STORE,
        "SPARK-26187 restore the stream-stream inner join query from Spark 2.4": CHECKPOINT,
        "SPARK-48687 - restore the stream-stream inner join query from Spark 3.5 and changing the join condition (key "
        "schema) should fail the query": CHECKPOINT,
        "SPARK-48687 - restore the stream-stream inner join query from Spark 3.5 and changing the value schema should "
        "fail the query": CHECKPOINT,
        "SPARK-51779 Verify StateSchemaV3 writes correct key and value schemas for join operator": STORE,
        "SPARK-51779 Join query using virtual column families with HDFS should fail": STORE,
        "SPARK-51779 Restart the join query and changing state format versions should reuse the version from offset log":
            STORE,
    },
)  # fmt: skip


# --- outer ---------------------------------------------------------------------------------------------------------


def _violated(streams: Streams) -> DataFrame:
    left, right = _windowed(streams)
    values = F.expr("leftValue > 10 AND (rightValue < 300 OR rightValue > 1000)")
    same = (left["key"] == right["key"]) & (left["window"] == right["window"]) & values
    return left.join(right, same, "left_outer").select(left["key"], _end(left), "leftValue", "rightValue")


def _united(streams: Streams) -> DataFrame:
    first = streams["input"].selectExpr("value AS key", "value AS leftValue", "value AS rightValue")
    left, right = _stream(streams, "left", 2), _stream(streams, "right", 3)
    joined = left.join(right, (left["key"] == right["key"]) & (left["leftTime"] == right["rightTime"]), "inner")
    return first.union(joined.select(left["key"], "leftValue", "rightValue"))


def _dated(left_delay: str, right_delay: str) -> Query:
    """The columns get names of their own, which Spark does not ask for."""

    def query(streams: Streams) -> DataFrame:
        left = streams["left"].withWatermark("eventTime", left_delay).alias("l")
        right = streams["right"].withWatermark("eventTime", right_delay).alias("r")
        near = "l.id = r.id AND l.eventTime BETWEEN r.eventTime - INTERVAL 30 seconds AND r.eventTime + INTERVAL 30 seconds"
        joined = left.join(right, F.expr(near), "leftOuter")
        columns = ("l.eventTime", "l.id", "l.comment", "r.eventTime", "r.id", "r.name")
        return joined.select(*(F.col(column).alias(f"c{place}") for place, column in enumerate(columns)))

    return query


def _nullable(streams: Streams) -> DataFrame:
    left, right = (
        streams[side].selectExpr(
            f"_1 AS {side}Key1", f"_2 AS {side}Key2", f"timestamp_seconds(_2) AS {side}Time", f"_2 * {times} AS {side}Value"
        ).withWatermark(f"{side}Time", "10 seconds")
        .select(f"{side}Key1", f"{side}Key2", F.window(f"{side}Time", "10 second").alias(f"{side}Window"), f"{side}Value")
        for side, times in (("left", 2), ("right", 3))
    )  # fmt: skip
    same = F.expr("leftKey1 <=> rightKey1 AND leftKey2 = rightKey2 AND leftWindow = rightWindow")
    joined = left.join(right, same, "left_outer")
    end = F.col("leftWindow.end").cast("long").alias("end")
    return joined.select("leftKey1", "rightKey1", "leftKey2", "rightKey2", end, "leftValue", "rightValue")


def _by_key_and_time(streams: Streams) -> DataFrame:
    left, right = (
        streams[side].selectExpr("key", "timestamp_seconds(time) AS eventTime").withWatermark("eventTime", "0 seconds")
        for side in ("left", "right")
    )
    joined = left.join(right, ["key", "eventTime"], "leftOuter")
    return joined.selectExpr("key", "CAST(eventTime AS LONG) AS eventTime")


def _three_by_time(streams: Streams) -> DataFrame:
    first, second, third = (
        streams[name].selectExpr("timestamp_seconds(_1) AS eventTime", f"_2 AS v{number}").withWatermark("eventTime", "0 seconds")
        for number, name in enumerate(("first", "second", "third"), start=1)
    )  # fmt: skip
    joined = first.join(second, ["eventTime"], "leftOuter").join(third, ["eventTime"], "leftOuter")
    return joined.selectExpr("CAST(eventTime AS LONG) AS eventTime", "v1", "v2", "v3")


def _excluded(left: list[int], right: list[int], first: Sequence[Any], second: Sequence[Any] = ()) -> list[Step]:
    """The steps of "early state exclusion", but for the end."""
    return [
        Add({"left": left, "right": right}), NewRows(first),
        Add({"left": [20], "right": [21]}), NewRows(second),
    ]  # fmt: skip


def _windowed_steps(unmatched: Sequence[Any]) -> list[Step]:
    return [
        Add({"left": range(1, 6), "right": range(3, 8)}), NewRows([(3, 10, 6, 9), (4, 10, 8, 12), (5, 10, 10, 15)]),
        Add({"left": [21], "right": [22]}), NewRows(unmatched),
        Add({"left": [22]}), NewRows([(22, 30, 44, 66)]),
    ]  # fmt: skip


def _range_steps(unmatched: tuple[Any, ...]) -> list[Step]:
    return [
        Add({"left": [(1, 5), (3, 5)]}), AllRows(),
        Add({"right": [(1, 10), (2, 5)]}), NewRows([(1, 1, 5, 10)]),
        Add({"right": [(1, 11)]}), NewRows(),
        Add({"left": [(1, 7), (1, 30)]}), NewRows([(1, 1, 7, 10), (1, 1, 7, 11)]),
        Add({"right": [(0, 30)]}), NewRows([unmatched]),
    ]  # fmt: skip


def _long_range_steps(unmatched: tuple[Any, ...]) -> list[Step]:
    return [
        Add({"left": [(1, 210), (3, 5)]}), AllRows(),
        Add({"right": [(1, 300), (2, 5)]}), NewRows([(1, 1, 210, 300)]),
        Add({"right": [(1, 450)]}), NewRows(),
        Add({"left": [(1, 260), (1, 1800)]}), NewRows([(1, 1, 260, 300), (1, 1, 260, 450)]),
        Add({"right": [(0, 1800)]}), NewRows([unmatched]),
    ]  # fmt: skip


def _range_cases(how: str, unmatched: tuple[Any, ...]) -> list[Case]:
    test = f"{how.replace('_', ' ')} with watermark range condition"
    minutes = {"3 minutes 30 seconds": "interval 3 minutes 30 seconds", "3:30": "interval '3:30' minute to second"}
    return [
        Case(test, _range_join(how), _range_steps(unmatched), schemas=KEYED, part="5 seconds"),
        *(
            Case(test, _range_join(how, "10 minutes", bound), _long_range_steps(unmatched), schemas=KEYED, part=part)
            for part, bound in minutes.items()
        ),
    ]  # fmt: skip


def _self_steps(third: Sequence[Any], others: Sequence[Any] = ()) -> list[Step]:
    return [
        _numbers(1), NewRows(_same(2, 4)),
        _numbers(6), NewRows(_same(6, 8, 10)),
        _numbers(11), NewRows([*_same(12, 14), *third, *others]),
    ]  # fmt: skip


AT_20: list[Step] = [Add({"right": [20]}), NewRows([(20, 30, 40, "60")])]
DAY = "2020-01-02"
OUTER_JOIN = Suite(
    "StreamingOuterJoinSuite",
    SOURCE,
    [
        Case("left outer early state exclusion on left", _conditional_join("left_outer", OF_LEFT), [
            *_excluded([1, 2, 3], [3, 4, 5], [(3, 10, 6, "9"), (1, 10, 2, None), (2, 10, 4, None)]),
            Stop(), Start(), *AT_20,
        ], schemas=SIDES),
        Case("left outer early state exclusion on right", _conditional_join("left_outer", OF_RIGHT), [
            *_excluded([3, 4, 5], [1, 2, 3], [(3, 10, 6, "9")], [(4, 10, 8, None), (5, 10, 10, None)]), *AT_20,
        ], schemas=SIDES),
        Case("right outer early state exclusion on left", _conditional_join("right_outer", OF_LEFT), [
            *_excluded([1, 2, 3], [3, 4, 5], [(3, 10, 6, "9")], [(4, 10, None, "12"), (5, 10, None, "15")]), *AT_20,
        ], schemas=SIDES),
        Case("right outer early state exclusion on right", _conditional_join("right_outer", OF_RIGHT), [
            *_excluded([3, 4, 5], [1, 2, 3], [(3, 10, 6, "9"), (1, 10, None, "3"), (2, 10, None, "6")]), *AT_20,
        ], schemas=SIDES),
        Case("windowed left outer join", _windowed_join("left_outer"),
             _windowed_steps([(1, 10, 2, None), (2, 10, 4, None)]), schemas=SIDES, quick=True),
        Case("windowed right outer join", _windowed_join("right_outer"),
             _windowed_steps([(6, 10, None, 18), (7, 10, None, 21)]), schemas=SIDES),
        *_range_cases("left_outer", (3, None, 5, None)),
        *_range_cases("right_outer", (None, 2, None, 5)),
        Case("left outer join with non-key condition violated", _violated, [
            Add({"left": [1, 2, 3], "right": [1, 2, 3]}), NewRows([(1, 10, 2, None), (2, 10, 4, None), (3, 10, 6, None)]),
            Add({"left": [20], "right": [21]}), NewRows(),
            Add({"right": [20]}), NewRows([(20, 30, 40, 60)]),
            Add({"left": [40, 41], "right": [40, 41]}), NewRows([(40, 50, 80, 120), (41, 50, 82, 123)]),
            Add({"left": [70], "right": [71]}), NewRows(),
            Add({"right": [70]}), NewRows([(70, 80, 140, 210)]),
            Add({"left": [101, 102, 103], "right": [101, 102, 103]}), NewRows(),
            Add({"left": [1000], "right": [1001]}),
            NewRows([(101, 110, 202, None), (102, 110, 204, None), (103, 110, 206, None)]),
        ], schemas=SIDES),
        Case("SPARK-26187 self left outer join should not return outer nulls for already matched rows",
             _self_join("left_outer"), _self_steps([(1, 1, None, None), (3, 3, None, None)]), schemas=SELF),
        Case("SPARK-26187 self right outer join should not return outer nulls for already matched rows",
             _self_join("right_outer", flipped=True), _self_steps([(None, None, 1, 1), (None, None, 3, 3)]),
             schemas=SELF),
        Case("SPARK-29438: ensure UNION doesn't lead stream-stream join to use shifted partition IDs", _united, [
            Add({"input": [11, 12, 13], "left": range(11, 16), "right": range(13, 18)}, files=2),
            NewRows([(11, 11, 11), (12, 12, 12), (13, 13, 13), (13, 26, 39), (14, 28, 42), (15, 30, 45)]),
            Stop(), Start(),
            Add({"input": [21, 22, 23], "left": range(21, 26), "right": range(23, 28)}, files=3),
            NewRows([(21, 21, 21), (22, 22, 22), (23, 23, 23), (23, 46, 69), (24, 48, 72), (25, 50, 75)]),
        ], schemas={"input": "value int", **SIDES}),
        Case("SPARK-32148 stream-stream join regression on Spark 3.0.0", _dated("2 minutes", "4 minutes"), [
            Add({
                "left": [("2020-01-01 00:00:00", "abc", "has no join partner"), (f"{DAY} 00:00:00", "abc", "joined with A"),
                         (f"{DAY} 01:00:00", "abc", "joined with B")],
                "right": [(f"{DAY} 00:00:10", "abc", "A"), (f"{DAY} 00:59:59", "abc", "B"), (f"{DAY} 02:00:00", "abc", "C")],
            }),
            NewRows([
                ("2020-01-01 00:00:00", "abc", "has no join partner", None, None, None),
                (f"{DAY} 00:00:00", "abc", "joined with A", f"{DAY} 00:00:10", "abc", "A"),
                (f"{DAY} 01:00:00", "abc", "joined with B", f"{DAY} 00:59:59", "abc", "B"),
            ]),
        ], schemas=DATED),
        Case("left-outer: joining non-nullable left join key with nullable right join key", _nullable, [
            Add({"left": [(1, n) for n in range(1, 6)]}), Add({"right": [(1, n) for n in range(3, 7)]}),
            NewRows([(1, 1, 3, 3, 10, 6, 9), (1, 1, 4, 4, 10, 8, 12), (1, 1, 5, 5, 10, 10, 15)]),
            Add({"left": [(1, 21)]}), Add({"right": [(1, 22)]}),
            NewRows([(1, None, 1, None, 10, 2, None), (1, None, 2, None, 10, 4, None)]),
        ], schemas=PAIRS),
        Case("left-outer: joining nullable left join key with non-nullable right join key", _nullable, [
            Add({"left": [(1, 1), (None, 2), (1, 3), (1, 4), (1, 5)]}), Add({"right": [(1, n) for n in range(3, 7)]}),
            NewRows([(1, 1, 3, 3, 10, 6, 9), (1, 1, 4, 4, 10, 8, 12), (1, 1, 5, 5, 10, 10, 15)]),
            Add({"left": [(1, 21)]}), Add({"right": [(1, 22)]}),
            NewRows([(1, None, 1, None, 10, 2, None), (None, None, 2, None, 10, 4, None)]),
        ], schemas=PAIRS),
        Case("left-outer: joining nullable left join key with nullable right join key", _nullable, [
            Add({"left": [(1, 1), (None, 2), (1, 3), (None, 4), (1, 5)]}),
            Add({"right": [(1, 3), (None, 4), (1, 5), (1, 6)]}),
            NewRows([(1, 1, 3, 3, 10, 6, 9), (None, None, 4, 4, 10, 8, 12), (1, 1, 5, 5, 10, 10, 15)]),
            Add({"left": [(1, 21)]}), Add({"right": [(1, 22)]}),
            NewRows([(1, None, 1, None, 10, 2, None), (None, None, 2, None, 10, 4, None)]),
        ], schemas=PAIRS),
        Case("SPARK-38684: outer join works correctly even if processing input rows and evicting state rows for same "
             "grouping key happens in the same micro-batch", _dated("0 second", "0 second"), [
            Add({"left": [(f"{DAY} 00:00:00", "abc", "left in batch 1")],
                 "right": [(f"{DAY} 00:01:00", "abc", "right in batch 1")]}), NewRows(),
            Add({"left": [(f"{DAY} 01:00:00", "abc", "left in batch 2")],
                 "right": [(f"{DAY} 01:01:00", "abc", "right in batch 2")]}), NewRows(),
            Add({"left": [(f"{DAY} 01:30:00", "abc", "left in batch 3")]}),
            NewRows([(f"{DAY} 00:00:00", "abc", "left in batch 1", None, None, None)]),
            Add({"right": [(f"{DAY} 01:30:10", "abc", "match with left in batch 3")]}),
            NewRows([
                (f"{DAY} 01:00:00", "abc", "left in batch 2", None, None, None),
                (f"{DAY} 01:30:00", "abc", "left in batch 3", f"{DAY} 01:30:10", "abc", "match with left in batch 3"),
            ]),
        ], schemas=DATED, no_data_batches=False),
        Case("SPARK-49829 left-outer join, input being unmatched is between WM for late event and WM for eviction",
             _by_key_and_time, [
            Add({"left": [("a", 1), ("b", 2)], "right": [("b", 2), ("c", 1)]}), NewRows([("b", 2)]),
            Add({"left": [("d", 1)]}), NewRows([("a", 1), ("d", 1)]),
        ], schemas=NAMED, no_data_batches=False),
    ],
    {"SPARK-26187 restore the stream-stream outer join query from Spark 2.4": CHECKPOINT},
)  # fmt: skip

FULL_OUTER_JOIN = Suite(
    "StreamingFullOuterJoinSuite",
    SOURCE,
    [
        Case("windowed full outer join", _windowed_join("full_outer"), [
            Add({"left": range(1, 6), "right": range(3, 8)}), NewRows([(3, 10, 6, 9), (4, 10, 8, 12), (5, 10, 10, 15)]),
            Stop(), Start(),
            Add({"left": [21], "right": [22]}),
            NewRows([(1, 10, 2, None), (2, 10, 4, None), (6, 10, None, 18), (7, 10, None, 21)]),
            Stop(), Start(),
            Add({"left": [22]}), NewRows([(22, 30, 44, 66)]),
            Stop(), Start(),
            Add({"left": [1]}), NewRows(),
            Add({"right": [5]}), NewRows(),
        ], schemas=SIDES),
        Case("full outer early state exclusion on left", _conditional_join("full_outer", OF_LEFT), [
            *_excluded(
                [1, 2, 3], [3, 4, 5],
                [(1, 10, 2, None, None, None), (2, 10, 4, None, None, None), (3, 10, 6, 3, 10, "9")],
                [(None, None, None, 4, 10, "12"), (None, None, None, 5, 10, "15")],
            ),
            Add({"right": [20]}), NewRows([(20, 30, 40, 20, 30, "60")]),
        ], schemas=SIDES),
        Case("full outer early state exclusion on right", _conditional_join("full_outer", OF_RIGHT), [
            *_excluded(
                [3, 4, 5], [1, 2, 3],
                [(None, None, None, 1, 10, "3"), (None, None, None, 2, 10, "6"), (3, 10, 6, 3, 10, "9")],
                [(4, 10, 8, None, None, None), (5, 10, 10, None, None, None)],
            ),
            Add({"right": [20]}), NewRows([(20, 30, 40, 20, 30, "60")]),
        ], schemas=SIDES),
        Case("full outer join with watermark range condition", _range_join("full_outer"), [
            Add({"left": [(1, 5), (3, 5)]}), NewRows(),
            Add({"right": [(1, 10), (2, 5)]}), NewRows([(1, 1, 5, 10)]),
            Add({"right": [(1, 9)]}), NewRows([(1, 1, 5, 9)]),
            Add({"left": [(1, 7), (1, 30)]}), NewRows([(1, 1, 7, 9), (1, 1, 7, 10)]),
            Add({"right": [(0, 30)]}), NewRows([(3, None, 5, None), (None, 2, None, 5)]),
        ], schemas=KEYED),
        Case("self full outer join", _self_join("full_outer"),
             _self_steps([(1, 1, None, None), (3, 3, None, None)]), schemas=SELF),
    ],
    {},
)  # fmt: skip

LEFT_SEMI_JOIN = Suite(
    "StreamingLeftSemiJoinSuite",
    SOURCE,
    [
        Case("windowed left semi join", _windowed_join("left_semi"), [
            Add({"left": range(1, 6), "right": range(3, 8)}), NewRows([(3, 10, 6), (4, 10, 8), (5, 10, 10)]),
            Add({"left": [21], "right": [22]}), NewRows(),
            Stop(), Start(),
            Add({"left": [22]}), NewRows([(22, 30, 44)]),
            Stop(), Start(),
            Add({"left": [1]}), NewRows(),
            Add({"right": [5]}), NewRows(),
        ], schemas=SIDES),
        Case("left semi early state exclusion on left", _conditional_join("left_semi", OF_LEFT), [
            *_excluded([1, 2, 3], [3, 4, 5], [(3, 10, 6)]), Add({"right": [20]}), NewRows([(20, 30, 40)]),
        ], schemas=SIDES),
        Case("left semi early state exclusion on right", _conditional_join("left_semi", OF_RIGHT), [
            *_excluded([3, 4, 5], [1, 2, 3], [(3, 10, 6)]), Add({"right": [20]}), NewRows([(20, 30, 40)]),
        ], schemas=SIDES),
        Case("left semi join with watermark range condition", _range_join("left_semi"), [
            Add({"left": [(1, 5), (3, 5)]}), NewRows(),
            Add({"right": [(1, 10), (2, 5)]}), NewRows([(1, 5)]),
            Add({"right": [(1, 9)]}), NewRows(),
            Add({"left": [(1, 7), (1, 30)]}), NewRows([(1, 7)]),
            Add({"right": [(0, 30)]}), NewRows(),
        ], schemas=KEYED),
        Case("self left semi join", _self_join("left_semi"), [
            _numbers(1), NewRows([(2, 2), (4, 4)]),
            _numbers(6), NewRows([(6, 6), (8, 8), (10, 10)]),
            _numbers(11), NewRows([(12, 12), (14, 14)]),
        ], schemas=SELF),
        Case("SPARK-49829 two chained stream-stream left outer joins among three input streams", _three_by_time, [
            Add({"first": [(20, 1)], "second": [(20, 1)], "third": [(20, 1)]}), NewRows([(20, 1, 1, 1)]),
            Add({"first": [(21, 2)], "second": [(21, 2)]}), NewRows(),
            Add({"first": [(22, 3)], "third": [(22, 3)]}), NewRows(),
            Add({"first": [(23, 4)]}), NewRows([(21, 2, 2, None)]),
            Add({"first": [(24, 5)], "second": [(24, 5)], "third": [(24, 5)]}), NewRows([(24, 5, 5, 5)]),
            Add({"first": [(100, 6)]}), NewRows([(22, 3, None, 3), (23, 4, None, None)]),
        ], schemas=THREE, no_data_batches=False),
    ],
    {},
)  # fmt: skip
