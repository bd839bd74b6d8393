"""One Dagster job for each kind of work, for any number of streams; a run's configuration names its stream.

Dagster's own work for a code location grows with the product of its asset jobs and its assets. With a job for each
stream, two hundred streams cost Dagster most of a minute; with these shared jobs, seconds.
"""

from stillstate.orchestration.jobs.shared.build import SharedJobs, build_shared_jobs

__all__ = ["SharedJobs", "build_shared_jobs"]
