"""The reference for people and editors, made from the code: of `stillstate.yaml` the JSON schema of `stillstate schema`
and docs/settings.md, of errors docs/errors.md (`make reference`)."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from state_runtime.base import errors
from state_runtime.base.settings import SettingsGroup, groups_of
from stillstate.orchestration.config.spec import JobSpec, Spec

__all__ = ["SCHEMA_NAME", "errors_page", "groups_below", "json_schema", "page", "schema_text"]

SCHEMA_NAME: Final = "stillstate.schema.json"
"""The file that `stillstate init` writes beside `stillstate.yaml`, which names it in its first line."""

_BEGINNING: Final = """# Settings

Every key of `stillstate.yaml`, made from its models by `make reference`. `stillstate schema --output FILE` writes the
same as a JSON schema, with which editors complete and check the file: the first line of a file that `stillstate init`
wrote names one.

Names carry their units: `_s` is seconds, and bytes are plain numbers in the file (`16777216`). A value outside its
bounds is refused when the file is read, with file and line. Keys of a job may stand below `defaults` too, for all jobs.
In Python, the settings of the runtime have the same names, groups and bounds, in `stillstate.JobSettings`:
`JobSettings(parallelism=4, checkpoint={"interval_s": 60})`. No setting of the runtime but
`max_ahead_s` changes a result, and each may be changed at any restart. [Operations](operations.md) says when to change
which.
"""
_ERRORS_BEGINNING: Final = """# Errors

Every error that Stillstate raises on purpose, made from `state_runtime/base/errors.py` by `make reference`. In Python
they are in `stillstate.errors`; a command ends with the exit code, and the heartbeat of a run that failed has the
error. A message says what happened, where, and what to do next. [The same by what you
see](operations.md#what-it-says-and-what-to-do), and [who brings a job back after which](operations.md#recovery).

Exit code 0 is success. Errors below one another are caught together: `except errors.Invalid` catches all of code 2.

"""
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def groups_below(root: type[SettingsGroup], path: str = "") -> Iterator[tuple[str, type[SettingsGroup]]]:
    """Yield a group and all groups below it, each with the keys that lead to it."""
    yield path, root
    for name, field in root.model_fields.items():
        for below in groups_of(field.annotation):
            yield from groups_below(below, f"{path}.{name}" if path else name)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the file, with descriptions and defaults."""
    schema = Spec.model_json_schema()
    for _, group in groups_below(Spec):
        texts, properties = _texts(group), _definition(schema, group)["properties"]
        for name, said in properties.items():
            said.pop("title", None)
            said["description"] = texts.get(name) or _text(groups_of(group.model_fields[name].annotation)[0])
    # The keys of `defaults` are put under each job before the file is checked, so a job may lack any key.
    del _definition(schema, JobSpec)["required"]
    schema["properties"]["defaults"] = {"$ref": "#/$defs/JobSpec", "description": "Keys that all jobs have by default."}
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def page() -> str:
    """Return docs/settings.md."""
    schema = json_schema()
    sections = [_BEGINNING]
    for path, group in groups_below(Spec):
        rows = [
            f"| `{name}` | {_default(name, said, group)} | {_allowed(name, said)} | {said['description']} |"
            for name, said in _definition(schema, group)["properties"].items()
            if name == "trigger" or (name in group.model_fields and not groups_of(group.model_fields[name].annotation))
        ]
        if path != "jobs.trigger":
            title = path.removeprefix("jobs.") if path not in ("", "jobs") else {"": "The file", "jobs": "A job"}[path]
            table = ["| key | default | allowed | meaning |", "|---|---|---|---|", *rows]
            sections.append("\n".join([f"## {title}", "", _text(group), "", *table, ""]))
    return "\n".join(sections)


def errors_page() -> str:
    """Return docs/errors.md."""
    codes = [
        f"| {error.exit_code} | `{error.__name__}` | {error.help} | {'no' if error.is_final else 'yes'} |"
        for error in errors.REACTIONS
        if error is not errors.StoreRefused
    ]
    rows = [
        f"| `{error.__name__}` | {', '.join(f'`{base.__name__}`' for base in error.__bases__ if base is not Exception)}"
        f" | {error.exit_code} | {_text(error)} | {error.mend} |"
        for error in (getattr(errors, name) for name in _in_order_of_the_tree())
    ]
    table = ["| exit code | error | meaning | started again in place |", "|---|---|---|---|", *codes]
    classes = ["| error | is a | exit code | what happened | what to do |", "|---|---|---|---|---|", *rows]
    return _ERRORS_BEGINNING + "\n".join(["## Exit codes", "", *table, "", "## Classes", "", *classes, ""])


def _in_order_of_the_tree() -> list[str]:
    """Return the names of the errors as the docstring of their module draws them, from above."""
    drawn = re.findall(r"^ +[│├└─ ]*(\w+)", errors.__doc__ or "", re.MULTILINE)
    return [name for name in drawn if isinstance(getattr(errors, name, None), type)]


def _definition(schema: dict[str, Any], group: type[SettingsGroup]) -> dict[str, Any]:
    found: dict[str, Any] = schema if group is Spec else schema["$defs"][group.__name__]
    return found


def _text(described: type) -> str:
    """Return a class's docstring as one line, without its sections."""
    told = (inspect.getdoc(described) or "").split("\n\nAttributes:")[0]
    return " ".join(told.split())


def _texts(group: type[SettingsGroup]) -> dict[str, str]:
    """Return the text below each field of the group and of the groups that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(group.mro()[: group.mro().index(SettingsGroup)]):
        tree = ast.parse(inspect.getsource(kind))
        body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text).replace("\n", " ")
    return found


def _default(name: str, said: dict[str, Any], group: type[SettingsGroup]) -> str:
    if group.model_fields[name].is_required():
        return "required"
    default: Any = said.get("default")
    if isinstance(default, list):
        return ", ".join(f"`{item}`" for item in default) or "none"
    if isinstance(default, bool) or (isinstance(default, str) and default):
        return f"`{str(default).lower() if isinstance(default, bool) else default}`"
    return "none" if default in (None, "", {}) else _number(name, default)


def _allowed(name: str, said: dict[str, Any]) -> str:
    if kinds := said.get("anyOf"):
        return " or ".join(_allowed(name, kind) for kind in kinds if kind.get("type") != "boolean" or len(kinds) == 1)
    if "enum" in said or "const" in said:
        return ", ".join(f"`{choice}`" for choice in said.get("enum", [said.get("const")]))
    if said.get("type") not in ("integer", "number"):
        words = {"string": "text", "boolean": "`true`, `false`", "array": "list", "object": "mapping", "null": "`null`"}
        return words.get(said.get("type", ""), "mapping")
    above = "more than " if "exclusiveMinimum" in said else ""
    low = said["exclusiveMinimum"] if above else said["minimum"]
    return f"{above}{_number(name, low)} … {_number(name, said['maximum'])}"


def _number(name: str, value: float) -> str:
    if "bytes" not in name or value < 1024:
        return f"{value:,.15g}"
    power = (int(value).bit_length() - 1) // 10
    return f"{value / 1024**power:g} {_UNITS[power]}"


if __name__ == "__main__":
    docs = Path(__file__).resolve().parents[2] / "docs"
    (docs / "settings.md").write_text(page(), encoding="utf-8")
    (docs / "errors.md").write_text(errors_page(), encoding="utf-8")
