"""The boundary between Stillstate and Spark: sessions, columns, SQL text, executors, and errors that cross it."""
