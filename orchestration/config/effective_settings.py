"""The settings that a job's last migration gave it, in place of those of `stillstate.yaml`.

The file has the wanted settings; a migration applies them, or tries and goes back. The result is recorded on the store
(state_runtime/snapshot/migration.py), and every start reads it: by a person, by the supervisor, by a recovery. So no
restart undoes a setting that a migration has changed, or tries one again that a migration has taken back.
"""

from __future__ import annotations

from state_runtime.base.errors import SnapshotInUse
from state_runtime.snapshot.migration import RunSettings, read_migration
from state_runtime.store import Store
from stillstate.orchestration.config.spec import JobSpec

__all__ = ["effective_settings", "is_tried", "refuse_while_migrating", "settings_of", "with_settings"]


def settings_of(job: JobSpec) -> RunSettings:
    """Return the file's settings."""
    return RunSettings(job.parallelism, job.backend)


def with_settings(job: JobSpec, settings: RunSettings) -> JobSpec:
    """Return the job with these settings; settings that they leave open are the file's."""
    return job.model_copy(
        update={
            "parallelism": settings.parallelism or job.parallelism,
            "backend": settings.backend or job.backend,
        }
    )


def effective_settings(job: JobSpec, root: Store) -> tuple[JobSpec, str]:
    """Return the job as a run of it starts now, and a message; the message is empty if the settings are the file's.

    Args:
        root: of the job.

    Raises:
        CorruptManifest, UnsupportedFormat: the record of the last migration cannot be read.
    """
    migration = read_migration(root)
    if migration is None:
        return job, ""
    held = with_settings(job, migration.settings)
    told = [
        f"{name} {now} and not {said}"
        for name, now, said in (
            ("parallelism", held.parallelism, job.parallelism),
            ("backend", held.backend, job.backend),
        )
        if now != said and said
    ]
    if not told:
        return held, ""
    why = "under way" if migration.is_open else migration.step.replace("-", " ")
    return held, (
        f"job {job.name!r} runs with {', '.join(told)}, as the file says: its last migration ({why}) says so. "
        f"`stillstate migrate {job.name}` brings it to what the file says"
    )


def is_tried(root: Store) -> bool:
    """Whether a run that starts now is the new one of a migration."""
    migration = read_migration(root)
    return migration is not None and migration.is_tried


def refuse_while_migrating(job: str, root: Store) -> None:
    """Refuse to start a job, or to take it back, in the middle of a migration.

    Raises:
        SnapshotInUse: one is under way.
    """
    migration = read_migration(root)
    if migration is not None and migration.is_open:
        raise SnapshotInUse(
            f"job {job!r}: {migration} is under way, and it starts and stops the job. If its process is gone, "
            f"`stillstate migrate {job} --resume` goes on with it"
        )
