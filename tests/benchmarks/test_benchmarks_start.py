"""Every measurement can be started: nobody runs all of them, and a renamed piece is not seen until somebody does."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks


@pytest.mark.parametrize("module", [each.name for each in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")])
def test_a_module_of_the_benchmarks_finds_all_that_it_imports(module: str) -> None:
    importlib.import_module(module)
