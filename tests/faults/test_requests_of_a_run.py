"""What a start, a restore, a copy and a quiet minute cost in requests, counted at an S3 protocol server (moto's). docs/operations.md has the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model import CountingIds, FakeClock, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import pending_stop
from state_runtime.snapshot.fencing import open_job_root, open_run, refuse_if_live
from state_runtime.snapshot.term_files import RunStatus, newest_term, write_status
from state_runtime.store import open_store
from tests.faults.engine import JOB, InProcess, Run, without_spark
from tests.job_settings import job_settings
from tests.s3_server import CountingServer

Requests = Counter[tuple[str, str]]
SHARDS, EPOCHS = 4, 3
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        yield running


def prepared(server: CountingServer, folder: Path, name: str, **changes: Any) -> Run:
    """A job that has run."""
    settings: dict[str, Any] = {
        "parallelism": SHARDS,
        "local_dir": str(folder / "local"),
        "materialize": False,
        "inline_bytes_max": 1 << 20,
        "upload_timeout_s": 600,
        **changes,
    }
    spark = InProcess()
    with without_spark(spark):
        run = Run(
            f"s3://lake/{name}",
            server.options,
            str(folder / "out"),
            job_settings(**settings),
            operators=1,
            clock=FakeClock(),
            ids=CountingIds(),
            spark=spark,
        )
        run.run([[f"key-{n}" for n in range(12 * SHARDS)]] * EPOCHS)
    return run


def start(server: CountingServer, name: str, prefix: int) -> Committer:
    """What `JobRun.go` asks of the store before Spark's query, in its order."""
    clock, ids = FakeClock(), CountingIds(prefix)
    clock.advance_s(3600)  # the run before it is dead
    catalog = Catalog(open_store(f"s3://lake/{name}", server.options), JOB, clock)
    refuse_if_live(catalog, clock)
    catalog.root.probe()
    info = open_job_root(catalog.root, JOB, clock=clock, ids=ids)
    catalog.latest()
    empty = empty_manifest(info.uid, SHARDS)
    committer = open_run(catalog, info, empty, actor=Actor(clock, ids, "h", 1))
    beat(committer, catalog)
    return committer


def beat(committer: Committer, catalog: Catalog) -> None:
    """One heartbeat: the term is still its own, it is written, requests are looked for, and whether somebody took over."""
    term = committer.term
    committer.ownership.check_term()
    write_status(
        catalog.root,
        RunStatus(term.term, term.run_uid, "running", 1, term.started_at_ms, 2.0, term.pid, term.host),
    )
    pending_stop(catalog.root, term.term)
    newest_term(catalog.root)


def since(server: CountingServer, mark: int) -> Requests:
    found = Counter((method, _kind(path)) for method, path in server.requests[mark:])
    return Counter({key: n for key, n in found.items() if key[1] != "probe"})


def _kind(path: str) -> str:
    parts = path.split("/")[2:]
    if not parts or parts == [""]:
        return "root"
    if parts[0].startswith("_probe"):
        return "probe"
    if parts[0] == "changelog":
        return "direct" if parts[-1].startswith("direct-") else "segment"
    return "manifest" if parts[-1] == "manifest.json" else parts[0]


def probed(server: CountingServer, mark: int) -> Counter[str]:
    return Counter(method for method, path in server.requests[mark:] if _kind(path) == "probe")


def test_a_start_costs_the_same_whatever_the_job_has(server: CountingServer, tmp_path: Path) -> None:
    """However many snapshots, segments and shards there are: a job that is large must come back as fast."""
    found = []
    for name, changes in (("few", {}), ("many", {"parallelism": 16, "inline_bytes_max": 0})):
        prepared(server, tmp_path / name, name, **changes)
        start(server, name, 50)  # from here on the run before has said something
        for prefix in (51, 52):
            mark = len(server.requests)
            start(server, name, prefix)
            found.append(since(server, mark))
            assert probed(server, mark) == {"PUT": 2, "GET": 2, "LIST": 1, "DELETE": 1}
    assert all(requests == found[0] for requests in found)
    assert found[0][("PUT", "manifest")] == 1
    assert found[0].total() <= 40


def test_a_heartbeat_is_four_small_requests(server: CountingServer) -> None:
    """The idle cost of a job, every `heartbeat_interval_s`: it is written, requests and newer runs are looked for."""
    committer = start(server, "beating", 1)
    catalog = Catalog(open_store("s3://lake/beating", server.options), JOB)
    mark = len(server.requests)
    beat(committer, catalog)
    assert since(server, mark) == {
        ("GET", "terms"): 1,
        ("PUT", "terms"): 1,
        ("LIST", "control"): 1,
        ("LIST", "terms"): 1,
    }


def restored(server: CountingServer, folder: Path, name: str, **changes: Any) -> Requests:
    """What bringing all shards back reads, on one host without local copies."""
    prepared(server, folder, name, **changes)
    settings: dict[str, Any] = {
        "parallelism": SHARDS,
        "local_dir": str(folder / "another host"),
        "materialize": False,
        "upload_timeout_s": 600,
        **changes,
    }
    spark = InProcess()
    with without_spark(spark):
        run = Run(
            f"s3://lake/{name}",
            server.options,
            str(folder / "out"),
            job_settings(**settings),
            operators=1,
            clock=FakeClock(),
            ids=CountingIds(77),
            spark=spark,
        )
        mark = len(server.requests)
        run.run([[f"key-{n}" for n in range(12 * SHARDS)]] * (EPOCHS + 1))
    found = since(server, mark)
    # What a restore reads; the start and its checkpoint look at documents of their own.
    return Counter({key: n for key, n in found.items() if key[0] == "GET" and key[1] in ("segment", "direct")})


def test_a_restore_reads_each_object_once_per_host(server: CountingServer, tmp_path: Path) -> None:
    """Whatever the number of shards on it."""
    log = restored(server, tmp_path / "log", "log")
    assert log == {("GET", "segment"): EPOCHS}
    direct = restored(server, tmp_path / "direct", "direct", inline_bytes_max=0)
    assert direct == {("GET", "segment"): EPOCHS, ("GET", "direct"): EPOCHS * SHARDS}


def test_a_copy_inside_the_store_is_three_requests_an_object(server: CountingServer, tmp_path: Path) -> None:
    """Two looks at its size, and the copy: no bytes pass through here. A savepoint reads each object once besides."""
    prepared(server, tmp_path, "copied", inline_bytes_max=0)
    root = open_store("s3://lake/copied", server.options).child(JOB)
    manifest = Catalog.of_root(root).latest()
    assert manifest is not None
    mark = len(server.requests)
    result = copy_snapshot(root, manifest, root.child("copy"), clock=FakeClock(), ids=CountingIds(9))
    found = Counter(method for method, path in server.requests[mark:] if "changelog" in path or "tables" in path)
    assert result.objects_copied == result.objects == EPOCHS * (SHARDS + 1)
    assert (found["PUT"], found["HEAD"]) == (result.objects, 2 * result.objects)
    indexes = found["GET"]
    mark = len(server.requests)
    copy_snapshot(root, manifest, root.child("saved"), verified=True, clock=FakeClock(), ids=CountingIds(9))
    found = Counter(method for method, path in server.requests[mark:] if "changelog" in path or "tables" in path)
    assert (found["PUT"], found["HEAD"]) == (result.objects, 2 * result.objects)
    assert found["GET"] == indexes + result.objects


def test_the_tables_of_the_documents_are_what_was_counted() -> None:
    """Numbers in a document are believed for years."""
    text = DOCUMENT.read_text().split("### Requests\n")[1].split("\n## ")[0]
    for row in ("| heartbeat | 1 PUT, 1 GET, 2 LIST |", "| probe of a start | 2 PUT, 2 GET, 1 LIST, 1 DELETE |"):
        assert row in text
