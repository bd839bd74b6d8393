"""Strict parsing of JSON into dataclasses, for everything that is read from a store; pure.

Pydantic checks the types of the dataclass. Two checks are added: a whole number has at most 64 bits (a longer one would
fail in later arithmetic, far from the file that holds it), and NaN and infinity are refused (JSON has no NaN, but
parsers accept it).
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, ValidationError

__all__ = ["ValidationError", "parse_json", "shown_problem"]

T = TypeVar("T")

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_VALIDATORS: dict[type[Any], SchemaValidator] = {}


def parse_json(cls: type[T], data: bytes) -> T:
    """Parse a value of the dataclass `cls`.

    Raises:
        ValidationError: it is not of that class.
    """
    validator = _VALIDATORS.get(cls)
    if validator is None:
        validator = _VALIDATORS[cls] = SchemaValidator(_bounded(TypeAdapter(cls).core_schema))
    value: T = validator.validate_json(data, strict=True)
    return value


def shown_problem(error: ValidationError) -> str:
    """Return the first problem and its place, without the input value."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: v if k in ("metadata", "default", "serialization") else _bounded(v) for k, v in schema.items()}
    if schema.get("type") == "int":
        return {"ge": _LEAST, "le": _MOST, **kept}
    if schema.get("type") == "float":
        return {**kept, "allow_inf_nan": False}
    return kept
