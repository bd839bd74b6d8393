"""Asset specs of the jobs in `stillstate.yaml`; pure.

One asset key per job and subject, since Dagster judges freshness per asset and not per partition. Both are external: a
stream is never a Dagster run; a run starts it and a sensor watches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import AvailableNow, JobSpec
from stillstate.orchestration.text import redacted_location

__all__ = [
    "JOB_TAG",
    "build_asset_specs",
    "job_asset_specs",
    "materialized_spec",
    "shared_fields",
]

JOB_TAG: Final = "stillstate/job"
_WARN_SHARE: Final = 0.5  # of the freshness window: half of it is left to look before the badge turns red


def build_asset_specs(mount: Mount, jobs: Iterable[JobSpec]) -> list[dg.AssetSpec]:
    """Return the specs of all jobs."""
    return [spec for job in jobs for spec in job_asset_specs(mount, job)]


def job_asset_specs(mount: Mount, job: JobSpec) -> tuple[dg.AssetSpec, dg.AssetSpec]:
    """Return the specs of a job's stream, and of its checkpoints downstream of it."""
    location = redacted_location(job.store).rstrip("/")
    shared = shared_fields(mount, job)
    stream = dg.AssetSpec(
        mount.stream(job.name),
        description=_paragraphs(
            job.description,
            f"The streaming job `{job.name}` (`{job.entry_point}`). One materialization is one run of its driver. "
            f"Start it with {mount.launch_text('start', job.name)}, "
            f"stop it with {mount.launch_text('stop', job.name)}.",
        ),
        kinds={"spark"},
        metadata={
            "entry_point": job.entry_point,
            "parallelism": job.parallelism,
            "trigger": _trigger_text(job),
            "launcher": job.launcher.kind,
        },
        **shared,
    )
    checkpoints = dg.AssetSpec(
        mount.checkpoints(job.name),
        deps=[stream.key],
        description=(
            f"Checkpoints of `{job.name}`: every materialization is one complete snapshot that the job can restart "
            "from. The data version is the snapshot's id."
        ),
        kinds={"spark", "arrow"},
        metadata={
            "dagster/uri": f"{location}/{job.name}",
            "store": location,
            "changelog": job.changelog,
            "materialization": f"by {job.materialization.by}",
        },
        freshness_policy=_freshness(job),
        **shared,
    )
    return mount.shown(stream), mount.shown(checkpoints)


def materialized_spec(mount: Mount, job: JobSpec) -> dg.AssetSpec:
    """Return the spec of a job's state tables. Unlike the other two, a Dagster run can make them."""
    fold = job.materialization
    who = {
        "driver": "The driver folds beside its epochs; a run of this asset folds at once.",
        "dagster": "A sensor starts a run when the log has grown"
        + (f", and so does the schedule `{fold.schedule}`." if fold.schedule else "."),
        "nobody": "Only a person starts a run.",
    }[fold.by]
    spec = dg.AssetSpec(
        mount.materialized(job.name),
        deps=[mount.checkpoints(job.name)],
        description=(
            f"State tables of `{job.name}`: each materialization folded its changelog into sorted tables, so that a "
            f"restart has less to replay. {who} The data version is the number of the materialization."
        ),
        kinds={"spark", "parquet"},
        metadata={
            "by": fold.by,
            "schedule": fold.schedule or "none",
            "min_bytes": fold.min_bytes,
            "ratio": fold.ratio,
            "max_segments": fold.max_segments,
            "interval_s": fold.interval_s,
            "replay_s": fold.replay_s,
        },
        **shared_fields(mount, job),
    )
    return mount.shown(spec)


def shared_fields(mount: Mount, job: JobSpec) -> dict[str, Any]:
    """Return the common fields of all assets of a job: group, owners, tags."""
    return {"group_name": mount.group_of(job.name), "owners": list(job.owners), "tags": {JOB_TAG: job.name}}


def _freshness(job: JobSpec) -> dg.FreshnessPolicy | None:
    """Return how old the newest checkpoint may be; only if the user has set it.

    There is no default: a quiet source makes no checkpoints, and a job that processes the available input ends on
    purpose; a badge that turns red for either is soon ignored.
    """
    if job.checkpoint.freshness_s is None or isinstance(job.trigger, AvailableNow):
        return None
    fail = timedelta(seconds=max(120.0, job.checkpoint.freshness_s))
    return dg.FreshnessPolicy.time_window(fail_window=fail, warn_window=max(timedelta(seconds=60), fail * _WARN_SHARE))


def _trigger_text(job: JobSpec) -> str:
    if job.trigger is None:
        return "as fast as possible"
    return "available now" if isinstance(job.trigger, AvailableNow) else f"every {job.trigger.processing_time_s:g} s"


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
