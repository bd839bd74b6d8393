"""The way to an Iceberg catalog. It may hold secrets, so nothing of it is shown but its name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.secrets import redacted, with_secrets

__all__ = ["CatalogAddress", "iceberg_library"]

_SECRET: Final = re.compile(r"secret|token|credential|password|\bkey\b|access-key|account-key|sas", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"(://[^/\s:@]*:)[^@\s]+(@)")


class CatalogAddress:
    """A catalog as pyiceberg's `load_catalog` takes it.

    Args:
        name: by which `.pyiceberg.yaml` and the variables `PYICEBERG_CATALOG__<NAME>__…` know it.
        options: settings of it; may hold secrets.
        options_env: per setting the variable in the environment that has it. It is read when the catalog is opened.
    """

    def __init__(self, name: str, options: Mapping[str, str] | None, options_env: Mapping[str, str] | None) -> None:
        self.name = name
        self._options = dict(options or {})
        self._options_env = dict(options_env or {})

    def __repr__(self) -> str:
        return f"CatalogAddress({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("the way to a catalog is not pickled; make the sink where the job is built")

    def redact(self, text: str) -> str:
        """Return a text of a library's without our secrets."""
        given = [str(value) for key, value in self._options.items() if _SECRET.search(key)]
        text = redacted(text, [*given, *map(os.environ.get, self._options_env.values())])
        return _PASSWORD.sub(r"\1***\2", text)

    def load(self) -> Any:
        """Open the catalog.

        Raises:
            InvalidConfiguration: pyiceberg or a variable is missing, or the settings name no catalog.
        """
        options = with_secrets(self._options, self._options_env, f"IcebergSink: catalog {self.name!r}")
        library = iceberg_library()
        try:
            return library.catalog.load_catalog(self.name, **options)
        except (ValueError, TypeError, library.exceptions.NotInstalledError) as error:
            # The chained error may repeat a setting, so it is not shown with this one.
            raise InvalidConfiguration(
                f"IcebergSink: the catalog {self.name!r} cannot be opened: {self.redact(str(error))}. Give its "
                "settings by catalog_options, by .pyiceberg.yaml, or by PYICEBERG_CATALOG__… variables"
            ) from None


def iceberg_library() -> Any:
    """Return pyiceberg.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import pyiceberg.catalog
        import pyiceberg.exceptions
        import pyiceberg.expressions
        import pyiceberg.io.pyarrow
        import pyiceberg.manifest
        import pyiceberg.table
    except ImportError as error:
        raise InvalidConfiguration(
            "IcebergSink needs the package pyiceberg: pip install 'stillstate[iceberg]'"
        ) from error
    return pyiceberg
