"""The picture of a pipeline: all that reads what is in it, whatever a store says, and what is not known is not in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from urllib.parse import unquote
from xml.etree import ElementTree

import dagster as dg
from dagster_world import World
from hypothesis import given
from hypothesis import strategies as st
from job_roots import JobRoot
from test_progress_sensor import SENSOR, of_jobs

from state_runtime.base.steps import Step
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OpenBatch, SegmentEntry, TimeEntry
from stillstate.assets.cards import cards_of
from stillstate.assets.picture import CARDS_MAX, Card, Tone, svg_of

SVG = "{http://www.w3.org/2000/svg}"
TONES: tuple[Tone, ...] = ("source", "operator", "stateless", "sink")


@st.composite
def graphs(draw: st.DrawFn, nodes_max: int = 25) -> list[Card]:
    """Any that a pipeline can be: each card reads earlier ones, and none reads a sink."""
    cards: list[Card] = []
    for number in range(draw(st.integers(1, nodes_max))):
        readable = [n for n, card in enumerate(cards) if card.tone != "sink"]
        tone = draw(st.sampled_from(TONES if readable else TONES[:1]))
        count = 0 if tone == "source" else 1 if tone == "sink" else 3
        reads = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=count, unique=True)) if count else []
        lines = ("12 rows",) * draw(st.integers(0, 4))
        cards.append(Card(title=f"n{number}", kind="k", tone=tone, lines=lines, reads=tuple(reads)))
    return cards


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def rectangles(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """By title the left, top, right and bottom of each card."""
    whole = ElementTree.fromstring(svg)
    titles = [e.text or "" for e in whole.iter(f"{SVG}text") if e.get("class") == "t"]
    found = [[float(e.attrib[name]) for name in ("x", "y", "width", "height")] for e in whole.iter(f"{SVG}rect")]
    return {title: (x, y, x + w, y + h) for title, (x, y, w, h) in zip(titles, found, strict=True)}


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The corners of each edge, from the card that is read to the tip at the card that reads."""
    found = []
    for e in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        begin, *turns = re.findall(r"[MHV][^MHV]+", e.attrib["d"])
        x, y = map(float, begin[1:].split())
        corners = [(x, y)]
        for turn in turns:
            x, y = (float(turn[1:]), y) if turn[0] == "H" else (x, float(turn[1:]))
            corners.append((x, y))
        found.append(corners)
    return found


@given(graphs())
def test_each_step_is_in_the_picture_once_and_each_edge_goes_from_the_one_to_the_other(cards: list[Card]) -> None:
    """Also where branches meet, and sinks were written long after what they read."""
    svg = svg_of(cards)
    places = rectangles(svg)
    assert sorted(places) == sorted(card.title for card in cards)

    def touched(x: float, y: float) -> str:
        """A card whose border is there: an edge ends where its tip is, and begins at a border or a line's width beside it."""
        (name,) = [
            n for n, (left, top, right, bottom) in places.items() if left - 1 <= x <= right and top <= y <= bottom
        ]
        return name

    drawn = sorted((touched(*line[0]), touched(*line[-1])) for line in lines(svg))
    assert drawn == sorted((cards[source].title, card.title) for card in cards for source in card.reads)


@given(graphs())
def test_no_two_cards_lie_upon_each_other_and_all_lie_within_the_picture(cards: list[Card]) -> None:
    svg = svg_of(cards, "a note")
    size = ElementTree.fromstring(svg).attrib
    spans = sorted((top, bottom) for _, top, _, bottom in rectangles(svg).values())
    assert all(bottom < top for (_, bottom), (top, _) in pairwise(spans))
    assert all(0 <= left < right <= float(size["width"]) for left, _, right, _ in rectangles(svg).values())
    assert spans[-1][1] <= float(size["height"])


@given(graphs(nodes_max=12))
def test_edges_of_different_steps_never_run_on_one_line(cards: list[Card]) -> None:
    """Else it cannot be seen which of two steps is read. Edges of one step may share their beginning."""
    runs = {
        (x, begin, line[0], end)
        for line in lines(svg_of(cards))
        for (x, begin), (x_after, end) in pairwise(line)
        if x == x_after
    }
    for x, begin, start, end in runs:
        assert not [r for r in runs if r[0] == x and r[2] != start and r[1] < end and begin < r[3]]


hostile = st.text(st.characters(), max_size=60) | st.sampled_from(
    ["</text><script>alert(1)</script>", "]]>", "&amp;", '" onload="x', "\x00\x1b[31m", "\ud800", "a" * 5_000, ""]
)


@given(
    st.lists(
        st.builds(
            Step,
            kind=hostile | st.sampled_from(["source", "sink", "union"]),
            name=hostile,
            reads=st.lists(st.integers(-5, 40), max_size=4).map(tuple),
            keys=st.lists(st.lists(hostile, max_size=2).map(tuple), max_size=2).map(tuple),
            rows=st.none() | st.integers(-(1 << 63), 1 << 64),
            late_rows=st.none() | st.integers(-(1 << 63), 1 << 64),
            state_rows=st.none() | st.integers(-(1 << 63), 1 << 64),
        ),
        max_size=12,
    ),
    st.integers(-(1 << 62), 1 << 62),
)
def test_whatever_a_store_says_the_picture_is_well_formed_and_holds_text_only(steps: list[Step], at_ms: int) -> None:
    """Names come from a heartbeat, which anybody may have written who can write to the store."""
    newest = replace(MANIFEST, time=TimeEntry(at_ms, at_ms, {"a": at_ms}, clocks={s.name: at_ms for s in steps}))
    svg = svg_of(cards_of(steps, newest), "\x00<b>")
    svg.encode()
    whole = ElementTree.fromstring(svg)
    assert {e.tag.removeprefix(SVG) for e in whole.iter()} <= {
        "svg",
        "style",
        "marker",
        "polygon",
        "text",
        "rect",
        "path",
    }
    assert len(list(whole.iter(f"{SVG}rect"))) == len(steps)
    assert all(not name.startswith("on") and name != "href" for e in whole.iter() for name in e.attrib)


MANIFEST = Manifest(1, "j" * 32, 7, 1, "c", "checkpoint", 0, 2)


def test_a_pipeline_of_hundreds_of_steps_is_cut_and_the_rest_is_counted() -> None:
    """Dagster keeps each event for weeks; and a page of thirty screens is read by nobody."""
    cards = [Card(title="source", kind="", tone="source")]
    cards += [Card(title=f"n{n}", kind="", tone="operator", lines=("x" * 60,) * 4, reads=(n,)) for n in range(199)]
    svg = svg_of(cards, "rows since then", CARDS_MAX)
    assert len(rectangles(svg)) == CARDS_MAX
    assert texts(svg)[-1] == f"and {200 - CARDS_MAX} more steps. rows since then"
    assert len(svg) < 30_000
    assert len(rectangles(svg_of(cards))) == 200, "a file may have all of them"


def test_a_step_has_its_rows_its_lag_and_its_state(flights: JobRoot) -> None:
    """Each number is in the card of its step, with the figures that the snapshot and the heartbeat have."""
    flights.start()
    steps = [
        Step(kind="source", name="flights", rows=1234),
        Step(kind="source", name="weather", rows=0),
        Step(kind="interval_join", name="plane-day", reads=(0, 1), keys=(("tailnum",), ("plane",)), rows=1234, late_rows=2, state_rows=40),
        Step(kind="sink", name="legs", reads=(2,), rows=77),
        Step(kind="transform", name="large", reads=(2,)),
    ]  # fmt: skip
    at_ms = 1_357_000_000_000
    time = TimeEntry(
        at_ms, at_ms - 90_000, {"flights.at": at_ms - 3_000}, {"plane-day": at_ms - 61_000}, idle=("weather",)
    )
    segment = SegmentEntry("changelog/x/9.seg", 1, "d", 1, 9, 1)
    waiting = OpenBatch(
        0, listing=segment.path, segments=(segment,), operators=(InflightNumbers("plane-day", 5, 1, 1, 1),)
    )
    newest = replace(flights.checkpoint(), time=time, open_batch=waiting)
    assert [card.lines for card in cards_of(steps, newest)] == [
        ("1,234 rows · newest event 3 s behind",),
        ("0 rows · idle",),
        (
            "by tailnum = plane",
            "1,234 rows · 2 late · 5 in flight",
            "watermark 2013-01-01 00:25:39Z, 1 min behind",
            "state 40 rows · tables 40 rows, 4.9 KiB",
        ),
        ("77 rows",),
        (),
    ]


def test_what_is_not_known_is_left_out(flights: JobRoot) -> None:
    """Of a job without a snapshot, and of one whose snapshots an earlier version wrote: no zero stands for unknown."""
    step = Step(kind="deduplicate", name="other", keys=((),))
    for newest in (None, replace(MANIFEST, time=None), replace(MANIFEST, time=TimeEntry(5))):
        (card,) = cards_of([step], newest)
        assert (card.title, card.kind, card.lines) == ("other", "deduplicate", ("all rows are one group",))
    (source,) = cards_of([Step(kind="source", name="")], MANIFEST)
    assert (source.title, source.kind, source.lines) == ("source", "", ())


def shown(event: dg.AssetMaterialization) -> str:
    """The picture in an event, as a browser finds it in the Markdown."""
    picture = event.metadata["pipeline"]
    assert isinstance(picture, dg.MarkdownMetadataValue)
    found = re.fullmatch(r"!\[2 steps\]\(<data:image/svg\+xml,([^<>&#\n\\]+)>\)", picture.md_str)
    assert found is not None
    return unquote(found[1])


def test_an_event_has_the_picture_of_the_run_that_made_its_checkpoint(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """And none of a run of an earlier version, which did not say what its pipeline is."""
    here = world(house="observation: {interval_s: 0}")
    flights.start()
    flights.checkpoint()
    (before,) = [e for e in of_jobs(here.tick(SENSOR)) if e.asset_key.path[-1] == "checkpoints"]
    assert "pipeline" not in before.metadata
    steps = (Step(kind="source", name="flights", rows=9), Step(kind="aggregate", name="by|day", reads=(0,)))
    flights.checkpoint()
    flights.beat(steps=steps)
    (event,) = [e for e in of_jobs(here.tick(SENSOR)) if e.asset_key.path[-1] == "checkpoints"]
    assert sorted(rectangles(shown(event))) == ["by|day", "flights"]
    assert texts(shown(event))[-1].endswith("state of snapshot 3")
