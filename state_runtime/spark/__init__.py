"""What stands between us and Spark: sessions, columns, SQL text, executors, and errors across its border."""
