"""A graph as a picture in SVG: one card below the other, edges at their left; pure.

So every graph has the same width, and is longer with each card. The colours of the page around it are not known:
cards bring their own, light ones, and lines are grey, which is seen on white and on black. An image runs no script and
loads nothing; names are escaped all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal
from xml.sax.saxutils import escape

__all__ = ["CARDS_MAX", "Card", "Tone", "svg_of"]

Tone = Literal["source", "operator", "stateless", "sink"]

CARDS_MAX: Final = 30
"""In one picture, where its size matters: some fifteen kilobytes, and three screens."""

_WIDTH: Final = 520
_LANE: Final = 12
_LANES_WIDTH_MAX: Final = 84
_INDENT: Final = 34
_GAP: Final = 14
_TITLE_HEIGHT: Final = 28
_LINE_HEIGHT: Final = 16
_CHAR: Final = 6.6  # width of a letter, in pixels; of a bold one it is a little more
_HEAD: Final = "".join(
    (
        "<style>text{font:12px system-ui,sans-serif;fill:#1f2430}",
        ".t{font-weight:600}.k{fill:#5b6270;text-anchor:end}.n,polygon{fill:#8b93a1}",
        "path{fill:none;stroke:#8b93a1;stroke-width:1.5;marker-end:url(#a)}rect{rx:5px}",
        ".source{fill:#dcebfb;stroke:#6fa8dc}.operator{fill:#e6e1f7;stroke:#9685cf}",
        ".stateless{fill:#f1f2f4;stroke:#b3b8c2}.sink{fill:#dff1e2;stroke:#7dbb88}</style>",
        "<marker id='a' refX='5' refY='2.5' markerWidth='5' markerHeight='5' orient='auto'>",
        "<polygon points='0,0 5,2.5 0,5'/></marker>",
    )
)
# XML has no other control characters, and no halves of pairs.
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A node of the picture.

    Attributes:
        reads: the places of the cards that it reads; others than earlier ones are not drawn.
    """

    title: str
    kind: str
    tone: Tone
    lines: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()

    @property
    def height(self) -> int:
        return _TITLE_HEIGHT + _LINE_HEIGHT * len(self.lines) + (6 if self.lines else 0)


def svg_of(cards: Sequence[Card], note: str = "", cards_max: int | None = None) -> str:
    """Return the picture: a card below what it reads, and sinks right below it.

    Args:
        note: below the cards.
        cards_max: more cards are counted in the note, and not drawn.
    """
    shown = _in_order(cards if cards_max is None else cards[:cards_max])
    if len(cards) > len(shown):
        note = f"and {len(cards) - len(shown):,} more steps. {note}"
    lanes = _lanes(shown)
    width = min(_LANES_WIDTH_MAX, _LANE * (1 + max(lanes.values(), default=-1)))
    at = {place: width * (lane + 0.5) / (1 + max(lanes.values())) for place, lane in lanes.items()}
    tops = _tops(shown)
    height = (tops[-1] + shown[-1].height if shown else 0) + (24 if note else 2)
    drawn = [
        *_edges(shown, tops, at, width),
        *(_card(card, top, width + (_INDENT if card.tone == "sink" else 0)) for card, top in zip(shown, tops)),
        f"<text class='n' x='1' y='{height - 6}'>{_text(note, _WIDTH)}</text>" if note else "",
    ]
    size = f"width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{_HEAD}{''.join(drawn)}</svg>"


def _in_order(cards: Sequence[Card]) -> list[Card]:
    """Return the cards with each sink right below the card that it reads, at their new places."""
    sinks: dict[int, list[int]] = {}
    for place, card in enumerate(cards):
        above = [each for each in card.reads if 0 <= each < place and cards[each].tone != "sink"]
        if card.tone == "sink" and above:
            sinks.setdefault(above[-1], []).append(place)
    moved = {place for below in sinks.values() for place in below}
    order = [each for place in range(len(cards)) if place not in moved for each in (place, *sinks.get(place, ()))]
    places = {before: place for place, before in enumerate(order)}
    return [replace(cards[n], reads=tuple(places[each] for each in cards[n].reads if each in places)) for n in order]


def _tops(cards: Sequence[Card]) -> list[int]:
    tops, top = [], 1
    for card in cards:
        tops.append(top)
        top += card.height + _GAP
    return tops


def _above(cards: Sequence[Card], place: int) -> int:
    """Return the last card before one that is no sink: an edge from there goes straight down, past its sinks. -1: there
    is none."""
    return next((n for n in range(place - 1, -1, -1) if cards[n].tone != "sink"), -1)


def _lanes(cards: Sequence[Card]) -> dict[int, int]:
    """Return a lane for each card that another one than the next reads; edges side by side have different lanes. Lane 0
    is the outermost."""
    ends: dict[int, int] = {}
    for place, card in enumerate(cards):
        above = _above(cards, place)
        ends |= {source: place for source in card.reads if 0 <= source < place and source != above}
    lanes: dict[int, int] = {}
    for source in sorted(ends):
        taken = {lanes[other] for other in lanes if ends[other] >= source}
        lanes[source] = next(lane for lane in range(len(ends)) if lane not in taken)
    return lanes


def _edges(cards: Sequence[Card], tops: Sequence[int], at: Mapping[int, float], left: int) -> list[str]:
    drawn = []
    for place, card in enumerate(cards):
        above, middle = _above(cards, place), tops[place] + _TITLE_HEIGHT / 2
        x = left + (_INDENT if card.tone == "sink" else 0)
        for source in sorted({each for each in card.reads if 0 <= each < place}):
            bottom = tops[source] + cards[source].height
            if source != above:
                line = f"M{left} {bottom - 8}H{at[source]:g}V{middle:g}H{x}"
            elif card.tone == "sink":
                line = f"M{left + 16} {bottom}V{middle:g}H{x}"
            else:
                line = f"M{left + 16} {bottom}V{tops[place]}"
            drawn.append(f"<path d='{line}'/>")
    return drawn


def _card(card: Card, top: int, left: int) -> str:
    room = _WIDTH - left - 22
    title = _text(card.title, room * 0.9 - _CHAR * len(card.kind[:40]))
    lines = "".join(
        f"<text x='{left + 10}' y='{top + _TITLE_HEIGHT + 10 + _LINE_HEIGHT * n}'>{_text(line, room)}</text>"
        for n, line in enumerate(card.lines)
    )
    return (
        f"<rect class='{card.tone}' x='{left}' y='{top}' width='{_WIDTH - left - 1}' height='{card.height}'/>"
        f"<text class='t' x='{left + 10}' y='{top + 18}'>{title}</text>"
        f"<text class='k' x='{_WIDTH - 10}' y='{top + 18}'>{_text(card.kind, room / 3)}</text>{lines}"
    )


def _text(text: str, room: float) -> str:
    """Return a text for XML that fits, cut if it is too long: letters of East Asia count twice."""
    shown, width = "", 0.0
    for letter in _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split())):
        width += _CHAR * (2 if letter >= "\u2e80" else 1)
        if width > room:
            return escape(shown[:-1]) + "…"
        shown += letter
    return escape(shown)
