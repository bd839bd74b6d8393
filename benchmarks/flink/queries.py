"""Five of NEXMark's queries as Flink SQL, as a Flink user would write them.

After nexmark-flink (https://github.com/nexmark/nexmark), changed where `benchmarks.nexmark_queries` changes them: `q5` gives
the greatest count of a window without its auction, `q7` takes the highest bid by rank and not by a join, which is the faster
way in Flink too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["QUERIES", "SETTINGS", "FlinkQuery", "tables"]

_SINK = "sink"

SETTINGS: Mapping[str, str] = {
    # What nexmark-flink sets, with a latency of one checkpoint: rows are put together before they go to the state.
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "1s",
    "table.exec.mini-batch.size": "50000",
    "table.optimizer.agg-phase-strategy": "TWO_PHASE",
    "table.optimizer.distinct-agg.split.enabled": "true",
    "pipeline.object-reuse": "true",
    "table.local-time-zone": "UTC",
}


@dataclass(frozen=True)
class FlinkQuery:
    """One query.

    Attributes:
        columns: of its answer, as a table declares them.
        select: its text, over the view `bid`.
    """

    columns: str
    select: str

    @property
    def sink(self) -> str:
        """A table that drops what it is given."""
        return f"CREATE TABLE {_SINK} ({self.columns}) WITH ('connector' = 'blackhole')"

    @property
    def insert(self) -> str:
        """The job."""
        return f"INSERT INTO {_SINK}\n{self.select}"


def tables(folder: Path) -> list[str]:
    """The statements that make the events of a folder a table, and its bids a view.

    Only what a query may ask for is declared: Flink's Parquet reader reads no other column.
    """
    return [
        "CREATE TABLE events (event_type INT, auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, "
        "date_time TIMESTAMP(3), WATERMARK FOR date_time AS date_time - INTERVAL '4' SECOND) "
        f"WITH ('connector' = 'filesystem', 'path' = 'file://{folder}', 'format' = 'parquet')",
        "CREATE TEMPORARY VIEW bid AS SELECT auction, bidder, price, channel, url, date_time FROM events "
        "WHERE event_type = 2",
    ]


_DAY = "DATE_FORMAT(date_time, 'yyyy-MM-dd')"

QUERIES: Mapping[str, FlinkQuery] = {
    "q5": FlinkQuery(
        "ends TIMESTAMP(3), num BIGINT",
        """SELECT window_end AS ends, MAX(num) AS num
FROM (
  SELECT auction, COUNT(*) AS num, window_start, window_end
  FROM TABLE(HOP(TABLE bid, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
  GROUP BY auction, window_start, window_end
)
GROUP BY window_start, window_end""",
    ),
    "q7": FlinkQuery(
        "auction BIGINT, bidder BIGINT, price BIGINT, ends TIMESTAMP(3)",
        """SELECT auction, bidder, price, window_end AS ends
FROM (
  SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY price DESC) AS place
  FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
)
WHERE place = 1""",
    ),
    "q11": FlinkQuery(
        "bidder BIGINT, bid_count BIGINT, begins TIMESTAMP(3), ends TIMESTAMP(3)",
        """SELECT bidder, COUNT(*) AS bid_count, window_start AS begins, window_end AS ends
FROM TABLE(SESSION(TABLE bid PARTITION BY bidder, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
GROUP BY bidder, window_start, window_end""",
    ),
    "q17": FlinkQuery(
        "auction BIGINT, `day` STRING, total_bids BIGINT, rank1_bids BIGINT, rank2_bids BIGINT, rank3_bids BIGINT, "
        "min_price BIGINT, max_price BIGINT, avg_price DOUBLE, sum_price BIGINT",
        f"""SELECT
  auction,
  {_DAY} AS `day`,
  COUNT(*) AS total_bids,
  COUNT(*) FILTER (WHERE price < 10000) AS rank1_bids,
  COUNT(*) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2_bids,
  COUNT(*) FILTER (WHERE price >= 1000000) AS rank3_bids,
  MIN(price) AS min_price,
  MAX(price) AS max_price,
  AVG(CAST(price AS DOUBLE)) AS avg_price,
  SUM(price) AS sum_price
FROM bid
GROUP BY auction, {_DAY}""",
    ),
    "q18": FlinkQuery(
        "bidder BIGINT, auction BIGINT, date_time TIMESTAMP(3), price BIGINT, channel STRING, url STRING",
        """SELECT bidder, auction, date_time, price, channel, url
FROM (
  SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS place
  FROM bid
)
WHERE place = 1""",
    ),
}
