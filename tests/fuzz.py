"""Requests mutated from valid ones, to the real exporter over HTTP and gRPC: `python -m tests.fuzz --count 10000`.

What must hold: it answers every request with "stored" or "refused for good", counts each that it refused, never dies, writes no file outside its own
directories, and rows of a run that nobody mutates are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from otel_forge_exporters.receiver import GrpcReceiver, HttpReceiver
from otel_forge_exporters.service import Service

from otel_forge.config import load_config
from otel_forge.metrics import HistogramReduce, Reduce
from tests.exporters.packets import Ranks, reduced

METHOD = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
STRANGE_TEXT = ["", "../../evil", "/etc/passwd", "a\0b", "ü" * 300, "x" * 100_000, "forge.contributors", "0", "\u202e", "{}", "[" * 5_000]
STRANGE_INTEGERS = [0, -1, 1, 2**31, 2**53, 2**62, -(2**62), 262_145]
STRANGE_DOUBLES = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -0.0]
RECORDS = [
    ("loss", 0.5, Reduce.MEAN), ("tokens", 3.0, Reduce.SUM), ("peak", 7.0, Reduce.MAX), ("low", -1.0, Reduce.MIN), ("spread", 1.5, Reduce.STD),
    ("length", 3.0, HistogramReduce((1.0, 2.0, 4.0))), ("bad", math.nan, Reduce.MEAN),
]  # fmt: skip
Message = Any


def valid_requests() -> list[bytes]:
    """One of every kind that there is."""
    ranks = Ranks(2, run_id="mutated", modes="global_reduce,per_rank_reduce")
    packets = [ranks.send(rank, step, RECORDS) for rank in range(2) for step in range(3)]
    controls = [ranks.control(0, kind, {"exit_code": 0, "flushes": 3, "run_config": {"lr": 1}}) for kind in ("hello", "run_info", "last")]
    return [*packets, *controls, reduced(packets[:2], "batch")]


# --- mutations ------------------------------------------------------------------------------------------------------------


def _mutate_bytes(body: bytes, some: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(some.choice([1, 1, 2, 8])):
        start = some.randrange(len(data) + 1)
        match some.randrange(5):
            case 0 if start < len(data):
                data[start] ^= 1 << some.randrange(8)
            case 1:
                data[start:start] = some.randbytes(some.choice([1, 4, 100]))
            case 2:
                del data[start : start + some.choice([1, 4, 100])]
            case 3:
                del data[start:]
            case _:
                data += data[start : start + 200]
    return bytes(data)


def _points(request: Message) -> list[Message]:
    found = []
    for resource in request.resource_metrics:
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            found += list(getattr(metric, kind).data_points) if kind else []
    return found


def _attribute_lists(request: Message) -> list[Message]:
    return [resource.resource.attributes for resource in request.resource_metrics] + [point.attributes for point in _points(request)]


def _set_strange(value: Message, some: random.Random) -> None:
    match some.randrange(6):
        case 0:
            value.string_value = some.choice(STRANGE_TEXT)
        case 1:
            value.int_value = some.choice(STRANGE_INTEGERS)
        case 2:
            value.double_value = some.choice(STRANGE_DOUBLES)
        case 3:
            value.bool_value = True
        case 4:
            value.array_value.values.add().string_value = "x"
        case _:
            value.Clear()


def _mutate_attribute(request: Message, some: random.Random) -> None:
    attributes = some.choice(_attribute_lists(request))
    if not attributes:
        return
    index = some.randrange(len(attributes))
    match some.randrange(4):
        case 0:
            del attributes[index]
        case 1:
            attributes[index].key = some.choice(STRANGE_TEXT)
        case 2:
            attributes.add().CopyFrom(attributes[index])
        case _:
            _set_strange(attributes[index].value, some)


def _mutate_point(request: Message, some: random.Random) -> None:
    points = _points(request)
    if not points:
        return
    point = some.choice(points)
    point.time_unix_nano = some.choice([0, 1, 2**64 - 1])
    if hasattr(point, "bucket_counts"):
        point.count = some.choice([0, 1, 2**64 - 1])
        point.sum, point.min, point.max = (some.choice(STRANGE_DOUBLES) for _ in range(3))
        if some.random() < 0.5:
            point.explicit_bounds.extend(some.choice(STRANGE_DOUBLES) for _ in range(some.randrange(4)))
    elif some.random() < 0.5:
        point.as_double = some.choice(STRANGE_DOUBLES)
    else:
        point.as_int = some.choice(STRANGE_INTEGERS)


def _mutate_shape(request: Message, some: random.Random) -> None:
    resource = request.resource_metrics[0]
    metrics = resource.scope_metrics[0].metrics
    match some.randrange(5):
        case 0:
            metrics[some.randrange(len(metrics))].name = some.choice(STRANGE_TEXT)
        case 1:
            metrics[some.randrange(len(metrics))].gauge.data_points.add().as_double = 1.0
        case 2:
            del metrics[some.randrange(len(metrics))]
        case 3:
            request.resource_metrics.add().CopyFrom(resource)
        case _:
            resource.ClearField("resource")


def mutated(some: random.Random, valid: list[bytes]) -> bytes:
    """A request that is a little, or very, wrong."""
    body = some.choice(valid)
    if some.random() < 0.4:
        return _mutate_bytes(body, some)
    request = ExportMetricsServiceRequest.FromString(body)
    for _ in range(some.choice([1, 1, 2, 5])):
        some.choice([_mutate_attribute, _mutate_attribute, _mutate_point, _mutate_shape])(request, some)
        if not request.resource_metrics or not request.resource_metrics[0].scope_metrics or not request.resource_metrics[0].scope_metrics[0].metrics:
            break
    return bytes(request.SerializeToString())


# --- the run ----------------------------------------------------------------------------------------------------------------


def _poster(port: int, closing: contextlib.ExitStack) -> Callable[[bytes], bool]:
    connection = closing.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)))

    def post(body: bytes) -> bool:
        connection.request("POST", "/v1/metrics", body, {"content-type": "application/x-protobuf"})
        answer = connection.getresponse()
        answer.read()
        if answer.status not in (200, 400):
            raise AssertionError(f"HTTP {answer.status}")
        return answer.status == 200

    return post


def _caller(port: int, closing: contextlib.ExitStack) -> Callable[[bytes], bool]:
    call = closing.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")).unary_unary(METHOD)

    def export(body: bytes) -> bool:
        try:
            call(body, timeout=30)
            return True
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:  # type: ignore[attr-defined]
                raise AssertionError(f"gRPC {error.code()}") from error  # type: ignore[attr-defined]
            return False

    return export


def _is_decodable(body: bytes) -> bool:
    try:
        ExportMetricsServiceRequest.FromString(body)
    except DecodeError:
        return False
    return True


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Send them, and between them a run that is right. Raises AssertionError when something that must hold does not."""
    folder = folder / "inside"
    config = load_config({"metric_logging": {"jsonl": {"path": str(folder / "rows.jsonl")}}})
    service = Service(config, state_dir=folder / "state", work_dir=folder)
    receivers = GrpcReceiver(service, "127.0.0.1:0"), HttpReceiver(service, "127.0.0.1:0", on_drain=lambda timeout_s, code: service.drain(timeout_s))
    service.start()
    for receiver in receivers:
        receiver.start()
    try:
        with contextlib.ExitStack() as closing:
            answers = _send_all(count, random.Random(seed), _caller(receivers[0].port, closing), _poster(receivers[1].port, closing))
        status = service.status()
        assert status["undecodable"] == answers["refused"], f"{status['undecodable']} counted, {answers['refused']} refused"
        steps = answers.pop("right")
        _check_right_rows(folder / "rows.jsonl", steps)
        assert {path.name for path in folder.iterdir()} <= {"state", "rows.jsonl"}, sorted(folder.iterdir())
        assert [path.name for path in folder.parent.iterdir()] == ["inside"], sorted(folder.parent.iterdir())
        return {**answers, "right_rows": steps, **{name: value for name, value in status.items() if name != "runs"}}
    finally:
        for receiver in receivers:
            receiver.stop()
        service.stop(5.0, 0)


def _send_all(count: int, some: random.Random, *ways: Callable[[bytes], bool]) -> Counter[str]:
    valid, right = valid_requests(), Ranks(2, run_id="right")
    answers: Counter[str] = Counter()
    for number in range(count):
        body = mutated(some, valid)
        stored = ways[number % len(ways)](body)
        answers["stored" if stored else "refused"] += 1
        assert stored == _is_decodable(body), f"request {number}"
        if number % 50 == 0:
            step = answers["right"]
            for rank in range(2):
                assert ways[rank](right.send(rank, step, [("loss", float(rank + step), Reduce.MEAN)]))
            answers["right"] += 1
    return answers


def _check_right_rows(path: Path, steps: int) -> None:
    """Every row of the run that nobody mutated is there once, and exact."""
    deadline = time.monotonic() + 60
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [row for row in map(json.loads, lines) if row["run_id"] == "right"]
        if len(rows) >= steps or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert sorted(row["step"] for row in rows) == list(range(steps)), f"{len(rows)} rows of {steps}"
    for row in rows:
        assert (row["metrics"]["loss"], row["ranks_reporting"], row["revision"]) == (row["step"] + 0.5, 2, 1), row


def main() -> int:
    """Run it; the counts on stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("otel_forge.exporter").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(fuzz(arguments.count, arguments.seed, Path(folder))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
