"""A house of many jobs on local stores, some of them on stores that do not answer: for tests and the run with a daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from job_roots import JobRoot

from state_runtime.base.clock import Clock

__all__ = ["House", "write_house"]


@dataclass
class House:
    """Jobs by what is the matter with them."""

    file: Path
    healthy: list[str]
    hanging: list[str]
    refused: list[str]
    roots: dict[str, JobRoot]


def write_house(
    folder: Path,
    clock: Clock,
    *,
    jobs: int,
    hanging: int,
    refused: int,
    hole: str,
    closed: str,
    extra: str = "",
    defaults: str = "",
    host: str = "",
    names: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> House:
    """Write `stillstate.yaml`, and for each healthy job a root with a run and a checkpoint.

    Args:
        hole, closed: endpoints.
        extra: YAML beside `jobs`; `defaults`: more of it below `defaults`.
        host: where the drivers say they are; empty: here.
        names: of the jobs; absent: by number.
        settings: of jobs that have some of their own, as YAML on one line. Such a job has no root yet.
    """
    special = settings or {}
    names = list(names) or [f"job-{n:03}" for n in range(jobs)]
    # Not at one end: whoever takes them in order must pass them.
    step = max(1, jobs // max(1, hanging + refused))
    bad = [name for name in names[::step] if name not in special][: hanging + refused]
    holes, closeds = bad[::2][:hanging], [name for name in bad if name not in bad[::2][:hanging]][:refused]
    shared = ["  entry_point: nowhere.job:build", "  store: state", *(f"  {line}" for line in defaults.splitlines())]
    lines = ["version: 1", *extra.splitlines(), "defaults:", *shared, "jobs:"]
    for name in names:
        endpoint = hole if name in holes else closed if name in closeds else None
        if name in special:
            lines.append(f"  {name}: {special[name]}")
            continue
        options = f"{{key: k, secret: s3cr3t, region: us-east-1, endpoint_url: {endpoint}}}"
        lines.append(
            f"  {name}: " + ("{}" if endpoint is None else f"{{store: s3://b/state, storage_options: {options}}}")
        )
    file = folder / "stillstate.yaml"
    file.write_text("\n".join(lines) + "\n")
    healthy = [name for name in names if name not in (*holes, *closeds, *special)]
    roots = {}
    for name in healthy:
        root = roots[name] = JobRoot(folder / "state", name, clock, **({"host": host} if host else {}))  # type: ignore[arg-type]
        root.start()
        root.checkpoint()
    return House(file, healthy, holes, closeds, roots)
