"""Jobs as families of Prometheus metrics; pure.

Names follow Prometheus' conventions: they begin with `stillstate_`, end with their base unit, and `_total` is a number
that only grows. The label is `stream`, because Prometheus adds a label `job` to every target. Unknown values of a job
are left out, so that a query sees the gap; they are never reported as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from state_runtime.base.sink_state import SinkState
from state_runtime.base.source_state import SourceState
from state_runtime.snapshot.manifest import Manifest
from stillstate.orchestration.probes.newest_savepoint import SavepointsSeen
from stillstate.orchestration.probes.pool import NOT_SEEN
from stillstate.orchestration.probes.vitals import DAMAGED, Vitals
from stillstate.orchestration.recovery.health import Verdict

__all__ = ["HEALTHS", "families"]

HEALTHS: Final[Sequence[str]] = (*get_args(Verdict), DAMAGED, NOT_SEEN)

_GAUGES: Final[Mapping[str, str]] = {
    "stillstate_job_seen": "1 if the job's store answered in time, else 0; without an answer nothing else is known.",
    "stillstate_job_well": "1 if the job needs no attention, else 0.",
    "stillstate_term": "Number of the newest run.",
    "stillstate_run_start_timestamp_seconds": "When the newest run began.",
    "stillstate_heartbeat_timestamp_seconds": "When the newest run last wrote its heartbeat.",
    "stillstate_checkpoint_id": "Id of the newest snapshot.",
    "stillstate_checkpoint_timestamp_seconds": "When the newest snapshot was made.",
    "stillstate_checkpoint_age_seconds": "Age of the newest snapshot when the job was looked at.",
    "stillstate_checkpoint_duration_seconds": "Of the newest snapshot: from the last row to the durable manifest.",
    "stillstate_alignment_seconds": "For how long the newest snapshot waited for rows after it was due.",
    "stillstate_epoch_duration_seconds": "Of the epochs that ended in the newest snapshot, together.",
    "stillstate_watermark_lag_seconds": "How far the watermark is behind the clock; 0 without one.",
    "stillstate_state_rows": "Live rows in all states.",
    "stillstate_log_bytes": "Changelog that a restart replays.",
    "stillstate_table_bytes": "State tables below that log.",
    "stillstate_replay_seconds": "About how long a restart replays the log.",
    "stillstate_inflight_rows": "Rows that the newest snapshot has in flight: read and not processed.",
    "stillstate_inflight_bytes": "The same in bytes of memory.",
    "stillstate_inflight_age_seconds": "How long the oldest of them had waited when the job was looked at.",
    "stillstate_savepoints": "Savepoints of the job, in any state.",
    "stillstate_savepoint_timestamp_seconds": "When the newest complete savepoint was made.",
    "stillstate_savepoint_age_seconds": "Age of the newest complete savepoint when the job was looked at.",
}

_SOURCE_GAUGES: Final[Mapping[str, str]] = {
    "stillstate_source_behind_records": "Records (offsets) that the job has not read.",
    "stillstate_source_behind_files": "Files that the job has not read, of a source that has files.",
    "stillstate_source_behind_bytes": "Bytes of these files.",
    "stillstate_source_oldest_unread_age_seconds": "Age of the oldest of them that was looked at; 0 if none waits.",
    "stillstate_source_away_seconds": "For how long the source has not answered; 0 if it does.",
    "stillstate_source_retention_left_seconds": "When the source removes the first record that the job has not read.",
}

_SINK_GAUGES: Final[Mapping[str, str]] = {
    "stillstate_sink_away_seconds": "For how long a sink that is away has taken no output.",
    "stillstate_sink_waiting_epochs": "Epochs whose output waits for a sink that is away.",
    "stillstate_sink_waiting_bytes": "Bytes of the output that waits for a sink that is away.",
    "stillstate_sink_holds_up": "1 if so much waits that the job begins no further epoch, else 0.",
}


def families(
    vitals: Mapping[str, Vitals], savepoints: Mapping[str, SavepointsSeen], now_ms: int, is_file_read: bool
) -> list[Metric]:
    """Return all families.

    Args:
        vitals: of every job.
        savepoints: of those whose store answered.
        is_file_read: whether the configuration could be read; else the jobs are the last known ones.
    """
    gauges = {name: GaugeMetricFamily(name, text, labels=["stream"]) for name, text in _GAUGES.items()}
    runs = CounterMetricFamily("stillstate_runs", "Runs that the job has had; each restart is one.", labels=["stream"])
    health = GaugeMetricFamily(
        "stillstate_job_health", "1 for the health that the job has, 0 for each other.", labels=["stream", "health"]
    )
    of_sources = {
        name: GaugeMetricFamily(name, text, labels=["stream", "source"]) for name, text in _SOURCE_GAUGES.items()
    }
    of_sinks = {name: GaugeMetricFamily(name, text, labels=["stream", "sink"]) for name, text in _SINK_GAUGES.items()}
    for job, seen in vitals.items():
        for sink in seen.status.sinks if seen.status is not None else ():
            for name, value in _of_sink(sink, now_ms).items():
                of_sinks[name].add_metric([job, sink.name], value)
        for source in seen.status.sources if seen.status is not None else ():
            for name, value in _of_source(source, now_ms).items():
                of_sources[name].add_metric([job, source.name], value)
        for name in HEALTHS:
            health.add_metric([job, name], float(seen.health == name))
        for name, value in (_of_look(seen, now_ms) | _of_savepoints(savepoints.get(job), now_ms)).items():
            gauges[name].add_metric([job], value)
        if seen.status is not None:
            runs.add_metric([job], float(seen.status.term))
    read = GaugeMetricFamily(
        "stillstate_config_last_reload_successful",
        "1 if stillstate.yaml could be read, else 0.",
        value=float(is_file_read),
    )
    return [read, health, *gauges.values(), *of_sources.values(), *of_sinks.values(), runs]


def _of_look(seen: Vitals, now_ms: int) -> dict[str, float]:
    found = {"stillstate_job_seen": float(seen.health != NOT_SEEN), "stillstate_job_well": float(seen.is_well)}
    status, head, progress = seen.status, seen.head, seen.progress
    if status is not None:
        found |= {
            "stillstate_term": float(status.term),
            "stillstate_run_start_timestamp_seconds": status.started_at_ms / 1000,
            "stillstate_heartbeat_timestamp_seconds": status.at_ms / 1000,
        }
    if head is not None:
        found |= {
            "stillstate_checkpoint_id": float(head.snapshot_id),
            "stillstate_checkpoint_timestamp_seconds": head.created_at_ms / 1000,
            "stillstate_checkpoint_age_seconds": max(0, now_ms - head.created_at_ms) / 1000,
            "stillstate_log_bytes": float(head.log_bytes),
            "stillstate_replay_seconds": seen.replay_s,
            **_in_flight(head, now_ms),
        }
    if progress is not None:
        found |= {
            "stillstate_checkpoint_duration_seconds": progress.checkpoint_ms / 1000,
            "stillstate_alignment_seconds": progress.alignment_ms / 1000,
            "stillstate_epoch_duration_seconds": progress.duration_ms / 1000,
            "stillstate_watermark_lag_seconds": seen.lag_s,
            "stillstate_state_rows": float(progress.state_rows),
            "stillstate_table_bytes": float(progress.table_bytes),
        }
    return found


def _of_source(source: SourceState, now_ms: int) -> dict[str, float]:
    found = {"stillstate_source_away_seconds": source.away_s(now_ms)}
    if source.behind >= 0:
        found[f"stillstate_source_behind_{source.unit}"] = float(source.behind)
        found["stillstate_source_oldest_unread_age_seconds"] = source.age_s(now_ms)
    if source.behind_bytes >= 0:
        found["stillstate_source_behind_bytes"] = float(source.behind_bytes)
    if source.retention_left_s >= 0:
        found["stillstate_source_retention_left_seconds"] = source.retention_left_s
    return found


def _of_sink(sink: SinkState, now_ms: int) -> dict[str, float]:
    return {
        "stillstate_sink_away_seconds": sink.away_s(now_ms),
        "stillstate_sink_waiting_epochs": float(sink.epochs),
        "stillstate_sink_waiting_bytes": float(sink.bytes),
        "stillstate_sink_holds_up": float(sink.holds_up),
    }


def _in_flight(head: Manifest, now_ms: int) -> dict[str, float]:
    waiting = head.open_batch.operators if head.open_batch is not None else ()
    oldest_ms = min((o.read_at_ms for o in waiting), default=now_ms)
    return {
        "stillstate_inflight_rows": float(sum(o.rows for o in waiting)),
        "stillstate_inflight_bytes": float(sum(o.bytes for o in waiting)),
        "stillstate_inflight_age_seconds": max(0, now_ms - oldest_ms) / 1000,
    }


def _of_savepoints(seen: SavepointsSeen | None, now_ms: int) -> dict[str, float]:
    if seen is None:
        return {}
    found = {"stillstate_savepoints": float(seen.count)}
    if seen.newest is not None:
        found |= {
            "stillstate_savepoint_timestamp_seconds": seen.newest.finished_at_ms / 1000,
            "stillstate_savepoint_age_seconds": max(0, now_ms - seen.newest.finished_at_ms) / 1000,
        }
    return found
