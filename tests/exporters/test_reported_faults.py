"""Wrong numbers that users of comparable tools reported: what the ranks record, and the row that is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.decode import decode

import otel_forge
from otel_forge import Reduce, record_metric
from otel_forge.testing import capture
from tests.exporters.packets import Ranks, reduced

MEAN, SUM, MAX, MIN, STD = Reduce.MEAN, Reduce.SUM, Reduce.MAX, Reduce.MIN, Reduce.STD
Recorded = list[tuple[str, Any, Any]]


def _row(recorded: list[Recorded], *, through_collector: bool) -> dict[str, Any]:
    ranks = Ranks(len(recorded))
    payloads = [ranks.send(rank, 0, records) for rank, records in enumerate(recorded)]
    assembler = Assembler(deadline_s=10.0, horizon_s=100.0, grace_s=3.0)
    for payload in [reduced(payloads, "batch")] if through_collector else payloads:
        for unit in decode(payload).units:
            assembler.add(unit, 0.0)
    (revision,) = assembler.due(0.0)
    return {key: value for key, value in revision.row.metrics.items() if not key.startswith("forge/")}


CASES: dict[str, tuple[list[Recorded], dict[str, Any]]] = {
    "ranks with different counts: pooled, not a mean of means": (
        [[("clip", 1.0, MEAN)] * 3 + [("clip", 0.0, MEAN)] * 9, [("clip", 1.0, MEAN)] * 3 + [("clip", 0.0, MEAN)]],
        {"clip": 0.375},
    ),
    "ranks with different keys never mix": (
        [[("tool/calls", 1.0, MEAN)], [("format/ok", 100.0, MEAN)]],
        {"tool/calls": 1.0, "format/ok": 100.0},
    ),
    "the std is that of all samples": ([[("x", 0.0, STD)] * 2, [("x", 10.0, STD)] * 2], {"x": 5.0}),
    "tokens that only one of two copies records are counted once": ([[("t", 5, SUM)], [], [("t", 5, SUM)], []], {"t": 10.0}),
    "a mean of ints is no int": ([[("x", 1, MEAN)], [("x", 2, MEAN)]], {"x": 1.5}),
    "the key's text does not choose the reduction": (
        [[("minmax_diff", 1, MEAN), ("len/max", 10, MEAN), ("admin/min_ratio", 1, SUM)],
         [("minmax_diff", 3, MEAN), ("len/max", 20, MEAN), ("admin/min_ratio", 1, SUM)]],
        {"minmax_diff": 2.0, "len/max": 15.0, "admin/min_ratio": 2.0},
    ),
    "an extremum that one rank has is that rank's": ([[("m", 3.0, MIN)], []], {"m": 3.0}),
    "int32 does not wrap and float32 does not stick": (
        [[("i", np.int32(2**31 - 1), SUM), ("f", np.float32(2**24), SUM)], [("i", np.int32(2**31 - 1), SUM), ("f", np.float32(1), SUM)]],
        {"i": 4294967294.0, "f": 16777217.0},
    ),
    "bfloat16 does not stick": ([[("b", torch.tensor(value, dtype=torch.bfloat16), SUM) for value in (256.0, 1.0, 1.0)]], {"b": 258.0}),
    "a rank without samples does not drag the mean down": ([[("x", 1.0, MEAN)] * 3, []], {"x": 1.0}),
    "negative values count": ([[("r", -1.5, MEAN), ("s", -3.0, SUM)], [("r", 0.5, MEAN)]], {"r": -0.5, "s": -3.0}),
    "one key, two reductions on two ranks": ([[("norm", 2.0, SUM)], [("norm", 4.0, MEAN)]], {"norm/sum": 2.0, "norm/mean": 4.0}),
    "ints of one rank and floats of another are one series": ([[("n", 3, SUM)], [("n", 2.5, SUM)]], {"n": 5.5}),
    "each reduction is over all ranks": (
        [[("a", rank, MEAN), ("b", rank, MIN), ("c", rank, MAX), ("d", rank, SUM)] for rank in range(4)],
        {"a": 1.5, "b": 0.0, "c": 3.0, "d": 6.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("through_collector", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_row_is_right(case: str, through_collector: bool) -> None:
    recorded, expected = CASES[case]
    assert _row(recorded, through_collector=through_collector) == expected


def test_a_value_that_is_stored_although_its_answer_was_lost_counts_once() -> None:
    """The request was stored, the answer lost, the request sent again by the direct route."""
    ranks = Ranks(2)
    payloads = [ranks.send(rank, 0, [("s", 10.0, SUM)]) for rank in range(2)]
    assembler = Assembler(deadline_s=10.0, horizon_s=100.0, grace_s=3.0)
    for payload in [reduced(payloads, "batch"), payloads[0], payloads[0]]:
        for unit in decode(payload).units:
            assembler.add(unit, 0.0)
    (revision,) = assembler.due(0.0)
    assert revision.row.metrics["s"] == 20.0


def test_fifty_steps_within_a_second_are_fifty_rows() -> None:
    with capture() as captured:
        for step in range(50):
            record_metric("x", float(step))
            otel_forge.flush(step)
        assert [(row["step"], row["metrics"]["x"]) for row in captured.rows] == [(step, float(step)) for step in range(50)]


def test_a_burst_of_five_thousand_scopes_arrives_or_is_counted() -> None:
    with capture() as captured:
        for _ in range(5_000):
            with otel_forge.span("call"):
                pass
        otel_forge.flush(0)
        otel_forge.flush(1)
        arrived = sum(span.name == "call" for span in captured.spans)
        left_out = sum(row["metrics"].get("forge/telemetry/spans_left_out", 0) for row in captured.rows)
    assert arrived >= 2_000
    assert arrived + left_out == 5_000
