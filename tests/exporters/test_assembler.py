"""Rows depend on what arrived, not on its order or grouping; who is missing is named; nothing counts twice."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.decode import RowId, decode
from otel_forge_exporters.rows import Row

from otel_forge.metrics import Reduce
from tests.exporters.packets import Ranks, mean, reduced

DEADLINE_S, GRACE_S = 10.0, 3.0


class Clocked:
    """An assembler with a clock of the test's own."""

    def __init__(self, **more: Any) -> None:
        self.assembler = Assembler(deadline_s=DEADLINE_S, horizon_s=3600.0, grace_s=GRACE_S, **more)
        self.now = 0.0

    def take(self, payload: bytes) -> None:
        decoded = decode(payload)
        for control in decoded.controls:
            self.assembler.control(control, self.now)
        for unit in decoded.units:
            self.assembler.add(unit, self.now)

    def due(self, after_s: float = 0.0) -> list[Row]:
        self.now += after_s
        return [revision.row for revision in self.assembler.due(self.now)]


def test_a_row_is_written_when_every_rank_is_in_and_pools_counts() -> None:
    """Three ones and nine zeros on one rank, three ones and a zero on the other: 6 / 16, not the mean of means."""
    ranks, clocked = Ranks(2), Clocked()
    clocked.take(ranks.send(0, 0, [("clip", value, Reduce.MEAN) for value in [1.0] * 3 + [0.0] * 9]))
    assert clocked.due() == []
    clocked.take(ranks.send(1, 0, [("clip", value, Reduce.MEAN) for value in [1.0] * 3 + [0.0]]))
    (row,) = clocked.due()
    assert (row.metrics["clip"], row.ranks_reporting, row.world_size, row.revision) == (0.375, 2, 2, 1)
    assert clocked.due(100.0) == []


def test_each_reduction_over_ranks() -> None:
    ranks, clocked = Ranks(4), Clocked()
    for rank in range(4):
        clocked.take(ranks.send(rank, 0, [(item.value, rank, item) for item in Reduce]))
    (row,) = clocked.due()
    metrics = {key: value for key, value in row.metrics.items() if not key.startswith("forge/")}
    assert metrics == {"mean": 1.5, "min": 0.0, "max": 3.0, "sum": 6.0, "count": 4.0, "std": math.sqrt(1.25)}


def test_std_is_of_all_samples_not_of_the_ranks() -> None:
    ranks, clocked = Ranks(2), Clocked()
    clocked.take(ranks.send(0, 0, [("s", 0.0, Reduce.STD)] * 2))
    clocked.take(ranks.send(1, 0, [("s", 10.0, Reduce.STD)] * 2))
    assert clocked.due()[0].metrics["s"] == 5.0


def test_keys_that_differ_between_ranks_never_mix() -> None:
    ranks, clocked = Ranks(2), Clocked()
    clocked.take(ranks.send(0, 0, mean(1.0, "tool/calls")))
    clocked.take(ranks.send(1, 0, mean(100.0, "format/ok")))
    metrics = clocked.due()[0].metrics
    assert (metrics["tool/calls"], metrics["format/ok"]) == (1.0, 100.0)


def test_one_key_with_two_reductions_is_kept_apart() -> None:
    ranks, clocked = Ranks(2), Clocked()
    clocked.take(ranks.send(0, 0, [("norm", 2.0, Reduce.SUM)]))
    clocked.take(ranks.send(1, 0, [("norm", 4.0, Reduce.MEAN)]))
    metrics = clocked.due()[0].metrics
    assert (metrics["norm/sum"], metrics["norm/mean"]) == (2.0, 4.0)
    assert "norm" not in metrics


def test_a_value_that_is_not_finite_is_visible_in_that_step_only() -> None:
    ranks, clocked = Ranks(2), Clocked()
    for step, value in ((5, math.nan), (6, 1.0), (7, math.inf)):
        clocked.take(ranks.send(0, step, mean(1.0)))
        clocked.take(ranks.send(1, step, mean(value)))
    bad, good, worse = clocked.due()
    assert (bad.metrics["loss"], dict(bad.nonfinite), bad.flat()["forge/nonfinite/loss"]) == (None, {"loss": 1}, 1)
    assert (good.metrics["loss"], dict(good.nonfinite)) == (1.0, {})
    assert dict(worse.nonfinite) == {"loss": 1}


def test_a_missing_rank_is_named_at_the_deadline_and_its_late_values_amend_the_row() -> None:
    ranks, clocked = Ranks(3), Clocked()
    for rank in (0, 2):
        clocked.take(ranks.send(rank, 7, mean(float(rank))))
    assert clocked.due(DEADLINE_S - 0.1) == []
    (row,) = clocked.due(0.2)
    assert (row.metrics["loss"], row.ranks_reporting, row.world_size, row.ranks_missing, row.revision) == (1.0, 2, 3, ("1",), 1)
    clocked.take(ranks.send(1, 7, mean(4.0)))
    (amended,) = clocked.due()
    assert (amended.metrics["loss"], amended.ranks_reporting, amended.ranks_missing, amended.revision) == (2.0, 3, (), 2)


def test_a_rank_that_is_gone_is_waited_for_three_times_only() -> None:
    ranks, clocked = Ranks(2), Clocked()
    for step in range(3):
        clocked.take(ranks.send(0, step, mean(1.0)))
        (row,) = clocked.due(DEADLINE_S)
        assert row.ranks_missing == ("1",)
    clocked.take(ranks.send(0, 3, mean(1.0)))
    assert [row.ranks_missing for row in clocked.due()] == [("1",)]
    clocked.take(ranks.send(1, 4, mean(3.0)))
    clocked.take(ranks.send(0, 4, mean(1.0)))
    assert [row.metrics["loss"] for row in clocked.due()] == [2.0]


def test_a_rank_that_has_said_it_is_done_is_not_waited_for() -> None:
    ranks, clocked = Ranks(2), Clocked()
    clocked.take(ranks.control(1, "last", {"exit_code": 0}))
    clocked.now += GRACE_S + 0.1
    clocked.take(ranks.send(0, 9, mean(1.0)))
    assert [row.ranks_missing for row in clocked.due()] == [("1",)]


def test_a_repeated_step_is_a_row_of_its_own() -> None:
    ranks, clocked = Ranks(1), Clocked()
    for occurrence in (0, 1):
        clocked.take(ranks.send(0, 100, mean(float(occurrence)), occurrence=occurrence))
    assert [(row.step, row.occurrence, row.metrics["loss"]) for row in clocked.due()] == [(100, 0, 0.0), (100, 1, 1.0)]


def test_two_runs_and_two_roles_at_once_do_not_touch() -> None:
    clocked = Clocked()
    groups = [Ranks(2, run_id="a"), Ranks(2, run_id="b"), Ranks(1, run_id="a", role="generator")]
    for value, ranks in enumerate(groups):
        for rank in range(ranks.world_size):
            clocked.take(ranks.send(rank, 0, mean(float(value))))
    assert {(row.run_id, row.role): row.metrics["loss"] for row in clocked.due()} == {
        ("a", "trainer"): 0.0,
        ("b", "trainer"): 1.0,
        ("a", "generator"): 2.0,
    }


def test_replicas_of_a_role_are_one_row_of_all_their_members() -> None:
    clocked = Clocked()
    replicas = [Ranks(2, replica=replica) for replica in (0, 1)]
    for replica in replicas:
        clocked.take(replica.control(0, "hello", {}))
    for number, replica in enumerate(replicas):
        for rank in range(2):
            clocked.take(replica.send(rank, 0, mean(float(number))))
    (row,) = clocked.due()
    assert (row.metrics["loss"], row.ranks_reporting, row.world_size, row.replica) == (0.5, 4, 4, None)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_order_any_grouping_and_any_resends_give_the_same_row(data: Any) -> None:
    """Random values on random ranks, sent alone or in reduced groups, some of them again: the row is that of the pooled values."""
    world = data.draw(st.integers(1, 8))
    values = [data.draw(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4)) for _ in range(world)]
    ranks, clocked = Ranks(world), Clocked()
    single = [
        ranks.send(rank, 0, [(name, v, kind) for v in values[rank] for name, kind in (("m", Reduce.MEAN), ("s", Reduce.STD))])
        for rank in range(world)
    ]
    order = data.draw(st.permutations(range(world)))
    cuts = sorted(data.draw(st.sets(st.integers(1, world), max_size=3)) | {world})
    groups = [order[start:end] for start, end in zip([0, *cuts], cuts, strict=False) if start < end]
    payloads = [
        single[group[0]] if len(group) == 1 else reduced([single[rank] for rank in group], f"batch{index}") for index, group in enumerate(groups)
    ]
    again = [single[rank] for rank in data.draw(st.lists(st.integers(0, world - 1), max_size=3))]
    stream = payloads + payloads[:1] + again
    random.Random(data.draw(st.integers())).shuffle(stream)
    rows: list[Row] = []
    for payload in stream:
        clocked.take(payload)
        rows += clocked.due()
    rows += clocked.due(DEADLINE_S)
    pooled = [value for items in values for value in items]
    assert rows[-1].ranks_reporting == world
    assert math.isclose(rows[-1].metrics["m"], math.fsum(pooled) / len(pooled), rel_tol=1e-12, abs_tol=1e-9)  # type: ignore[arg-type]
    assert math.isclose(rows[-1].metrics["s"], statistics.pstdev(pooled), rel_tol=1e-9, abs_tol=1e-9)  # type: ignore[arg-type]
    assert [row.revision for row in rows] == list(range(1, len(rows) + 1))


def test_a_payload_that_counts_a_rank_twice_is_left_out_and_named() -> None:
    ranks, clocked = Ranks(2), Clocked()
    first = ranks.send(0, 0, mean(1.0))
    clocked.take(reduced([first, first, ranks.send(1, 0, mean(3.0))], "twice"))
    (row,) = clocked.due(DEADLINE_S)
    assert "loss" not in row.metrics
    assert row.ranks_doubtful == ("0", "1")


ALL_KINDS = [(item.value, 3.0, item) for item in Reduce] + [("h", 3.0, Reduce.HISTOGRAM([1.0, 5.0])), ("bad", math.nan, Reduce.MEAN)]


@pytest.mark.parametrize("times", [2, 3, 15])
def test_behind_reducing_gateways_a_partial_that_was_added_up_whole_several_times_counts_once(times: int) -> None:
    ranks = Ranks(14)
    packets = [ranks.send(rank, 0, ALL_KINDS) for rank in range(14)]
    once, several = Clocked(divides=True), Clocked(divides=True)
    once.take(reduced(packets, "once"))
    several.take(reduced(packets * times, "several"))
    (wanted,), (row,) = once.due(), several.due()
    assert (row.metrics, row.nonfinite, row.ranks_reporting, row.ranks_doubtful) == (wanted.metrics, wanted.nonfinite, 14, ())


def test_a_partial_in_which_ranks_count_differently_is_not_divided() -> None:
    ranks, clocked = Ranks(2), Clocked(divides=True)
    first = ranks.send(0, 0, mean(1.0))
    clocked.take(reduced([first, first, ranks.send(1, 0, mean(3.0))], "twice"))
    (row,) = clocked.due(DEADLINE_S)
    assert "loss" not in row.metrics
    assert row.ranks_doubtful == ("0", "1")


def test_a_partial_that_says_twice_but_holds_odd_counts_is_not_divided() -> None:
    """The second packet of rank 0 lost a series on its way: half of what is there would be a wrong number."""
    ranks, clocked = Ranks(1), Clocked(divides=True)
    whole, bare = ranks.send(0, 0, mean(1.0)), ranks.send(0, 0, [])
    clocked.take(reduced([whole, bare], "twice"))
    (row,) = clocked.due(DEADLINE_S)
    assert ("loss" in row.metrics, row.ranks_doubtful) == (False, ("0",))


def test_a_replica_that_joins_later_is_in_from_then_on_and_one_that_leaves_is_not_waited_for() -> None:
    """Three copies of a service: the third starts at step 4, the first is done after step 6."""
    clocked, replicas = Clocked(), [Ranks(1, role="generator", replica=replica) for replica in range(3)]
    found = []
    for step in range(9):
        if step in (0, 4):
            for replica in replicas[:2] if step == 0 else replicas[2:]:
                clocked.take(replica.control(0, "hello", {}))
        here = replicas[: 2 if step < 4 else 3] if step < 7 else replicas[1:]
        for number, replica in enumerate(here):
            clocked.take(replica.send(0, step, mean(float(number))))
        found += [(row.step, row.ranks_reporting, row.metrics["loss"]) for row in clocked.due(0.1)]
        if step == 6:
            clocked.take(replicas[0].control(0, "last", {"exit_code": 0}))
            clocked.now += GRACE_S + 0.1
    assert found == [(step, 2, 0.5) if step < 4 or step > 6 else (step, 3, 1.0) for step in range(9)]


def test_a_copy_that_is_first_heard_of_when_a_row_is_closed_is_named_in_it() -> None:
    kept: dict[RowId, Row] = {}
    clocked = Clocked(recall=kept.get)
    first, second = (Ranks(1, replica=replica) for replica in range(2))
    clocked.take(first.send(0, 0, mean(1.0)))
    kept |= {revision.row_id: revision.row for revision in clocked.assembler.due(clocked.now)}
    clocked.assembler.close_due(clocked.now + 61.0)
    clocked.take(first.send(0, 0, mean(8.0)))
    assert clocked.due() == []
    clocked.take(second.send(0, 0, mean(5.0)))
    (row,) = clocked.due()
    assert (row.revision, row.metrics["loss"], row.ranks_reporting, row.ranks_doubtful) == (2, 1.0, 1, ("1.0",))


def test_memory_is_given_back_when_rows_are_closed() -> None:
    ranks, clocked = Ranks(1), Clocked()
    for step in range(100):
        clocked.take(ranks.send(0, step, mean(1.0)))
        clocked.due()
    assert len(clocked.assembler.close_due(clocked.now + 61.0)) == 100
    clocked.take(ranks.send(0, 5, mean(9.0)))
    assert clocked.due() == []
    assert clocked.assembler.late_units == 1
