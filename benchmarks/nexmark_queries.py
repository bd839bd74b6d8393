"""NEXMark's queries, each as a job of ours, as a streaming query of Spark's, and as a batch query that both must agree with.

Numbers and meanings as in nexmark-flink. What is written here is what a user would write: nothing is arranged for either
engine. A query that emits updates is judged by the last row of each key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F

from benchmarks.processors import TopBids
from state_runtime import aggregates, windows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from state_runtime import StreamingJob
    from state_runtime.job import Stream

__all__ = ["QUERIES", "Query"]

DELAY = "4 seconds"

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


# --- joins ----------------------------------------------------------------------------------------------------------


BEGINS = "timestamp_seconds(unix_seconds(date_time) div 10 * 10)"


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


QUERIES: Mapping[str, Query] = {
    **{name: _stateless(title, change) for name, (title, change) in STATELESS.items()},
    "q5": Query("hot items", _our_q5, _peer_q5, "append", time="ends"),
    "q11": Query("sessions", _our_q11, _peer_q11, "append", time="ends"),
    "q16": Query("channels, approximate distinct", _our_q16, _peer_q16, "update", keys=("channel", "day")),
    "q17": Query("auction statistics", _our_q17, _peer_q17, "update", keys=("auction", "day")),
    "q18": Query("last bid", _our_q18, _peer_q18, "update", keys=("bidder", "auction")),
    "q8": Query("new sellers, join", _our_q8, _peer_q8, "append", time="auction_time", reads=2),
    "q20": Query("bids with auction, join", _our_q20, _peer_q20, "append", time="bid_time", reads=2),
    "q19": Query("top ten, rows", _our_q19, _peer_q19, "update", keys=("auction",), batch=_batch_q19),
}
