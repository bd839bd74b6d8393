"""YAML with the place of every value, so that each error can name file, line and key.

Only plain data is read: mappings, lists and scalars. Tags that would construct objects, merge keys and duplicate keys
are errors, and every bound below is checked before a value is kept (a small file of nested aliases can otherwise expand
to gigabytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from state_runtime.base.errors import InvalidConfiguration

__all__ = ["FILE_BYTES_MAX", "Located", "Plain", "Problems", "read_tree"]

FILE_BYTES_MAX: Final = 1024 * 1024  # a configuration of a thousand jobs is a tenth of that
NODES_MAX: Final = 100_000  # counted after alias expansion
DEPTH_MAX: Final = 32
PROBLEMS_SHOWN_MAX: Final = 50

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
Scalar: TypeAlias = bool | int | float | str | None
Key: TypeAlias = str | int

_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Located:
    """A value and its place. `path` is where it was written: for a default, below `defaults`."""

    value: Scalar | list[Located] | dict[str, Located]
    line: int
    path: tuple[Key, ...]

    def plain(self) -> Plain:
        """Return the value without its places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def get(self, key: str) -> Located | None:
        """Return the child under `key`, or None (also when this is not a mapping)."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def find(self, path: tuple[Key, ...]) -> tuple[Located, tuple[Key, ...]]:
        """Return the deepest existing value on the way along `path`, and the rest that does not exist."""
        here = self
        for depth, key in enumerate(path):
            child: Located | None = None
            if isinstance(here.value, dict):
                child = here.value.get(str(key))
            elif isinstance(here.value, list) and isinstance(key, int) and key < len(here.value):
                child = here.value[key]
            if child is None:
                return here, path[depth:]
            here = child
        return here, ()

    def merged_over(self, base: Located) -> Located:
        """Return this value with the keys that only `base` has; mappings merge at every depth, all else replaces."""
        if not isinstance(self.value, dict) or not isinstance(base.value, dict):
            return self
        merged = dict(base.value)
        for key, child in self.value.items():
            merged[key] = child.merged_over(merged[key]) if key in merged else child
        return Located(merged, self.line, self.path)

    def mapped(self, change: Callable[[Located], Scalar]) -> Located:
        """Return the same tree with every scalar replaced by `change(scalar)`."""
        if isinstance(self.value, dict):
            return Located({k: c.mapped(change) for k, c in self.value.items()}, self.line, self.path)
        if isinstance(self.value, list):
            return Located([c.mapped(change) for c in self.value], self.line, self.path)
        return Located(change(self), self.line, self.path)

    def with_child(self, key: str, child: Located) -> Located:
        """Return a copy of this mapping with one child replaced."""
        if not isinstance(self.value, dict):
            raise TypeError("only a mapping has named children")
        return Located({**self.value, key: child}, self.line, self.path)


@dataclass
class Problems:
    """All problems of one file, collected so that the user can fix them at once."""

    file: Path
    found: dict[tuple[int, str, str], None] = field(default_factory=dict)

    def add(self, line: int, path: tuple[Key, ...], message: str) -> None:
        """Note one problem; a repeated one (a default that several jobs inherit) is kept once."""
        self.found.setdefault((line, dotted(path), message))

    def has(self, line: int, path: tuple[Key, ...]) -> bool:
        """Whether a problem of this key is already known."""
        return any((line, dotted(path)) == (known, key) for known, key, _ in self.found)

    def __iter__(self) -> Iterator[str]:
        for line, key, message in sorted(self.found):
            yield f"{self.file}:{line}: {key + ': ' if key else ''}{message}"

    def raise_if_any(self) -> None:
        """Raise one `InvalidConfiguration` with a line for each problem."""
        if self.found:
            lines = list(self)
            more = len(lines) - PROBLEMS_SHOWN_MAX
            tail = [f"… and {more} more"] if more > 0 else []
            raise InvalidConfiguration("\n".join(lines[:PROBLEMS_SHOWN_MAX] + tail))


def dotted(path: tuple[Key, ...]) -> str:
    """`jobs.flights.owners[1]`"""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def read_tree(file: Path, problems: Problems) -> Located:
    """Read a YAML file whose top level is a mapping.

    Problems that leave something to validate (a duplicate key, a strange tag) are added to `problems`.

    Raises:
        InvalidConfiguration: the file is missing, unreadable, too large, not UTF-8, not YAML, not a mapping.
    """
    text = _read_text(file)
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        # The mark's snippet would repeat a line of the file, which may hold a password: only the problem.
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise InvalidConfiguration(f"{file}:{line}: not valid YAML: {what}") from None
    except YAMLError as error:
        raise InvalidConfiguration(f"{file}:1: not valid YAML: {type(error).__name__}") from None
    except RecursionError:
        raise InvalidConfiguration(f"{file}:1: nested too deeply; at most {DEPTH_MAX} levels") from None
    if not isinstance(root, MappingNode):
        what = "empty" if root is None else "a list" if isinstance(root, SequenceNode) else "a single value"
        raise InvalidConfiguration(f"{file}:1: the file is {what}; it must have the keys `version` and `jobs`")
    return _Reader(problems).read(root, ())


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            body = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise InvalidConfiguration(
            f"{file}: there is no such file; create it, or name another with --config or $STILLSTATE_CONFIG"
        ) from None
    except OSError as error:
        raise InvalidConfiguration(f"{file}: cannot be read: {error.strerror or error}") from None
    if len(body) > FILE_BYTES_MAX:
        raise InvalidConfiguration(f"{file}: larger than {FILE_BYTES_MAX:,} bytes; not a configuration file")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise InvalidConfiguration(f"{file}:{line}: not UTF-8 text; save the file as UTF-8") from None


class _Reader:
    """Turns composed nodes into located values."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._nodes = 0
        self._constructor = YAML(typ="safe", pure=True).constructor

    def read(self, node: Node, path: tuple[Key, ...]) -> Located:
        line = node.start_mark.line + 1
        self._nodes += 1
        if self._nodes > NODES_MAX or len(path) > DEPTH_MAX:
            raise InvalidConfiguration(
                f"{self._problems.file}:{line}: {dotted(path[:3])}: too many values or too deep "
                f"(at most {NODES_MAX:,} values, {DEPTH_MAX} levels; aliases count each time they are used)"
            )
        if isinstance(node, MappingNode):
            return Located(self._mapping(node, path), line, path)
        if isinstance(node, SequenceNode):
            return Located([self.read(child, (*path, i)) for i, child in enumerate(node.value)], line, path)
        return Located(self._scalar(node, path), line, path)

    def _mapping(self, node: MappingNode, path: tuple[Key, ...]) -> dict[str, Located]:
        read: dict[str, Located] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                self._problems.add(line, path, "merge keys (<<) are not supported; put what jobs share in `defaults`")
                continue
            if not isinstance(key_node, ScalarNode) or not isinstance(key_node.value, str):
                self._problems.add(line, path, "a key must be a plain word")
                continue
            key = key_node.value
            if key in read:
                first = read[key].line
                self._problems.add(line, (*path, key), f"the same key is already in line {first}; remove one")
                continue
            value = self.read(value_node, (*path, key))
            # The line of the key, not of the value: a mapping's own mark is the place of its first child.
            read[key] = Located(value.value, line, value.path)
        return read

    def _scalar(self, node: Node, path: tuple[Key, ...]) -> Scalar:
        tag = node.tag or ""
        if tag == _TIMESTAMP:
            return str(node.value)  # a date stays the text that was written: options are JSON-like values
        if tag not in _SCALARS:
            self._problems.add(node.start_mark.line + 1, path, f"the tag {tag[:60]} is not supported")
            return None
        try:
            value = self._constructor.construct_object(node)
        except (YAMLError, ValueError):
            self._problems.add(node.start_mark.line + 1, path, "not a valid value of its type; quote it")
            return None
        if value is None or isinstance(value, bool | int | float | str):
            # ruamel's number classes keep how a number was written; the plain ones travel better.
            return value if value is None or isinstance(value, bool) else _plain_number(value)
        return str(node.value)


def _plain_number(value: int | float | str) -> int | float | str:
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str(value)
