"""A short run of `python -m tests.kills`, and a proof that its judge would notice."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kills import VICTIMS, Course, Plan, is_sound, judge, run
from tests.ranks import Job, RankProcess, expected


def test_servers_and_ranks_killed_at_random_moments_cost_no_value_unnoticed(tmp_path: Path) -> None:
    """Every kind of victim once; the seed decides when."""
    result = run(Plan(ranks=8, steps=24, series=5, kills=len(VICTIMS), per_process=4, interval_s=0.3, quiet_s=4.0, seed=1), tmp_path)
    assert is_sound(result), result
    assert result["kills"] == dict.fromkeys(VICTIMS, 1)
    assert (result["rows"], result["exact_rows"] + result["marked_rows"]) == (24, 24)


PLAN = Plan(ranks=4, steps=2, series=5)


def row(step: int, missing: tuple[int, ...] = (), **other: Any) -> dict[str, Any]:
    counted = [rank for rank in range(PLAN.ranks) if rank not in missing]
    metrics = {**expected(counted, PLAN.series, step), "forge/step_time_s/max": 1.0}
    return {
        "step": step, "occurrence": 0, "attempt": 0, "revision": 1, "metrics": metrics, "ranks_missing": [str(rank) for rank in missing],
        "ranks_reporting": len(counted), "world_size": PLAN.ranks, **other,
    }  # fmt: skip


def killed(folder: Path, ranks: range, begun: float, at: float) -> Course:
    """A course in which the process of these ranks began step 1 and was killed."""
    process = RankProcess(folder, Job("", PLAN.ranks, PLAN.steps, PLAN.series, 1.0, 1.0, 0.0), ranks.start, len(ranks))
    (folder / f"ranks{ranks.start}.journal").write_text(f"0 1.0\n1 {begun}\n")
    return Course(Counter({"ranks": 1}), [(process, at)], drained=True)


def test_the_judge_takes_a_named_rank_only_where_it_was_killed_with_unsent_values(tmp_path: Path) -> None:
    now = time.time()
    rows = [row(0), row(1, missing=(2,))]
    assert is_sound(judge(PLAN, rows, killed(tmp_path, range(2, 4), now, now + 1)))
    assert judge(PLAN, rows, killed(tmp_path, range(2, 4), now, now + 100))["named_without_cause"] == 1
    assert judge(PLAN, rows, killed(tmp_path, range(2), now, now + 1))["named_without_cause"] == 1


@pytest.mark.parametrize(
    ("rows", "violated"),
    [
        ([row(0), row(1), row(1)], "twice"),
        ([row(0)], "missing_rows"),
        ([row(0), row(1) | {"metrics": row(0)["metrics"]}], "wrong"),
        ([row(0), row(1, missing=(2,)) | {"ranks_missing": []}], "wrong"),
        ([row(0), row(1) | {"ranks_reporting": 3}], "wrong"),
    ],
)
def test_the_judge_notices(rows: list[dict[str, Any]], violated: str) -> None:
    assert judge(PLAN, rows, Course(drained=True))[violated] == 1
