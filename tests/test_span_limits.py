"""Too many spans of a step: the outermost stay, and no kept span loses its parent."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

import otel_forge
from otel_forge import span
from otel_forge.span_limits import LEFT_OUT, SpanLimit, child_id, depth_of
from otel_forge.spans import SpanRecord
from otel_forge.testing import capture


def _record(span_id: int, parent_id: int, step: int = 0) -> SpanRecord:
    return SpanRecord(str(span_id), 0, 1, span_id, parent_id, step, {})


def _tree(shape: list[int], bits: random.Random) -> list[SpanRecord]:
    """Spans in the order they end; `shape` says at which depth each begins."""
    ended: list[SpanRecord] = []
    open_: list[SpanRecord] = []
    for depth in shape:
        while len(open_) > depth:
            ended.append(open_.pop())
        parent = open_[-1].span_id if open_ else 0
        open_.append(_record(child_id(parent, bits.getrandbits), parent))
    while open_:
        ended.append(open_.pop())
    return ended


@given(st.lists(st.integers(0, 6), max_size=200), st.integers(1, 30), st.lists(st.integers(0, 200), max_size=6), st.integers(0, 2**32))
def test_no_kept_span_is_without_its_parent_and_what_is_left_out_is_counted(shape: list[int], limit: int, cuts: list[int], seed: int) -> None:
    records = _tree(shape, random.Random(seed))
    limiting = SpanLimit(limit)
    kept: list[SpanRecord] = []
    edges = [0, *sorted(cut for cut in cuts if cut < len(records)), len(records)]
    for start, end in itertools.pairwise(edges):
        kept += limiting.choose(records[start:end])
    ids = {record.span_id for record in kept}
    assert all(not record.parent_id or record.parent_id in ids for record in kept)
    assert {record.span_id for record in records if not record.parent_id} <= ids
    assert len(kept) + limiting.left_out == len(records)
    if len(records) <= limit:
        assert len(kept) == len(records)


def test_depth_is_in_the_id_and_ids_are_64_bits() -> None:
    parent = 0
    for depth in range(1, 100):
        parent = child_id(parent)
        assert depth_of(parent) == min(depth, 63)
        assert 0 < parent < 2**64


def test_a_step_with_too_many_spans_keeps_its_phases_and_says_how_many_it_left_out() -> None:
    with capture() as captured:
        limit = otel_forge.pipeline.current()._worker._limit  # type: ignore[union-attr]
        limit._per_step = 10
        with span("step"):
            for phase in ("data", "forward"):
                with span(phase):
                    for _ in range(50):
                        with span("leaf"):
                            pass
        otel_forge.flush(0)
        names = [found.name for found in captured.spans]
        (outermost,) = [found for found in captured.spans if found.name == "step"]
        metrics = captured.rows[0]["metrics"]
        assert {"step", "data", "forward"} <= set(names)
        assert len(names) <= 13
        assert outermost.attributes[LEFT_OUT] == 103 - len(names)
        otel_forge.flush(1)
        metrics |= captured.rows[1]["metrics"]
        assert metrics["forge/telemetry/spans_left_out"] == 103 - len(names)
