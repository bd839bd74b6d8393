"""A Spark that lets nobody in: all that pyspark keeps to itself is refused, as on a version that has it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from state_runtime.spark import internals
from state_runtime.spark.internals import INTERNALS


@contextmanager
def nothing_known() -> Iterator[pytest.MonkeyPatch]:
    """As in a process that has tried nothing yet; afterwards as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(INTERNALS, "_refused", set())
        patch.setattr(INTERNALS, "_probed", set())
        yield patch


@contextmanager
def everything_refused() -> Iterator[None]:
    """pyspark itself goes on as ever: only what goes through `private` is refused."""

    def refused(owner: object, name: str, *default: Any) -> Any:
        raise AttributeError(f"{name} is refused")

    with nothing_known() as patch:
        patch.setattr(internals, "_read", refused)
        yield
