"""Makes or resumes a savepoint in a process of its own, for tests that kill it: `python savepoint_process.py make|resume NAME JSON`."""

from __future__ import annotations

import json
import sys

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, resume_savepoint, savepoint_of_stopped
from state_runtime.store import open_store


def main() -> None:
    action, name, where = sys.argv[1:]
    place = json.loads(where)
    work = SavepointWork(open_store(place["url"], place["options"]), "child:1", SYSTEM_CLOCK, SYSTEM_IDS)
    record = (
        savepoint_of_stopped(work, name) if action == "make" else resume_savepoint(work, name, force=True)
    )  # fmt: skip
    print(record.state)


if __name__ == "__main__":
    main()
