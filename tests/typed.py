"""A person with a terminal: files are written and commands typed as a page of the documentation prints them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

ROOT = Path(__file__).resolve().parents[1]
COMMAND_S_MAX = 240.0
_PARTS = re.compile(r"^(?:```(\w+)\n(.*?)^```|((?: {4}[^\n]*\n| *\n(?= {4}))+))", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of a page: a file with its name, or commands with none."""

    file: str
    text: str

    def commands(self) -> list[str]:
        """The commands of the block, without their comments."""
        lines = (re.split(r"\s+#", line.strip())[0] for line in self.text.split("\n"))
        return [line for line in lines if line]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, or a part of it, in order.

    A fenced block is a file if its first line is a comment with a file's name, and is passed over else; an indented one
    is what is typed.
    """
    for language, fenced, indented in _PARTS.findall(text):
        if not language:
            yield Block("", indented)
        elif named := re.match(r"# ([\w.]+\.(?:py|yaml))\n", fenced):
            yield Block(named[1], fenced)


class Shell:
    """Types commands; `stillstate` and `python` are this environment's. Close it: nothing that it started stays."""

    def __init__(self, folder: Path, **environment: str) -> None:
        programs = folder / "bin"
        programs.mkdir()
        for name, words in {"python": "", "stillstate": "-m stillstate.orchestration.cli "}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            (programs / name).chmod(0o755)
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("STILLSTATE_CONFIG", "DAGSTER_HOME")},
            **environment,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        self._log = folder / "typed.log"

    def write(self, block: Block) -> None:
        """Save a block under its name; again, if a page prints it again."""
        (self.folder / block.file).write_text(block.text)

    def run(self, command: str, exit_code: int = 0) -> str:
        """Its output; it must end as said."""
        if command.startswith("cd "):
            self.folder = self.folder / command.removeprefix("cd ")
            return ""
        ended = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            stdin=subprocess.DEVNULL,
        )
        assert ended.returncode == exit_code, (
            f"{command}: exit code {ended.returncode}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
        )
        return ended.stdout

    def run_until(self, command: str, done: Callable[[str], bool], sign: signal.Signals = signal.SIGINT) -> None:
        """Start it, wait until it has done something, and send a signal to all of it. After what Ctrl-C sends, which is
        the default, it must end as if nothing had failed."""
        with self._log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            wait_until(lambda: done(self._log.read_text()) or process.poll() is not None)
            assert process.poll() is None, f"{command}: ended by itself\n{self._log.read_text()[-3000:]}"
            os.killpg(process.pid, sign)
            ended = process.wait(COMMAND_S_MAX)
            assert ended == 0 or sign is signal.SIGKILL, f"{command}: ended badly\n{self._log.read_text()[-3000:]}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@retry(retry=retry_if_result(lambda done: not done), stop=stop_after_delay(COMMAND_S_MAX), wait=wait_fixed(0.5))
def wait_until(done: Callable[[], bool]) -> bool:
    """Wait for something that other processes do; they say nothing when they have."""
    return done()
