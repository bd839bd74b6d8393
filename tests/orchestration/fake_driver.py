"""A driver without Spark: claims a term, beats, obeys (or not). Called like `stillstate run JOB --config FILE`.

What it does is the job's option `behaviour`:

    normal           stops when it is asked to
    quiet            the same, and says that its source is quiet
    checkpoints      makes one checkpoint first
    finishes         ends at once, as if its input had ended
    fails            ends with an error of user code once it is terminated
    fails-at-once    the same before it runs
    goes-silent      runs, and is not heard of again
    crashes          ends with an error that nobody foresaw as soon as it runs
    narrow           quiet; makes the savepoint that it is asked for and ends, and crashes with more shards than the file says
    dies-asked       the first run is gone when it is asked for a savepoint; a later one makes it, and goes on
    exit             ends before it has a term
    never-starts     never has one
    ignore-all       obeys nothing but SIGKILL

It lives for a minute at most, or for the option `lives_s`, whatever the test forgets.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading

from job_roots import checkpoint_of, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import ControlAnswer, answer, new_requests, pending_stop
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.term_files import RunState, RunStatus, write_status
from state_runtime.store import open_store
from stillstate.orchestration.config.effective_settings import effective_settings
from stillstate.orchestration.config.spec import load_spec

BEAT_S = 0.05


def save_as_asked(catalog: Catalog, term: int, owner: str) -> bool:
    """Make the savepoint that somebody waits for; whether one did."""
    for request in new_requests(catalog.root, term, ()).values():
        if request is None or request.action != "savepoint":
            continue
        work = SavepointWork(catalog.root, owner, SYSTEM_CLOCK, SYSTEM_IDS)
        made = savepoint_of_stopped(work, request.name, trigger=request.trigger, tags=request.tags)
        now_ms = SYSTEM_CLOCK.now_ms()
        answer(catalog.root, request, ControlAnswer(request.request_id, "accepted", now_ms, "", made.snapshot_id))
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("job")
    parser.add_argument("--config")
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--until-idle", action="store_true")
    parser.add_argument("--log-file")
    arguments = parser.parse_args()
    file_job = load_spec(arguments.config).job(arguments.job)
    job = file_job
    behaviour = job.options.get("behaviour", "normal")
    print(f"fake driver: {behaviour}, takeover {arguments.takeover}", flush=True)
    if behaviour == "exit":
        print(f"no luck with {job.storage_options.get('secret', '')}", file=sys.stderr, flush=True)
        return 5
    woken = threading.Event()
    terminated = threading.Event()

    def on_sigterm(*_: object) -> None:
        terminated.set()
        woken.set()

    signal.signal(signal.SIGTERM, on_sigterm if behaviour != "ignore-all" else signal.SIG_IGN)
    if behaviour == "never-starts":
        woken.wait(60)
        return 1
    catalog = Catalog(open_store(job.store), job.name)
    info = open_job_root(catalog.root, job.name, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
    job, _ = effective_settings(file_job, catalog.root)
    host = os.environ.get("FAKE_HOST") or socket.gethostname()
    committer = open_run(catalog, info, empty_manifest(info), actor=Actor(SYSTEM_CLOCK, SYSTEM_IDS, host, os.getpid()))

    def beat(state: RunState, kind: str = "", message: str = "") -> None:
        write_status(
            catalog.root,
            RunStatus(
                term=committer.term.term,
                run_uid=committer.term.run_uid,
                state=state,
                at_ms=SYSTEM_CLOCK.now_ms(),
                started_at_ms=committer.term.started_at_ms,
                heartbeat_interval_s=0.05,
                pid=os.getpid(),
                host=host,
                snapshot_id=committer.last.snapshot_id,
                advanced_at_ms=SYSTEM_CLOCK.now_ms(),
                quiet=behaviour in ("quiet", "narrow"),
                error_kind=kind,
                message=message,
                cause=os.environ.get("STILLSTATE_START_CAUSE", ""),
                supervisor_pid=int(os.environ.get("STILLSTATE_SUPERVISOR_PID", "0")),
                parallelism=job.parallelism,
                backend=job.backend,
            ),
        )

    beat("starting")
    if behaviour == "fails-at-once":
        beat("failed", "user-code", "UserCodeError: no")
        return 7
    if behaviour == "goes-silent":
        beat("running")
        return 0
    if behaviour == "finishes":
        beat("finished")
        return 0
    if behaviour == "checkpoints":
        beat("running")
        draft = checkpoint_of(committer.last)
        catalog.root.put(draft.segments[-1].path, b"x" * draft.segments[-1].bytes)
        committer.commit(draft)
    if behaviour == "fails":
        beat("running")
        terminated.wait(60)
        print(f"it broke with {job.storage_options.get('secret', '')}", file=sys.stderr, flush=True)
        beat("failed", "user-code", "UserCodeError: no")
        return 7
    if behaviour == "crashes" or (behaviour == "narrow" and job.parallelism > file_job.parallelism):
        beat("running")
        print(f"term {committer.term.term}: {job.parallelism} shards to restore", flush=True)
        message = f"MemoryError: no room for {job.parallelism} shards"
        print(message, file=sys.stderr, flush=True)
        beat("failed", message=message)
        return 1
    for _ in range(int(float(job.options.get("lives_s", 60)) / BEAT_S)):
        beat("running")
        term = committer.term.term
        asked = behaviour in ("normal", "quiet", "checkpoints") and pending_stop(catalog.root, term) is not None
        if behaviour == "dies-asked" and term == 1 and new_requests(catalog.root, term, ()):
            os.kill(os.getpid(), signal.SIGKILL)
        made = behaviour in ("narrow", "dies-asked") and save_as_asked(catalog, term, f"{host}:{os.getpid()}")
        saved = made and behaviour == "narrow"
        if asked or saved or terminated.is_set():
            beat("stopped")
            return 0
        woken.wait(BEAT_S)
    return 1


if __name__ == "__main__":
    sys.exit(main())
