"""Rows as OTLP, taken by a real HTTP server and by the Collector."""

from __future__ import annotations

import contextlib
import math
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.otlp import OtlpBackend
from otel_forge_exporters.rows import HistogramValue
from otel_forge_exporters.service import Service

from otel_forge.cli import binaries
from otel_forge.config import LoggingMode, OtlpConfig, load_config
from otel_forge.errors import ConfigError
from tests.exporters.packets import Ranks, mean
from tests.exporters.test_backends import row
from tests.http_server import OK, Answer, Receiver, serving
from tests.integration.conftest import wait_for
from tests.test_delivery import free_port

HISTOGRAM = HistogramValue((1.0, 2.0), (1, 2, 1), 0.5, 3.0, 6.5)


@contextlib.contextmanager
def _backend(server: Receiver, **options: Any) -> Iterator[OtlpBackend]:
    backend = OtlpBackend(OtlpConfig(endpoint=server.url.removesuffix("/v1/metrics"), **options), RunInfo("r", namespace="lab"), Path())
    backend.open()
    yield backend
    backend.close(0, 5.0)


def _points(bodies: list[bytes]) -> list[tuple[str, Any, dict[str, Any]]]:
    """(metric name, point, resource and point attributes) of all requests."""
    found = []
    for body in bodies:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                points = metric.histogram.data_points if metric.HasField("histogram") else metric.gauge.data_points
                found += [(metric.name, point, _plain(resource.resource.attributes) | _plain(point.attributes)) for point in points]
    return found


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


def _gauges(bodies: list[bytes], name: str = "loss") -> list[float]:
    return [point.as_double for found, point, _ in _points(bodies) if found == name]


def test_each_value_is_a_gauge_at_the_row_s_time_and_the_step_is_no_attribute() -> None:
    with serving() as server, _backend(server) as backend:
        backend.write([row(7, metrics={"loss": 0.5, "Verlust (%)": 1.0}, time_unix=100.25)])
    points = {name.partition(".")[0]: (point.as_double, point.time_unix_nano, attributes) for name, point, attributes in _points(server.bodies)}
    common = {"service.name": "trainer", "service.namespace": "lab", "service.instance.id": "r", "forge.run": "r", "forge.attempt": 0}
    common |= {"run": "r", "role": "trainer"}
    assert points == {
        "loss": (0.5, 100_250_000_000, common),
        "kVerlust____": (1.0, 100_250_000_000, common | {"forge.key": "Verlust (%)"}),
        "forge/step": (7.0, 100_250_000_000, common),
        "forge/ranks_reporting": (2.0, 100_250_000_000, common),
    }


def test_members_are_resources_and_ranks_are_attributes() -> None:
    with serving() as server, _backend(server, logging_mode=LoggingMode.PER_RANK_REDUCE) as backend:
        backend.write([row(0, rank=rank, replica=rank, metrics={"loss": float(rank)}) for rank in range(2)])
    found = [
        (attributes["service.instance.id"], attributes["rank"], attributes.get("replica"))
        for n, _, attributes in _points(server.bodies)
        if n == "loss"
    ]
    assert found == [("r-trainer-0-0", 0, None), ("r-trainer-1-1", 1, 1)]


def test_histograms_add_up_over_the_steps() -> None:
    with serving() as server, _backend(server) as backend:
        backend.write([row(0, metrics={"h": HISTOGRAM}), row(1, metrics={"h": HISTOGRAM}, time_unix=2.5)])
    points = [point for name, point, _ in _points(server.bodies) if name == "h"]
    assert [(list(point.bucket_counts), point.count, point.sum) for point in points] == [([1, 2, 1], 4, 6.5), ([2, 4, 2], 8, 13.0)]
    assert points[0].start_time_unix_nano == points[1].start_time_unix_nano < points[0].time_unix_nano
    assert _gauges(server.bodies, "h/p50") == [1.5, 1.5]


def test_a_value_that_is_not_finite_is_nan_and_counted_and_later_revisions_are_not_sent() -> None:
    with serving() as server, _backend(server) as backend:
        backend.write([row(0, metrics={"loss": None}, nonfinite={"loss": 3}), row(0, revision=2)])
    assert [math.isnan(value) for value in _gauges(server.bodies)] == [True]
    assert _gauges(server.bodies, "forge/nonfinite/loss") == [3.0]


def test_what_failed_is_sent_again_as_it_was() -> None:
    """Unavailable, then no answer at all, then taken: the histogram of the batch is added up once, and no row is left out."""
    answers: dict[int, Answer | str] = {2: (503, b"later", {}), 3: "reset"}
    with serving(lambda number, body: answers.get(number, OK)) as server, _backend(server) as backend:
        backend.write([row(0, metrics={"h": HISTOGRAM})])
        rows = [row(1, metrics={"h": HISTOGRAM})]
        for _ in range(2):
            with pytest.raises(ConnectionError, match=r"HTTP 503|connection"):
                backend.write(rows)
        backend.write(rows)
    assert server.bodies[1] == server.bodies[2] == server.bodies[3]
    assert [point.count for name, point, _ in _points(server.bodies[-1:]) if name == "h"] == [8]


def test_what_is_refused_for_good_is_said_once_and_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    partly = ExportMetricsServiceResponse()
    partly.partial_success.rejected_data_points = 1
    partly.partial_success.error_message = "out of order"
    answers: dict[int, Answer] = {1: (400, b"out of bounds", {}), 2: (200, partly.SerializeToString(), {})}
    with serving(lambda number, body: answers.get(number, OK)) as server, _backend(server) as backend:
        for step in range(3):
            backend.write([row(step)])
    assert len(server.bodies) == 3
    assert [record.getMessage().split(" for good: ")[1] for record in caplog.records] == ["HTTP 400 out of bounds"]


def test_many_rows_go_in_several_requests() -> None:
    with serving() as server, _backend(server) as backend:
        backend.write([row(step, metrics={f"key/{number}": 1.0 for number in range(100)}) for step in range(120)])
    assert len(server.bodies) == 3
    assert _gauges(server.bodies, "forge/step") == [float(step) for step in range(120)]


def test_a_receiver_that_is_down_delays_only_this_backend(tmp_path: Path) -> None:
    port = free_port()
    backends = {"otlp": {"endpoint": f"http://127.0.0.1:{port}", "headers": {"x-token": "t"}}, "jsonl": {"path": str(tmp_path / "rows.jsonl")}}
    service = Service(load_config({"metric_logging": backends}), state_dir=None, work_dir=tmp_path)
    service.start()
    ranks = Ranks(1)
    for step in range(3):
        service.accept_metrics(ranks.send(0, step, mean(float(step))))
    wait_for(lambda: "cannot connect" in str(service.status()["runs"]["r"]["backends"]["otlp"]["error"]), 10, "a failure")
    with serving(port=port) as server:
        assert service.drain(20)
        service.stop(5.0, 0)
    assert _gauges(server.bodies) == [0.0, 1.0, 2.0]
    assert server.headers[0]["x-token"] == "t"


def test_an_endpoint_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"metric_logging.otlp.endpoint: Field required"):
        load_config({"metric_logging": {"otlp": {}}})
    with pytest.raises(ConfigError, match=r"metric_logging.otlp.endpoint: must be a URL such as http://127.0.0.1:4318, not 'localhost:4318'"):
        load_config({"metric_logging": {"otlp": {"endpoint": "localhost:4318"}}})


@pytest.mark.integration
def test_prometheus_finds_the_values_behind_a_real_collector(tmp_path: Path) -> None:
    """The Collector's own OTLP receiver takes them; what its Prometheus exporter then offers is scraped."""
    program = binaries.find(binaries.COLLECTOR)
    if program is None:
        pytest.skip("no Collector: otel-forge collector install")
    port, scraped = free_port(), free_port()
    config = tmp_path / "collector.yaml"
    config.write_text(f"""
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters: {{prometheus: {{endpoint: "127.0.0.1:{scraped}"}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{metrics: {{receivers: [otlp], exporters: [prometheus]}}}}
""")
    collector = subprocess.Popen([str(program), "--config", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        service = Service(
            load_config({"metric_logging": {"otlp": {"endpoint": f"http://127.0.0.1:{port}"}}}), state_dir=tmp_path / "state", work_dir=tmp_path
        )
        service.start()
        ranks = Ranks(2)
        for rank in range(2):
            service.accept_metrics(ranks.send(rank, 5, mean(float(rank), "train/loss")))
        assert service.drain(30)
        service.stop(5.0, 0)
        page = _scrape(scraped)
    finally:
        collector.terminate()
        collector.wait(20)
    values = {line.partition("{")[0]: float(line.split()[-1]) for line in page.splitlines() if 'run="r"' in line and not line.startswith("#")}
    assert (values["train_loss"], values["forge_step"], values["forge_ranks_reporting"]) == (0.5, 5.0, 2.0)


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
