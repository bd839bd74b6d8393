"""Fixtures for sinks into other systems' tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from sql_helpers import Database

from examples.servers.postgres import PostgresServer


@pytest.fixture
def database(postgres_server: PostgresServer, tmp_path: Path) -> Database:
    return Database(postgres_server, tmp_path, postgres_server.database())
