"""Dagster's own storage in a real PostgreSQL, for `make test-postgres`: a house of many jobs does not live on SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from examples.servers.postgres import USER, PostgresServer
from stillstate.orchestration.starter import instance_settings

__all__ = ["STORAGE_ENV", "DagsterStorage"]

STORAGE_ENV = "STILLSTATE_TEST_STORAGE"


class DagsterStorage:
    """A server whose databases are the storage of instances, one for each."""

    def __init__(self) -> None:
        self._server = PostgresServer()

    @contextmanager
    def instance(self, folder: Path) -> Iterator[dg.DagsterInstance]:
        """A new instance with the settings that `stillstate init` writes, and its storage here."""
        name, server = self._server.database(), self._server
        url = f"postgresql+psycopg2://{USER}@/{name}?host={server.folder}&port={server.port}"
        folder.mkdir()
        settings = f"{instance_settings()}\nstorage:\n  postgres:\n    postgres_url: {url}\n"
        (folder / "dagster.yaml").write_text(settings)
        with dg.DagsterInstance.from_config(str(folder)) as made:
            yield made

    def close(self) -> None:
        """End the server, and remove its folder."""
        self._server.close()
