"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from . import run_guard

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from examples.servers.kafka import KafkaBroker
    from examples.servers.postgres import PostgresServer

ROOT = Path(__file__).parent.parent

# `make test` draws the same examples each time, so that it says of the code what it said before; soaks draw new ones.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("new", derandomize=False, deadline=None)
hypothesis.settings.load_profile("new" if os.environ.get("STILLSTATE_SOAK") else "same")

# Spark's workers import the processors of the tests by name.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# Java of tests lives too short for its optimizing compiler, which took a quarter of all time. Spark's launcher reads this,
# and so do the jobs that tests start as processes.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


# Tests that take long and whose law a smaller one, or another variant, holds in `make test`; and those over the whole
# year of flights, which takes most of a minute to make.
LONG = frozenset((ROOT / "tests" / "long.txt").read_text("utf-8").splitlines())


def pytest_configure() -> None:
    run_guard.start()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in LONG:
            item.add_marker("long")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all tests: two slots, and three tries per task so that re-execution can be tested."""
    from state_runtime import build_session

    from .refusal import everything_refused

    folder = tmp_path_factory.mktemp("spark")
    session = build_session(
        "tests",
        "local[2,3]",
        {
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
            "spark.sql.shuffle.partitions": "2",
            # Jobs look alike, and so does the code that Spark compiles for them: 100 entries are gone before the next test.
            "spark.sql.codegen.cache.maxEntries": "2000",
            "spark.driver.memory": "1g",
        },
    )
    # `make test-public`
    with everything_refused() if os.environ.get("STILLSTATE_TEST_SPARK") == "public" else nullcontext():
        yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One broker for all tests that do not kill it; each test makes topics of its own."""
    from examples.servers.kafka import KafkaBroker

    with KafkaBroker(tmp_path_factory.mktemp("kafka") / "broker") as broker:
        yield broker


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for all tests that ask for one; each makes its own database, and who kills it starts it again."""
    from examples.servers.postgres import PostgresServer

    server = PostgresServer()
    try:
        yield server
    finally:
        server.close()
