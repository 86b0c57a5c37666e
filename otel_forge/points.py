"""Encoding of folded values as OTLP protobuf, straight to bytes: one packet is one ExportMetricsServiceRequest.

Field numbers are those of opentelemetry-proto v1 (metrics.proto, common.proto, resource.proto); the tests parse every packet with that package.
A MetricsData object of the SDK for the same packet costs about ten times as much CPU in the training process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from otel_forge import wire
from otel_forge.moments import Buckets, Moments, Summary, WeightedSum

AttributeValue = str | bool | int | float
PART_BYTES = 8 << 20
"""A packet grows to about this size before it is split into parts."""

_pack_histogram = struct.Struct("<BQBQBQBdBBQBdBd").pack
_pack_double = struct.Struct("<BQBQBd").pack
_pack_int = struct.Struct("<BQBQBq").pack
_DELTA = b"\x10\x01"
_COUNT_MAX = (1 << 63) - 1


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SMALL = [_varint(value) for value in range(1024)]


def varint(value: int) -> bytes:
    """An unsigned or (as OTLP's int64 wants it) a negative number in two's complement of 64 bits."""
    return _SMALL[value] if 0 <= value < 1024 else _varint(value)


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field; its number is at most 127."""
    size = len(content)
    return _SMALL[number << 3 | 2] + (_SMALL[size] if size < 1024 else _varint(size)) + content


def any_value(value: AttributeValue) -> bytes:
    """An AnyValue message."""
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    return field(1, str(value).encode("utf-8", "replace"))


def key_value(key: str, value: AttributeValue) -> bytes:
    """A KeyValue message."""
    return field(1, key.encode()) + field(2, any_value(value))


def attributes(number: int, pairs: Mapping[str, AttributeValue] | Iterable[tuple[str, AttributeValue]]) -> bytes:
    """Repeated KeyValue fields with the given field number (7 in a number point, 9 in a histogram point, 1 in a resource)."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return b"".join(field(number, key_value(key, value)) for key, value in items)


NUMBER = 7
HISTOGRAM = 9


@dataclass(frozen=True, slots=True)
class PointContext:
    """What all points of one packet share, encoded once: times and the attributes step, role, … in both point kinds."""

    start_unix_nano: int
    time_unix_nano: int
    number_attributes: bytes
    histogram_attributes: bytes

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, AttributeValue]], start_unix_nano: int, time_unix_nano: int) -> PointContext:
        """Encode the shared attributes."""
        return cls(start_unix_nano, time_unix_nano, attributes(NUMBER, pairs), attributes(HISTOGRAM, pairs))


class ContextTemplate:
    """Makes the PointContexts of one member: what never changes is encoded once, and of the rest only the numbers are."""

    def __init__(self, constant: Sequence[tuple[str, AttributeValue]], varying: Sequence[str]) -> None:
        """`varying`: the names of the int attributes that `context` is given the values of, in this order."""
        self._constant = (attributes(NUMBER, constant), attributes(HISTOGRAM, constant))
        self._names = [field(1, name.encode()) for name in varying]

    def context(self, values: Sequence[int], start_unix_nano: int, time_unix_nano: int) -> PointContext:
        """The context of a packet; values are ints ≥ 0."""
        number, histogram_ = self._constant
        for name, value in zip(self._names, values, strict=True):
            content = varint(value)
            size = len(content) + 1
            encoded = name + b"\x12" + _SMALL[size] + b"\x18" + content  # KeyValue {key, value = 2 {int_value = 3}}
            encoded = _SMALL[len(encoded)] + encoded
            number += b"\x3a" + encoded  # field 7
            histogram_ += b"\x4a" + encoded  # field 9
        return PointContext(start_unix_nano, time_unix_nano, number, histogram_)


@dataclass(frozen=True, slots=True)
class SeriesName:
    """What is constant of one series, encoded once when its key is registered."""

    name: bytes
    """Metric.name, as a field."""
    number_attributes: bytes
    histogram_attributes: bytes

    @classmethod
    def of(cls, key: str, reduction: str, component: str | None = None) -> SeriesName:
        """Name and attributes of the series of a key, a reduction and, for compound ones, a component."""
        name = wire.metric_name(key, component)
        pairs: list[tuple[str, AttributeValue]] = [(wire.REDUCTION, f"{reduction}:{component}" if component else reduction)]
        if name != key:
            pairs.append((wire.KEY, key))
        return cls(field(1, name.encode()), attributes(NUMBER, pairs), attributes(HISTOGRAM, pairs))


def histogram(series: SeriesName, context: PointContext, summary: Summary) -> bytes:
    """A Metric with one Histogram point without bounds."""
    point = (
        _pack_histogram(
            0x11, context.start_unix_nano, 0x19, context.time_unix_nano, 0x21, summary.count, 0x29, summary.sum, 0x32, 8, summary.count,
            0x59, summary.min, 0x61, summary.max,
        )
        + context.histogram_attributes
        + series.histogram_attributes
    )  # fmt: skip
    return _metric(series.name, b"\x4a", point)


def _metric(name: bytes, kind: bytes, point: bytes) -> bytes:
    """A Metric with one point: field(2, name + field(kind, field(1, point) + delta)), without the calls, because there is one for each series."""
    size = len(point)
    head = b"\x0a" + (_SMALL[size] if size < 1024 else _varint(size))
    size += len(head) + 2
    head = name + kind + (_SMALL[size] if size < 1024 else _varint(size)) + head
    size = len(head) + len(point) + 2
    return b"\x12" + (_SMALL[size] if size < 1024 else _varint(size)) + head + point + _DELTA


def bucketed(series: SeriesName, context: PointContext, buckets: Buckets, bounds: Sequence[float]) -> bytes:
    """A Metric with one Histogram point with explicit bounds."""
    summary = buckets.summary
    point = b"".join(
        (
            struct.pack("<BQBQBQBd", 0x11, context.start_unix_nano, 0x19, context.time_unix_nano, 0x21, summary.count, 0x29, summary.sum),
            field(6, struct.pack(f"<{len(buckets.counts)}Q", *buckets.counts)),
            field(7, struct.pack(f"<{len(bounds)}d", *bounds)),
            struct.pack("<BdBd", 0x59, summary.min, 0x61, summary.max),
            context.histogram_attributes,
            series.histogram_attributes,
        )
    )
    return field(2, series.name + field(9, field(1, point) + _DELTA))


def double_sum(series: SeriesName, context: PointContext, value: float) -> bytes:
    """A Metric with one double Sum point: delta, not monotonic."""
    point = _pack_double(0x11, context.start_unix_nano, 0x19, context.time_unix_nano, 0x21, value)
    return _metric(series.name, b"\x3a", point + context.number_attributes + series.number_attributes)


def int_sum(series: SeriesName, context: PointContext, values: Iterable[tuple[int, Sequence[tuple[str, AttributeValue]]]]) -> bytes:
    """A Metric with one int64 Sum point per (value, further attributes)."""
    data_points = b"".join(
        field(
            1,
            _pack_int(0x11, context.start_unix_nano, 0x19, context.time_unix_nano, 0x31, value)
            + context.number_attributes
            + series.number_attributes
            + attributes(NUMBER, further),
        )
        for value, further in values
    )
    return field(2, series.name + field(7, data_points + _DELTA))


def gauge(name: str, points: Iterable[tuple[int, float, bytes]]) -> bytes:
    """A Metric with Gauge points (time_unix_nano, value, encoded number attributes)."""
    data_points = b"".join(field(1, struct.pack("<BQBd", 0x19, time_unix_nano, 0x21, value) + encoded) for time_unix_nano, value, encoded in points)
    return field(2, field(1, name.encode()) + field(5, data_points))


def weighted(names: tuple[SeriesName, SeriesName], context: PointContext, value: WeightedSum) -> bytes:
    """The two Metrics of a weighted mean."""
    return double_sum(names[0], context, value.weighted_sum) + double_sum(names[1], context, value.weight)


def moments(names: tuple[SeriesName, SeriesName, SeriesName], context: PointContext, value: Moments) -> bytes:
    """The Metrics of exact power sums, one point per non-zero limb; Σx or Σx² of nothing but zeros has none."""
    encoded = int_sum(names[0], context, [(value.n, ((wire.LIMB, 0),))])
    for name, total, shift in ((names[1], value.x, wire.X_SHIFT), (names[2], value.xx, wire.XX_SHIFT)):
        limbs = wire.to_limbs(total, shift)
        if limbs:
            encoded += int_sum(name, context, [(limb, ((wire.LIMB, index),)) for index, limb in limbs])
    return encoded


_CONTRIBUTORS = SeriesName(field(1, wire.CONTRIBUTORS_METRIC.encode()), b"", b"")


def contributors(context: PointContext, rank: int | None, member: str | None = None) -> bytes:
    """The Metric that says whose values are in the packet; `member` names a task of an open world, which has no rank."""
    if rank is None:
        return int_sum(_CONTRIBUTORS, context, [(wire.OPEN_WORLD_VALUE, ((wire.BLOCK, 0), (wire.MEMBER, member or "")))])
    block, value = wire.contributors_value(rank)
    return int_sum(_CONTRIBUTORS, context, [(value, ((wire.BLOCK, block),))])


_SCOPE = field(1, field(1, wire.SCOPE.encode()))


@dataclass(frozen=True, slots=True)
class ResourceTemplate:
    """The resource of one kind of packet, encoded once; only the packet id differs between packets."""

    encoded: bytes
    route_end: int
    """Offset in `encoded` just behind the letters of `forge.route`; 0 without a route."""

    @classmethod
    def of(cls, pairs: Mapping[str, AttributeValue]) -> ResourceTemplate:
        """Encode the attributes; the route, if any, comes first."""
        route = {wire.ROUTE: pairs[wire.ROUTE]} if wire.ROUTE in pairs else {}
        first = attributes(1, route)
        return cls(first + attributes(1, {key: value for key, value in pairs.items() if key != wire.ROUTE}), len(first))

    def request(self, packet_id: str, metrics: bytes) -> tuple[bytes, int | None]:
        """A whole ExportMetricsServiceRequest of these Metrics, and the offset of the six letters of its `forge.route` (None without one)."""
        resource = self.encoded + attributes(1, ((wire.PACKET_ID, packet_id),))
        head = b"\x0a" + varint(len(resource))
        scope_metrics = field(2, _SCOPE + metrics)
        body_length = len(head) + len(resource) + len(scope_metrics)
        lead = b"\x0a" + varint(body_length)
        payload = b"".join((lead, head, resource, scope_metrics))
        if not self.route_end:
            return payload, None
        return payload, len(lead) + len(head) + self.route_end - len(wire.ROUTE_WINDOW)
