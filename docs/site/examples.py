"""Docstrings have their examples indented below `Example:`, as Python; the site shows them as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example:\n((?:\1 +\S.*\n|[ ]*\n)*(?:\1 +\S.*))", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts a fence around each example before the docstring is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(example: re.Match[str]) -> str:
    """The example as a block of code under its word."""
    margin, code = example[1], example[2]
    return f"{margin}Example:\n{margin}    ```python\n{code}\n{margin}    ```"
