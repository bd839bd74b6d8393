"""What an error of PostgreSQL means for a run; pure.

PostgreSQL repeats values of rows in its messages, and in their details. So ours are made of its codes and of the names
of columns and constraints, and the original is not chained to them: a log would have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from state_runtime.base.errors import (
    InvalidConfiguration,
    InvalidPipeline,
    StillstateError,
    StoreRefused,
    StoreUnavailable,
)

if TYPE_CHECKING:
    import psycopg

__all__ = ["explained", "name_of", "passes"]

_PASSES: Final = re.compile(
    # Connections; serialization failures and deadlocks; a server that stops, starts or is full; a session that the
    # server ended; locks; a standby that is not promoted yet.
    r"08...|40001|40P01|40003|53...|57P0[1-5]|25P0[34]|55P03|55006|25006\Z"
)
_REFUSES: Final = re.compile(r"28...|42501\Z")
_NO_WAY_IN: Final = re.compile(
    r"password authentication failed|authentication failed|no pg_hba\.conf entry|role .* does not exist|no password "
    r"supplied|permission denied|certificate",
    re.IGNORECASE,
)
"""What libpq says of a connection that is refused for good: such an error has no code."""
_NO_DATABASE: Final = re.compile(r"database .* does not exist", re.IGNORECASE)
_OF_ROWS: Final = re.compile(r"2[123]...\Z")
_SAID_CHARS_MAX: Final = 300
_IN_COPY: Final = re.compile(r"^COPY [^\n]*?, column (?P<rest>[^\n]*)", re.MULTILINE)


def passes(error: psycopg.Error) -> bool:
    """Return whether the same may succeed later: the server, the network or another transaction was in the way."""
    if error.sqlstate:
        return bool(_PASSES.match(error.sqlstate))
    # Without a code it comes from libpq: no connection, or none any more.
    return _is_of_connection(error) and not _NO_WAY_IN.search(str(error)) and not _NO_DATABASE.search(str(error))


def name_of(error: psycopg.Error, redact: Callable[[str], str]) -> str:
    """Return what an error is, and of a connection also what libpq says of it: `NotNullViolation`, `OperationalError
    (Connection refused)`. What the server says of a statement is left out.

    Args:
        redact: takes passwords out of a text.
    """
    name = type(error).__name__
    said = " ".join(str(error).split())
    if error.sqlstate or not said or not _is_of_connection(error):
        return name
    return f"{name} ({redact(said)[:_SAID_CHARS_MAX]})"


def explained(
    error: psycopg.Error, place: str, columns: Sequence[str], redact: Callable[[str], str]
) -> StillstateError:
    """Return our error for one of PostgreSQL's.

    Args:
        place: the table, with host and name of its database, for the message.
        columns: of the rows; the message names one only if it is among them.
        redact: see `name_of`.
    """
    code, where = error.sqlstate or "", f"the table {place}"
    name = name_of(error, redact)
    if passes(error) or code == "57014":
        return StoreUnavailable(
            f"{where} took nothing: {name}. Nothing is lost: start again; the output is staged and comes then"
        )
    if _NO_DATABASE.search(str(error)) and (not code or code == "3D000"):
        return InvalidConfiguration(f"there is no database for {where}: create it, or put the address right")
    if _REFUSES.match(code) or (not code and _NO_WAY_IN.search(str(error))):
        return StoreRefused(
            f"{where} cannot be written: {name}{_named(error, columns)}. Grant the role what it needs "
            "(docs/postgres.md lists it), or put user and password right, and start again; the output is staged and "
            "comes then"
        )
    if code == "21000":
        return InvalidPipeline(
            f"{where} takes keys for equal that the rows have as different ones, by its collation or type. Make them "
            "alike in a transform (lower, trim), or give the column another collation, and start"
        )
    what = "does not take the rows" if _OF_ROWS.match(code) else "cannot be written"
    return InvalidPipeline(
        f"{where} {what}: {name}{_named(error, columns)}. What is staged stays, and comes when the table is put right "
        "and the job is started; or go back to the snapshot before (--from-snapshot) with code that gives other rows"
    )


def _is_of_connection(error: psycopg.Error) -> bool:
    return any(kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(error).__mro__)


def _named(error: psycopg.Error, columns: Sequence[str]) -> str:
    """Return the column or constraint that an error is about, in words; "" if it does not say."""
    column = error.diag.column_name or _column_in_copy(error.diag.context or "", columns)
    if column:
        return f", column {column!r}"
    return f", constraint {error.diag.constraint_name!r}" if error.diag.constraint_name else ""


def _column_in_copy(context: str, columns: Sequence[str]) -> str:
    """Return the column that COPY was at. Its value stands behind the name."""
    found = _IN_COPY.search(context)
    if found is None:
        return ""
    at = [name for name in columns if found["rest"] == name or found["rest"].startswith(f"{name}:")]
    return max(at, key=len, default="")
