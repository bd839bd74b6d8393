"""Values of the file that are never shown: storage options, and the receiver of notifications."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from state_runtime.base.secrets import REDACTED
from state_runtime.store.options import StoreOptions

__all__ = ["SecretMapping", "Secrets"]


class Secrets(Mapping[str, Any]):
    """Storage options. Reading gives the values; printing never does.

    Not a pydantic `SecretStr` per value, because fsspec wants the plain (and nested) options.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({{{', '.join(f'{key!r}: {REDACTED!r}' for key in self._values)}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("storage options are not pickled; read the configuration again where they are needed")

    def redact(self, text: str) -> str:
        """Return `text` without any value that may be secret; for log lines of other programs."""
        return StoreOptions("", self._values).redact(text)


def _secrets(value: object) -> object:
    if isinstance(value, Secrets):
        return value
    if isinstance(value, dict):
        return Secrets(value)
    raise PydanticCustomError("secrets", "must be a mapping of options of the store's library")


SecretMapping = Annotated[Secrets, BeforeValidator(_secrets), WithJsonSchema({"type": "object"})]
