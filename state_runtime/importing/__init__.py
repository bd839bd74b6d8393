"""Import of another engine's state into a snapshot: of a stopped query of Spark's own.

`native_checkpoint` reads Spark's logs (no Spark needed), `native_operators` matches `transformWithState` with a job's
processors, `native_queries` and `native_slots` the operators of a plain query with those of the same `job.query`.
`native` reads the state through Spark's own reader and writes the snapshot (import it by name: it needs pyspark).
"""
