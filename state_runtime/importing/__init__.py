"""Import of another engine's state into a snapshot: of a stopped query of Spark's own `transformWithState`.

`native_checkpoint` reads Spark's logs (no Spark needed), `native_operators` matches its operators with a job's,
`native` reads the state through Spark's own reader and writes the snapshot (import it by name: it needs pyspark).
"""
