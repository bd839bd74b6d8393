"""Materialization: fold changelog into state tables (sorted Parquet), apart from the checkpoints.

`plan` decides what and when (pure), `write_tables` reads and writes, `records` has the documents in the store and how
the driver adopts them, `run` is a materialization from claim to record, `background` is the driver's thread,
`spark_job` the Spark batch job (import it by name: it needs pyspark).
"""

from __future__ import annotations

from state_runtime.materialize.background import BackgroundMaterializer
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.materialize.plan import due
from state_runtime.materialize.records import Protected, Record, apply, fits, protected
from state_runtime.materialize.run import materialize

__all__ = [
    "BackgroundMaterializer",
    "MaterializationSizes",
    "Protected",
    "Record",
    "apply",
    "due",
    "fits",
    "materialize",
    "protected",
]
