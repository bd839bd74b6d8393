"""No damage to what is stored makes a reader crash, hang or fill the memory; only our own errors come out. `make fuzz` goes on for longer."""

from __future__ import annotations

import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import DictStore, examples

from tests.fuzz.targets import (
    ROOTS,
    TARGETS,
    document_classes,
    enveloped,
    json_bytes,
    objects_of,
    parts_of_document,
    read_document,
    read_everything,
    sample_of,
)

EXAMPLES = {"documents": 400, "segment-tails": 200, "parts": 300, "tables": 200, "roots": 150}
TIMES = int(os.environ.get("STILLSTATE_SOAK", "1"))
GROWTH_KIB_MAX = 512 * 1024


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_damaged_bytes_give_typed_errors_in_bounded_memory(name: str) -> None:
    """Structure-aware: what is damaged has the right digests and lengths around it, so that it is looked at."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @examples(EXAMPLES[name] * TIMES)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        TARGETS[name](lambda below: data.draw(st.integers(0, max(below - 1, 0))))

    run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < GROWTH_KIB_MAX


@pytest.mark.parametrize("root", ROOTS)
def test_what_is_fuzzed_is_read_when_it_is_whole(root: str) -> None:
    """A target that refuses everything would find nothing."""
    read_everything(DictStore(dict(objects_of(root))))


@pytest.mark.parametrize("root", ROOTS)
def test_an_operator_that_a_manifest_has_twice_confuses_no_reader(root: str) -> None:
    """A find of the fuzzer led by coverage: with other states the second time, and found by its uid in the first."""
    objects = dict(objects_of(root))
    for path in [p for p in objects if p.endswith("manifest.json")]:
        kind, version, value = parts_of_document(objects[path])
        for operator in list(value.get("operators", ())):
            value["operators"].insert(0, {**operator, "states": []})
        objects[path] = enveloped(kind, json_bytes(value), version)
    read_everything(DictStore(objects))


@pytest.mark.parametrize("kind", sorted(document_classes()))
def test_a_made_up_document_of_each_kind_reaches_its_reader(kind: str) -> None:
    """New kinds are found in the code: their samples must be near enough to be damaged further."""
    from state_runtime.base.errors import StillstateError
    from state_runtime.snapshot.document import decode_document

    data = enveloped(kind, json_bytes(sample_of(document_classes()[kind])))
    try:
        decode_document(kind, document_classes()[kind], data, "here")
    except StillstateError as error:
        pytest.fail(f"{kind}: {error}")
    read_document(kind, data)
