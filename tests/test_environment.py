"""OpenTelemetry's own variables, each as its specification says; the receivers are real ones over HTTP, TLS and gRPC."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import otel_forge
from otel_forge import record_metric
from otel_forge.config import load_config, otlp_settings, user_resource
from otel_forge.delivery import Packet
from otel_forge.otlp_grpc import GrpcPoster
from otel_forge.otlp_http import Poster, Verdict
from tests.http_server import OK, Receiver, serving

TLS = Path(__file__).parent / "tls"
CERTIFICATE, KEY = str(TLS / "localhost-test-only.pem"), str(TLS / "localhost-test-only.key")


def _requests(server: Receiver) -> list[Any]:
    bodies = [gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body for body in server.bodies]
    return [resource for body in bodies for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics]


def _train(**options: Any) -> None:
    otel_forge.init(**options)
    record_metric("loss", 1.0)
    assert otel_forge.flush(0, wait_s=10)
    otel_forge.shutdown()


def _keys(resources: list[Any]) -> set[str]:
    return {metric.name for resource in resources for scope in resource.scope_metrics for metric in scope.metrics}


def _attributes(resource: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in resource.resource.attributes}


@pytest.mark.parametrize("signal", ["", "METRICS_"])
def test_endpoint_headers_and_resource_are_used(signal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        base = server.url.removesuffix("/v1/metrics")
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT", base if not signal else server.url)
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}HEADERS", "x-tenant=me%20too,authorization=Bearer abc")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=red%20one,service.name=lost,forge.run_id=hijack")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
        _train(run_id="r1")
        headers = {name.lower(): value for name, value in server.headers[0].items()}
        values = [resource for resource in _requests(server) if _attributes(resource)["forge.packet"] == "values"]
    assert (headers["x-tenant"], headers["authorization"]) == ("me too", "Bearer abc")
    found = _attributes(values[0])
    assert (found["team"], found["service.name"], found["forge.run_id"]) == ("red one", "my-service", "r1")
    assert "loss" in _keys(values)


def test_a_signal_s_own_variable_beats_the_general_one() -> None:
    settings = otlp_settings(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1/", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://b:2/own",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3", "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "4",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "none",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/a", "OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE": "/b",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
        }
    )  # fmt: skip
    assert (settings.metrics_url, settings.timeout_s, settings.compression, settings.ca_file) == ("http://b:2/own", 4.0, "none", "/b")
    assert settings.protocol == "grpc"


@pytest.mark.parametrize("text", ["", "soon", "-1"])
def test_a_timeout_that_cannot_be_read_is_the_default(text: str) -> None:
    assert otlp_settings({"OTEL_EXPORTER_OTLP_TIMEOUT": text}).timeout_s == 10.0


def test_the_file_s_resource_gives_way_to_the_environment() -> None:
    config = load_config({"resource": {"a": 1, "b": "file"}})
    assert user_resource(config, {"OTEL_RESOURCE_ATTRIBUTES": "b=env,,broken,=x"}) == {"a": 1, "b": "env"}


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED", "FORGE_DISABLE_METRICS"])
def test_disabled_means_that_nothing_is_started_or_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url.removesuffix("/v1/metrics"))
        monkeypatch.setenv(name, "true")
        before = threading.active_count()
        otel_forge.init()
        record_metric("loss", 1.0)
        with otel_forge.span("x"):
            pass
        assert not otel_forge.flush(0, wait_s=1)
        assert threading.active_count() == before
        otel_forge.shutdown()
        assert server.bodies == []


def test_tls_with_the_given_certificate_is_used_and_without_it_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tls=(CERTIFICATE, KEY)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://localhost:{server.server_port}")
        otel_forge.init(run_id="r1")
        record_metric("loss", 1.0)
        otel_forge.flush(0)
        assert otel_forge.shutdown(timeout_s=0.5).spilled
        assert server.bodies == []
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", CERTIFICATE)
        _train(run_id="r1")
        assert "loss" in _keys(_requests(server))


class _Service:
    """A real OTLP/gRPC receiver that answers as a test chooses."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans = 0
        self.metadata: list[dict[str, str]] = []
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self.answer = b""
        self.stall = threading.Event()

    def export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        self.bodies.append(body)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.details == "stall":
            self.stall.wait(20)
        if self.status is not None:
            context.abort(self.status, self.details)
        return self.answer

    def export_spans(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        self.spans += len(ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans)
        return b""


@contextmanager
def grpc_serving() -> Iterator[tuple[_Service, int]]:
    service = _Service()
    methods = {"Export": grpc.unary_unary_rpc_method_handler(service.export)}
    server = grpc.server(futures.ThreadPoolExecutor(4))
    traces = {"Export": grpc.unary_unary_rpc_method_handler(service.export_spans)}
    for name, handlers in (("metrics.v1.MetricsService", methods), ("trace.v1.TraceService", traces)):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"opentelemetry.proto.collector.{name}", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield service, port
    finally:
        service.stall.set()
        server.stop(None).wait()


def test_protocol_grpc_sends_packets_and_spans_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_serving() as (service, port):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=me")
        otel_forge.init(run_id="r1")
        with otel_forge.span("work"):
            record_metric("loss", 1.0)
        assert otel_forge.flush(0, wait_s=10)
        report = otel_forge.shutdown()
        requests = [ExportMetricsServiceRequest.FromString(body) for body in service.bodies]
        assert "loss" in _keys([resource for request in requests for resource in request.resource_metrics])
        assert service.spans == 1
        assert {metadata["x-tenant"] for metadata in service.metadata} == {"me"}
    assert (report.spilled, report.dropped) == (0, 0)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (grpc.StatusCode.UNAVAILABLE, Verdict.UNKNOWN), (grpc.StatusCode.RESOURCE_EXHAUSTED, Verdict.UNKNOWN),
        (grpc.StatusCode.UNKNOWN, Verdict.UNKNOWN), (grpc.StatusCode.UNAUTHENTICATED, Verdict.FORBIDDEN),
        (grpc.StatusCode.UNIMPLEMENTED, Verdict.FORBIDDEN), (grpc.StatusCode.INVALID_ARGUMENT, Verdict.REJECTED),
    ],
)  # fmt: skip
def test_each_grpc_status_has_its_meaning(status: grpc.StatusCode, verdict: Verdict) -> None:
    with grpc_serving() as (service, port):
        poster = GrpcPoster(f"http://127.0.0.1:{port}", "metrics", {}, 5.0, "gzip", None)
        service.status, service.details = status, "why"
        outcome = poster.post(b"x")
        assert (outcome.verdict, "why" in outcome.detail) == (verdict, True)
        service.details = "data refused due to high memory usage"
        if status is grpc.StatusCode.UNAVAILABLE:
            assert poster.post(b"x").verdict is Verdict.NOT_STORED
        service.status = None
        service.answer = ExportMetricsServiceResponse(partial_success={"rejected_data_points": 3, "error_message": "too old"}).SerializeToString()
        assert poster.post(b"x").detail == "3 points were left out: too old"
        poster.close()


def test_a_grpc_receiver_that_is_not_there_or_stalls_is_no_hang() -> None:
    with grpc_serving() as (service, port):
        service.details = "stall"
        poster = GrpcPoster(f"http://127.0.0.1:{port}", "metrics", {}, 0.3, "gzip", None)
        assert poster.post(b"x").verdict is Verdict.UNKNOWN
        service.details = ""
        assert poster.post(b"x").verdict is Verdict.ACCEPTED
    outcome = poster.post(b"x")
    assert (outcome.verdict, outcome.renewed) == (Verdict.NOT_STORED, True)
    poster.close()


def test_a_partial_success_is_said_with_its_count_and_reason(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ExportMetricsServiceResponse(partial_success={"rejected_data_points": 2, "error_message": "unit unknown"}).SerializeToString()
    with serving(lambda n, body: (200, answer, {})) as server:
        monkeypatch.setenv("OTEL_FORGE_ENDPOINT", server.url.removesuffix("/v1/metrics"))
        _train()
    assert "2 points were left out: unit unknown" in caplog.text


def test_a_name_that_does_not_resolve_is_said_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_FORGE_ENDPOINT", "http://no-such-host.invalid:4318")
    otel_forge.init()
    record_metric("loss", 1.0)
    otel_forge.flush(0)
    report = otel_forge.shutdown(timeout_s=1.0)
    assert (report.delivered, report.dropped) == (0, 0)
    assert report.spilled >= 2
    assert "no-such-host.invalid" in caplog.text
    assert "cannot connect" in caplog.text


def test_large_requests_are_compressed_except_to_loopback() -> None:
    body = b"loss " * 10_000
    with serving(lambda n, body: OK) as server:
        for pretend, compressed in ((False, False), (True, True)):
            poster = Poster(server.url, {}, 5.0, "gzip", None)
            poster._gzip = poster._gzip or pretend  # the only host here is loopback
            assert poster.post(body).verdict is Verdict.ACCEPTED
            assert (gzip.decompress(server.bodies[-1]) if compressed else server.bodies[-1]) == body
            assert server.headers[-1].get("content-encoding") == ("gzip" if compressed else None)
            poster.close()


_THIRD_PARTY = """
import sys
from opentelemetry import metrics
early = metrics.get_meter("early").create_counter("early.requests")
import otel_forge
if sys.argv[1] == "user_first":
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    reader = InMemoryMetricReader(); metrics.set_meter_provider(MeterProvider([reader]))
otel_forge.init(run_id="r1", role="trainer", rank=0, world_size=1)
otel_forge.record_metric("loss", 1.0)
assert otel_forge.flush(0, wait_s=10)
import time
deadline = time.monotonic() + 10
while sys.argv[1] != "user_first" and "Proxy" in type(metrics.get_meter_provider()).__name__ and time.monotonic() < deadline:
    time.sleep(0.01)
if sys.argv[1] == "user_later":
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    reader = InMemoryMetricReader(); metrics.set_meter_provider(MeterProvider([reader]))
early.add(3)
metrics.get_meter("late").create_counter("late.requests").add(4)
if sys.argv[1].startswith("user"):
    names = {m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert names == {"early.requests", "late.requests"}, names
otel_forge.shutdown()
"""


@pytest.mark.parametrize("who", ["nobody", "user_first", "user_later"])
def test_instruments_of_others_go_through_the_user_s_provider_else_through_ours(who: str, tmp_path: Path) -> None:
    with serving() as server:
        environ = {"OTEL_FORGE_ENDPOINT": server.url.removesuffix("/v1/metrics"), "OTEL_FORGE_STATE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", _THIRD_PARTY, who], env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        theirs = [resource for resource in _requests(server) if "forge.packet" not in _attributes(resource)]
    assert _keys(theirs) == ({"early.requests", "late.requests"} if who == "nobody" else set())
    for resource in theirs:
        found = _attributes(resource)
        assert (found["forge.run_id"], found["forge.rank"], found["service.name"]) == ("r1", 0, "trainer")


def test_any_exporter_of_the_sdk_can_take_the_metrics_and_spans() -> None:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class Keeping(MetricExporter):
        def __init__(self) -> None:
            super().__init__()
            self.data: list[Any] = []

        def export(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
            self.data.append(metrics_data)
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            return True

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
            self.data.append("shut down")

    exporter, spans = Keeping(), InMemorySpanExporter()
    otel_forge.init(run_id="r1", metric_exporter=exporter, span_exporter=spans)
    with otel_forge.span("work", {"files": 3}):
        record_metric("loss", 2.0)
        record_metric("loss", 4.0)
    record_metric("tokens", 7.0, otel_forge.Reduce.SUM)
    assert otel_forge.flush(5, wait_s=10)
    report = otel_forge.shutdown()
    assert (report.dropped, exporter.data[-1]) == (0, "shut down")
    metrics = {m.name: m for data in exporter.data[:-1] for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    (loss,) = metrics["loss"].data.data_points
    assert (loss.count, loss.sum, loss.min, loss.max, loss.attributes["step"]) == (2, 6.0, 2.0, 4.0, 5)
    assert metrics["tokens"].data.data_points[0].value == 7.0
    (span,) = spans.get_finished_spans()
    assert (span.name, span.attributes) == ("work", {"step": 0, "files": 3})


def test_an_sdk_exporter_that_fails_costs_the_training_nothing_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    class Broken(ConsoleMetricExporter):
        def export(self, *arguments: Any, **options: Any) -> Any:
            raise OSError("no space")

    otel_forge.init(metric_exporter=Broken())
    record_metric("loss", 1.0)
    assert not otel_forge.flush(0, wait_s=10)
    assert otel_forge.shutdown().dropped >= 1
    assert "lost a packet: OSError('no space')" in caplog.text


def test_an_empty_payload_is_empty_data() -> None:
    from otel_forge.sdk_exporters import metrics_data

    assert list(metrics_data(Packet(b"", "metrics", None, False, "x").payload).resource_metrics) == []
