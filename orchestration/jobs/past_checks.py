"""Dagster's own record of Stillstate's checks: the newest evaluation of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import dagster as dg

__all__ = ["evaluation_of_record", "is_red", "newest_evaluations"]

KEYS_PER_QUERY: Final = 500


def newest_evaluations(instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]) -> dict[dg.AssetCheckKey, Any]:
    """Return the newest evaluation of each check that has one, and is not being evaluated again."""
    found: dict[dg.AssetCheckKey, Any] = {}
    for start in range(0, len(keys), KEYS_PER_QUERY):
        part = keys[start : start + KEYS_PER_QUERY]
        records = instance.event_log_storage.get_latest_asset_check_execution_by_key(part)
        found |= {key: record for key, record in records.items() if _has_evaluation(record)}
    return {key: found[key] for key in keys if key in found}


def _has_evaluation(record: Any) -> bool:
    event = record.event.dagster_event if record.event is not None else None
    return event is not None and isinstance(event.event_specific_data, dg.AssetCheckEvaluation)


def evaluation_of_record(record: Any) -> dg.AssetCheckEvaluation:
    """Return the evaluation in a record of `newest_evaluations`."""
    found: dg.AssetCheckEvaluation = record.event.dagster_event.event_specific_data
    return found


def is_red(record: Any) -> bool:
    """Whether the record is an error, not a warning."""
    evaluation = evaluation_of_record(record)
    return not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.ERROR
