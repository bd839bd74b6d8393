"""How a run ends that was asked to stop."""

from __future__ import annotations

import threading

from state_runtime.base.errors import CorruptSegment, ProcessEnded, StoreUnavailable, UserCodeError, WorkerEnded
from state_runtime.driver.run import is_part_of_stop
from state_runtime.spark.errors import typed_error
from state_runtime.spark.java_errors import Thrown, error_of_chain

# Spark 4.3.0: what an epoch's action raised when Java got SIGTERM.
SHUT_DOWN = Thrown("org.apache.spark.SparkException", "Job 12 cancelled because SparkContext was shut down")


def test_processes_that_a_stop_signal_ends_too_are_part_of_the_stop() -> None:
    """systemd signals all of a service, `timeout` and a terminal a group: Spark's processes end in the middle of an
    epoch. The run was stopped, not lost: nobody is to start it again."""
    stop = threading.Event()
    ended = (
        error_of_chain([SHUT_DOWN]),
        error_of_chain([Thrown("a.Wrapper", "x"), Thrown("b.E", "Cannot call methods on a stopped SparkContext.")]),
        typed_error(RuntimeError("SparkException: Python worker exited unexpectedly (crashed) ... at org.")),
        ProcessEnded("Java is gone"),
    )
    for failure in ended:
        assert isinstance(failure, ProcessEnded)
        assert not is_part_of_stop(failure, stop), "nobody asked: it is a loss, and is brought back"
    stop.set()
    assert all(is_part_of_stop(failure, stop) for failure in ended)
    for other in (CorruptSegment("a"), UserCodeError("b"), StoreUnavailable("c"), ValueError("d")):
        assert not is_part_of_stop(other, stop), "it would have ended the run in any case"


def test_a_worker_that_ends_is_still_the_users_to_look_into() -> None:
    assert WorkerEnded.exit_code == UserCodeError.exit_code
    assert WorkerEnded.kind == UserCodeError.kind
