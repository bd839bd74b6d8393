"""How a job's store is reached, as stillstate.yaml says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_roots import SECRET

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.config.spec import JobSpec, Secrets, load_spec


def job_of(write_config: Callable[..., Path], extra: str) -> JobSpec:
    return load_spec(write_config(extra=extra)).job("flights")


def test_a_profile_and_a_single_writer_reach_whoever_opens_the_store(write_config: Callable[..., Path]) -> None:
    """Sensors, commands, the driver and its tasks get the storage options and nothing else."""
    job = job_of(write_config, "storage_profile: lake\nsingle_writer: true\nstorage_options: {region: eu-west-1}")
    assert dict(job.storage_options) == {"region": "eu-west-1", "profile": "lake", "single_writer": True}


def test_without_them_the_options_are_as_they_are(write_config: Callable[..., Path]) -> None:
    assert dict(job_of(write_config, f"storage_options: {{secret: {SECRET}}}").storage_options) == {"secret": SECRET}
    assert dict(job_of(write_config, "single_writer: false").storage_options) == {}


@pytest.mark.parametrize("extra", ["single_writer: maybe", "storage_profile: [a]", "storage_profile: 7"])
def test_other_types_are_refused(write_config: Callable[..., Path], extra: str) -> None:
    with pytest.raises(InvalidConfiguration):
        job_of(write_config, extra)


def test_what_may_be_shown_is_not_taken_out_of_log_lines() -> None:
    """A region is a word of many texts."""
    options = Secrets({"secret": SECRET, "region": "north", "endpoint_url": "http://store:9000", "profile": "lake"})
    line = f"at http://store:9000 in the north by lake: {SECRET}"
    assert options.redact(line) == "at http://store:9000 in the north by lake: ***"
