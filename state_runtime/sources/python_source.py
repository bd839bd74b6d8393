"""What sources that are written in Python share: limits of a batch, errors that Spark's process hands on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.spark.errors import marked
from state_runtime.spark.versions import requirement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["HAS_LIMITS", "check_limit", "telling"]

try:  # Spark 4.2 and newer
    from pyspark.sql.streaming.datasource import ReadLimit  # noqa: F401

    HAS_LIMITS = True
except ImportError:
    HAS_LIMITS = False


def check_limit(name: str, value: int | None, spark: SparkSession) -> None:
    """Refuse a limit of batches that this version of Spark would not keep.

    Args:
        name: of the argument.

    Raises:
        InvalidConfiguration: it is set, and Spark is older than 4.2.
    """
    if value is not None and not HAS_LIMITS:
        raise InvalidConfiguration(
            f"{name} needs Spark 4.2 or newer, and this is {spark.version}: an older Spark does not tell a source of "
            f"Python how far it may go. Leave it out, or update Spark ({requirement()})"
        )


@contextmanager
def telling() -> Iterator[None]:
    """Mark an error, so that the driver finds it in the text that Spark makes of it."""
    try:
        yield
    except StillstateError as error:
        raise marked(error) from error
