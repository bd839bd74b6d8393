"""pyspark's `StatefulProcessor` with all of its handle, and our `VectorizedProcessor`: code of the user's, driven a
shard at a time."""
