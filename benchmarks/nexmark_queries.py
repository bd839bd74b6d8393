"""NEXMark's queries, each as a job of ours, as a streaming query of Spark's, and as a batch query that both must agree with.

Numbers and meanings as in nexmark-flink. What is written here is what a user would write: nothing is arranged for either
engine. A query that emits updates is judged by the last row of each key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F

from benchmarks.processors import DAY_COLUMNS, DayStatistics, OwnBids, TopBids
from state_runtime import aggregates, windows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from state_runtime import StreamingJob
    from state_runtime.job import Stream

__all__ = ["QUERIES", "Query"]

DELAY = "4 seconds"
BEGINS = "timestamp_seconds(unix_seconds(date_time) div 10 * 10)"
"""Of the ten seconds that an event lies in."""

Peer = Callable[["DataFrame"], "DataFrame"]
Ours = Callable[["StreamingJob", "DataFrame"], "Stream"]


@dataclass(frozen=True)
class Query:
    """One query.

    Attributes:
        keys: of what is emitted again with every update; none if each row is emitted once.
        time: the column that says whether a row of the answer is complete; none if each is at once.
        peer: Spark's streaming query over the events.
        ours: the same as a job.
        batch: the whole answer over events that are not a stream; as `peer`, unless Spark has no such query.
        compared: what of a job's answer is compared with it; all, unless the answer depends on the clock.
        mode: output mode of Spark's.
        sink: both write Parquet files; else both drop what they computed.
        reads: how often Spark's plan reads each row.
    """

    title: str
    ours: Ours
    peer: Peer
    mode: Literal["append", "update"]
    keys: tuple[str, ...] = ()
    time: str = ""
    batch: Peer | None = None
    compared: Peer | None = None
    sink: bool = False
    reads: int = 1

    @property
    def answer(self) -> Peer:
        """The batch query."""
        return self.batch or self.peer


def bids(events: DataFrame) -> DataFrame:
    return events.where("event_type = 2").select("bid.*").withWatermark("date_time", DELAY)


def auctions(events: DataFrame) -> DataFrame:
    return events.where("event_type = 1").select("auction.*").withWatermark("date_time", DELAY)


def people(events: DataFrame) -> DataFrame:
    return events.where("event_type = 0").select("person.*").withWatermark("date_time", DELAY)


# --- stateless ------------------------------------------------------------------------------------------------------

CHANNEL_ID = (
    "CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3' "
    "ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END"
)
HOURS = "CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime' WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 "
STATELESS: Mapping[str, tuple[str, Peer]] = {
    "q0": ("pass through", lambda b: b.select("auction", "bidder", "price", "date_time", "extra")),
    "q1": ("currency", lambda b: b.selectExpr("auction", "bidder", "0.908 * price AS price", "date_time", "extra")),
    "q2": ("selection", lambda b: b.where("auction % 123 = 0").select("auction", "price")),
    "q14": (
        "calculation",
        lambda b: b.where("0.908 * price > 1000000 AND 0.908 * price < 50000000").selectExpr(
            "auction", "bidder", "0.908 * price AS price", HOURS + "THEN 'nightTime' ELSE 'otherTime' END AS time",
            "date_time", "extra", "length(extra) - length(replace(extra, 'c', '')) AS c_counts",
        ),
    ),
    "q21": (
        "channel id",
        lambda b: b.selectExpr("auction", "bidder", "price", "channel", f"{CHANNEL_ID} AS channel_id").where(
            "channel_id != ''"
        ),
    ),
    "q22": (
        "url split",
        lambda b: b.selectExpr(
            "auction", "bidder", "price", "channel",
            *(f"split_part(url, '/', {place}) AS dir{number}" for number, place in enumerate((4, 5, 6), 1)),
        ),
    ),
}  # fmt: skip


def _stateless(title: str, change: Peer) -> Query:
    def ours(job: StreamingJob, events: DataFrame) -> Stream:
        return job.read(bids(events)).transform(change)

    return Query(title, ours, lambda events: change(bids(events)), "append", sink=True)


# --- aggregates -----------------------------------------------------------------------------------------------------


def _our_q5(job: StreamingJob, events: DataFrame) -> Stream:
    counted = job.read(bids(events)).key_by("auction").window(
        windows.sliding("10 seconds", "2 seconds"), uid="bids", output_mode="append", num=aggregates.count()
    )  # fmt: skip
    # Of the windows that end together the greatest count: a tumbling window around their end.
    return counted.transform(
        lambda df: df.selectExpr("1 AS all", "window_time(window) AS ends", "num")
    ).key_by("all").window(
        windows.tumbling("2 seconds"), uid="most", output_mode="append", num=aggregates.max("num")
    ).transform(lambda df: df.selectExpr("window.end AS ends", "num"))  # fmt: skip


def _peer_q5(events: DataFrame) -> DataFrame:
    counted = bids(events).groupBy(F.window("date_time", "10 seconds", "2 seconds"), "auction").count()
    most = counted.groupBy(F.window(F.window_time("window"), "2 seconds")).agg(F.max("count").alias("num"))
    return most.selectExpr("window.end AS ends", "num")


def _our_q11(job: StreamingJob, events: DataFrame) -> Stream:
    return job.read(bids(events)).key_by("bidder").window(
        windows.session("10 seconds"), uid="sessions", output_mode="append", bid_count=aggregates.count()
    ).transform(lambda df: df.selectExpr("bidder", "bid_count", "window.start AS begins", "window.end AS ends"))  # fmt: skip


def _peer_q11(events: DataFrame) -> DataFrame:
    counted = bids(events).groupBy("bidder", F.session_window("date_time", "10 seconds").alias("window"))
    return counted.agg(F.count("*").alias("bid_count")).selectExpr(
        "bidder", "bid_count", "window.start AS begins", "window.end AS ends"
    )


_RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")


def _ranked(frame: DataFrame) -> DataFrame:
    ranks = [f"CASE WHEN {rank} THEN 1 END AS rank{number}" for number, rank in enumerate(_RANKS, 1)]
    return frame.selectExpr("*", "date_format(date_time, 'yyyy-MM-dd') AS day", *ranks)


def _our_q17(job: StreamingJob, events: DataFrame) -> Stream:
    return job.read(bids(events)).transform(_ranked).key_by("auction", "day").aggregate(
        uid="stats",
        total_bids=aggregates.count(),
        rank1_bids=aggregates.count("rank1"),
        rank2_bids=aggregates.count("rank2"),
        rank3_bids=aggregates.count("rank3"),
        min_price=aggregates.min("price"),
        max_price=aggregates.max("price"),
        avg_price=aggregates.avg("price"),
        sum_price=aggregates.sum("price"),
    )  # fmt: skip


def _peer_q17(events: DataFrame) -> DataFrame:
    return _ranked(bids(events)).groupBy("auction", "day").agg(
        F.count("*").alias("total_bids"),
        *(F.count(f"rank{n}").alias(f"rank{n}_bids") for n in (1, 2, 3)),
        F.min("price").alias("min_price"),
        F.max("price").alias("max_price"),
        F.avg("price").alias("avg_price"),
        F.sum("price").alias("sum_price"),
    )  # fmt: skip


def _our_q16(job: StreamingJob, events: DataFrame) -> Stream:
    return job.read(bids(events)).transform(_ranked).key_by("channel", "day").aggregate(
        uid="stats",
        total_bids=aggregates.count(),
        rank1_bids=aggregates.count("rank1"),
        total_bidders=aggregates.count_distinct_approx("bidder"),
        total_auctions=aggregates.count_distinct_approx("auction"),
    )  # fmt: skip


def _peer_q16(events: DataFrame) -> DataFrame:
    return _ranked(bids(events)).groupBy("channel", "day").agg(
        F.count("*").alias("total_bids"),
        F.count("rank1").alias("rank1_bids"),
        F.approx_count_distinct("bidder").alias("total_bidders"),
        F.approx_count_distinct("auction").alias("total_auctions"),
    )  # fmt: skip


def _our_q18(job: StreamingJob, events: DataFrame) -> Stream:
    return (
        job.read(bids(events)).key_by("bidder", "auction").latest_by("date_time", "price", "channel", "url", uid="last")
    )


def _peer_q18(events: DataFrame) -> DataFrame:
    newest = F.max_by(F.struct("date_time", "price", "channel", "url"), "date_time").alias("last")
    return bids(events).groupBy("bidder", "auction").agg(newest).select("bidder", "auction", "last.*")


def _our_q7(job: StreamingJob, events: DataFrame) -> Stream:
    return job.read(bids(events)).window(
        windows.tumbling("10 seconds"), uid="highest", output_mode="append",
        **{column: aggregates.max_by(column, "price") for column in ("auction", "bidder", "price")},
    ).transform(lambda df: df.selectExpr("auction", "bidder", "price", "window.end AS ends"))  # fmt: skip


def _peer_q7(events: DataFrame) -> DataFrame:
    highest = F.max_by(F.struct("auction", "bidder", "price"), "price").alias("highest")
    window = F.window("date_time", "10 seconds")
    return bids(events).groupBy(window).agg(highest).selectExpr("highest.*", "window.end AS ends")


def _batch_q7(events: DataFrame) -> DataFrame:
    windowed = bids(events).selectExpr("auction", "bidder", "price", f"{BEGINS} + INTERVAL 10 SECONDS AS ends")
    return windowed.groupBy("ends").agg(F.max("price").alias("price")).join(windowed, ["ends", "price"]).select(
        "auction", "bidder", "price", "ends"
    )  # fmt: skip


def _arrivals(events: DataFrame) -> DataFrame:
    arrived = events.where("event_type = 2").selectExpr("bid.bidder", "current_timestamp() AS arrived")
    return arrived.withWatermark("arrived", "0 seconds")


def _our_q12(job: StreamingJob, events: DataFrame) -> Stream:
    return job.read(_arrivals(events)).key_by("bidder").window(
        windows.tumbling("10 seconds"), uid="arrivals", output_mode="update", bid_count=aggregates.count()
    ).transform(lambda df: df.selectExpr("bidder", "window.start AS begins", "bid_count"))  # fmt: skip


def _peer_q12(events: DataFrame) -> DataFrame:
    counted = _arrivals(events).groupBy("bidder", F.window("arrived", "10 seconds").alias("window"))
    return counted.agg(F.count("*").alias("bid_count")).selectExpr("bidder", "window.start AS begins", "bid_count")


def _batch_q12(events: DataFrame) -> DataFrame:
    return bids(events).groupBy("bidder").agg(F.count("*").alias("bid_count"))


def _sums_q12(answer: DataFrame) -> DataFrame:
    return answer.groupBy("bidder").agg(F.sum("bid_count").alias("bid_count"))


# --- joins ----------------------------------------------------------------------------------------------------------


def _sellers(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    return (
        people(events).selectExpr("id", "name", f"{BEGINS} AS begins", "date_time"),
        auctions(events).selectExpr("seller", f"{BEGINS} AS begins_too", "date_time AS auction_time"),
    )


def _our_q8(job: StreamingJob, events: DataFrame) -> Stream:
    left, right = _sellers(events)
    keyed = job.read(left).key_by("id", "begins")
    return keyed.interval_join(
        right, right_keys=("seller", "begins_too"), lower="-10 seconds", upper="10 seconds", uid="join"
    ).transform(lambda df: df.select("id", "name", "begins", "auction_time"))  # fmt: skip


def _peer_q8(events: DataFrame) -> DataFrame:
    left, right = _sellers(events)
    near = "auction_time >= date_time - INTERVAL 10 SECONDS AND auction_time <= date_time + INTERVAL 10 SECONDS"
    joined = left.join(right, F.expr(f"id = seller AND begins = begins_too AND {near}"))
    return joined.select("id", "name", "begins", "auction_time")


def _offers(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    return (
        auctions(events).where("category = 10").select("id", "item_name", "seller", "category", "date_time"),
        bids(events).selectExpr("auction", "bidder", "price", "channel", "url", "date_time AS bid_time"),
    )


def _our_q20(job: StreamingJob, events: DataFrame) -> Stream:
    left, right = _offers(events)
    keyed = job.read(left).key_by("id")
    return keyed.interval_join(right, right_keys=("auction",), lower="0 seconds", upper="20 seconds", uid="join").transform(
        lambda df: df.select("id", "item_name", "bidder", "price", "url", "bid_time")
    )  # fmt: skip


def _peer_q20(events: DataFrame) -> DataFrame:
    left, right = _offers(events)
    near = "bid_time >= date_time AND bid_time <= date_time + INTERVAL 20 SECONDS"
    joined = left.join(right, F.expr(f"id = auction AND {near}"))
    return joined.select("id", "item_name", "bidder", "price", "url", "bid_time")


def _local(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    return (
        people(events).where("state IN ('OR', 'ID', 'CA')").select("id", "name", "city", "state", "date_time"),
        auctions(events).where("category = 10").selectExpr("id AS auction", "seller", "date_time AS auction_time"),
    )


def _our_q3(job: StreamingJob, events: DataFrame) -> Stream:
    left, right = _local(events)
    keyed = job.read(left).key_by("id")
    return keyed.interval_join(right, right_keys=("seller",), lower="-1 hour", upper="1 hour", uid="join").transform(
        lambda df: df.select("name", "city", "state", "auction", "auction_time")
    )  # fmt: skip


def _peer_q3(events: DataFrame) -> DataFrame:
    left, right = _local(events)
    near = "auction_time >= date_time - INTERVAL 1 HOUR AND auction_time <= date_time + INTERVAL 1 HOUR"
    joined = left.join(right, F.expr(f"id = seller AND {near}"))
    return joined.select("name", "city", "state", "auction", "auction_time")


LONGEST = "30 seconds"
"""Of an auction: after its end no bid counts, and this long before it none was there."""


def _contests(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    opened = events.where("event_type = 1").select("auction.*").withWatermark("expires", "34 seconds")
    return (
        opened.select("id", "item_name", "date_time", "expires"),
        bids(events).selectExpr("auction", "bidder", "price", "date_time AS bid_time"),
    )


def _our_q9(job: StreamingJob, events: DataFrame) -> Stream:
    left, right = _contests(events)
    joined = job.read(left).key_by("id").interval_join(
        right, right_keys=("auction",), lower=f"-{LONGEST}", upper="0 seconds", uid="join"
    )  # fmt: skip
    return joined.transform(lambda df: df.where("bid_time >= date_time")).key_by("id").latest_by(
        ["price", "bid_time"], "item_name", "bidder", uid="winner", ascending=[False, True]
    ).transform(lambda df: df.select("id", "item_name", "bidder", "price", "bid_time"))  # fmt: skip


def _bids_in_time(events: DataFrame) -> DataFrame:
    left, right = _contests(events)
    near = f"bid_time >= date_time AND bid_time <= expires AND bid_time >= expires - INTERVAL {LONGEST}"
    return left.join(right, F.expr(f"id = auction AND {near}"))


def _peer_q9(events: DataFrame) -> DataFrame:
    first = F.expr("struct(price, -unix_micros(bid_time))")
    winner = F.max_by(F.struct("item_name", "bidder", "price", "bid_time"), first).alias("winner")
    return _bids_in_time(events).groupBy("id", "expires").agg(winner).select("id", "winner.*")


# --- a class of the user's ------------------------------------------------------------------------------------------

TOP_SCHEMA = "auction bigint, top array<bigint>"


def _our_q19(job: StreamingJob, events: DataFrame) -> Stream:
    keyed = job.read(bids(events).select("auction", "price")).key_by("auction")
    return keyed.transform_with_state(TopBids(), output_schema=TOP_SCHEMA, uid="top")


def _peer_q19(events: DataFrame) -> DataFrame:
    keyed = bids(events).select("auction", "price").groupBy("auction")
    return keyed.transformWithState(TopBids(), TOP_SCHEMA, "Update", "None")


def _batch_q19(events: DataFrame) -> DataFrame:
    prices = F.slice(F.sort_array(F.collect_list("price"), asc=False), 1, 10)
    return bids(events).groupBy("auction").agg(prices.alias("top"))


DAY_SCHEMA = ", ".join(f"{name} {'bigint' if number else 'string'}" for number, name in enumerate(DAY_COLUMNS))


def _days(events: DataFrame) -> DataFrame:
    rank = f"CASE WHEN {_RANKS[0]} THEN 1 WHEN {_RANKS[1]} THEN 2 ELSE 3 END AS rank"
    return bids(events).selectExpr("date_format(date_time, 'yyyy-MM-dd') AS day", rank, "bidder", "auction")


def _our_q15(job: StreamingJob, events: DataFrame) -> Stream:
    keyed = job.read(_days(events)).key_by("day")
    return keyed.transform_with_state(DayStatistics(), output_schema=DAY_SCHEMA, uid="statistics")


def _peer_q15(events: DataFrame) -> DataFrame:
    return _days(events).groupBy("day").transformWithState(DayStatistics(), DAY_SCHEMA, "Update", "None")


def _batch_q15(events: DataFrame) -> DataFrame:
    counted = [("bids", "count(1)"), ("bidders", "count(DISTINCT bidder)"), ("auctions", "count(DISTINCT auction)")]
    columns = [
        F.expr(f"{count} FILTER (WHERE {where})").alias(f"{rank}_{what}")
        for what, count in counted
        for rank, where in (("total", "true"), *((f"rank{n}", f"rank = {n}") for n in (1, 2, 3)))
    ]
    return _days(events).groupBy("day").agg(*columns)


OWN_SCHEMA = "bidder bigint, name string, item_name string, price bigint, url string"


def _three(events: DataFrame) -> DataFrame:
    person, auction = (f"event_type = {kind}" for kind in (0, 1))
    return events.selectExpr(
        f"CASE WHEN {person} THEN person.id WHEN {auction} THEN auction.seller ELSE bid.bidder END AS id",
        "event_type AS kind",
        f"CASE WHEN {person} THEN person.name WHEN {auction} THEN auction.item_name ELSE bid.url END AS text",
        "bid.price",
    )


def _our_q23(job: StreamingJob, events: DataFrame) -> Stream:
    keyed = job.read(_three(events)).key_by("id")
    return keyed.transform_with_state(OwnBids(), output_schema=OWN_SCHEMA, uid="join")


def _peer_q23(events: DataFrame) -> DataFrame:
    return _three(events).groupBy("id").transformWithState(OwnBids(), OWN_SCHEMA, "Append", "None")


def _batch_q23(events: DataFrame) -> DataFrame:
    person, auction, bid = (_three(events).where(f"kind = {kind}").alias(f"of{kind}") for kind in (0, 1, 2))
    joined = bid.join(person, "id").join(auction, "id")
    return joined.selectExpr(
        "id AS bidder", "of0.text AS name", "of1.text AS item_name", "of2.price", "of2.text AS url"
    )


QUERIES: Mapping[str, Query] = {
    **{name: _stateless(title, change) for name, (title, change) in STATELESS.items()},
    "q5": Query("hot items", _our_q5, _peer_q5, "append", time="ends"),
    "q11": Query("sessions", _our_q11, _peer_q11, "append", time="ends"),
    "q16": Query("channels, approximate distinct", _our_q16, _peer_q16, "update", keys=("channel", "day")),
    "q17": Query("auction statistics", _our_q17, _peer_q17, "update", keys=("auction", "day")),
    "q18": Query("last bid", _our_q18, _peer_q18, "update", keys=("bidder", "auction")),
    "q7": Query("highest bid", _our_q7, _peer_q7, "append", time="ends", batch=_batch_q7),
    "q12": Query(
        "processing-time windows",
        _our_q12,
        _peer_q12,
        "update",
        keys=("bidder", "begins"),
        batch=_batch_q12,
        compared=_sums_q12,
    ),
    "q3": Query("local items, join", _our_q3, _peer_q3, "append", time="auction_time", reads=2),
    "q8": Query("new sellers, join", _our_q8, _peer_q8, "append", time="auction_time", reads=2),
    "q20": Query("bids with auction, join", _our_q20, _peer_q20, "append", time="bid_time", reads=2),
    "q9": Query(
        "winning bids, join", _our_q9, _peer_q9, "append", keys=("id",), time="bid_time", batch=_peer_q9, reads=2
    ),
    "q15": Query("distinct by price, rows", _our_q15, _peer_q15, "update", keys=("day",), batch=_batch_q15),
    "q23": Query("three-way join, rows", _our_q23, _peer_q23, "append", batch=_batch_q23),
    "q19": Query("top ten, rows", _our_q19, _peer_q19, "update", keys=("auction",), batch=_batch_q19),
}
