"""Packets of ranks, made by the rank side's own code, for tests of the exporter."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from otel_forge import wire
from otel_forge.identity import Member, Run
from otel_forge.metrics import Reduce, Registry
from otel_forge.packets import PacketBuilder, Sealed

Recorded = Iterable[tuple[str, Any, Any]]
"""(key, value, reduction) as given to record_metric."""


class Ranks:
    """The ranks of one role; `send(rank, step, records)` gives the payload of one flush."""

    def __init__(
        self,
        world_size: int,
        *,
        role: str = "trainer",
        run_id: str = "r",
        attempt: int = 1000,
        modes: str = "global_reduce",
        replica: int = 0,
        window: bool = False,
    ) -> None:
        """`window`: the packets are for a Collector's window instead of the exporter."""
        self.world_size = world_size
        self.builders = [
            PacketBuilder(
                Member(role, replica, rank, world_size),
                Run(run_id, attempt),
                {},
                nonce=f"{role}{replica}.{rank}",
                modes=modes,
                window=window,
                contribute=True,
            )
            for rank in range(world_size)
        ]

    def send(self, rank: int, step: int, records: Recorded, *, occurrence: int = 0, took_s: float = 1e-6) -> bytes:
        (payload,) = self.send_parts(rank, step, records, occurrence=occurrence, took_s=took_s)
        return payload

    def send_parts(self, rank: int, step: int, records: Recorded, *, occurrence: int = 0, took_s: float = 1e-6) -> list[bytes]:
        registry = Registry()
        registry.set_mode(off=False, bounded=False, stream=None)
        for key, value, reduction in records:
            registry.record(key, value, reduction, None)
        now = time.time_ns()
        sealed = Sealed(step, step, occurrence, now - round(took_s * 1e9), now, registry.drain())
        return [packet.payload for packet in self.builders[rank].values(sealed)]

    def control(self, rank: int, kind: str, body: Mapping[str, Any]) -> bytes:
        return self.builders[rank].control(kind, body, time.time_ns()).payload


def reduced(payloads: Iterable[bytes], batch_id: str) -> bytes:
    """What the Collector's window makes of payloads: one resource, one batch id; the points are left unmerged, which the exporter must not mind."""
    whole = ExportMetricsServiceRequest()
    target = whole.resource_metrics.add()
    scope = target.scope_metrics.add()
    for payload in payloads:
        for resource_metrics in ExportMetricsServiceRequest.FromString(payload).resource_metrics:
            run_id = next(pair.value.string_value for pair in resource_metrics.resource.attributes if pair.key == wire.RUN_ID)
            for scope_metrics in resource_metrics.scope_metrics:
                scope.metrics.extend(scope_metrics.metrics)
    for key, value in ((wire.RUN_ID, run_id), (wire.BATCH_ID, batch_id)):
        pair = target.resource.attributes.add(key=key)
        pair.value.string_value = value
    return whole.SerializeToString()


def mean(value: float, key: str = "loss") -> Recorded:
    return [(key, value, Reduce.MEAN)]
