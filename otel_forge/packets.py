"""From what one flush took to the packets that leave: fold, encode, split. It must not know queues, threads or the network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from otel_forge import points, wire
from otel_forge.delivery import Packet
from otel_forge.identity import Member, Run
from otel_forge.metrics import HistogramReduce, Reduce, Series, Taken
from otel_forge.modes import LoggingMode
from otel_forge.moments import Chunk, Summary, bucket, exact_moments, summarize, weigh
from otel_forge.points import AttributeValue, ContextTemplate, PointContext, ResourceTemplate, SeriesName

PHASE_SUFFIX = "/duration_max_s"
MAX_PHASES = 16
"""Phases of a step that say which rank was slowest in them."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """What one `flush(step)` took."""

    step: int
    trace_step: int
    """The step that the spans since the last flush carry."""
    occurrence: int
    start_unix_nano: int
    end_unix_nano: int
    taken: list[Taken]
    flush_s: float = 0.0
    """What the flush cost its caller."""
    values_dropped: int = 0
    """Values that were left out up to now, since the start."""

    def is_ready(self) -> bool:
        """Whether every value is known; device times come later."""
        return all(taken.is_ready() for taken in self.taken if taken.deferred)


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """One record as it happened."""

    key: str
    value: float
    time_unix_nano: int
    step: int
    sequence: int


class PacketBuilder:
    """Makes the packets of one member. Used by one thread."""

    def __init__(
        self, member: Member, run: Run, resource: Mapping[str, AttributeValue], *, nonce: str, modes: str, window: bool, contribute: bool
    ) -> None:
        self._member = member
        self._run = run
        self._nonce = nonce
        self._window = window
        self._contribute = contribute
        self._sequence = 0
        identity: dict[str, AttributeValue] = {wire.ROLE: member.role, wire.REPLICA: member.replica, wire.RANK: member.rank}
        identity |= {wire.WORLD_SIZE: member.world_size, wire.RUN_ID: run.run_id, wire.ATTEMPT: run.attempt}
        self.resource: Mapping[str, AttributeValue] = {**resource, **identity}
        """Who this member is, on everything it sends."""
        self._resource = {**self.resource, wire.MODES: modes, wire.NONCE: nonce}
        constant: list[tuple[str, AttributeValue]] = [
            (wire.POINT_ROLE, member.role), (wire.POINT_REPLICA, member.replica), (wire.POINT_ATTEMPT, run.attempt),
            (wire.POINT_WORLD_SIZE, member.world_size),
        ]  # fmt: skip
        self._contexts = ContextTemplate(constant, (wire.STEP, wire.OCCURRENCE, wire.PART, wire.PARTS))
        self._templates: dict[tuple[str, str, bool], ResourceTemplate] = {}
        self._names: dict[tuple[str, str, str | None], SeriesName] = {}

    # --- values --------------------------------------------------------------------------------------------------

    def values(self, sealed: Sealed, telemetry: Mapping[str, tuple[float, str]] | None = None) -> list[Packet]:
        """The packets of one flush: one, or as many parts as its size asks for. Each carries the contributors.

        A member that is kept out of global values sends an empty packet there, so that nobody waits for it, and its values beside.
        `telemetry`: key → (value, `sum` or `max`), what telemetry says of itself.
        """
        parts = _split(sealed.taken)
        packets = []
        for part, taken in enumerate(parts):
            context = self._context(sealed, part, len(parts))
            own = self._own(sealed, telemetry or {}, context) if part == 0 else []
            head = b"".join([points.contributors(context, self._member.rank), *own])
            body = b"".join(metric for item in taken for metric in self._series(item, context))
            route = wire.ROUTE_WINDOW if self._window else wire.ROUTE_DIRECT
            if self._contribute:
                packets.append(self._packet(wire.PACKET_VALUES, route, head + body, window=self._window))
            else:
                packets.append(self._packet(wire.PACKET_VALUES, route, head, window=self._window, for_global_only=True))
                packets.append(self._packet(wire.PACKET_VALUES, wire.ROUTE_DIRECT, head + body, window=False, contribute=False))
        return packets

    def _context(self, sealed: Sealed, part: int, parts: int) -> PointContext:
        values = (sealed.step, sealed.occurrence, part, parts)
        return self._contexts.context(values, sealed.start_unix_nano, sealed.end_unix_nano)

    def _own(self, sealed: Sealed, telemetry: Mapping[str, tuple[float, str]], context: PointContext) -> list[bytes]:
        start, end = sealed.start_unix_nano / 1e9, sealed.end_unix_nano / 1e9
        took_s = max(0, sealed.end_unix_nano - sealed.start_unix_nano) / 1e9
        own = {
            wire.STEP_START_METRIC: (_single(start), "min"),
            wire.STEP_END_METRIC: (_single(end), "max"),
            wire.TRACE_STEP_METRIC: (_single(float(sealed.trace_step)), "min"),
            wire.STEP_TIME_METRIC: (_single(took_s), "mean"),
            wire.SLOWEST_METRIC: (_single(self._with_rank(took_s)), "max"),
            **self._phases(sealed),
        }
        encoded = [points.histogram(self._name(name, reduction), context, summary) for name, (summary, reduction) in own.items()]
        for key, (value, reduction) in telemetry.items():
            name = self._name(key, reduction)
            encoded.append(points.double_sum(name, context, value) if reduction == "sum" else points.histogram(name, context, _single(value)))
        return encoded

    def _with_rank(self, seconds: float) -> float:
        return float((int(seconds * 1e6) << 20) + self._member.rank)

    def _phases(self, sealed: Sealed) -> dict[str, tuple[Summary, str]]:
        """The longest phases of the step, for the question which one the slowest rank lost its time in."""
        found = [
            (max(taken.values), taken.series.key.removesuffix(PHASE_SUFFIX))
            for taken in sealed.taken
            if taken.series.reduction is Reduce.MAX and taken.values and taken.series.key.endswith(PHASE_SUFFIX)
        ]
        longest = sorted(found, reverse=True)[:MAX_PHASES]
        return {f"{wire.SLOWEST_PHASE_PREFIX}{phase}": (_single(self._with_rank(seconds)), "max") for seconds, phase in longest}

    def _series(self, taken: Taken, context: PointContext) -> list[bytes]:
        series, values = taken.series, taken.values
        plain = [chunk for chunk, weight in taken.chunks if weight is None]
        weighted = [(chunk, weight) for chunk, weight in taken.chunks if weight is not None]
        encoded = []
        nonfinite = 0
        if taken.weighted or weighted:
            total = weigh(taken.weighted, weighted)
            nonfinite += total.nonfinite
            if total.weight > 0:
                names = (self._name(series.key, "mean", wire.WEIGHTED_SUM), self._name(series.key, "mean", wire.WEIGHT))
                encoded.append(points.weighted(names, context, total))
        if values or plain:
            points_of, bad = self._fold(series, values, plain, context)
            encoded += points_of
            nonfinite += bad
        if nonfinite:
            encoded.append(points.double_sum(self._name(series.key, series.reduction.value, wire.NONFINITE), context, float(nonfinite)))
        return encoded

    def _fold(self, series: Series, values: list[float], chunks: list[Chunk], context: PointContext) -> tuple[list[bytes], int]:
        """The Metrics of unweighted values, and how many of those were not finite."""
        reduction = series.reduction
        if isinstance(reduction, HistogramReduce):
            buckets = bucket(values, reduction.bounds, chunks)
            name = self._name(series.key, reduction.value)
            return [points.bucketed(name, context, buckets, reduction.bounds)] if buckets.summary.count else [], buckets.summary.nonfinite
        if reduction is Reduce.STD:
            moments = exact_moments(values, chunks)
            names = tuple(self._name(series.key, "std", component) for component in (wire.MOMENT_N, wire.MOMENT_X, wire.MOMENT_XX))
            return [points.moments((names[0], names[1], names[2]), context, moments)] if moments.n else [], moments.nonfinite
        summary = summarize(values, chunks)
        if not summary.count:
            return [], summary.nonfinite
        name = self._name(series.key, reduction.value)
        if reduction in (Reduce.SUM, Reduce.COUNT):
            return [points.double_sum(name, context, summary.sum)], summary.nonfinite
        return [points.histogram(name, context, summary)], summary.nonfinite

    def _name(self, key: str, reduction: str, component: str | None = None) -> SeriesName:
        name = self._names.get((key, reduction, component))
        if name is None:
            name = self._names[key, reduction, component] = SeriesName.of(key, reduction, component)
        return name

    # --- everything else -----------------------------------------------------------------------------------------

    def control(self, kind: str, body: Mapping[str, Any], time_unix_nano: int) -> Packet:
        """A hello, run_info or last packet; what JSON cannot hold is written as its text."""
        text = json.dumps(body, default=str, allow_nan=True)
        encoded = points.gauge(wire.CONTROL_METRIC, [(time_unix_nano, 1.0, points.attributes(points.NUMBER, {wire.BODY: text}))])
        return self._packet(kind, wire.ROUTE_DIRECT, encoded, window=False)

    def stream(self, items: Iterable[StreamPoint]) -> Packet:
        """Records as they happened, in one packet."""
        by_key: dict[str, list[tuple[int, float, bytes]]] = {}
        for item in items:
            pairs: dict[str, AttributeValue] = {
                wire.STEP: item.step, wire.POINT_ROLE: self._member.role, wire.POINT_REPLICA: self._member.replica,
                wire.POINT_ATTEMPT: self._run.attempt, wire.SEQUENCE: item.sequence,
            }  # fmt: skip
            if wire.metric_name(item.key) != item.key:
                pairs[wire.KEY] = item.key
            by_key.setdefault(item.key, []).append((item.time_unix_nano, item.value, points.attributes(points.NUMBER, pairs)))
        encoded = b"".join(points.gauge(wire.metric_name(key), data_points) for key, data_points in by_key.items())
        return self._packet(wire.PACKET_STREAM, wire.ROUTE_DIRECT, encoded, window=False)

    def _packet(self, kind: str, route: str, metrics: bytes, *, window: bool, contribute: bool = True, for_global_only: bool = False) -> Packet:
        template = self._templates.get((kind, route, contribute))
        if template is None:
            further: dict[str, AttributeValue] = {wire.ROUTE: route, wire.PACKET: kind}
            if not contribute:
                further[wire.CONTRIBUTE] = False
            if for_global_only:  # the member's own row is made of its other packet
                further[wire.MODES] = LoggingMode.GLOBAL_REDUCE.value
            template = self._templates[kind, route, contribute] = ResourceTemplate.of({**self._resource, **further})
        packet_id = f"{self._nonce}/{self._sequence}"
        self._sequence += 1
        payload, route_offset = template.request(packet_id, metrics)
        return Packet(payload=payload, signal="metrics", route_offset=route_offset, window=window, packet_id=packet_id)


def _single(value: float) -> Summary:
    return Summary(1, value, value, value, 0)


def _split(taken: list[Taken]) -> list[list[Taken]]:
    """Group series so that each group stays under PART_BYTES; what is reduced together is one series and stays together."""
    groups: list[list[Taken]] = [[]]
    size = 0
    for item in taken:
        cost = 500 + 4 * len(item.series.key.encode("utf-8", "replace")) + (4000 if item.series.reduction is Reduce.STD else 0)
        if isinstance(item.series.reduction, HistogramReduce):
            cost += 16 * len(item.series.reduction.bounds)
        if size + cost > points.PART_BYTES and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += cost
    return groups
