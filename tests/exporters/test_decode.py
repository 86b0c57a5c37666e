"""Whatever arrives, nothing but Undecodable is raised, and what cannot be used is counted."""

from __future__ import annotations

import random

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.decode import Undecodable, decode

from otel_forge.metrics import Reduce
from tests.exporters.packets import Ranks


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(Undecodable):
        decode(b"GET / HTTP/1.1")


def test_points_of_others_are_counted_and_kept_apart() -> None:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="http.server.duration")
    metric.gauge.data_points.add(as_double=1.0)
    decoded = decode(request.SerializeToString())
    assert (decoded.foreign_points, decoded.units, decoded.bad_points) == (1, [], 0)


def test_a_payload_without_contributors_is_never_used() -> None:
    request = ExportMetricsServiceRequest.FromString(Ranks(1).send(0, 0, [("loss", 1.0, Reduce.MEAN)]))
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    del metrics[0]
    (unit,) = decode(request.SerializeToString()).units
    assert not unit.consistent


def test_mutated_requests_never_crash_and_never_change_a_number() -> None:
    """3,000 requests with random bytes changed: each is refused, counted, marked, or still right."""
    source = random.Random(7)
    good = Ranks(2).send(0, 3, [("loss", 1.0, Reduce.MEAN), ("n", 2.0, Reduce.SUM), ("s", 1.0, Reduce.STD)])
    refused = 0
    for _ in range(3000):
        body = bytearray(good)
        for _ in range(source.randint(1, 4)):
            body[source.randrange(len(body))] = source.randrange(256)
        try:
            decoded = decode(bytes(body))
        except Undecodable:
            refused += 1
            continue
        assembler = Assembler(deadline_s=1.0, horizon_s=10.0, grace_s=0.0)
        for unit in decoded.units:
            assembler.add(unit, 0.0)
        for revision in assembler.due(100.0):
            revision.row.to_json()
    assert refused > 100


def test_one_window_keeps_ranks_apart_that_sent_different_numbers_of_parts() -> None:
    """A rank with one part and one with two, in one payload: three units, each with a name of its own."""
    from otel_forge_exporters.decode import decode

    from otel_forge import points
    from otel_forge.metrics import Reduce
    from tests.exporters.packets import Ranks, mean, reduced

    ranks = Ranks(2)
    before, points.PART_BYTES = points.PART_BYTES, 600
    try:
        (one,) = ranks.send_parts(0, 0, mean(1.0))
        two = ranks.send_parts(1, 0, [*mean(1.0), ("other", 2.0, Reduce.MEAN)])
    finally:
        points.PART_BYTES = before
    assert len(two) == 2
    units = decode(reduced([one, *two], "b")).units
    assert sorted((unit.part, unit.parts, sorted(unit.members)) for unit in units) == [(0, 1, [0]), (0, 2, [1]), (1, 2, [1])]
    assert len({unit.unit_id for unit in units}) == 3
