"""Finds the function that builds a job; the error names the missing part, and the existing names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from state_runtime.base.errors import InvalidConfiguration, StillstateError, UserCodeError

__all__ = ["load_entry_point", "refuse_missing_module"]


def load_entry_point(entry_point: str, folder: Path | None = None) -> Callable[[Any], Any]:
    """Import `package.module:function`.

    Args:
        entry_point: checked by the schema of `stillstate.yaml`.
        folder: put on the import path first; the folder of the configuration file.

    Raises:
        InvalidConfiguration: no such module or attribute, or it is not a function.
        UserCodeError: the module itself raised while it was imported; the cause is chained.
    """
    _look_first_in(folder)
    module_name, _, attribute = entry_point.partition(":")
    target: Any = _import(module_name, entry_point)
    seen = module_name
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [n for n in vars(target) if not n.startswith("_")] if hasattr(target, "__dict__") else []
            raise InvalidConfiguration(
                f"entry_point {entry_point!r}: {seen} has no {part!r}; {_nearest(part, names, 'it')}"
            )
        target, seen = getattr(target, part), f"{seen}.{part}"
    if not callable(target):
        raise InvalidConfiguration(
            f"entry_point {entry_point!r}: {seen} is a {type(target).__name__}, not a function; "
            "name a function that takes the job's context and returns a StreamingJob"
        )
    found: Callable[[Any], Any] = target
    return found


def refuse_missing_module(entry_point: str, folder: Path | None = None) -> None:
    """Find the module without importing it: an import takes seconds, and other work can begin before.

    Raises:
        InvalidConfiguration: no module has this name.
    """
    _look_first_in(folder)
    module_name = entry_point.partition(":")[0]
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    except Exception:
        return  # a package around it raised: the import will raise too, with the reason
    if found is None:
        _import(module_name, entry_point)


def _look_first_in(folder: Path | None) -> None:
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import(module_name: str, entry_point: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise InvalidConfiguration(
                f"entry_point {entry_point!r}: the module {module_name} needs {missing!r}, which is not "
                "installed; install it into this Python environment"
            ) from error
        raise _no_module(missing, entry_point) from None
    except ImportError as error:
        raise InvalidConfiguration(
            f"entry_point {entry_point!r}: the module {module_name} cannot be imported: {error}"
        ) from error
    except StillstateError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"entry_point {entry_point!r}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error


def _no_module(missing: str, entry_point: str) -> InvalidConfiguration:
    parent, _, last = missing.rpartition(".")
    names = _submodules(parent)
    where = f"the package {parent}" if parent else "this Python environment"
    return InvalidConfiguration(
        f"entry_point {entry_point!r}: there is no module {missing!r}; {_nearest(last, names, where)}. "
        "Modules are looked for beside the configuration file and in this Python environment"
    )


def _submodules(package: str) -> list[str]:
    if not package:
        return [m.name for m in pkgutil.iter_modules()] + list(sys.stdlib_module_names)
    paths: Iterable[str] = getattr(sys.modules.get(package), "__path__", [])
    return [m.name for m in pkgutil.iter_modules(list(paths))]


def _nearest(wanted: str, names: list[str], owner: str) -> str:
    near = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    if near:
        return f"close to it: {', '.join(near)}"
    shown = ", ".join(sorted(names)[:10])
    return f"{owner} has: {shown}" if 0 < len(names) <= 50 else f"{owner} has no name close to it"
