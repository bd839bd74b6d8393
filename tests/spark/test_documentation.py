"""The jobs in README and guide run as they stand there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from state_runtime import JobContext, JobSettings

from .timed import TimedJob

if TYPE_CHECKING:
    from examples.servers.postgres import PostgresServer

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


def jobs() -> Iterator[tuple[str, str]]:
    """Every Python block of README and the two guides that builds a whole job, with the heading it stands under; but for
    the job that `stillstate init` writes, which tests/test_pages.py runs with its input."""
    text = "".join(
        (ROOT / name).read_text()
        for name in (
            "README.md",
            "docs/guide.md",
            "docs/from-sql.md",
            "docs/delta.md",
            "docs/iceberg.md",
            "docs/postgres.md",
        )
    )
    heading = ""
    for part in re.split(r"^(## [^\n]*|```python\n.*?^```)$", text, flags=re.MULTILINE | re.DOTALL):
        if part.startswith("## "):
            heading = part[3:]
        elif part.startswith("```python") and "def build(context" in part and 'options["inbox"]' not in part:
            yield heading, part.removeprefix("```python\n").removesuffix("```")


JOBS = list(jobs())
OF_DATABASES = [(heading, code) for heading, code in JOBS if "SqlSink(" in code]
WITHOUT = [job for job in JOBS if job not in OF_DATABASES]


def test_the_guide_has_jobs() -> None:
    assert len(JOBS) >= 6
    assert [heading for heading, _ in JOBS].count("Your own query") == 3
    assert [heading for heading, _ in JOBS].count("The other way: steps") == 1, "README's"


@pytest.mark.parametrize("code", [code for _, code in WITHOUT], ids=[f"{h}-{i}" for i, (h, _) in enumerate(WITHOUT)])
def test_a_job_of_the_guide_runs_as_it_stands_there(spark: SparkSession, tmp_path: Path, code: str) -> None:
    run_as_it_stands(spark, tmp_path, code)


@pytest.mark.servers
@pytest.mark.parametrize("code", [code for _, code in OF_DATABASES])
def test_a_job_with_a_database_runs_as_it_stands_there(
    spark: SparkSession, tmp_path: Path, code: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgres_server.database()
    monkeypatch.setenv("SHOP_DATABASE", postgres_server.url(database))
    run_as_it_stands(spark, tmp_path, code)
    ((orders, ids, amount),) = postgres_server.execute(
        "SELECT count(*), count(DISTINCT id), sum(amount) FROM orders", database
    )
    assert orders == ids > 0
    assert postgres_server.execute("SELECT sum(orders), sum(spent) FROM customers", database) == [(orders, amount)]


def run_as_it_stands(spark: SparkSession, tmp_path: Path, code: str) -> None:
    module = tmp_path / "guide_job.py"
    module.write_text(code)
    names: dict[str, object] = {"__name__": "__main__"}  # so that its classes travel to the tasks by value
    exec(compile(code, str(module), "exec"), names)
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    context = JobContext("guide", str(tmp_path / "store"), settings=settings)
    result = names["build"](context).run(spark, trigger={"availableNow": True})  # type: ignore[operator]
    assert result.state == "finished"
    assert result.epochs >= 1


def test_the_guides_processor_with_time_is_due_when_it_says(spark: SparkSession, tmp_path: Path) -> None:
    section = (ROOT / "docs" / "guide.md").read_text().split("**Time.**")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "guide.py", "exec"), names)

    def build(stream: Any) -> Any:
        named = stream.transform(lambda df: df.withColumnRenamed("k", "name"))
        return named.key_by("name").process(names["Quiet"](), "name string, n long", uid="quiet")

    job = TimedJob(spark, tmp_path, build)
    assert job.run([("a", 0, 1)]) == []
    last = job.manifest()
    assert last.operators[0].next_due_ms == last.time.batch_time_ms + 60_000


@pytest.fixture
def berlin(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of that time zone."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.parametrize(
    ("change", "hours", "delay", "days_open"),
    [("2024-03-31", 23, "1 second", 1), ("2024-10-27", 25, "1 second", 1), ("2024-10-27", 25, "26 hours", 2)],
)
def test_the_days_of_the_how_to_have_the_hours_of_their_time_zone(
    berlin: SparkSession, tmp_path: Path, change: str, hours: int, delay: str, days_open: int
) -> None:
    """Against Spark's batch query, around the day on which the clocks are set; in four runs that cut days in two."""
    page = (ROOT / "docs" / "how-to.md").read_text()
    (code,) = re.findall(r"```python\n(# days\.py\n.*?)```", page, re.DOTALL)
    assert '"1 second"' in code
    assert '`"26 hours"`' in page
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code.replace('"1 second"', f'"{delay}"'), "days.py", "exec"), names)
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    options = {"inbox": str(inbox), "out": str(out)}
    context = JobContext("days", str(tmp_path / "store"), options=options, settings=settings)
    noon = datetime.fromisoformat(f"{change}T12:00:00+00:00")
    for day in range(-1, 3):
        at = [noon + timedelta(days=day, minutes=minute - 720) for minute in range(0, 24 * 60, 20)]
        orders = [{"shop": "AB"[n % 2], "amount": n, "at": t.isoformat()} for n, t in enumerate(at)]
        (inbox / f"{day}.json").write_text("\n".join(json.dumps(order) for order in orders))
        names["build"](context).run(berlin, trigger={"availableNow": True})

    read = berlin.read.schema("shop string, amount long, at timestamp").json(str(inbox))
    by_day = read.groupBy("shop", F.to_date("at").alias("day"))
    expected = by_day.agg(F.count("*").alias("orders"), F.sum("amount").alias("sales")).collect()
    found = berlin.read.parquet(str(out)).select("shop", "day", "orders", "sales").collect()
    closed = sorted({row.day for row in expected})[:-days_open]
    assert sorted(found) == sorted(row for row in expected if row.day in closed), "each closed day once"
    assert sum(row.orders for row in found if str(row.day) == change) == hours * 3


def test_ends_of_days_weeks_and_months_are_what_the_how_to_says(berlin: SparkSession) -> None:
    """On the day of 25 hours, which is a Sunday; in parentheses the two intervals are 24 hours less a microsecond."""
    page = (ROOT / "docs" / "how-to.md").read_text()
    ends = [re.search(rf"date_trunc\('{unit}', at\)[^`\"]*", page) for unit in ("DAY", "WEEK", "MONTH")]
    texts = [end[0] for end in ends if end is not None]
    assert len(texts) == 3
    at = berlin.sql("SELECT timestamp'2024-10-27 12:00:00' AS at")
    wrong = texts[0].replace("INTERVAL 1 DAY - INTERVAL 1 MICROSECOND", "(INTERVAL 1 DAY - INTERVAL 1 MICROSECOND)")
    (found,) = at.select(*(F.expr(text).cast("string") for text in (*texts, wrong))).collect()
    assert tuple(found) == (
        "2024-10-27 23:59:59.999999",
        "2024-10-27 23:59:59.999999",
        "2024-10-31 23:59:59.999999",
        "2024-10-27 22:59:59.999999",
    )
