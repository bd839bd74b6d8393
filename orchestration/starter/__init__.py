"""The folder that `stillstate init` writes: a job runs in it, from the command line and under Dagster."""

from stillstate.orchestration.starter.folder import SAMPLE_FILES, instance_settings, write_folder

__all__ = ["SAMPLE_FILES", "instance_settings", "write_folder"]
