"""What sources that are written in Python share: secrets, limits of a batch, errors that Spark's process hands on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.spark.errors import marked
from state_runtime.spark.versions import requirement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["HAS_LIMITS", "check_limit", "refuse_secrets", "telling", "with_secrets"]

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


def refuse_secrets(names: Iterable[str], looks_secret: re.Pattern[str], argument: str) -> None:
    """Refuse secrets among a source's options.

    Args:
        argument: of the source, that names environment variables for them.

    Raises:
        InvalidConfiguration: an option's name says that it is one.
    """
    for name in filter(looks_secret.search, names):
        raise InvalidConfiguration(
            f"{name} is a secret, and options are shown by Spark: name an environment variable that holds it, "
            f'{argument}={{"{name}": "NAME"}}'
        )


def with_secrets(options: Mapping[str, str], variables: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return options with those that environment variables of this process hold.

    Args:
        variables: their names, by option.
        where: the source, for the message.

    Raises:
        InvalidConfiguration: a variable is not set.
    """
    missing = sorted(name for name in variables.values() if name not in os.environ)
    if missing:
        raise InvalidConfiguration(
            f"{where}: the environment variable {missing[0]} is not set, which holds an option of it. It must be set "
            "for the driver, and on a cluster for the executors (spark.executorEnv.…)"
        )
    return {**options, **{option: os.environ[name] for option, name in variables.items()}}


@contextmanager
def telling() -> Iterator[None]:
    """Mark an error, so that the driver finds it in the text that Spark makes of it."""
    try:
        yield
    except StillstateError as error:
        raise marked(error) from error
