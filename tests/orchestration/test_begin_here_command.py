"""`stillstate init` and `stillstate dagster`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stillstate.orchestration.cli import app
from stillstate.orchestration.config.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]


def test_init_writes_a_folder_whose_configuration_holds(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["init", str(tmp_path / "new"), "--json"])
    assert ended.exit_code == 0, ended.output
    written = json.loads(ended.output)["files"]
    assert all(Path(path).is_file() for path in written)
    assert set(load_spec(tmp_path / "new" / "stillstate.yaml").jobs) == {"legs", "legs2"}


@pytest.mark.parametrize("taken", ["stillstate.yaml", "flights_job.py", "inbox/sample-2.parquet"])
def test_init_overwrites_nothing_and_then_writes_nothing(tmp_path: Path, taken: str) -> None:
    mine = tmp_path / taken
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    ended = CliRunner().invoke(app, ["init", str(tmp_path)])
    assert ended.exit_code == 2
    assert taken in ended.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_init_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = CliRunner().invoke(app, ["init", str(tmp_path / "file" / "below")])
    assert ended.exit_code == 2
    assert "cannot be written" in ended.output


def test_dagster_starts_beside_the_configuration_and_ends_with_a_sigterm(tmp_path: Path) -> None:
    """What `dagster` is given is seen through a stand-in for it; tests/test_pages.py starts the real one."""
    assert CliRunner().invoke(app, ["init", str(tmp_path)]).exit_code == 0
    (tmp_path / "dagster" / "dagster.yaml").unlink()
    stand_in = tmp_path / "stand-in" / "dagster"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text("")
    (stand_in / "__main__.py").write_text(
        "import os, signal, sys, threading\n"
        "over = threading.Event()\n"
        "signal.signal(signal.SIGINT, lambda *_: over.set())\n"
        "print(os.environ['DAGSTER_HOME'], os.environ['STILLSTATE_CONFIG'], os.getcwd(), *sys.argv[1:], flush=True)\n"
        "over.wait(60)\n"
        "sys.exit(0 if over.is_set() else 9)\n"
    )
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{stand_in.parent}{os.pathsep}{ROOT}"}
    environment.pop("DAGSTER_HOME", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "stillstate.orchestration.cli", "dagster", "--config", "../stillstate.yaml"],
        cwd=tmp_path / "elsewhere",
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    home, config, folder, *arguments = lines[-1].split()
    assert Path(home) == tmp_path / "dagster"
    assert (tmp_path / "dagster" / "dagster.yaml").is_file()
    assert Path(config).resolve() == tmp_path / "stillstate.yaml"
    assert Path(folder).resolve() == tmp_path
    assert arguments[:3] == ["dev", "-m", "stillstate.orchestration.definitions"]


def test_dagster_takes_a_free_port_where_the_usual_one_is_taken(tmp_path: Path) -> None:
    from stillstate.orchestration.commands.begin_here import free_port

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        usual = taken.getsockname()[1]
        found = free_port("127.0.0.1", usual)
        assert found not in (0, usual)


def test_a_dagster_that_does_not_hear_is_asked_again_and_drivers_are_left_alone(tmp_path: Path) -> None:
    """It once lost a Ctrl-C that came while its page started, and waited for ever."""
    driver = "import sys; sys.stdin.read(); print('the driver went on', flush=True)"
    (tmp_path / "deaf.py").write_text(
        "import signal, subprocess, sys\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        f"command = [sys.executable, '-c', {driver!r}]\n"
        "driver = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)\n"
        "print('started', flush=True)\n"
        "while True: signal.pause()\n"
    )
    command = (
        "import os, sys, pathlib\n"
        "from stillstate.orchestration.commands import begin_here\n"
        "begin_here._PATIENCE_S = 0.1\n"
        "command = [sys.executable, 'deaf.py']\n"
        f"sys.exit(begin_here._run_until_it_ends(command, dict(os.environ), pathlib.Path({str(tmp_path)!r})))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ours = subprocess.Popen(
        [sys.executable, "-c", command], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert ours.stdout is not None
        assert ours.stdout.readline() == "started\n"
        ours.send_signal(signal.SIGTERM)
        said, _ = ours.communicate(timeout=60)
        assert ours.returncode == 0
        assert said == "the driver went on\n"
    finally:
        if ours.poll() is None:
            os.killpg(ours.pid, signal.SIGKILL)
            ours.wait()
