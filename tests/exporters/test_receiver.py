"""What a real client gets for an answer: OK means stored, everything else means come again, unless the bytes are none of OTLP's."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from otel_forge_exporters.receiver import Access, GrpcReceiver, HttpReceiver
from otel_forge_exporters.service import Service

from otel_forge.config import load_config
from otel_forge.errors import ConfigError
from tests.exporters.packets import Ranks, mean
from tests.integration.conftest import rows_of, wait_for

METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Service, GrpcReceiver, HttpReceiver]]:
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    receivers = GrpcReceiver(service, "127.0.0.1:0"), HttpReceiver(service, "127.0.0.1:0", on_drain=lambda timeout_s, code: service.drain(timeout_s))
    service.start()
    for receiver in receivers:
        receiver.start()
    yield service, *receivers
    for receiver in receivers:
        receiver.stop()
    service.stop(5.0, 0)


def _post(port: int, body: bytes, path: str = "/v1/metrics", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, body, {"content-type": "application/x-protobuf", **{k.replace("_", "-"): v for k, v in headers.items()}})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _export(port: int, body: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(METRICS)(body, timeout=10)
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code


def test_both_protocols_store_and_a_row_of_both_is_written(serving: Any, tmp_path: Path) -> None:
    _, rpc, http_receiver = serving
    ranks = Ranks(3)
    assert _export(rpc.port, ranks.send(0, 0, mean(1.0))) == grpc.StatusCode.OK
    assert _post(http_receiver.port, ranks.send(1, 0, mean(2.0)))[0] == 200
    assert _post(http_receiver.port, gzip.compress(ranks.send(2, 0, mean(6.0))), content_encoding="gzip")[0] == 200
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 1, 10, "the row")
    assert rows_of(tmp_path / "rows.jsonl")[0]["metrics"]["loss"] == 3.0


def test_rubbish_is_refused_for_good_and_harms_nothing(serving: Any) -> None:
    service, rpc, http_receiver = serving
    assert _export(rpc.port, b"\xff\xff rubbish") == grpc.StatusCode.INVALID_ARGUMENT
    assert _post(http_receiver.port, b"\xff\xff rubbish")[0] == 400
    assert _post(http_receiver.port, b"not gzip", content_encoding="gzip")[0] == 400
    assert _post(http_receiver.port, b"{}", content_type="application/json")[0] == 415
    with socket.create_connection(("127.0.0.1", rpc.port)) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with socket.create_connection(("127.0.0.1", http_receiver.port)) as raw:
        raw.sendall(b"\x00\x01\x02")
    assert _export(rpc.port, Ranks(1).send(0, 0, mean(1.0))) == grpc.StatusCode.OK
    assert service.status()["undecodable"] == 2


def test_what_cannot_be_stored_is_answered_with_come_again(serving: Any) -> None:
    """A disk that fails, and a service that stops: never an answer on which a Collector would drop the data."""
    service, rpc, http_receiver = serving
    service._spool._db.execute("DROP TABLE inbox")
    body = Ranks(1).send(0, 0, mean(1.0))
    assert _export(rpc.port, body) == grpc.StatusCode.UNAVAILABLE
    assert _post(http_receiver.port, body)[0] == 503
    service._stopped = True
    assert _export(rpc.port, body) == grpc.StatusCode.UNAVAILABLE


def test_health_status_and_drain(serving: Any) -> None:
    _, _, http_receiver = serving
    connection = http.client.HTTPConnection("127.0.0.1", http_receiver.port, timeout=10)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    connection.close()
    assert _post(http_receiver.port, Ranks(1).send(0, 0, mean(1.0)))[0] == 200
    status, answer = _post(http_receiver.port, b"", "/drain?timeout_s=20")
    assert (status, json.loads(answer)) == (200, {"drained": True})


def test_a_taken_port_is_an_error_with_its_name(tmp_path: Path) -> None:
    service = Service(load_config({}), state_dir=None, work_dir=tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=endpoint):
            HttpReceiver(service, endpoint, on_drain=lambda timeout_s, code: True)


@pytest.mark.parametrize("endpoint", ["0.0.0.0:4327", "[::]:4327", "10.0.0.1:4327", "node1:4327"])
def test_an_address_that_others_reach_needs_a_token_or_a_certificate(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"collector\.token, or collector\.tls"):
        Access.of(load_config({}).collector, endpoint)
    assert Access.of(load_config({"collector": {"token": "t"}}).collector, endpoint).token == "t"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4327", "[::1]:4327", "localhost:4327"])
def test_loopback_asks_for_nothing(endpoint: str) -> None:
    """The Collector of `otel-forge up` on the same machine has no token to show."""
    assert Access.of(load_config({"collector": {"token": "t"}}).collector, endpoint) == Access()


def test_only_who_shows_the_token_is_heard(tmp_path: Path) -> None:
    service = Service(load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}}), state_dir=None, work_dir=tmp_path)
    rpc = GrpcReceiver(service, "127.0.0.1:0", Access("right"))
    http_receiver = HttpReceiver(service, "127.0.0.1:0", Access("right"), on_drain=lambda timeout_s, code: True)
    service.start()
    rpc.start()
    http_receiver.start()
    body = Ranks(1).send(0, 0, mean(1.0))
    try:
        for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "Bearer right"}, 200)):
            assert _post(http_receiver.port, body, **headers)[0] == status
            assert _post(http_receiver.port, b"", "/drain", **headers)[0] == status
        with grpc.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
            call = channel.unary_unary(METRICS)
            with pytest.raises(grpc.RpcError) as refused:
                call(body, timeout=10, metadata=(("authorization", "Bearer wrong"),))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
            call(body, timeout=10, metadata=(("authorization", "Bearer right"),))
    finally:
        rpc.stop()
        http_receiver.stop()
        service.stop(5.0, 0)
