"""The system simulation uses the models of the runtime's tests."""

from __future__ import annotations

import sys
from pathlib import Path

MODELS = str(Path(__file__).resolve().parent.parent / "state_runtime")
if MODELS not in sys.path:
    sys.path.insert(0, MODELS)
