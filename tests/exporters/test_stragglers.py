"""The slowest rank of a step, its lag and its phase, from the reduced packets alone."""

from __future__ import annotations

import json
import logging
import math

import pytest
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.decode import decode
from otel_forge_exporters.rows import Row, from_stored, to_stored
from otel_forge_exporters.stragglers import SAME_RANK_STEPS, StragglerWatch

from otel_forge.metrics import Reduce
from tests.exporters.packets import Ranks, reduced


def _row(took_s: list[float], step: int = 0, *, through_collector: bool = False) -> Row:
    """Each rank's step took so long, a third of it in data and the excess over 1 s in forward."""
    ranks = Ranks(len(took_s))
    payloads = []
    for rank, seconds in enumerate(took_s):
        phases = {"trainer/data": 1 / 3, "trainer/forward": seconds - 1 / 3}
        records = [(f"{name}/duration_avg_s", value, Reduce.MEAN) for name, value in phases.items()]
        records += [(f"{name}/duration_max_s", value, Reduce.MAX) for name, value in phases.items()]
        payloads.append(ranks.send(rank, step, records, took_s=seconds))
    if through_collector:
        payloads = [reduced(payloads, "batch")]
    assembler = Assembler(deadline_s=10.0, horizon_s=100.0, grace_s=3.0)
    for payload in payloads:
        for unit in decode(payload).units:
            assembler.add(unit, 0.0)
    (revision,) = assembler.due(0.0)
    return revision.row


@pytest.mark.parametrize("through_collector", [False, True])
def test_a_row_says_who_was_slowest_how_far_behind_and_in_what(through_collector: bool) -> None:
    row = _row([1.0, 1.0, 1.6, 1.0], through_collector=through_collector)
    found = {key: value for key, value in row.metrics.items() if key.startswith("forge/")}
    assert found["forge/slowest_rank"] == 2.0
    for key, value in (("step_time_s/min", 1.0), ("step_time_s/mean", 1.15), ("step_time_s/max", 1.6), ("slowest_lag_s", 0.45)):
        number = found[f"forge/{key}"]
        assert isinstance(number, float)
        assert math.isclose(number, value, abs_tol=2e-6)
    straggler = row.straggler
    assert straggler is not None
    assert (straggler.rank, straggler.phase) == (2, "trainer/forward")
    assert math.isclose(straggler.phase_lag_s or 0.0, 0.45, abs_tol=2e-6)
    assert from_stored(to_stored(row)) == row
    assert json.loads(row.to_json())["straggler"]["phase"] == "trainer/forward"


def test_one_rank_alone_is_no_straggler() -> None:
    row = _row([1.0])
    assert row.straggler is None
    assert row.metrics["forge/step_time_s/max"] == 1.0


def test_the_same_slowest_rank_for_many_steps_is_said_once_until_it_catches_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = StragglerWatch()
    slow, even = [1.0, 1.5, 1.0], [1.0, 1.001, 1.0]
    for step in range(SAME_RANK_STEPS - 1):
        watch.add(_row(slow, step))
    assert not caplog.records
    for step in range(3):
        watch.add(_row(slow, 100 + step))
    assert ["rank 1 of run r was the slowest in 10 steps in a row" in record.getMessage() for record in caplog.records] == [True]
    assert "most of it in trainer/forward" in caplog.text
    watch.add(_row(even))
    for step in range(SAME_RANK_STEPS):
        watch.add(_row(slow, 200 + step))
    assert len(caplog.records) == 2
