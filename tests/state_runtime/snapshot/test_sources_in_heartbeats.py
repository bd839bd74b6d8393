"""What a heartbeat stores of a job's sources: older and newer versions read each other's."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest

from state_runtime.base.source_state import YOUNGER, SourceState
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.paths import heartbeat_path, term_path
from state_runtime.snapshot.term_files import RunStatus, read_status, write_status
from state_runtime.store import open_store
from tests.fuzz.targets import enveloped

TOPIC = SourceState("orders", 1000, behind=3, oldest_unread_ms=900, retention_left_s=60.0, kept_s=3600.0)
TABLE = SourceState("/lake/orders", 1000, behind=12, unit="files", behind_bytes=0, behind_versions=4)
BEFORE = ("name", "asked_at_ms", "away_since_ms", "behind", "oldest_unread_ms", "retention_left_s", "said", "kept_s",
          "age_change_s")  # fmt: skip


@dataclass(frozen=True)
class Older:
    """What an older version knows of a source, in part."""

    name: str
    asked_at_ms: int = 0
    behind: int = -1


@dataclass(frozen=True)
class OlderStatus:
    term: int
    sources: tuple[Older, ...] = ()


def stored(store: Any, *sources: SourceState) -> bytes:
    status = RunStatus(3, "uid", "running", 1000, 900, 1.0, 7, "here", sources=sources)
    write_status(store, status)
    return bytes(store.read(heartbeat_path(3), 100_000))


def test_what_is_stored_is_read_and_fields_that_say_nothing_are_not_stored(tmp_path: Any) -> None:
    """No bytes are more than bytes that are not known."""
    store = open_store(str(tmp_path))
    store.put(term_path(3), b"a term")
    body = json.loads(stored(store, TOPIC, TABLE).splitlines()[1])
    topic, table = body["sources"]
    assert sorted(topic) == sorted(BEFORE), "of a topic nothing is new"
    assert (table["unit"], table["behind_bytes"], table["behind_versions"]) == ("files", 0, 4)
    status = read_status(store)
    assert status is not None
    assert status.sources == (TOPIC, TABLE)


def test_the_default_of_each_younger_field_is_what_it_says_without_one() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(SourceState) if field.name in YOUNGER}
    assert defaults == YOUNGER


def test_an_older_heartbeat_counts_records(tmp_path: Any) -> None:
    body = json.loads(stored(open_store(str(tmp_path)), TOPIC).splitlines()[1])
    for source in body["sources"]:
        del source["kept_s"], source["age_change_s"]
    old = decode_document("heartbeat", RunStatus, enveloped("heartbeat", json.dumps(body).encode()), "here")
    assert [(s.unit, s.behind, s.behind_bytes, s.kept_s) for s in old.sources] == [("records", 3, -1, -1.0)]


@pytest.mark.parametrize("sources", [(TOPIC,), (TABLE,), (TOPIC, TABLE)], ids=["topic", "table", "both"])
def test_an_older_version_reads_a_newer_heartbeat(tmp_path: Any, sources: tuple[SourceState, ...]) -> None:
    """It takes files for records."""
    read = decode_document("heartbeat", OlderStatus, stored(open_store(str(tmp_path)), *sources), "here")
    assert read.sources == tuple(Older(s.name, s.asked_at_ms, s.behind) for s in sources)
