"""One Dagster job for each kind of work, whatever the number of streams; a run is told which stream it is about.

Dagster's own work for a code location grows with the product of its asset jobs and its assets. With a job for each
stream, two hundred streams take it most of a minute; these take it seconds.
"""

from stillstate.orchestration.jobs.shared.build import SharedJobs, build_shared_jobs

__all__ = ["SharedJobs", "build_shared_jobs"]
