"""Errors that come back from Spark's tasks as text: whose they are."""

from __future__ import annotations

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PythonException

from state_runtime.base.errors import (
    CorruptSegment,
    InvalidConfiguration,
    ProcessEnded,
    TasksDisagree,
    UserCodeError,
    WorkerEnded,
    can_pass,
)
from state_runtime.base.usercode import UserTraceback, user_traceback
from state_runtime.spark.errors import ERROR_MARK, cause_of, marked, typed_error


def raised(*files: str, last: str = "KeyError: 'mine'") -> PythonException:
    frames = "".join(f'  File "{file}", line {n + 1}, in step\n    next(rows)\n' for n, file in enumerate(files))
    return PythonException(
        f"An exception was thrown from the Python worker:\nTraceback (most recent call last):\n{frames}{last}\n"
    )


def test_a_marked_error_is_the_one_that_the_task_raised() -> None:
    error = typed_error(
        raised(
            "/job.py",
            "/lib/state_runtime/task.py",
            last=f"E: {ERROR_MARK}CorruptSegment] a is damaged [/stillstate-error]",
        )
    )
    assert type(error) is CorruptSegment
    assert str(error) == "a is damaged"


def test_without_our_code_in_the_traceback_it_is_the_users() -> None:
    error = typed_error(raised("/lib/pyspark/worker.py", "/home/me/job.py"))
    assert isinstance(error, UserCodeError)
    assert "raised KeyError: 'mine' (/home/me/job.py, line 2, in step)" in str(error)


def test_with_our_code_in_the_traceback_and_without_a_mark_it_is_a_fault_of_ours_and_stays_as_it_is() -> None:
    error = raised("/lib/pyspark/worker.py", "/lib/state_runtime/task.py", "/lib/pyarrow/table.py")
    assert typed_error(error) is error


def test_a_text_without_a_traceback_and_any_other_error_stay_as_they_are() -> None:
    for error in (PythonException("lost"), ValueError('File "/a.py", line 1, in f')):
        assert typed_error(error) is error


def failed_in_a_task() -> UserCodeError:
    """As a guard makes it: the user's exception is the cause."""
    try:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("no luck") from error
    except ValueError as error:
        made = UserCodeError("operator 'op' raised ValueError: no luck (job.py, line 3, in f)")
        made.__cause__ = error
    return made


def test_the_users_own_traceback_comes_over_the_border_and_is_what_is_printed_first() -> None:
    """Spark leaves the cause out and puts hundreds of lines of its own in its place."""
    text = "Job aborted\n" + str(marked(failed_in_a_task())) + "\n\tat org.apache.spark.Task.run(Task.scala:1)\n" * 200
    raised = RuntimeError(text)
    typed = typed_error(raised)
    assert type(typed) is UserCodeError
    assert str(typed) == "operator 'op' raised ValueError: no luck (job.py, line 3, in f)"
    cause = cause_of(typed, raised)
    assert isinstance(cause, UserTraceback)
    lines = user_traceback(cause).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'  File "{__file__}", line' in lines[1]
    assert "KeyError: 'missing'" in lines
    assert lines[-1] == "ValueError: no luck"
    assert len(lines) < 20


def test_a_cause_that_is_the_users_exception_itself_is_kept_and_other_errors_keep_sparks() -> None:
    """A sink's function raises in the driver: its exception is there, and Spark's text about it says less."""
    local, spark = failed_in_a_task(), RuntimeError("Spark's")
    assert cause_of(local, spark) is local.__cause__
    assert cause_of(local, local) is local.__cause__
    damaged = CorruptSegment("a is damaged")
    assert cause_of(damaged, spark) is spark


def test_a_traceback_is_cut_to_the_users_frames_and_to_a_size() -> None:
    """It travels inside the text of an error; of a deep recursion the end is what matters."""

    def deeper(level: int) -> int:
        return deeper(level - 1) if level else 1 // 0

    try:
        deeper(500)
    except ZeroDivisionError as error:
        text = user_traceback(error)
    assert text.endswith("ZeroDivisionError: integer division or modulo by zero")
    assert len(text) < 9_000


def test_a_worker_that_dies_is_the_users_to_look_into() -> None:
    """`os._exit` in a function, a crash of a native library or too little memory: Spark only says that it is gone."""
    error = typed_error(RuntimeError("... SparkException: Python worker exited unexpectedly (crashed) ... at org."))
    assert type(error) is WorkerEnded
    assert "memory ran out" in str(error)
    assert error.__cause__ is not None
    assert user_traceback(error.__cause__) == "It left no traceback.", "and not Spark's thousand lines"


def refused_by(module: str) -> ConnectionRefusedError:
    """A refused connection that passed through a module of this name."""
    namespace = {"__name__": module}
    exec("def connect():\n    raise ConnectionRefusedError(111, 'Connection refused')", namespace)
    try:
        namespace["connect"]()  # type: ignore[operator]
    except ConnectionRefusedError as error:
        return error
    raise RuntimeError("it did not refuse")


def test_an_action_that_spark_gives_up_for_other_output_of_a_repeated_task_is_run_again() -> None:
    """Spark's words for it, of 4.3. An executor that is lost while rows are in flight must not end the run."""
    error = typed_error(
        RuntimeError(
            "org.apache.spark.SparkException: Job aborted due to stage failure: A shuffle map stage with indeterminate output "
            "was failed and retried. However, Spark cannot rollback the ResultStage 13 to re-process the input data, and has to "
            "fail this job. Please eliminate the indeterminacy by checkpointing the RDD before repartition and try again."
        )
    )
    assert isinstance(error, TasksDisagree)
    assert can_pass(error)


def test_an_ended_java_process_is_told_as_such() -> None:
    """py4j only says that nobody answers: an out-of-memory killer that took Java looked like a fault of the network."""
    for error in (
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o36.awaitTermination"),
        Py4JError("org.apache.spark.sql.classic.SparkSession does not exist in the JVM"),
        refused_by("py4j.clientserver"),
    ):
        typed = typed_error(error)
        assert type(typed) is ProcessEnded
        assert "Spark's Java process ended" in str(typed)
        assert "Start the job again" in str(typed)


def test_a_connection_of_the_users_that_is_refused_is_not_javas() -> None:
    for error in (
        refused_by("psycopg"),
        Py4JError("An error occurred while calling o1.f. Trace:\npy4j.Py4JException: no"),
        Py4JError("com.mine.Helper does not exist in the JVM"),
    ):
        assert typed_error(error) is error


def test_a_source_whose_folder_changed_says_what_to_do() -> None:
    typed = typed_error(
        RuntimeError("terminated with exception: Wrong basePath /new for the root path: file:/old/1.json X")
    )
    assert type(typed) is InvalidConfiguration
    assert str(typed).startswith("the source reads from /new, and")
    assert "file:/old/1.json" in str(typed)
