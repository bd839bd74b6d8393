"""Secrets of sources, sinks and stores: they are named by environment variables, and are in no text.

A job's code names the variable; each process reads its own environment when it needs the value, so that no plan, no
manifest and no closure holds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from state_runtime.base.errors import InvalidConfiguration

__all__ = ["REDACTED", "SECRET_CHARS_MIN", "redacted", "refuse_secrets", "with_secrets"]

REDACTED: Final = "***"
SECRET_CHARS_MIN: Final = 4
"""Of values that may be secret and may not: shorter ones (a region, "1") would redact harmless text."""


def refuse_secrets(names: Iterable[str], looks_secret: re.Pattern[str], argument: str) -> None:
    """Refuse secrets among options that are shown.

    Args:
        argument: that names environment variables for them.

    Raises:
        InvalidConfiguration: an option's name says that it is one.
    """
    for name in filter(looks_secret.search, names):
        raise InvalidConfiguration(
            f"{name} is a secret, and options are shown by Spark: name an environment variable that holds it, "
            f'{argument}={{"{name}": "NAME"}}'
        )


def with_secrets(options: Mapping[str, Any], variables: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return options with those that environment variables of this process hold.

    Args:
        variables: their names, by option.
        where: the source or the sink, for the message.

    Raises:
        InvalidConfiguration: a variable is not set, or is empty.
    """
    missing = [name for name in variables.values() if not os.environ.get(name)]
    if missing:
        raise InvalidConfiguration(
            f"{where}: the environment variable {missing[0]} is not set, which holds an option of it. It must be set "
            "for the driver, and for a source on a cluster for the executors too (spark.executorEnv.…)"
        )
    return {**options, **{option: os.environ[name] for option, name in variables.items()}}


def redacted(text: str, values: Iterable[Any], chars_min: int = 1) -> str:
    """Return a text of a library without values that no text may have.

    Args:
        values: what is no text, and what is shorter than `chars_min`, is passed over.
    """
    secrets = {value for value in values if isinstance(value, str) and len(value) >= chars_min}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, REDACTED)
    return text
