"""A job of real Spark that is fed all the time by a test that knows what must come of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

__all__ = ["KEYS", "PROJECT", "Feeder", "command", "newest_of_each_key", "output"]

PROJECT = str(Path(__file__).resolve().parents[2])
KEYS = 12


class Feeder:
    """Writes input all the time, and knows what comes of it."""

    def __init__(self, inbox: Path) -> None:
        self._inbox, self._ended = inbox, threading.Event()
        self.rows = 0
        self._thread = threading.Thread(target=self._feed, daemon=True)
        inbox.mkdir()
        self._write()
        self._thread.start()

    def _feed(self) -> None:
        while not self._ended.wait(0.5):
            self._write()

    def _write(self) -> None:
        lines = [json.dumps({"k": f"k{n % KEYS}", "v": n}) for n in range(self.rows, self.rows + 20)]
        part = self._inbox / f".{self.rows:08d}.tmp"
        part.write_text("\n".join(lines) + "\n")
        part.rename(self._inbox / f"{self.rows:08d}.json")
        self.rows += 20

    def end(self) -> dict[str, tuple[int, int]]:
        """Stop; count and sum of each key, computed anew."""
        self._ended.set()
        self._thread.join()
        counts: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for n in range(self.rows):
            counts[f"k{n % KEYS}"] += 1
            totals[f"k{n % KEYS}"] += n
        return {key: (counts[key], totals[key]) for key in counts}


def command(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stillstate.orchestration.cli", *arguments, "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        cwd=config.parent,
    )


def output(folder: Path) -> list[tuple[str, int, int]]:
    """What is published: like Spark, without what lies below names that begin with `_` or `.`, where tasks stage."""
    published = (f for f in folder.rglob("*.parquet") if not any(p[0] in "_." for p in f.relative_to(folder).parts))
    return [(r["k"], r["n"], r["total"]) for f in sorted(published) for r in pq.read_table(f).to_pylist()]


def newest_of_each_key(rows: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    newest: dict[str, tuple[int, int]] = {}
    for key, count, total in rows:
        newest[key] = max(newest.get(key, (0, 0)), (count, total))
    return newest
