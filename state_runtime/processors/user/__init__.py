"""User code driven one shard at a time: pyspark's `StatefulProcessor` with its whole handle, and Stillstate's
`VectorizedProcessor`."""
