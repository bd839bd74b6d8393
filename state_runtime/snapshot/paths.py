"""Names of all objects below a job root; pure. See docs/format.md for the layout."""

from __future__ import annotations

import re

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.limits import NAME_CHARS_MAX

__all__ = [
    "BOUNDARY_DIR",
    "BUILDING_FILE",
    "CHANGELOG_DIR",
    "CLAIM_FILE",
    "CONTROL_DIR",
    "CONVERSION_FILE",
    "JOB_FILE",
    "MATERIALIZATIONS_DIR",
    "MIGRATIONS_DIR",
    "MOVED_FILE",
    "MOVING_FILE",
    "OUTPUTS_DIR",
    "PINS_DIR",
    "PUBLISHED_FILE",
    "SAVEPOINTS_DIR",
    "SNAPSHOTS_DIR",
    "SNAPSHOT_ID_MAX",
    "TERMS_DIR",
    "boundary_path",
    "check_job_name",
    "check_uid",
    "epochs_path",
    "epochs_term_of",
    "heartbeat_path",
    "listing_path",
    "manifest_path",
    "materialization_path",
    "migration_path",
    "named_for",
    "named_snapshot_of",
    "pin_path",
    "pinned_id_of",
    "run_mark_path",
    "run_mark_term",
    "safe_name",
    "savepoint_path",
    "segment_path",
    "sequence_of",
    "shard_file_path",
    "snapshot_id_of",
    "term_of",
    "term_path",
]

JOB_FILE = "job.json"
CLAIM_FILE = "claim.json"
MOVING_FILE = "moving.json"
CONVERSION_FILE = "conversion.json"
BUILDING_FILE = "building.json"
MOVED_FILE = "moved.json"
PUBLISHED_FILE = "published.json"
TERMS_DIR = "terms"
CHANGELOG_DIR = "changelog"
SNAPSHOTS_DIR = "snapshots"
CONTROL_DIR = "control"
MATERIALIZATIONS_DIR = "materializations"
MIGRATIONS_DIR = "migrations"
OUTPUTS_DIR = "outputs"
BOUNDARY_DIR = "boundary"
PINS_DIR = "pins"
SAVEPOINTS_DIR = "savepoints"

_JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*\Z")
_PIN = re.compile(r"([0-9]{20})-[0-9A-Za-z]+\.json\Z")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
_NAMED_FOR = re.compile(r"(?:.*-)?([0-9]{20})-[0-9A-Za-z]+(?:\.seg|\.json)?\Z")
_RUN_MARK = re.compile(r"(run-(?P<term>[0-9]{20})-|root-)[0-9A-Za-z]+\Z")
_DIGITS = 20

SNAPSHOT_ID_MAX = (1 << 64) - 1
"""Larger than the id of any snapshot."""


def check_job_name(name: str, what: str = "job name") -> str:
    """Return `name` if it can be a job's folder: lower-case ASCII, so that no two names meet on any store.

    Args:
        what: kind of the name, for the message.
    """
    if len(name) > NAME_CHARS_MAX or not _JOB_NAME.match(name):
        raise InvalidConfiguration(
            f"{what} {name[:80]!r} must be 1 to {NAME_CHARS_MAX} of a-z, 0-9, _ and -, starting with a letter or digit"
        )
    return name


def check_uid(uid: str, what: str) -> str:
    """Return `uid` if it can name an operator, a state or a sink in a path."""
    if len(uid) > NAME_CHARS_MAX or not _UID.match(uid):
        raise InvalidConfiguration(
            f"{what} {uid[:80]!r} must be 1 to {NAME_CHARS_MAX} letters, digits, _ and -, starting with a letter or "
            "digit"
        )
    return uid


def safe_name(name: str) -> str:
    """Return a user's state name as a path part: the name itself, with other characters replaced."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:NAME_CHARS_MAX] or "_"


def manifest_path(snapshot_id: int) -> str:
    return f"{SNAPSHOTS_DIR}/{snapshot_id:0{_DIGITS}d}/manifest.json"


def term_path(term: int) -> str:
    return f"{TERMS_DIR}/{term:0{_DIGITS}d}.json"


def heartbeat_path(term: int) -> str:
    return f"{TERMS_DIR}/{term:0{_DIGITS}d}.heartbeat.json"


def epochs_path(term: int) -> str:
    return f"{TERMS_DIR}/{term:0{_DIGITS}d}.epochs.json"


def epochs_term_of(name: str) -> int | None:
    """Return the term in a file name `<20 digits>.epochs.json` below `terms/`, or None for other names."""
    stem, dot, rest = name.partition(".epochs.")
    return term_of(f"{stem}.{rest}") if dot else None


def materialization_path(record_id: int, *, started: bool = False) -> str:
    """Return the path of a materialization's record, or (started) of the pin that it holds while it works."""
    return f"{MATERIALIZATIONS_DIR}/{record_id:0{_DIGITS}d}{'.started' if started else ''}.json"


def migration_path(number: int) -> str:
    return f"{MIGRATIONS_DIR}/{number:0{_DIGITS}d}.json"


def run_mark_path(term: int, run_uid: str) -> str:
    """Return the path of a run's own mark. It is beside the boundaries, so that one listing shows both
    (snapshot/fencing.py)."""
    return f"{BOUNDARY_DIR}/run-{term:0{_DIGITS}d}-{run_uid}"


def run_mark_term(name: str) -> int | None:
    """Return the term of the run that left a mark; 0 for a mark of earlier versions, which all runs of a job shared.
    None for other names."""
    found = _RUN_MARK.match(name)
    return int(found["term"] or 0) if found else None


def boundary_path(sequence: int) -> str:
    return f"{BOUNDARY_DIR}/{sequence:0{_DIGITS}d}.json"


def pin_path(snapshot_id: int, uid: str) -> str:
    return f"{PINS_DIR}/{snapshot_id:0{_DIGITS}d}-{uid}.json"


def savepoint_path(name: str) -> str:
    """Return the folder of a savepoint: a separate job root, with one snapshot."""
    return f"{SAVEPOINTS_DIR}/{check_job_name(name, 'savepoint name')}"


def segment_path(term: int, name: str) -> str:
    return f"{CHANGELOG_DIR}/{term:0{_DIGITS}d}/{name}"


def shard_file_path(term: int, operator: str, name: str) -> str:
    return f"files/{term:0{_DIGITS}d}/{operator}/{name}"


def listing_path(term: int, name: str) -> str:
    return f"files/{term:0{_DIGITS}d}/{name}.json"


def named_for(snapshot_id: int, name: str) -> str:
    """Name data that a task writes for a later snapshot; a uid follows the name. By this name, and not by a clock,
    garbage collection knows that a manifest may still name the data."""
    return f"{name}-{snapshot_id:0{_DIGITS}d}"


def named_snapshot_of(path: str) -> int | None:
    """Return the snapshot that a segment, a listing or data of a task was written for; None if the name has no id."""
    found = _NAMED_FOR.match(path.rpartition("/")[2])
    return int(found[1]) if found else None


def snapshot_id_of(name: str) -> int | None:
    """Return the id in a folder name below `snapshots/`, or None for a foreign name."""
    return int(name) if len(name) == _DIGITS and name.isascii() and name.isdigit() else None


def pinned_id_of(name: str) -> int | None:
    """Return the snapshot's id in a file name below `pins/`, or None for a foreign name."""
    found = _PIN.match(name)
    return int(found.group(1)) if found else None


def sequence_of(name: str) -> int | None:
    """Return the number in a file name `<20 digits>.json`, or None for a foreign name."""
    return term_of(name)


def term_of(name: str) -> int | None:
    """Return the term in a file name `<20 digits>.json` below `terms/`, or None (heartbeats and foreign files)."""
    stem, dot, rest = name.partition(".")
    return int(stem) if rest == "json" and dot and len(stem) == _DIGITS and stem.isascii() and stem.isdigit() else None
