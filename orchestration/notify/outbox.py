"""The outbox: what is wrong, and which notifications were sent or are still to be sent; pure.

A trouble goes through these states, and is written down after each:

1. seen, and not sent;
2. sent: no further notification while it lasts;
3. passed, and that not sent; a trouble that passed before it could be sent is still sent, both times;
4. removed from the book.

A trouble that comes back in state 3 is in state 2 again: its receiver was not notified that it had passed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

__all__ = ["TEXT_CHARS_MAX", "Book", "Entry", "Message", "Trouble", "read_book"]

BOOK_VERSION: Final = 1
MESSAGE_VERSION: Final = 1
TROUBLES_MAX: Final = 2000
"""Entries at the same time: those of two hundred streams of which everything is wrong."""
TEXT_CHARS_MAX: Final = 1000
"""Characters of the text of one; the rest is in Dagster."""

State = Literal["failed", "passed"]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A fault that lasts.

    Attributes:
        key: the same as long as it is the same trouble.
        stream: the job in `stillstate.yaml`.
        what: the check that is red, or the Dagster job whose run failed.
        where: the asset of the check, or the run's id.
        text: why, without secrets.
        at_ms: since when.
    """

    key: str
    stream: str
    what: str
    where: str
    text: str
    at_ms: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A trouble in the book.

    Attributes:
        passed_ms: when it had passed; 0: it lasts.
    """

    trouble: Trouble
    is_told: bool = False
    passed_ms: int = 0


@dataclass(frozen=True)
class Message:
    """The message about a trouble to a receiver."""

    trouble: Trouble
    state: State
    at_ms: int

    def document(self) -> dict[str, Any]:
        """Return the message as JSON; `version` is the version of this form."""
        return {
            "version": MESSAGE_VERSION,
            "state": self.state,
            "trouble": self.trouble.key,
            "stream": self.trouble.stream,
            "what": self.trouble.what,
            "where": self.trouble.where,
            "text": self.trouble.text,
            "since_ms": self.trouble.at_ms,
            "at_ms": self.at_ms,
        }


@dataclass(frozen=True, kw_only=True)
class Book:
    """All troubles.

    Attributes:
        entries: by the trouble's key, in the order in which they were seen.
        read_id: of Dagster's newest event about a run that was read; None: no event was read yet.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    read_id: int | None = None

    def with_seen(self, red: Iterable[Trouble], passed: Mapping[str, int]) -> Book:
        """Return the book after a look.

        Args:
            red: the troubles that exist now.
            passed: troubles that have passed: key, and since when; a key in neither is unchanged.
        """
        entries = dict(self.entries)
        for trouble in red:
            known = entries.get(trouble.key)
            if known is None and len(entries) < TROUBLES_MAX:
                entries[trouble.key] = Entry(trouble=replace(trouble, text=trouble.text[:TEXT_CHARS_MAX]))
            elif known is not None and known.passed_ms:
                entries[trouble.key] = replace(known, passed_ms=0)
        for key, at_ms in passed.items():
            known = entries.get(key)
            if known is not None and not known.passed_ms:
                entries[key] = replace(known, passed_ms=max(1, at_ms))
        return replace(self, entries=entries)

    def due(self) -> list[Message]:
        """Return the messages to send, the longest waiting first; of each trouble only the next message."""
        messages = [
            Message(e.trouble, "passed" if e.is_told else "failed", e.passed_ms if e.is_told else e.trouble.at_ms)
            for e in self.entries.values()
            if not e.is_told or e.passed_ms
        ]
        return sorted(messages, key=lambda message: message.at_ms)

    def after(self, message: Message) -> Book:
        """Return the book when a message has arrived."""
        entries = dict(self.entries)
        known = entries[message.trouble.key]
        if message.state == "passed":
            del entries[message.trouble.key]
        else:
            entries[message.trouble.key] = replace(known, is_told=True)
        return replace(self, entries=entries)

    def text(self) -> str:
        """Return the book as versioned JSON."""
        entries = [
            [t.key, t.stream, t.what, t.where, t.text, t.at_ms, e.is_told, e.passed_ms]
            for e in self.entries.values()
            for t in (e.trouble,)
        ]
        return json.dumps({"version": BOOK_VERSION, "read": self.read_id, "entries": entries}, separators=(",", ":"))


def read_book(text: str | None) -> Book:
    """Parse a book. A book that cannot be parsed is replaced by an empty one: present troubles are sent once more,
    troubles that have passed meanwhile are not."""
    try:
        data = json.loads(text or "{}")
        if data.get("version") != BOOK_VERSION:
            return Book()
        entries = [_entry(*row) for row in data["entries"]]
        read_id = None if data["read"] is None else int(data["read"])
        return Book(entries={entry.trouble.key: entry for entry in entries}, read_id=read_id)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Book()


def _entry(key: str, stream: str, what: str, where: str, text: str, at_ms: int, is_told: bool, passed_ms: int) -> Entry:
    trouble = Trouble(
        key=str(key), stream=str(stream), what=str(what), where=str(where), text=str(text), at_ms=int(at_ms)
    )
    return Entry(trouble=trouble, is_told=bool(is_told), passed_ms=int(passed_ms))
