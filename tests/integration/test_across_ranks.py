"""What a stock Collector could do wrong with points of several ranks, through the real one: apart in time, one identity, kinds, parts, restarts."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from otel_forge_exporters.decode import decode
from otel_forge_exporters.values import Sum

from otel_forge import points
from otel_forge.cli.tiers import Tiers
from otel_forge.metrics import Reduce
from otel_forge.otlp_http import Poster, Verdict
from tests.exporters.packets import Ranks, mean
from tests.integration.conftest import rows_of, wait_for

WINDOW_S, DEADLINE_S = 0.5, 6.0
Post = Callable[[bytes], None]


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    folder = tmp_path_factory.mktemp("across")
    config = folder / "forge.yaml"
    config.write_text(
        f"metric_logging: {{jsonl: {{path: {folder}/rows.jsonl}}}}\ncollector: {{window_s: {WINDOW_S}, row_deadline_s: {DEADLINE_S}}}\n"
    )
    started = Tiers(folder, config, agents=0, window_s=WINDOW_S)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture
def post(tiers: Tiers) -> Iterator[Post]:
    poster = Poster(tiers.endpoints[0] + "/v1/metrics", {}, 10.0, "none", None)

    def send(payload: bytes) -> None:
        assert poster.post(payload).verdict is Verdict.ACCEPTED

    yield send
    poster.close()


def wait_for_rows(tiers: Tiers, run_id: str, count: int, timeout_s: float = 30) -> list[dict[str, Any]]:
    """Every line of a run, when there are so many."""
    wait_for(lambda: len(rows(tiers, run_id)) >= count, timeout_s, f"{count} rows of {run_id}")
    return rows(tiers, run_id)


def rows(tiers: Tiers, run_id: str) -> list[dict[str, Any]]:
    return [row for row in rows_of(tiers.folder / "rows.jsonl") if row["run_id"] == run_id]


def total(value: float, key: str = "tokens") -> list[tuple[str, float, Reduce]]:
    return [(key, value, Reduce.SUM)]


@pytest.mark.parametrize("apart_s", [0.003, 4 * WINDOW_S])
def test_ranks_that_send_a_step_apart_in_time_are_one_row(apart_s: float, tiers: Tiers, post: Post) -> None:
    """In one window, or in two: the first rank's alone is never a final value."""
    run_id = f"apart-{apart_s:g}"
    ranks = Ranks(2, run_id=run_id, window=True)
    post(ranks.send(0, 3, [*total(1.0), *mean(1.0)]))
    time.sleep(apart_s)
    post(ranks.send(1, 3, [*total(1.0), *mean(3.0)]))
    (row,) = wait_for_rows(tiers, run_id, 1)
    assert (row["metrics"]["tokens"], row["metrics"]["loss"], row["ranks_reporting"], row["revision"]) == (2.0, 2.0, 2, 1)


def test_points_that_lose_their_rank_reach_the_exporter_as_one_with_the_sum(tiers: Tiers, post: Post) -> None:
    """Never two points with one identity, of which a receiver would keep the last."""
    ranks = Ranks(2, run_id="identity", window=True)
    for rank in range(2):
        post(ranks.send(rank, 0, total(1.0)))
    wait_for_rows(tiers, "identity", 1)
    tiers.servers["exporter"].kill_and_start_again()
    tiers.servers["exporter"].stop()  # it holds the file alone
    with sqlite3.connect(tiers.folder / "exporter" / "spool.sqlite") as db:
        bodies = [body for (body,) in db.execute("SELECT body FROM inbox")]
    db.close()
    tiers.servers["exporter"].start()
    tiers.servers["exporter"].wait_healthy()
    units = [unit for body in bodies for unit in decode(body).units if unit.row.run_id == "identity"]
    values = [value for unit in units for value in unit.values["tokens", "sum"]]
    assert sorted(value.value for value in values if isinstance(value, Sum)) in ([2.0], [1.0, 1.0])
    assert len(values) == len(units), "one point in each payload"


def test_whole_numbers_of_one_rank_and_fractions_of_another_are_one_series(tiers: Tiers, post: Post) -> None:
    ranks = Ranks(2, run_id="kinds", window=True)
    for step, told in enumerate([(3, 2.5), (3.0, 2)]):
        for rank, value in enumerate(told):
            post(ranks.send(rank, step, total(value)))
    found = wait_for_rows(tiers, "kinds", 2)
    assert [row["metrics"]["tokens"] for row in found] == [5.5, 5.0]


def test_a_step_that_is_cut_into_many_parts_keeps_every_reduction(tiers: Tiers, post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """120 keys in parts of about ten, of which some come in another window than the others."""
    monkeypatch.setattr(points, "PART_BYTES", 5_500)
    ranks = Ranks(2, run_id="parts", window=True)
    kinds = [Reduce.SUM, Reduce.MEAN, Reduce.MAX, Reduce.MIN, Reduce.COUNT]
    sent = [ranks.send_parts(rank, 0, [(f"k{number}", float(number + rank), kinds[number % 5]) for number in range(120)]) for rank in range(2)]
    assert len(sent[0]) >= 12
    for part in sent[0] + sent[1][::2]:
        post(part)
    time.sleep(2 * WINDOW_S)
    for part in sent[1][1::2]:
        post(part)
    (row,) = wait_for_rows(tiers, "parts", 1)
    wanted = {f"k{n}": (2.0 * n + 1, n + 0.5, n + 1.0, float(n), 2)[n % 5] for n in range(120)}
    assert {key: row["metrics"][key] for key in wanted} == wanted


def test_a_rank_that_dies_and_is_started_again_adds_nothing_of_its_past(tiers: Tiers, post: Post) -> None:
    """Rank 1 is gone for steps 5 and 6: those rows are of rank 0 and name it; no other step is more or less than the two."""
    first, again = Ranks(2, run_id="respawned", window=True), Ranks(2, run_id="respawned", window=True)
    again.builders[1]._nonce = "another process"
    for step in range(10):
        post(first.send(0, step, total(1.0)))
        if step not in (5, 6):
            post((first if step < 5 else again).send(1, step, total(1.0)))
    found = wait_for_rows(tiers, "respawned", 10)
    assert {row["step"]: row["metrics"]["tokens"] for row in found} == {step: 1.0 if step in (5, 6) else 2.0 for step in range(10)}
    assert {row["step"]: row.get("ranks_missing") for row in found if row["step"] in (5, 6)} == {5: ["1"], 6: ["1"]}
    assert len(found) == 10
