"""Where a database is and how to get in. It may hold a password, so nothing of it is shown but host and name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.secrets import redacted, with_secrets

if TYPE_CHECKING:
    import psycopg

__all__ = ["Address", "psycopg_of"]

_DEFAULTS: Final[Mapping[str, tuple[str, str]]] = {
    # A driver whose server went away without a word learns it within two minutes, not within hours.
    "connect_timeout": ("PGCONNECT_TIMEOUT", "10"),
    "keepalives_idle": ("", "30"),
    "keepalives_interval": ("", "10"),
    "keepalives_count": ("", "6"),
    "tcp_user_timeout": ("", "90000"),
    "application_name": ("PGAPPNAME", "stillstate"),
}
"""Parameters of libpq with their variable in the environment, and our value where neither has one."""
_PORTS: Final = re.compile(r"[0-9,]*\Z")


class Address:
    """The address of a database, as libpq takes it: a URL or `name=value` pairs, completed by the `PG…` variables.

    Args:
        dsn: the address; may hold a password.
        dsn_env: name of a variable in the environment that has it. It is read when a connection is opened.
    """

    def __init__(self, dsn: str, dsn_env: str) -> None:
        if dsn and dsn_env:
            raise InvalidConfiguration("SqlSink: give dsn or dsn_env, not both")
        self._dsn = dsn
        self._dsn_env = dsn_env

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("the address of a database is not pickled; make the sink where the job is built")

    @property
    def shown(self) -> str:
        """Host, port and name of the database, for messages: no user, and no password."""
        parts = self._parts()
        environment = {key: os.environ.get(f"PG{key.upper()}", "") for key in ("service", "host", "hostaddr", "port")}
        parts = {**environment, "dbname": os.environ.get("PGDATABASE", ""), **parts}
        if parts["service"]:
            return f"service {parts['service']}"
        host = parts["host"] or parts["hostaddr"] or "localhost"
        return f"{host}:{parts['port'] or 5432}/{parts['dbname']}"

    def redact(self, text: str) -> str:
        """Return a text of libpq's without the password."""
        secrets = [self._parts().get(name) for name in ("password", "sslpassword")]
        return redacted(text, (*secrets, os.environ.get("PGPASSWORD")))

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection without a transaction. Its transactions are READ COMMITTED, whatever the server's default:
        see docs/design/0050-postgresql.md.

        Raises:
            InvalidConfiguration: psycopg is missing, or the address is no address.
            psycopg.Error: there is no way in.
        """
        library = psycopg_of()
        parts = {key: ours for key, (variable, ours) in _DEFAULTS.items() if not os.environ.get(variable)}
        # A pooler between us and the server may give each transaction another session: nothing is prepared there.
        connection: psycopg.Connection[Any] = library.connect(
            **{**parts, **self._parts(), "client_encoding": "UTF8"}, autocommit=True, prepare_threshold=None
        )
        connection.isolation_level = library.IsolationLevel.READ_COMMITTED
        connection.read_only = False
        return connection

    def _parts(self) -> dict[str, str]:
        dsn = with_secrets({}, {"dsn": self._dsn_env}, "SqlSink")["dsn"] if self._dsn_env else self._dsn
        library = psycopg_of()
        try:
            found = library.conninfo.conninfo_to_dict(dsn)
        except library.ProgrammingError:
            # What libpq says of it repeats a part of it, which may be the password.
            raise self._no_address() from None
        parts = {key: str(value) for key, value in found.items() if value is not None}
        # Of a password with / or @ in it, a URL makes hosts, ports and names, which are shown.
        shown = (parts.get("host", ""), parts.get("dbname", ""))
        if any("@" in part for part in shown) or not _PORTS.match(parts.get("port", "")):
            raise self._no_address()
        return parts

    def _no_address(self) -> InvalidConfiguration:
        where = f"the variable {self._dsn_env}" if self._dsn_env else "dsn"
        return InvalidConfiguration(
            f"SqlSink: {where} is no address of a database (it is not repeated here: it may hold a password). It is "
            "postgresql://user@host:5432/name, or host=… dbname=… user=…; special characters in a URL are written as "
            "%XX"
        )


def psycopg_of() -> Any:
    """Return psycopg.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import psycopg
        import psycopg.conninfo
        import psycopg.errors
        import psycopg.sql
    except ImportError as error:
        raise InvalidConfiguration("SqlSink needs the package psycopg: pip install 'stillstate[postgres]'") from error
    return psycopg
