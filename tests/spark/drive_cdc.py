"""The job of docs/cdc.md as a driver of its own, for tests that kill it: `python -m tests.spark.drive_cdc ROOT SERVERS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from state_runtime import JobContext, JobSettings, StreamingJob, build_session
from tests.conftest import ROOT

__all__ = ["TOPIC", "job_of_page"]

TOPIC = "shop.public.customers"
"""As the page has it."""


def job_of_page(root: Path, servers: str, topic: str, parallelism: int = 2) -> StreamingJob:
    """The page's job as it stands there, on another topic."""
    code = (ROOT / "docs" / "cdc.md").read_text().split("```python\n")[1].split("```")[0]
    assert TOPIC in code
    names: dict[str, object] = {"__name__": "__main__"}
    exec(
        compile(
            code.replace(TOPIC, topic).replace('"earliest"', '"earliest", max_offsets_per_trigger=40'), "cdc.md", "exec"
        ),
        names,
    )
    settings = JobSettings(parallelism=parallelism, local_dir=str(root / "local"))
    context = JobContext("cdc", str(root / "store"), {"kafka": servers}, settings=settings)
    return names["build"](context)  # type: ignore[operator,no-any-return]


def main() -> None:
    """Run it to the end of the topic."""
    os.environ["STILLSTATE_DRIVER_PID"] = str(os.getpid())
    spark = build_session("cdc", "local[2]", {"spark.ui.enabled": "false", "spark.driver.memory": "1g"})
    job_of_page(Path(sys.argv[1]), sys.argv[2], sys.argv[3]).run(spark, trigger={"availableNow": True})


if __name__ == "__main__":
    main()
