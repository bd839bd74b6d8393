"""The configuration file, the command line, launchers, and the Dagster jobs and sensors: they decide when to act.

Thin on purpose: every action is a plain function that also works from the command line and from a test without Dagster.
Nothing here imports pyspark while loading, so the code location loads without Java. User code locations import
`stillstate`.
"""
