"""Texts over several literals, filled again: no line is too long, and no literal ends in the middle of a line that its next words would fit.

`python -m tests.literals` does it for our packages (`make format`); `tests/test_tidy.py` refuses what it would change.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.import_map import our_files

WIDTH = 120
LITERAL = re.compile(r'(f?)"((?:[^"\\]|\\.)*)"\Z', re.DOTALL)


@dataclass(frozen=True)
class Word:
    """A piece of a text that no line may tear, with the blank or line end behind it."""

    text: str
    is_formatted: bool

    @property
    def has_braces(self) -> bool:
        return "{" in self.text or "}" in self.text


def refilled(source: str) -> str:
    """The same program; texts with lines that are too long, or with more of them than they need, are filled again."""
    lines = source.splitlines(keepends=True)
    for literals in reversed(list(groups(source, lines))):
        first, last = literals[0], literals[-1]
        column, behind = first.start[1], lines[last.end[0] - 1][last.end[1] :]
        made = filled([literal.string for literal in literals], column, len(behind.rstrip("\n")))
        is_long = any(len(lines[literal.start[0] - 1].rstrip("\n")) > WIDTH for literal in literals)
        if len(made) >= len(literals) and not is_long:
            continue
        before = lines[first.start[0] - 1][:column]
        made[0], made[1:] = before + made[0], [" " * column + text for text in made[1:]]
        lines[first.start[0] - 1 : last.end[0]] = [*(text + "\n" for text in made[:-1]), made[-1] + behind]
    return "".join(lines)


def groups(source: str, lines: Sequence[str]) -> Iterator[list[tokenize.TokenInfo]]:
    """Literals below each other in one column, each alone in its line but for what is before the first and behind the
    last."""
    found: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            found.append(token)
            continue
        if token.type == tokenize.NL and found:
            continue
        if found and is_column(found, lines) and (len(found) > 1 or begins_its_line(found[0])):
            yield found
        found = []


def begins_its_line(literal: tokenize.TokenInfo) -> bool:
    """So it stands between brackets, and may take more lines; a docstring has other quotes."""
    return not literal.line[: literal.start[1]].strip()


def is_column(literals: Sequence[tokenize.TokenInfo], lines: Sequence[str]) -> bool:
    is_below = all(a.end[0] + 1 == b.start[0] for a, b in pairwise(literals))
    in_column = {literal.start[1] for literal in literals} == {literals[0].start[1]}
    is_alone = not any(lines[literal.end[0] - 1][literal.end[1] :].strip() for literal in literals[:-1])
    are_plain = all(LITERAL.match(literal.string) and literal.start[0] == literal.end[0] for literal in literals)
    return is_below and in_column and is_alone and are_plain


def filled(literals: Sequence[str], column: int, behind: int) -> list[str]:
    """The literals of the same text, in as few lines as it takes."""
    words = joined([words_of(*LITERAL.match(literal).groups()) for literal in literals])  # type: ignore[union-attr]
    # A brace of a plain literal is a brace; beside a formatted one it would have to be doubled.
    is_plain = not any(word.has_braces and word.is_formatted for word in words)
    if not is_plain and any(word.has_braces and not word.is_formatted for word in words):
        return list(literals)
    made, line = [], ""
    for number, word in enumerate(words):
        room = WIDTH - column - (behind if number == len(words) - 1 else 0)
        if line and (len(written(line + word.text, is_plain=is_plain)) > room or line.endswith("\\n")):
            made.append(line)
            line = ""
        line += word.text
    return [written(text, is_plain=is_plain) for text in [*made, line]]


def written(text: str, *, is_plain: bool) -> str:
    is_formatted = not is_plain and ("{" in text or "}" in text)
    return f'{"f" if is_formatted else ""}"{text}"'


def joined(literals: Sequence[list[Word]]) -> list[Word]:
    """The words of all; one that two literals tore is one again."""
    words: list[Word] = []
    for literal in literals:
        if words and literal and not words[-1].text.endswith((" ", "\\n")):
            torn = words.pop()
            head = Word(torn.text + literal[0].text, torn.is_formatted or literal[0].is_formatted)
            words += [head, *literal[1:]]
        else:
            words += literal
    return words


def words_of(prefix: str, body: str) -> list[Word]:
    """A literal cut behind its blanks and line ends, but for those in the braces of a formatted one."""
    words, word, depth, at = [], "", 0, 0
    while at < len(body):
        step = 2 if body[at] == "\\" or (prefix and body[at : at + 2] in ("{{", "}}") and not depth) else 1
        piece = body[at : at + step]
        if prefix and step == 1:
            depth += (piece == "{") - (piece == "}")
        word, at = word + piece, at + step
        is_end = piece == "\\n" or (piece == " " and body[at : at + 1] != " ")
        if is_end and not depth:
            words.append(Word(word, bool(prefix)))
            word = ""
    return [*words, Word(word, bool(prefix))] if word else words


def main() -> None:
    for file in our_files():
        source = file.read_text()
        if (made := refilled(source)) != source:
            file.write_text(made)
            print(f"refilled: {file}")


if __name__ == "__main__":
    main()
