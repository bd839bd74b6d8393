"""Chains of stops, kills and re-scales with rows in flight, over seeds that no test draws: `make soak-inflight`.

    python -m tests.soak.inflight --lives 1000 --seed 7
    python -m tests.soak.inflight --again '7-12' --law 'drained and rescaled' --chain 'a join of two streams'

A *life* is one example of one law of `tests/state_runtime/driver/inflight_laws.py` on one chain of operators: an aligned run that
nothing disturbs, and a disturbed one over the same input, compared row for row. Driver, tasks, store, local copies and the commit
protocol are the real ones; Spark's planning and shuffle are stood in for. Each law has so many lives, dealt out over the chains.

The processes are separate for each piece of lives, so that what one leaves in memory ends with it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "state_runtime"), str(ROOT / "tests" / "state_runtime" / "driver")]

import pytest  # noqa: E402
from inflight_chains import CHAINS  # noqa: E402
from inflight_laws import LAWS, Life  # noqa: E402

PIECE = 50
REPORT = ROOT / "tests" / "soak" / "reports" / "inflight.json"


@dataclass(frozen=True)
class OfLaw:
    """What was played of a law; every life held it.

    Attributes:
        chains: lives of each.
        counts: what they met.
    """

    seed: int
    lives: int
    seconds: float
    chains: dict[str, int]
    counts: dict[str, int]


def play(name: str, law: str, chain: str) -> Counter[str]:
    """One life.

    Raises:
        AssertionError: the law does not hold; stderr names the life, and its folder stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="soak-inflight-"))
    chosen = next(c for c in CHAINS if c.name == chain)
    with pytest.MonkeyPatch.context() as patch:
        life = Life(
            f"--again {name!r} --law {law!r} --chain {chain!r}", folder, random.Random(f"{name} {law}"), chosen, patch
        )
        try:
            seen = LAWS[law](life)
        except BaseException:
            print(f"this life did not hold its law; again: python -m tests.soak.inflight {life.name}", file=sys.stderr)
            raise
    shutil.rmtree(folder)
    return seen


def chain_of(number: int) -> str:
    """Of the n-th life."""
    return CHAINS[number % len(CHAINS)].name


def piece(seed: int, law: str, first: int, end: int) -> Counter[str]:
    """Lives from one number up to another, in a process of their own.

    Raises:
        subprocess.CalledProcessError: one did not hold its law, which is on stderr.
    """
    command = [sys.executable, "-m", "tests.soak.inflight", "--seed", str(seed), "--law", law]
    done = subprocess.run([*command, "--piece", f"{first}:{end}"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return Counter(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=1000, help="of each law (1000)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; a new one each time by default")
    parser.add_argument("--again", default="", help="play one life again, by the name in the error")
    parser.add_argument("--law", choices=[*LAWS], default=None, help="that law only")
    parser.add_argument("--chain", choices=[c.name for c in CHAINS], default=CHAINS[0].name, help="of --again")
    parser.add_argument("--piece", default="", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with the counts of each law")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if given.again:
        print(dict(play(given.again, given.law or next(iter(LAWS)), given.chain)))
        return 0
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    if given.piece:
        first, end = map(int, given.piece.split(":"))
        seen: Counter[str] = Counter()
        for number in range(first, end):
            seen += play(f"{seed}-{number}", given.law, chain_of(number))
        print(json.dumps(seen))
        return 0
    for law in [given.law] if given.law else LAWS:
        print(f"{law}: seed {seed}", file=sys.stderr, flush=True)
        soak(law, seed, given.lives, partial(note, given.report, law))
    print(given.report.read_text())
    return 0


def soak(law: str, seed: int, lives: int, tell: Callable[[OfLaw], None]) -> None:
    """So many lives of a law; `tell` hears of those that held it, piece by piece."""
    begun_s, counts = time.monotonic(), Counter[str]()
    for first in range(0, lives, PIECE):
        end = min(lives, first + PIECE)
        counts.update(piece(seed, law, first, end))
        took_s = round(time.monotonic() - begun_s, 1)
        tell(OfLaw(seed, end, took_s, dict(Counter(map(chain_of, range(end)))), dict(sorted(counts.items()))))
        print(f"{law}: {end} of {lives} lives held it", file=sys.stderr, flush=True)


def note(report: Path, law: str, played: OfLaw) -> None:
    """Write what is known of a law into the report, beside what it has of others."""
    told = json.loads(report.read_text()) if report.exists() else {}
    told[law] = asdict(played)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
