"""The jobs in README and guide run as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import JobContext, JobSettings

from .timed import TimedJob

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


def jobs() -> Iterator[tuple[str, str]]:
    """Every Python block of README and the two guides that builds a whole job, with the heading it stands under; but for
    the job that `stillstate init` writes, which tests/test_readme.py runs with its input."""
    text = "".join(
        (ROOT / name).read_text() for name in ("README.md", "docs/guide.md", "docs/from-sql.md", "docs/delta.md")
    )
    heading = ""
    for part in re.split(r"^(## [^\n]*|```python\n.*?^```)$", text, flags=re.MULTILINE | re.DOTALL):
        if part.startswith("## "):
            heading = part[3:]
        elif part.startswith("```python") and "def build(context" in part and 'options["inbox"]' not in part:
            yield heading, part.removeprefix("```python\n").removesuffix("```")


JOBS = list(jobs())


def test_the_guide_has_jobs() -> None:
    assert len(JOBS) >= 6
    assert [heading for heading, _ in JOBS].count("Your own query") == 4


@pytest.mark.parametrize("code", [code for _, code in JOBS], ids=[f"{h}-{i}" for i, (h, _) in enumerate(JOBS)])
def test_a_job_of_the_guide_runs_as_it_stands_there(spark: SparkSession, tmp_path: Path, code: str) -> None:
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
