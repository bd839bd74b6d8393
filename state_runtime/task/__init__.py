"""The code that runs in a Spark task: restore → process → log → acknowledge."""
