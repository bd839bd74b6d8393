"""Random user programs over several epochs, in our engine and in a model of Spark's over plain dictionaries."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import colliding, examples, spread
from spark_model import (
    NAMES,
    TIMERS,
    Job,
    Scripted,
    Setup,
    SparkModel,
    grouped,
    keys_of,
    list_operations,
    map_operations,
    timer_operations,
    times,
    value_operations,
)

from state_runtime.processors.operator import EpochClock
from state_runtime.processors.user import scope

everything = value_operations | list_operations | map_operations | timer_operations
names = st.sampled_from(NAMES)


def scripted_epochs(operations: st.SearchStrategy[Any], *, initial: bool) -> st.SearchStrategy[Any]:
    """Epochs: rows of initial state (in the first), input rows, and what expired timers do."""
    rows = st.lists(st.tuples(names, st.lists(operations, max_size=4)), max_size=7)
    first = rows if initial else st.just([])
    epoch = st.tuples(rows, st.lists(st.lists(operations, max_size=3), min_size=1, max_size=3), st.integers(0, 40))
    return st.tuples(first, st.lists(epoch, min_size=1, max_size=4))


setups = st.builds(
    Setup,
    time_mode=st.sampled_from(["processing", "event"]),
    pandas=st.booleans(),
    slice_keys_max=st.sampled_from([1, 2, 65_536]),
    slice_rows_max=st.sampled_from([1, 3, 200_000]),
    frame_rows_max=st.sampled_from([1, 2, 10_000]),
) | st.builds(Setup, ttl_ms=st.sampled_from([1, 25, 50]), slice_keys_max=st.sampled_from([2, 65_536]))  # fmt: skip


def check_program(setup: Setup, program: Any, hash_of: Any, folder: Path | None = None) -> None:
    """Run it in both and compare what user code saw, the output, and what is stored at the end."""
    first, epochs = program
    model, job = SparkModel(setup), Job(setup, folder)
    now_ms = 0
    for number, (rows, timer_scripts, passed_ms) in enumerate(epochs):
        now_ms += passed_ms
        clock = EpochClock(now_ms, now_ms // 2, 0, number + 1)
        if setup.time_mode == "event":
            clock = EpochClock(7, now_ms, 0, number + 1)

        def fire(key: Any, ts: int, scripts: Any = timer_scripts) -> Any:
            return scripts[(ts + len(key[0] or "")) % len(scripts)]

        processor = Scripted(setup, fire)
        processor.scripts = [script for _, script in first] + [script for _, script in rows]
        initial = grouped([(k, n) for n, (k, _) in enumerate(first)], hash_of) if first and number == 0 else None
        given_rows = grouped([(k, len(first) + n) for n, (k, _) in enumerate(rows)], hash_of)
        expected = model.epoch(
            clock,
            _calls(first, initial) if initial is not None else [],
            [(key, [op for script in scripts for op in script]) for key, scripts in _calls(rows, given_rows)],
            fire,
            lambda key: hash_of(key),
        )
        result, outputs = job.run(processor, given_rows, clock, initial)
        assert _without_ties(processor.seen, hash_of) == _without_ties(expected, hash_of)
        assert len(outputs) == len([e for e in expected if e[0] != "initial"])
        assert (processor.inits, processor.closed) == (1, 1)
        if setup.time_mode != "none":
            bound_ms = clock.batch_time_ms if setup.time_mode == "processing" else clock.watermark_ms
            assert result.due_taken == {TIMERS: bound_ms}
        _compare_stored(model, job, clock.batch_time_ms)
        if not setup.ttl_ms:
            # What expires, or is cleared without having been read, is not counted as lost; all else is.
            exact = not _clears_collections([*first, *(row for rows, _, _ in epochs for row in rows)], epochs)
            assert job.rows == model.live_rows() if exact else job.rows >= model.live_rows()


def _calls(rows: Any, given_rows: Any) -> Any:
    """Per key in the order of the groups its scripts."""
    return [(key, [script for k, script in rows if (k,) == key]) for key in keys_of(given_rows)]


def _without_ties(seen: Any, hash_of: Any) -> Any:
    """Timers of one time and one hash may fire in any order among keys."""
    ranked = []
    for entry in seen:
        timer = entry[0] == "timer"
        ranked.append(
            (("initial", "input", "timer").index(entry[0]), entry[2] if timer else 0, hash_of(entry[1]), entry)
        )
    assert [r[:3] for r in ranked] == sorted(r[:3] for r in ranked), "calls are out of order"
    return sorted(ranked, key=lambda r: (r[0], r[1], r[2], repr(r[3][1])))


def _clears_collections(rows: Any, epochs: Any) -> bool:
    scripts = [script for _, script in rows] + [script for _, scripts, _ in epochs for script in scripts]
    return any(
        what in ("list", "map") and method in ("clear", "put") for script in scripts for what, method, *_ in script
    )


def _compare_stored(model: SparkModel, job: Job, now_ms: int) -> None:
    stored = job.stored(now_ms)
    value = {(r["key.k"],): (r["value.n"], r["value.s"]) for r in stored["v"]}
    assert value == {k: v for k, (v, _) in model.value.items()}
    lists: dict[Any, list[Any]] = {}
    for r in stored["l"]:
        lists.setdefault((r["key.k"],), []).append((r["value.n"], r["value.s"]))
    assert lists == {k: [v for v, _ in elements] for k, elements in model.list.items() if elements}
    maps: dict[Any, dict[Any, Any]] = {}
    for r in stored["m"]:
        maps.setdefault((r["key.k"],), {})[(r["entry.a"], r["entry.b"])] = (r["value.n"], r["value.s"])
    assert maps == {k: {m: v for m, (v, _) in entries.items()} for k, entries in model.map.items() if entries}
    timers: dict[Any, set[int]] = {}
    for r in stored.get(TIMERS, []):
        timers.setdefault((r["key.k"],), set()).add(r["due"])
    assert timers == {k: times for k, times in model.timers.items() if times}


# How many stored rows make a list or map large, and how many are made Python values at once.
limits = st.sampled_from([(4_096, 4_096, 131_072), (0, 4_096, 131_072), (1, 1, 1), (4_096, 1, 2), (2, 3, 6)])


def with_limits(wanted: tuple[int, int, int], check: Any, *arguments: Any) -> None:
    """Run a check with other limits."""
    names = ("ENTRIES_PER_KEY_MAX", "_WINDOW_FIRST", "_WINDOW_MAX")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, wanted, strict=True):
            patch.setattr(scope, name, value)
        check(*arguments)


@given(setups, st.data(), st.sampled_from([spread, colliding]), limits)
@examples(200)
def test_a_random_program_sees_what_it_sees_in_spark(
    setup: Setup, data: st.DataObject, hash_of: Any, wanted: Any
) -> None:
    """Value, list, map, timers and TTL together; initial state first; both flavours; slices of any size; hashes collide."""
    with_limits(wanted, check_program, setup, data.draw(scripted_epochs(everything, initial=True)), hash_of)


@pytest.mark.parametrize(
    "operations",
    [value_operations, list_operations, map_operations, timer_operations],
    ids=["value", "list", "map", "timers"],
)
@given(data=st.data(), ttl_ms=st.sampled_from([0, 0, 30]), wanted=limits, hash_of=st.sampled_from([spread, colliding]))
@examples(100)
def test_every_kind_of_state_is_its_plain_python_twin(
    operations: Any, data: st.DataObject, ttl_ms: int, wanted: Any, hash_of: Any
) -> None:
    """Any order of all methods on stored, new, cleared and expired content; also where every list and map counts as large."""
    program = data.draw(scripted_epochs(operations, initial=False))
    with_limits(wanted, check_program, Setup(ttl_ms=ttl_ms), program, hash_of)


@given(st.data(), limits)
@examples(100)
def test_handlers_of_expired_timers_read_and_write_state_like_any_other(data: st.DataObject, wanted: Any) -> None:
    """Many timers of many keys at once, each of which reads lists, maps and timers of its key."""
    rows = [
        (name, [("timers", "registerTimer", ts) for ts in data.draw(st.lists(times, max_size=4))]) for name in NAMES
    ]
    rows += data.draw(st.lists(st.tuples(names, st.lists(list_operations | map_operations, max_size=3)), max_size=7))
    handlers = data.draw(st.lists(st.lists(everything, min_size=1, max_size=4), min_size=1, max_size=4))
    epochs = [(rows, handlers, 1), ([], handlers, 40), ([], handlers, 60), ([], handlers, 60)]
    with_limits(
        wanted, check_program, Setup(slice_keys_max=data.draw(st.sampled_from([2, 3, 99]))), ([], epochs), spread
    )


_FOLDERS = count()


@given(setups, st.data(), st.sampled_from([spread, colliding]))
@examples(60)
def test_a_random_program_sees_the_same_over_the_local_store(
    tmp_path: Path, setup: Setup, data: st.DataObject, hash_of: Any
) -> None:
    """With files, merges, and an index by time that does not look twice at what an epoch has taken."""
    folder = tmp_path / str(next(_FOLDERS))
    check_program(setup, data.draw(scripted_epochs(everything, initial=True)), hash_of, folder)
    shutil.rmtree(folder, ignore_errors=True)
