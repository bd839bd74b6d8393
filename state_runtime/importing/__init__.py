"""Import of another engine's state into a snapshot: of a stopped query of Spark's own `transformWithState`.

`checkpoint` reads Spark's logs (no Spark needed), `operators` matches its operators with a job's, `spark` reads the
state through Spark's own reader and writes the snapshot (import it by name: it needs pyspark).
"""
