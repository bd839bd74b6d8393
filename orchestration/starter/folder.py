"""A working folder: the files in `files/` beside this one, and some input to begin with."""

from __future__ import annotations

import random
from importlib.resources import files
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.config.reference import SCHEMA_NAME, schema_text

__all__ = ["SAMPLE_FILES", "WRITTEN", "instance_settings", "write_folder"]

WRITTEN: Final = {
    "stillstate.yaml": "stillstate.yaml",
    "flights_job.py": "flights_job.py.txt",
    "feed.py": "feed.py.txt",
    "workspace.yaml": "workspace.yaml",
    "dagster/dagster.yaml": "dagster.yaml",
    ".gitignore": "gitignore",
}
"""The files that are written beside the JSON schema of `stillstate.yaml`, and the file that holds the text of each.
Python code is kept as text: it belongs to the user, and Stillstate does not import it."""

SAMPLE_FILES: Final = 3
"""Input files, so that a new job has rows to process at once."""

_SAMPLE_ROWS: Final = 1000
_PLANES: Final = 500
_CARRIERS: Final = ("AA", "B6", "DL", "EV", "UA")


def text_of(name: str) -> str:
    """Return the text of one of the files in `files/`."""
    return files("stillstate.orchestration.starter").joinpath("files", name).read_text(encoding="utf-8")


def instance_settings() -> str:
    """Return `dagster.yaml`: telemetry off, and one start, recovery or materialization of a job at a time."""
    return text_of("dagster.yaml")


def write_folder(folder: Path) -> list[Path]:
    """Write a job, its configuration, its input and Dagster's settings; return the paths, in order.

    Nothing that exists is overwritten. After a crash the written files are complete, and the call is refused until they
    are removed.

    Raises:
        InvalidConfiguration: a file of a name that would be written exists; nothing was written.
    """
    schema = folder / SCHEMA_NAME
    samples = [folder / "inbox" / f"sample-{number}.parquet" for number in range(1, SAMPLE_FILES + 1)]
    wanted = {folder / name: source for name, source in WRITTEN.items()}
    if taken := [path for path in (*wanted, schema, *samples) if path.exists() or path.is_symlink()]:
        names = ", ".join(str(path) for path in taken[:5]) + (" …" if len(taken) > 5 else "")
        raise InvalidConfiguration(f"{names}: exists already; nothing was written. Name a new folder")
    try:
        for path, source in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text_of(source), encoding="utf-8")
        schema.write_text(schema_text(), encoding="utf-8")
        _write_samples(samples)
    except OSError as error:
        raise InvalidConfiguration(f"{folder}: cannot be written ({error.strerror}); name another folder") from error
    return [*wanted, schema, *samples]


def _write_samples(paths: list[Path]) -> None:
    drawn = random.Random(2013)  # the same rows for every user
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        planes = [drawn.randrange(_PLANES) for _ in range(_SAMPLE_ROWS)]
        carriers = [_CARRIERS[plane % len(_CARRIERS)] for plane in planes]
        pq.write_table(pa.table({"tailnum": [f"N{plane:03d}" for plane in planes], "carrier": carriers}), path)
