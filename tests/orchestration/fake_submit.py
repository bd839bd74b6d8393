"""A `spark-submit` without Spark: runs a driver in this process's session, or (cluster mode) on "another host".

It notes in `submitted.json`, beside itself, with what it was called, and what was in the file of settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FAKE_DRIVER = Path(__file__).parent / "fake_driver.py"


def main(arguments: list[str]) -> int:
    application = next(n for n, argument in enumerate(arguments) if argument.endswith("submitted.py"))
    options, driver = arguments[:application], arguments[application + 1 :]
    properties = Path(options[options.index("--properties-file") + 1])
    noted = {
        "options": options,
        "driver": driver,
        "properties": properties.read_text(),
        "properties_mode": properties.stat().st_mode & 0o777,
    }
    (Path(os.environ["SPARK_HOME"]) / "submitted.json").write_text(json.dumps(noted))
    if "--refuse" in options:
        print(f"no such queue; {properties.read_text()}", file=sys.stderr)
        return 1
    if driver[0] == "--cause":
        os.environ["STILLSTATE_START_CAUSE"] = driver[1]
        driver = driver[2:]
    command = [sys.executable, str(FAKE_DRIVER), *driver]
    if options[options.index("--deploy-mode") + 1] == "client":
        return subprocess.run(command, check=False).returncode
    # The file that was shipped is found where the driver works: here, in the folder of the configuration.
    driven = subprocess.Popen(command, env={**os.environ, "FAKE_HOST": "node-7"}, start_new_session=True)
    (Path(os.environ["SPARK_HOME"]) / "driver.pid").write_text(str(driven.pid))
    print("submitted as application_1_0001", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
