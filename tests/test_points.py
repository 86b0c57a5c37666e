"""Hand-made OTLP is what opentelemetry-proto reads."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from otel_forge import points, wire
from otel_forge.moments import bucket, exact_moments, summarize, weigh
from otel_forge.points import ContextTemplate, PointContext, ResourceTemplate, SeriesName

CONTEXT = PointContext.of([("step", 7), ("role", "trainer"), ("attempt", 1_790_000_000_000)], 10, 20)


def _parse(metrics: bytes, **resource: Any) -> Any:
    payload, _ = ResourceTemplate.of(resource).request("n/0", metrics)
    request = ExportMetricsServiceRequest.FromString(payload)
    assert request.resource_metrics[0].scope_metrics[0].scope.name == "otel_forge"
    return request.resource_metrics[0]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def test_a_mean_is_a_histogram_without_bounds() -> None:
    metric = _parse(points.histogram(SeriesName.of("loss", "mean"), CONTEXT, summarize([1.0, -3.0]))).scope_metrics[0].metrics[0]
    point = metric.histogram.data_points[0]
    assert (metric.name, metric.histogram.aggregation_temporality) == ("loss", 1)
    assert (point.count, point.sum, point.min, point.max, list(point.bucket_counts), list(point.explicit_bounds)) == (2, -2.0, -3.0, 1.0, [2], [])
    assert (point.start_time_unix_nano, point.time_unix_nano) == (10, 20)
    assert _attributes(point.attributes) == {"step": 7, "role": "trainer", "attempt": 1_790_000_000_000, wire.REDUCTION: "mean"}


def test_a_key_that_otel_does_not_allow_travels_as_an_attribute() -> None:
    metric = _parse(points.double_sum(SeriesName.of("Verlust (%)", "sum"), CONTEXT, 2.5)).scope_metrics[0].metrics[0]
    point = metric.sum.data_points[0]
    assert metric.name == wire.metric_name("Verlust (%)")
    assert (point.as_double, metric.sum.is_monotonic, metric.sum.aggregation_temporality) == (2.5, False, 1)
    assert _attributes(point.attributes)[wire.KEY] == "Verlust (%)"


def test_buckets_and_weights_have_their_fields() -> None:
    buckets = bucket([0.5, 1.5, 9.0], [1.0, 2.0])
    names = (SeriesName.of("w", "mean", wire.WEIGHTED_SUM), SeriesName.of("w", "mean", wire.WEIGHT))
    encoded = points.bucketed(SeriesName.of("h", "histogram"), CONTEXT, buckets, [1.0, 2.0]) + points.weighted(names, CONTEXT, weigh([(2.0, 3.0)]))
    histogram, weighted_sum, weight = _parse(encoded).scope_metrics[0].metrics
    point = histogram.histogram.data_points[0]
    assert (list(point.bucket_counts), list(point.explicit_bounds), point.count, point.max) == ([1, 1, 1], [1.0, 2.0], 3, 9.0)
    assert (weighted_sum.name, weighted_sum.sum.data_points[0].as_double) == ("w.weighted_sum", 6.0)
    assert (weight.name, weight.sum.data_points[0].as_double) == ("w.weight", 3.0)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=10))
def test_moments_come_back_from_their_limbs(values: list[float]) -> None:
    moments = exact_moments(values)
    names = tuple(SeriesName.of("s", "std", component) for component in ("n", "x", "xx"))
    metrics = _parse(points.moments((names[0], names[1], names[2]), CONTEXT, moments)).scope_metrics[0].metrics
    found = {
        metric.name: [(_attributes(point.attributes)[wire.LIMB], point.as_int) for point in metric.sum.data_points] for metric in metrics
    }  # fmt: skip
    assert found["s.n"] == [(0, len(values))]
    assert wire.from_limbs(found.get("s.x", []), wire.X_SHIFT) == moments.x
    assert wire.from_limbs(found.get("s.xx", []), wire.XX_SHIFT) == moments.xx


def test_contributors_name_the_block_and_an_open_world_its_member() -> None:
    ranked, open_world = _parse(points.contributors(CONTEXT, 25) + points.contributors(CONTEXT, None, "task-a")).scope_metrics[0].metrics
    point = ranked.sum.data_points[0]
    assert (ranked.name, _attributes(point.attributes)[wire.BLOCK], point.as_int) == (wire.CONTRIBUTORS_METRIC, 2, 16 + (1 << 48))
    assert _attributes(open_world.sum.data_points[0].attributes)[wire.MEMBER] == "task-a"


def test_the_route_of_a_packet_changes_by_overwriting_six_bytes() -> None:
    resource = {"service.name": "window", wire.ROUTE: wire.ROUTE_WINDOW, "x" * 300: "window"}
    payload, offset = ResourceTemplate.of(resource).request("n/1", b"")
    assert offset is not None
    changed = payload[:offset] + wire.ROUTE_DIRECT.encode() + payload[offset + 6 :]
    before, after = (_attributes(ExportMetricsServiceRequest.FromString(item).resource_metrics[0].resource.attributes) for item in (payload, changed))
    assert before == {**resource, wire.PACKET_ID: "n/1"}
    assert after == {**before, wire.ROUTE: wire.ROUTE_DIRECT}


@given(st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text()))
def test_every_attribute_value_comes_back(value: Any) -> None:
    found = _attributes(_parse(b"", key=value).resource.attributes)["key"]
    assert found == value.encode("utf-8", "replace").decode() if isinstance(value, str) else found == value
    assert type(found) is type(value)


@given(st.lists(st.integers(0, 2**62), min_size=2, max_size=2))
def test_a_template_s_context_is_that_of_its_pairs(values: list[int]) -> None:
    template = ContextTemplate([("role", "trainer")], ("step", "part"))
    assert template.context(values, 1, 2) == PointContext.of([("role", "trainer"), ("step", values[0]), ("part", values[1])], 1, 2)
