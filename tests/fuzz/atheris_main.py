"""Coverage-guided fuzzing: `make fuzz TARGET=parts`. Needs the package atheris, which is no dependency of Stillstate."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "state_runtime")]
with atheris.instrument_imports(include=["state_runtime"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        target(lambda below: provider.ConsumeIntInRange(0, max(below - 1, 0)))

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
