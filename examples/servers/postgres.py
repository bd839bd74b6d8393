"""A real PostgreSQL on loopback: killed as a machine's end kills it, and started again with its data on the same port."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

__all__ = ["PASSWORD", "USER", "PostgresServer"]

USER = "stillstate"
PASSWORD = "a-pass-word-of-tests"
"""Asked of connections over the port; none is asked of those over the socket in the server's folder."""
_PROGRAMS = Path("/usr/lib/postgresql")


class PostgresServer:
    """A server of its own, on a socket in its folder and on a port of loopback.

    Attributes:
        folder: holds its socket and its data.
        port: the same after each start.
    """

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stillstate-pg-"))
        self.port = _free_port()
        self._owner: dict[str, Any] = {}
        if os.geteuid() == 0:  # as root it refuses to run
            entry = pwd.getpwnam("postgres")
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
            self._owner = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        subprocess.run(
            [
                *(_program("initdb"), "-D", str(self._data), "-U", USER, "--no-sync"),
                *("--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C"),
            ],
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
            **self._owner,
        )
        self._names = itertools.count(1)
        self.start(**settings)
        self.execute(f"ALTER ROLE {USER} PASSWORD '{PASSWORD}'")

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self, **settings: str) -> None:
        """Start it, or start it again with what it has; it answers when this returns."""
        given = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(
            [
                *(_program("postgres"), "-D", str(self._data), "-k", str(self.folder), "-p", str(self.port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", *given),
            ],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._owner,
        )
        for attempt in Retrying(
            retry=retry_if_exception_type(psycopg.OperationalError),
            stop=stop_after_delay(60),
            wait=wait_fixed(0.1),
            reraise=True,
        ):
            with attempt:
                self.execute("SELECT 1")

    def kill(self) -> None:
        """End all of its processes at once, without a word to anybody. What they had not written is lost.

        A server that is dead already stays dead.
        """
        processes: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            processes = [psutil.Process(self._process.pid)]
            # First the one that would start others; then those that it had.
            processes += processes[0].children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(60)
        psutil.wait_procs(processes[1:], 60)

    def restart(self, **settings: str) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start(**settings)

    def database(self) -> str:
        """Make a new, empty database and return its name."""
        name = f"tested_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def dsn(self, database: str = "postgres") -> str:
        """The address over the socket, without a password."""
        return f"host={self.folder} port={self.port} user={USER} dbname={database}"

    def url(self, database: str = "postgres") -> str:
        """The address over the port, with the password."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres", given: Any = None) -> list[tuple[Any, ...]]:
        """Execute a statement outside of any transaction, and return its rows."""
        with psycopg.connect(self.dsn(database), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement, given)
            return cursor.fetchall() if cursor.description else []

    def rows(self, statement: str, database: str) -> list[dict[str, Any]]:
        """The rows of a query, by the names of their columns."""
        with psycopg.connect(self.dsn(database), autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
            return connection.execute(statement).fetchall()

    def close(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _program(name: str) -> str:
    """A program of PostgreSQL, of the newest version if it is not on the path."""
    found = shutil.which(name) or max(map(str, _PROGRAMS.glob(f"*/bin/{name}")), default="")
    if not found:
        raise FileNotFoundError(f"PostgreSQL's {name} is not on this machine (Debian: apt-get install postgresql)")
    return found
