"""What `stillstate init` writes: a folder in which a job runs, by hand and under Dagster."""

from stillstate.orchestration.starter.folder import SAMPLE_FILES, instance_settings, write_folder

__all__ = ["SAMPLE_FILES", "instance_settings", "write_folder"]
