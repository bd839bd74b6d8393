"""`stillstate query`: what it prints, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from job_roots import SECRET, JobRoot
from typer.testing import CliRunner, Result

from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry, TimeEntry
from state_runtime.state.keyhash import hash_key
from state_runtime.state.table import StateSchema, entry_of_time
from stillstate.orchestration.cli import app
from tests.stored import write_segment, write_task_changes

KEYS = pa.schema([("tailnum", pa.string())])
SEEN = StateSchema(KEYS, pa.schema([("flights", pa.int64()), ("tailnum", pa.string())]))
ODD_VALUES = pa.schema(
    [
        ("raw", pa.binary()),
        ("price", pa.decimal128(10, 2)),
        ("ratio", pa.float64()),
        ("at", pa.timestamp("us", "UTC")),
        ("legs", pa.list_(pa.struct([("to", pa.string()), ("raw", pa.binary())]))),
        ("late", pa.bool_()),
    ]
)
ODD = StateSchema(KEYS, ODD_VALUES)
OPERATORS = (
    OperatorEntry("legs", "test", "`tailnum` string", (
        StateEntry("seen", "value", "`flights` bigint, `tailnum` string"),
        StateEntry("odd", "value", "`raw` binary, `price` decimal(10,2), `ratio` double, `at` timestamp, "
                                   "`legs` array<struct<to:string,raw:binary>>, `late` boolean"),
    )),
    OperatorEntry("twins", "test", "`tailnum` string", (StateEntry("odd", "value", "`n` int"),)),
)  # fmt: skip

Rows = dict[str | None, tuple[Any, ...] | None]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["query", *arguments])


def as_json(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def checkpoint(root: JobRoot, state: str, schema: StateSchema, rows: Rows) -> Manifest:
    """One more checkpoint with these changes; None is a tombstone."""
    hashed = {hash_key([pa.array([key], pa.string())]): (key, value) for key, value in rows.items()}
    ordered = [hashed[h] for h in sorted(hashed)]
    batch = schema.batch(
        np.array(sorted(hashed), dtype=np.uint64),
        np.array([value is None for _, value in ordered]),
        [pa.array([key for key, _ in ordered], pa.string())],
        [pa.array([v and v[i] for _, v in ordered], f.type) for i, f in enumerate(schema.values)],
    )
    return checkpoint_batches(root, {state: batch}, OPERATORS)


def checkpoint_batches(
    root: JobRoot, batches: dict[str, pa.RecordBatch], operators: tuple[OperatorEntry, ...], now_ms: int = 0
) -> Manifest:
    """One more checkpoint with these changes of operator "legs"."""
    assert root.committer is not None
    last, store = root.committer.last, root.catalog.root
    task = write_task_changes(
        store,
        term=1,
        operator="legs",
        hash_range=(0, (1 << 64) - 1),
        changes=batches,
        inline_bytes_max=1 << 20,
        ids=SYSTEM_IDS,
    )
    segment = write_segment(
        store, [task], job_uid=last.job_uid, term=1, snapshot_id=last.snapshot_id + 1, ids=SYSTEM_IDS
    )
    assert segment is not None
    segments = (*last.segments, segment)
    draft = replace(last, kind="checkpoint", operators=operators, segments=segments, time=TimeEntry(now_ms, 60_000))
    return root.committer.commit(draft)


@pytest.fixture
def config(write_config: Callable[..., Path], flights: JobRoot) -> str:
    """Snapshot 2: two planes and the null key. Snapshot 3: one has flown again, one is gone."""
    flights.start()
    checkpoint(flights, "seen", SEEN, {"N1": (1, "a"), "N2": (7, "b"), None: (3, None)})
    checkpoint(flights, "seen", SEEN, {"N1": (2, "a"), "N2": None})
    return str(write_config())


def test_help_has_an_example_and_the_rules(config: str) -> None:
    result = call("--help")
    assert "Example: stillstate query flights seen --operator legs --key tailnum=N14228" in result.output
    for word in (
        "--json",
        "--csv",
        "--config",
        "--snapshot",
        "--limit",
        "--columns",
        "--where",
        "--entry",
        "exit code 0",
    ):
        assert word in " ".join(result.output.split())


def test_a_key_is_shown_with_all_its_columns(config: str) -> None:
    """Two of them have one name here, and are kept apart."""
    found = as_json("flights", "seen", "--key", "tailnum=N1", "-c", config)
    assert found == {
        "job": "flights",
        "snapshot_id": 3,
        "operator": "legs",
        "state": "seen",
        "columns": ["key.tailnum", "flights", "value.tailnum"],
        "rows": [{"key.tailnum": "N1", "flights": 2, "value.tailnum": "a"}],
        "more": False,
    }
    table = call("flights", "seen", "--key", "tailnum=N1", "-c", config)
    assert table.exit_code == 0
    for word in ("legs/seen of flights, snapshot 3", "key.tailnum", "N1", "flights"):
        assert word in table.stdout


def test_any_snapshot_can_be_asked(config: str) -> None:
    """A tombstone is no row; the snapshot before it still has one."""
    key = ["flights", "seen", "-k", "tailnum=N2", "-c", config]
    assert as_json(*key, "--snapshot", "2")["rows"][0]["flights"] == 7
    assert as_json(*key, "--snapshot", "latest")["rows"] == []
    gone = call(*key)
    assert gone.exit_code == 0
    assert gone.stdout == "legs/seen of flights, snapshot 3: no row of this key\n"


def test_a_column_without_value_is_the_null_key(config: str) -> None:
    assert as_json("flights", "seen", "-k", "tailnum", "-c", config)["rows"][0]["flights"] == 3
    assert as_json("flights", "seen", "-k", "tailnum=", "-c", config)["rows"] == []
    assert "null" in call("flights", "seen", "-k", "tailnum", "-c", config).stdout


def test_a_table_is_limited_filtered_and_cut_to_columns(config: str) -> None:
    everything = as_json("flights", "seen", "-s", "2", "-c", config)
    assert len(everything["rows"]) == 3
    assert not everything["more"]
    first = as_json("flights", "seen", "-s", "2", "-n", "1", "--columns", "flights,key.tailnum", "-c", config)
    assert [list(row) for row in first["rows"]] == [["flights", "key.tailnum"]]
    assert first["rows"][0]["flights"] == everything["rows"][0]["flights"]
    assert first["more"]
    assert "only the first 1 rows" in call("flights", "seen", "-s", "2", "-n", "1", "-c", config).stdout
    assert as_json("flights", "seen", "-s", "2", "-w", "flights=7", "-c", config)["rows"][0]["key.tailnum"] == "N2"
    assert "no row with these values" in call("flights", "seen", "-w", "flights=99", "-c", config).stdout


def test_csv_is_for_spreadsheets(config: str) -> None:
    """The hint that there is more goes to stderr, where it is in nobody's way."""
    result = call("flights", "seen", "-s", "2", "-n", "2", "--csv", "-c", config)
    rows = list(csv.reader(io.StringIO(result.stdout)))
    assert rows[0] == ["key.tailnum", "flights", "value.tailnum"]
    assert len(rows) == 3
    assert "only the first 2 rows" in result.stderr
    assert call("flights", "seen", "-k", "tailnum=N2", "--csv", "-c", config).stdout.splitlines() == [",".join(rows[0])]


def test_every_value_has_a_text(config: str, flights: JobRoot) -> None:
    """JSON has no binary, no NaN and no dates; Python's calendar ends in 9999, a state's does not."""
    at = datetime(2013, 1, 31, 12, tzinfo=UTC)
    value = (b"\x00\xff", Decimal("1.50"), float("nan"), at, [{"to": "\x1b[31mred[/]", "raw": b"\x01"}], True)
    checkpoint(flights, "odd", ODD, {"N1": value, "N2": (None, None, None, 2**60, None, None)})
    odd = ["flights", "odd", "-o", "legs", "-c", config]
    row = as_json(*odd, "-k", "tailnum=N1")["rows"][0]
    assert row == {
        "tailnum": "N1",
        "raw": "00ff",
        "price": "1.50",
        "ratio": "nan",
        "at": "2013-01-31 12:00:00.000000Z",
        "legs": [{"to": "\x1b[31mred[/]", "raw": "01"}],
        "late": True,
    }
    assert as_json(*odd, "-k", "tailnum=N2")["rows"][0]["at"] is not None
    for name in ("raw", "price", "ratio", "at", "late"):  # what is printed can be asked for
        text = json.dumps(row[name]).strip('"')
        assert as_json(*odd, "-w", f"{name}={text}")["rows"] == [row], name
    for output in ([], ["--csv"]):
        result = call(*odd, *output)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert "red[/]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "says"),
    [
        (["flights", "nope"], 2, "InvalidConfiguration", "it has: seen (of legs), odd (of legs), odd (of twins)"),
        (["flights", "odd"], 2, "InvalidConfiguration", "name one of: legs, twins"),
        (["flights", "seen", "-o", "nope"], 2, "InvalidConfiguration", "it has: legs, twins"),
        (["flights", "seen", "-o", "twins"], 2, "InvalidConfiguration", "it has: odd"),
        (["flights", "seen", "-k", "N1"], 2, "InvalidConfiguration", "Write tailnum=VALUE"),
        (["flights", "odd", "-o", "legs", "-w", "price=1.555"], 2, "InvalidData", "'price' is decimal(10,2)"),
        (["flights", "seen", "--columns", "flights,nope"], 2, "InvalidConfiguration", "key.tailnum, flights"),
        (["flights", "seen", "-s", "99"], 2, "MissingSnapshot", "no snapshot 99"),
        (["flights", "seen", "-s", "../x"], 2, "MissingSnapshot", "not a snapshot"),
        (["nope", "seen"], 2, "JobNotFound", "nope"),
        (["flights", "seen", "--csv"], 2, "InvalidConfiguration", "one of them"),
    ],
)
def test_errors_say_what_exists_and_go_to_stderr(
    config: str, arguments: list[str], code: int, kind: str, says: str
) -> None:
    if "--csv" not in arguments:
        plain = call(*arguments, "-c", config)
        assert plain.exit_code == code, plain.output
        assert plain.stdout == ""
        assert plain.stderr.startswith(f"{kind}: ")
        assert says in plain.stderr
    result = call(*arguments, "--json", "-c", config)
    assert result.exit_code == code
    error = json.loads(result.stderr)["error"]
    assert error["type"] == kind
    assert says in error["message"]


def test_damaged_state_is_exit_code_5(config: str, flights: JobRoot) -> None:
    for file in (flights.store_path / "flights" / "changelog").rglob("*.seg"):
        body = bytearray(file.read_bytes())
        body[len(body) // 4] ^= 0x10
        file.write_bytes(body)
    result = call("flights", "seen", "-c", config)
    assert result.exit_code == 5
    assert "CorruptSegment" in result.stderr
    assert "Restore the file" in result.stderr


def test_no_secret_is_ever_printed(write_config: Callable[..., Path], config: str) -> None:
    secret = str(write_config(extra=f"storage_options: {{key: {SECRET}}}"))
    for arguments in (["flights", "seen"], ["flights", "nope"], ["flights", "seen", "--json"], ["flights", "seen", "-s", "9"]):  # fmt: skip
        assert SECRET not in call(*arguments, "-c", secret).output


def test_a_query_starts_without_spark_or_dagster(config: str) -> None:
    """It is typed while people wait. (Where pandas is installed, Arrow loads it to make its first array.)"""
    code = (
        "import sys\n"
        "from stillstate.orchestration.cli import app\n"
        f"app(['query', 'flights', 'seen', '-k', 'tailnum=N1', '-c', {config!r}], standalone_mode=False)\n"
        f"app(['query', 'flights', 'seen', '--json', '-c', {config!r}], standalone_mode=False)\n"
        "print([m for m in ('pyspark', 'dagster', 's3fs') if m in sys.modules], file=sys.stderr)\n"
    )
    project = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": project},
    )
    assert done.stderr.strip() == "[]"
    assert done.returncode == 0


# --- many rows per key, and times --------------------------------------------------------------------------------

AIRPORTS = pa.schema([("airport", pa.string())])
FLOWN = pa.schema([("n", pa.int32())])
COLLECTIONS = (
    OperatorEntry("legs", "stateful-processor", "`tailnum` string", (
        StateEntry("visits", "map", "`n` int", "`airport` string", "expires"),
        StateEntry("route", "list", "`n` int"),
        StateEntry("$timers", "timers", "", time="due"),
    ), "processingTime, append"),
)  # fmt: skip


@pytest.fixture
def collections(write_config: Callable[..., Path], flights: JobRoot) -> str:
    """One plane: two airports that it visited and one visit long ago, three legs, a timer at 12:00."""
    flights.start()
    plane = [pa.array(["N1"] * 3)]
    hashes = np.array([hash_key([pa.array(["N1"])])] * 3, dtype=np.uint64)
    three, numbers = np.array([1, 2, 3], dtype=np.uint64), [pa.array([10, 20, 30], pa.int32())]
    batches = {
        "visits": StateSchema(KEYS, FLOWN, AIRPORTS, "expires").batch(
            hashes, None, plane, numbers, entries=three, entry_columns=[pa.array(["JFK", "EWR", "LGA"])],
            times=pa.array([60_000, None, 500], pa.int64()),
        ),
        "route": StateSchema(KEYS, FLOWN, pa.schema([])).batch(hashes, None, plane, numbers, entries=three),
        "$timers": StateSchema(KEYS, pa.schema([]), pa.schema([]), "due").batch(
            hashes[:1], None, [pa.array(["N1"])], [], entries=entry_of_time(np.array([43_200_000])),
            times=pa.array([43_200_000], pa.int64()),
        ),
    }  # fmt: skip
    checkpoint_batches(flights, batches, COLLECTIONS, now_ms=1_000)
    return str(write_config())


def test_a_map_shows_its_keys_and_one_entry_can_be_asked_for(collections: str) -> None:
    """What has expired is not shown; what never expires has no time."""
    found = as_json("flights", "visits", "-k", "tailnum=N1", "-c", collections)
    assert found["columns"] == ["tailnum", "airport", "n", "expires"]
    assert found["rows"] == [
        {"tailnum": "N1", "airport": "JFK", "n": 10, "expires": "1970-01-01 00:01:00.000Z"},
        {"tailnum": "N1", "airport": "EWR", "n": 20, "expires": None},
    ]
    one = as_json("flights", "visits", "-k", "tailnum=N1", "--entry", "airport=EWR", "-c", collections)
    assert [row["n"] for row in one["rows"]] == [20]
    refused = call("flights", "route", "--entry", "airport=EWR", "-c", collections)
    assert refused.exit_code == 2
    assert "state 'route' is no map" in refused.stderr


def test_a_list_is_shown_in_order_and_a_timer_with_its_time(collections: str) -> None:
    route = as_json("flights", "route", "-c", collections)["rows"]
    assert [(row["position"], row["n"]) for row in route] == [(0, 10), (1, 20), (2, 30)]
    timers = as_json("flights", "$timers", "-c", collections)["rows"]
    assert timers == [{"tailnum": "N1", "due": "1970-01-01 12:00:00.000Z"}]


def test_describe_shows_kinds_times_and_clocks(collections: str) -> None:
    text = CliRunner().invoke(app, ["describe", "latest", "-c", collections]).stdout
    for word in ("visits", "map", "TTL", "airport", "$timers", "due", "processingTime", "batch time", "watermark"):
        assert word in text, word
