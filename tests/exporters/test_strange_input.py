"""Whatever arrives, the exporter answers, counts it, writes the rows that are right, and names no file after it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.decode import decode
from otel_forge_exporters.service import Service
from otel_forge_exporters.values import Unreadable

from otel_forge import wire
from otel_forge.config import load_config
from otel_forge.metrics import HistogramReduce
from tests.exporters.packets import Ranks, mean
from tests.fuzz import fuzz
from tests.integration.conftest import rows_of, wait_for


def test_300_mutated_requests_harm_nothing(tmp_path: Path) -> None:
    """`python -m tests.fuzz` sends 10,000."""
    found = fuzz(300, 1, tmp_path)
    assert found["stored"] + found["refused"] == 300
    assert min(found["refused"], found["bad_points"], found["foreign_points"]) > 0, "each kind of trouble came up"


def changed(body: bytes, change: Callable[[Any], None]) -> bytes:
    request = ExportMetricsServiceRequest.FromString(body)
    change(request.resource_metrics[0])
    return bytes(request.SerializeToString())


def set_resource(name: str, **value: Any) -> Callable[[Any], None]:
    def change(resource_metrics: Any) -> None:
        pair = next(pair for pair in resource_metrics.resource.attributes if pair.key == name)
        for field, content in value.items():
            setattr(pair.value, field, content)

    return change


def metric_of(resource_metrics: Any, name: str) -> Any:
    return next(metric for metric in resource_metrics.scope_metrics[0].metrics if metric.name == name)


def break_own_histogram(resource_metrics: Any) -> None:
    """Buckets that do not fit, in a series of otel-forge's own."""
    metric_of(resource_metrics, wire.STEP_END_METRIC).histogram.data_points[0].explicit_bounds.extend([1.0, 2.0])


def claim_a_huge_world(resource_metrics: Any) -> None:
    point = metric_of(resource_metrics, wire.CONTRIBUTORS_METRIC).sum.data_points[0]
    next(pair for pair in point.attributes if pair.key == wire.POINT_WORLD_SIZE).value.int_value = 2**60


@pytest.mark.parametrize(
    "change",
    [
        set_resource(wire.RUN_ID, string_value="../../evil"),
        set_resource(wire.RUN_ID, string_value=".."),
        set_resource(wire.RUN_ID, string_value="a/b"),
        set_resource(wire.WORLD_SIZE, int_value=2**60),
        set_resource(wire.RANK, int_value=-1),
        set_resource(wire.RANK, int_value=2),
        set_resource(wire.REPLICA, int_value=2**40),
    ],
)
def test_an_impossible_sender_is_counted_and_left_out(change: Callable[[Any], None]) -> None:
    decoded = decode(changed(Ranks(2).send(0, 0, mean(1.0)), change))
    assert (decoded.units, decoded.per_rank, decoded.bad_points) == ([], [], 1)


def test_a_world_that_is_too_large_is_not_believed() -> None:
    (unit,) = decode(changed(Ranks(2).send(0, 0, mean(1.0)), claim_a_huge_world)).units
    assert (unit.consistent, unit.worlds) == (False, {})


@pytest.mark.parametrize("bound", [math.nan, math.inf, 1.0])
def test_bounds_that_no_backend_could_hold_are_counted_and_left_out(bound: float) -> None:
    def change(resource_metrics: Any) -> None:
        metric_of(resource_metrics, "length").histogram.data_points[0].explicit_bounds[1] = bound

    decoded = decode(changed(Ranks(1).send(0, 0, [("length", 3.0, HistogramReduce((1.0, 2.0, 4.0)))]), change))
    assert decoded.bad_points == 1
    (unit,) = decoded.units
    assert unit.values["length", "histogram"] == [Unreadable()]


def test_a_key_of_which_one_rank_cannot_be_read_has_no_number(tmp_path: Path) -> None:
    """The mean of the other rank would be a wrong number without a mark; the other key is whole."""

    def change(resource_metrics: Any) -> None:
        metric_of(resource_metrics, "loss").histogram.data_points[0].count = 0

    ranks, assembler = Ranks(2), Assembler(deadline_s=10.0, horizon_s=3600.0, grace_s=3.0)
    records = [*mean(1.0), *mean(2.0, "other")]
    for payload in (ranks.send(0, 0, records), changed(ranks.send(1, 0, records), change)):
        for unit in decode(payload).units:
            assembler.add(unit, 0.0)
    (revision,) = assembler.due(0.0)
    assert (revision.row.metrics["loss"], revision.row.metrics["other"], revision.row.nonfinite) == (None, 2.0, {"loss": 1})


def test_a_control_packet_nested_100000_deep_is_counted() -> None:
    def change(resource_metrics: Any) -> None:
        point = resource_metrics.scope_metrics[0].metrics[0].gauge.data_points[0]
        next(pair for pair in point.attributes if pair.key == wire.BODY).value.string_value = "[" * 100_000

    assert decode(changed(Ranks(1).control(0, "hello", {}), change)).bad_points == 1


def test_rows_behind_a_strange_payload_are_written_and_a_restart_takes_it_again(tmp_path: Path) -> None:
    """A payload whose row cannot be made well, and a control packet with a strange exit code, stop neither this process nor the next."""
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    ranks = Ranks(2)
    for step in range(2):
        service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
        service.start()
        service.accept_metrics(changed(ranks.send(0, 7, mean(1.0)), break_own_histogram))
        service.accept_metrics(changed(ranks.send(0, 8, mean(1.0)), claim_a_huge_world))
        service.accept_metrics(ranks.control(0, "last", {"exit_code": [1]}))
        for rank in range(2):
            service.accept_metrics(ranks.send(rank, step, mean(float(rank))))
        wait_for(lambda step=step: step in {row["step"] for row in rows_of(tmp_path / "rows.jsonl")}, 10, "the right row")  # type: ignore[misc]
        service.stop(5.0)
    rows = {row["step"]: row for row in rows_of(tmp_path / "rows.jsonl")}
    assert [rows[step]["metrics"]["loss"] for step in range(2)] == [0.5, 0.5]
    json.dumps(rows, allow_nan=False)
