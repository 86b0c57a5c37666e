"""`every`, `include`, `exclude` and `rename`: what a backend gets, and that a merged value means what a single one means."""

from __future__ import annotations

import bisect
import dataclasses
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue, Row
from otel_forge_exporters.service import Service
from otel_forge_exporters.shaping import Shaper, merge_rows

from otel_forge.config import BackendConfig, load_config
from otel_forge.errors import ConfigError
from otel_forge.metrics import Reduce
from tests.exporters.packets import Ranks, mean
from tests.exporters.test_backends import row
from tests.integration.conftest import wait_for

BOUNDS = (-2.0, 0.0, 2.0)
RECORDED = {
    "mean": Reduce.MEAN, "sum": Reduce.SUM, "min": Reduce.MIN, "max": Reduce.MAX, "std": Reduce.STD, "count": Reduce.COUNT,
    "histogram": Reduce.HISTOGRAM(BOUNDS),
}  # fmt: skip
STEPS = 23
RANKS = 2


class Keeper:
    """A backend that keeps its rows, by the folder it is given and how often it writes."""

    kept: ClassVar[dict[tuple[Path, str], list[Row]]] = {}

    def __init__(self, config: Any, run: RunInfo, work_dir: Path) -> None:
        self.rows = self.kept.setdefault((work_dir, config.model_extra["label"]), [])

    def open(self) -> None: ...

    def write(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    def has(self, row: Row) -> bool | None:
        return (row.key, row.revision) in {(known.key, known.revision) for known in self.rows}

    def close(self, exit_code: int | None, timeout_s: float) -> None: ...

    def location(self) -> str | None:
        return None


def _service(folder: Path, *, state: str | None = None, **backends: dict[str, Any]) -> Service:
    sections = {name: {"class": f"{__name__}:Keeper", "label": name, **options} for name, options in backends.items()}
    config = load_config({"metric_logging": sections, "collector": {"row_deadline_s": 0.2}})
    service = Service(config, state_dir=folder / state if state else None, work_dir=folder)
    service.start()
    return service


def _rows(folder: Path, label: str) -> list[Row]:
    return Keeper.kept.get((folder, label), [])


def _values(rank: int, step: int) -> list[float]:
    source = random.Random(f"{rank}/{step}")
    return [1e6 + source.uniform(-5, 5) for _ in range(1 + (rank + step) % 4)]


def _truth(ranks: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
    """The reductions over all records, by the standard library."""
    values = [value for step in steps for rank in ranks for value in _values(rank, step)]
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect.bisect_left(BOUNDS, value - 1e6)] += 1
    return {
        "mean": pytest.approx(statistics.fmean(values), rel=1e-15),
        "sum": pytest.approx(sum(values), rel=1e-15),
        "min": min(values),
        "max": max(values),
        "std": pytest.approx(statistics.pstdev(values), rel=1e-15),
        "count": len(values),
        "histogram": counts,
    }


def _found(found: Row) -> dict[str, Any]:
    histogram = found.metrics["histogram"]
    assert isinstance(histogram, HistogramValue)
    return {key: found.metrics[key] for key in RECORDED if key != "histogram"} | {"histogram": list(histogram.counts)}


@pytest.mark.parametrize("every", [1, 2, 7, 100])
@pytest.mark.parametrize("mode", ["global_reduce", "per_rank_reduce"])
def test_a_reduced_value_is_that_of_all_records_of_its_steps_whatever_the_frequency(tmp_path: Path, every: int, mode: str) -> None:
    service = _service(tmp_path, x={"every": every, "logging_mode": mode})
    ranks = Ranks(RANKS, modes="global_reduce,per_rank_reduce")
    for step in range(STEPS):
        for rank in range(RANKS):
            records = [(key, value - 1e6 if key == "histogram" else value, how) for key, how in RECORDED.items() for value in _values(rank, step)]
            service.accept_metrics(ranks.send(rank, step, records))
    assert service.drain(10)
    service.stop(5.0, 0)
    members = [None] if mode == "global_reduce" else list(range(RANKS))
    for member in members:
        own = [found for found in _rows(tmp_path, "x") if found.rank == member]
        windows = [[step for step in range(STEPS) if -(-step // every) == number] for number in range(-(-(STEPS - 1) // every) + 1)]
        assert [(found.step, found.revision) for found in own] == [(window[-1], 1) for window in windows]
        for found, window in zip(own, windows, strict=True):
            assert _found(found) == _truth(range(RANKS) if member is None else [member], window)


def test_a_weighted_mean_is_weighed_over_the_steps_too(tmp_path: Path) -> None:
    heavy = row(1, metrics={"loss": 1.0}, parts={"loss": ("mean", 30.0, 30.0)})
    light = row(2, metrics={"loss": 4.0}, parts={"loss": ("mean", 40.0, 10.0)})
    assert merge_rows([heavy, light]).metrics == {"loss": 1.75}


def test_a_value_that_was_not_finite_in_one_step_is_not_hidden_by_the_others() -> None:
    good = row(1, metrics={"loss": 1.0, "lr": 1.0}, parts={"loss": ("mean", 1.0, 1.0), "lr": ("max",)})
    bad = row(2, metrics={"loss": None, "lr": 2.0}, nonfinite={"loss": 3}, parts={"lr": ("max",)})
    merged = merge_rows([good, bad])
    assert (merged.metrics, merged.nonfinite) == ({"loss": None, "lr": 2.0}, {"loss": 3})


def test_the_slowest_rank_is_that_of_the_slowest_step() -> None:
    rows = [row(step, metrics={"forge/step_time_s/max": seconds, "forge/slowest_rank": rank}, parts={"forge/step_time_s/max": ("max",)})
            for step, seconds, rank in ((1, 0.5, 7.0), (2, 2.5, 3.0), (3, 1.0, 5.0))]  # fmt: skip
    assert merge_rows(rows).metrics == {"forge/step_time_s/max": 2.5, "forge/slowest_rank": 3.0}


def test_what_was_missing_in_a_step_is_missing_in_the_merged_row() -> None:
    merged = merge_rows([row(1, ranks_reporting=1, ranks_missing=("1",)), row(2)])
    assert (merged.ranks_reporting, merged.world_size, merged.ranks_missing) == (1, 2, ("1",))


class _Store:
    """Stored revisions, and the shaper that reads them."""

    def __init__(self, **options: Any) -> None:
        self.rows: list[Row] = []
        self.shaper = Shaper(BackendConfig(**options), self.stored)

    def stored(self, keys: Sequence[str], before: int | None) -> list[Row]:
        return [known for seq, known in enumerate(self.rows) if known.key in keys and (before is None or seq < before)]

    def add(self, *rows: Row) -> list[tuple[int, int, Any]]:
        made = []
        for item in rows:
            self.rows.append(item)
            made += self.shaper.take(len(self.rows) - 1, item)
        return [(found.step, found.revision, found.metrics["n"]) for found in made]

    def rest(self) -> list[tuple[int, int, Any]]:
        return [(found.step, found.revision, found.metrics["n"]) for found in self.shaper.rest()]


def _counted(step: int, **more: Any) -> Row:
    return row(step, metrics={"n": 1.0}, parts={"n": ("sum",)}, **more)


def test_windows_whose_last_step_never_comes_are_written_when_a_later_one_comes() -> None:
    store = _Store(every=10)
    assert store.add(*(_counted(step) for step in range(4, 30, 5))) == [(9, 1, 2.0), (19, 1, 2.0)]
    assert store.rest() == [(29, 1, 2.0)]
    assert store.rest() == []


def test_evaluations_are_merged_among_themselves() -> None:
    store = _Store(every=4)
    made = store.add(*(_counted(step, occurrence=occurrence) for step in range(9) for occurrence in (0, 1) if not occurrence or step == 3))
    assert made == [(0, 1, 1.0), (4, 1, 4.0), (3, 1, 1.0), (8, 1, 4.0)]


def test_a_revision_of_a_merged_step_makes_a_revision_of_the_merged_row() -> None:
    store = _Store(every=3)
    late = dataclasses.replace(_counted(2), revision=2, metrics={"n": 5.0})
    assert store.add(_counted(1), _counted(2), _counted(3), late) == [(3, 1, 3.0), (3, 4, 7.0)]
    assert store.add(_counted(4), dataclasses.replace(late, revision=3)) == [(3, 5, 7.0)]


def test_a_step_that_comes_after_its_window_was_written_makes_a_revision() -> None:
    store = _Store(every=3)
    assert store.add(_counted(1), _counted(3), _counted(2)) == [(3, 1, 2.0), (3, 3, 3.0)]


def test_a_newer_attempt_ends_the_windows_of_the_older_one_and_shares_none_with_it() -> None:
    store = _Store(every=10)
    assert store.add(_counted(11), _counted(12), _counted(11, attempt=1)) == [(12, 1, 2.0)]
    assert store.rest() == [(11, 1, 1.0)]


def test_rows_of_one_record_are_not_merged() -> None:
    store = _Store(every=2)
    assert store.add(*(_counted(step, sequence=step, rank=0) for step in range(4))) == [(0, 1, 1.0), (2, 1, 1.0)]


def test_an_exporter_that_was_stopped_in_the_middle_of_a_window_loses_and_doubles_nothing(tmp_path: Path) -> None:
    ranks = Ranks(1)
    first = _service(tmp_path, state="state", x={"every": 4})
    for step in range(7):
        first.accept_metrics(ranks.send(0, step, [("n", 1.0, Reduce.SUM)]))
    assert first.drain(10)
    first.stop(5.0, None)  # the run goes on in another process, so steps 5 and 6 wait
    assert [(found.step, found.metrics["n"]) for found in _rows(tmp_path, "x")] == [(0, 1.0), (4, 4.0)]
    second = _service(tmp_path, state="state", x={"every": 4})
    for step in range(7, 10):
        second.accept_metrics(ranks.send(0, step, [("n", 1.0, Reduce.SUM)]))
    assert second.drain(10)
    second.stop(5.0, 0)
    assert [(found.step, found.revision, found.metrics["n"]) for found in _rows(tmp_path, "x")] == [
        (0, 1, 1.0),
        (4, 1, 4.0),
        (8, 1, 4.0),
        (9, 1, 1.0),
    ]


def test_a_rank_that_is_late_amends_the_merged_row(tmp_path: Path) -> None:
    service = _service(tmp_path, state="state", x={"every": 2})
    ranks = Ranks(2)
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        service.accept_metrics(ranks.send(rank, step, [("n", 1.0, Reduce.SUM)]))
    wait_for(lambda: len(_rows(tmp_path, "x")) == 1, 10, "the row without rank 1")
    service.accept_metrics(ranks.send(1, 2, [("n", 1.0, Reduce.SUM)]))
    wait_for(lambda: len(_rows(tmp_path, "x")) == 2, 10, "the amended row")
    service.stop(5.0, 0)
    assert [(found.step, found.revision, found.metrics["n"], found.ranks_reporting) for found in _rows(tmp_path, "x")] == [
        (2, 1, 3.0, 1),
        (2, 3, 4.0, 2),
    ]


def test_keys_are_chosen_and_renamed_for_each_backend_alone(tmp_path: Path) -> None:
    chosen = {"include": ["train/*", "lr"], "exclude": "*/secret", "rename": {"train/loss": "loss"}}
    service = _service(tmp_path, chosen=chosen, all={}, evals={"include": ["eval/*"]})
    records = [record for key in ("train/loss", "train/secret", "lr", "other") for record in mean(1.0, key)]
    service.accept_metrics(Ranks(1).send(0, 0, [*records, ("train/loss", float("nan"), Reduce.MEAN)]))
    assert service.drain(10)
    service.stop(5.0, 0)
    (found,) = _rows(tmp_path, "chosen")
    assert (dict(found.metrics), dict(found.nonfinite)) == ({"loss": None, "lr": 1.0}, {"loss": 1})
    (found,) = _rows(tmp_path, "all")
    assert found.metrics.keys() >= {"train/loss", "train/secret", "lr", "other"}
    assert _rows(tmp_path, "evals") == []  # nothing of the row is for it


def test_a_name_that_is_taken_stays_with_its_metric(caplog: pytest.LogCaptureFixture) -> None:
    shaper = Shaper(BackendConfig(rename={"a": "b", "c": "d"}), lambda keys, before: [])
    (found,) = shaper.take(0, row(0, metrics={"a": 1.0, "b": 2.0, "c": 3.0}))
    assert found.metrics == {"a": 1.0, "b": 2.0, "d": 3.0}
    assert "'a' keeps its name" in caplog.text


def test_two_keys_with_one_new_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"metric_logging.jsonl.rename: 'a' and 'b' would both be 'x'"):
        load_config({"metric_logging": {"jsonl": {"rename": {"a": "x", "b": "x"}}}})
