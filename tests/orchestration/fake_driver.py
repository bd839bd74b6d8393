"""A driver without Spark: claims a term, beats, obeys (or not). Called like `stillstate run JOB --config FILE`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading

from job_roots import empty_manifest

from orchestration.config.spec import load_spec
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import pending_stop
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.term_files import RunState, RunStatus, write_status
from state_runtime.store import open_store


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("job")
    parser.add_argument("--config")
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--until-idle", action="store_true")
    parser.add_argument("--log-file")
    arguments = parser.parse_args()
    job = load_spec(arguments.config).job(arguments.job)
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
    host = socket.gethostname()
    committer = open_run(
        catalog, info, empty_manifest(info), clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, host=host, pid=os.getpid()
    )

    def beat(state: RunState) -> None:
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
            ),
        )

    beat("starting")
    if behaviour == "finishes":
        beat("finished")
        return 0
    for _ in range(1200):  # a minute at most, whatever the test forgets
        beat("running")
        asked = behaviour == "normal" and pending_stop(catalog.root, committer.term.term) is not None
        if asked or terminated.is_set():
            beat("stopped")
            return 0
        woken.wait(0.05)
    return 1


if __name__ == "__main__":
    sys.exit(main())
