"""A driver as a process of its own: `python -m tests.cluster.drive ROOT MASTER [SETTING=VALUE…]`; a line on its input stops it.

It prints a JSON line per epoch: the epoch's numbers.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

from state_runtime import build_session

from ..conftest import ROOT
from .jobs import places_job

_SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    root, master = Path(sys.argv[1]), sys.argv[2]
    conf = dict(pair.split("=", 1) for pair in sys.argv[3:])
    settings: dict[str, Any] = {"placement": conf.pop("placement", "sticky")}
    if rounds := int(conf.pop("rounds", "0")):
        # Epochs end before their batch.
        settings |= {"rounds": rounds, "checkpoint_mode": "unaligned", "unaligned_epoch_s": 1.0}
    settings["meets"] = conf.pop("meets", "") == "yes"
    spark = build_session(
        "places",
        master,
        {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "1g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": _SMALL,
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            "spark.local.dir": str(root / "scratch"),
            "spark.sql.warehouse.dir": str(root / "warehouse"),
            **conf,
        },
    )
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    result = places_job(root, **settings).run(
        spark, on_progress=lambda p: print(json.dumps(p.to_json_dict()), flush=True), stop=stop
    )
    print(json.dumps({"ended": result.state}), flush=True)
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
