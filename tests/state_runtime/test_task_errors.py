"""Errors that come back from Spark's tasks as text: whose they are."""

from __future__ import annotations

from pyspark.errors import PythonException

from state_runtime.base.errors import CorruptSegment, UserCodeError
from state_runtime.spark.errors import ERROR_MARK, typed_error


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
