"""Sources that need no connector of Spark's, and keep exact positions in snapshots.

A source is given to `read()` as it is, or opened with `load(spark)` where a query needs the DataFrame:

    job.read(sources.kafka("orders", bootstrap_servers="broker:9092"))

`from_debezium` makes columns of what Debezium writes into a topic, `from_registry` of records in a schema registry's
wire format.
"""

from __future__ import annotations

from state_runtime.sources.debezium import from_debezium
from state_runtime.sources.delta import DeltaSource as delta
from state_runtime.sources.kafka import KafkaSource as kafka
from state_runtime.sources.registry import from_registry

__all__ = ["delta", "from_debezium", "from_registry", "kafka"]
