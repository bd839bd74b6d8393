"""What docs/parity.md says of Spark's Scala suites, made of the cases: `python -m tests.spark_suite.page` writes it there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from .all_suites import SUITES
from .stream_test import Case, Suite, Watermark

__all__ = ["PAGE", "section_of", "written"]

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
BEGIN = "<!-- tests/spark_suite/page.py writes what follows -->\n"
END = "<!-- until here -->\n"
KINDS = ("run", "run in part", "refused", "not run")


def _tests(suite: Suite) -> dict[str, list[Case]]:
    """The tests of a suite that are played, with the queries of each."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in suite.cases:
        found[case.test].append(case)
    return found


def _kind(cases: Sequence[Case]) -> str:
    refused = [bool(case.refused) for case in cases]
    return "refused" if all(refused) else "run in part" if any(refused) or any(map(_differs, cases)) else "run"


def _differs(case: Case) -> bool:
    return any(isinstance(step, Watermark) and step.ours is not None for step in case.steps)


def _numbers() -> Iterator[str]:
    total = dict.fromkeys(KINDS, 0)
    yield f"| suite | tests | {' | '.join(KINDS)} | read at |"
    yield "|---" * (len(KINDS) + 3) + "|"
    for suite in SUITES:
        kinds = [_kind(cases) for cases in _tests(suite).values()] + ["not run"] * len(suite.not_run)
        numbers = {kind: kinds.count(kind) for kind in KINDS}
        total = {kind: total[kind] + numbers[kind] for kind in KINDS}
        row = " | ".join(str(number) for number in numbers.values())
        repository, _, commit = suite.source.partition("@")
        yield f"| `{suite.name}` | {len(kinds)} | {row} | {repository}@{commit[:12]} |"
    yield f"| all | {sum(total.values())} | {' | '.join(str(number) for number in total.values())} | |"


def _refused() -> Iterator[str]:
    """Words of a refusal, and the tests."""
    found: dict[str, list[str]] = defaultdict(list)
    for suite in SUITES:
        for test, cases in _tests(suite).items():
            for words in dict.fromkeys(case.refused for case in cases if case.refused):
                found[words].append(f"{suite.name.removeprefix('Streaming').removesuffix('Suite')}: {test}")
    yield "| refused with these words | tests |"
    yield "|---|---|"
    for words, tests in found.items():
        yield f"| {words} | {len(tests)}: {'; '.join(tests)} |"


def _not_run() -> Iterator[str]:
    yield "| not run | because |"
    yield "|---|---|"
    for suite in SUITES:
        for test, why in suite.not_run.items():
            yield f"| {suite.name.removeprefix('Streaming').removesuffix('Suite')}: {test} | {why} |"


def section_of(page: str) -> str:
    """The part of the page that is made here."""
    return page.partition(BEGIN)[2].partition(END)[0]


def written() -> str:
    """That part, as it has to be."""
    return "\n" + "\n\n".join("\n".join(lines) for lines in (_numbers(), _refused(), _not_run())) + "\n\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(BEGIN + section_of(text), BEGIN + written(), 1))
