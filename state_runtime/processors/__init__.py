"""Operators on keyed state: pyspark's StatefulProcessor and the built-in vectorised operators."""
