"""Dagster's own storage in a real PostgreSQL, for `make test-postgres`: a house of many jobs does not live on SQLite."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg2
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from stillstate.orchestration.starter import instance_settings

__all__ = ["STORAGE_ENV", "PostgresServer"]

STORAGE_ENV = "STILLSTATE_TEST_STORAGE"
_PROGRAMS = Path("/usr/lib/postgresql")


class PostgresServer:
    """A server of its own, on a socket in its folder: no port, no password. Each instance gets a new database."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stillstate-pg-"))
        self._owner: dict[str, Any] = {}
        if os.geteuid() == 0:  # as root it refuses to run
            entry = pwd.getpwnam("postgres")
            os.chown(self._folder, entry.pw_uid, entry.pw_gid)
            self._owner = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        data = str(self._folder / "data")
        subprocess.run(
            [_program("initdb"), "-D", data, "-U", "dagster", "--auth=trust", "--no-sync"],
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            **self._owner,
        )
        self._process = subprocess.Popen(
            [_program("postgres"), "-D", data, "-k", str(self._folder), "-c", "listen_addresses=", "-c", "fsync=off"],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._owner,
        )
        self._names = itertools.count(1)
        for attempt in Retrying(
            retry=retry_if_exception_type(psycopg2.OperationalError), stop=stop_after_delay(60), wait=wait_fixed(0.1)
        ):
            with attempt:
                self._execute("SELECT 1")

    def _execute(self, statement: str) -> None:
        connection = psycopg2.connect(host=str(self._folder), user="dagster", dbname="postgres")
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
        finally:
            connection.close()

    @contextmanager
    def instance(self, folder: Path) -> Iterator[dg.DagsterInstance]:
        """A new instance with the settings that `stillstate init` writes, and its storage here."""
        name = f"dagster_{next(self._names)}"
        self._execute(f"CREATE DATABASE {name}")
        url = f"postgresql+psycopg2://dagster@/{name}?host={self._folder}"
        folder.mkdir()
        settings = f"{instance_settings()}\nstorage:\n  postgres:\n    postgres_url: {url}\n"
        (folder / "dagster.yaml").write_text(settings)
        with dg.DagsterInstance.from_config(str(folder)) as made:
            yield made

    def close(self) -> None:
        """End it, and remove its folder."""
        self._process.terminate()
        self._process.wait(60)
        shutil.rmtree(self._folder)


def _program(name: str) -> str:
    """A program of PostgreSQL, of the newest version if it is not on the path."""
    found = shutil.which(name) or max(map(str, _PROGRAMS.glob(f"*/bin/{name}")), default="")
    if not found:
        raise FileNotFoundError(f"PostgreSQL's {name} is not on this machine (Debian: apt-get install postgresql)")
    return found
