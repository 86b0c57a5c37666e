"""From OTLP bytes to units, controls and stream rows. Nothing that arrives may raise anything but Undecodable; what is not ours is counted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from otel_forge import wire
from otel_forge_exporters.values import Histogram, Limbs, SeriesKey, Sum, Unreadable, Value

MAX_WORLD = 1 << 18
"""A world that claims to be larger is not believed: its missing ranks would have to be listed."""
RUN_ID_FORM = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}")
"""A run id names files and directories."""
MemberId = int | str
"""A ranked member is `replica << 32 | rank`; a task of an open world is its name."""


class Undecodable(Exception):
    """Bytes that are no OTLP request at all."""


def member_id(replica: int, rank: int) -> int:
    """The id of a ranked member within its role."""
    return replica << 32 | rank


def member_name(member: MemberId) -> str:
    """How a member is named to people: its rank, with the replica where that is not 0."""
    if isinstance(member, str):
        return member
    replica, rank = member >> 32, member & 0xFFFFFFFF
    return str(rank) if not replica else f"{replica}.{rank}"


@dataclass(frozen=True, slots=True)
class RowId:
    """What one global row is about. `attempt` is the token of the wire."""

    run_id: str
    role: str
    attempt: int
    step: int
    occurrence: int


@dataclass(slots=True)
class Unit:
    """The part of one payload that belongs to one row: either used whole, or not at all."""

    unit_id: str
    row: RowId
    part: int
    parts: int
    direct: bool
    members: dict[MemberId, int] = field(default_factory=dict)
    """Member → how often it is in the sums."""
    worlds: dict[int, int] = field(default_factory=dict)
    """Replica → its world size; 0 is an open world."""
    consistent: bool = True
    """False: the contributors do not add up, so the values cannot be used."""
    values: dict[SeriesKey, list[Value]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sender:
    """The member a payload that was not reduced comes from."""

    run_id: str
    role: str
    replica: int
    rank: int
    world_size: int
    attempt: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Control:
    """A hello, run_info or last packet."""

    kind: str
    sender: Sender
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamValue:
    """One record of one member."""

    sender: Sender
    key: str
    value: float
    step: int
    sequence: int
    time_unix: float


@dataclass(slots=True)
class Decoded:
    """Everything one request holds."""

    units: list[Unit] = field(default_factory=list)
    """For global rows."""
    per_rank: list[tuple[Sender, Unit]] = field(default_factory=list)
    """For rows of one member."""
    controls: list[Control] = field(default_factory=list)
    stream: list[StreamValue] = field(default_factory=list)
    foreign_points: int = 0
    bad_points: int = 0
    complaints: list[str] = field(default_factory=list)


def decode(body: bytes) -> Decoded:
    """Take one ExportMetricsServiceRequest apart. Raises Undecodable only when the bytes are no protobuf of that kind."""
    try:
        request = ExportMetricsServiceRequest.FromString(body)
    except (DecodeError, RecursionError) as error:
        raise Undecodable(f"not an ExportMetricsServiceRequest: {error}") from error
    decoded = Decoded()
    for resource_metrics in request.resource_metrics:
        try:
            _decode_resource(resource_metrics, decoded)
        except Exception as error:  # whatever is wrong with one payload, the others of the request are right
            decoded.bad_points += 1
            decoded.complaints.append(f"a payload of ours could not be read: {str(error)[:200]}")
    return decoded


def _decode_resource(resource_metrics: Any, decoded: Decoded) -> None:
    resource = _attributes(resource_metrics.resource.attributes)
    run_id = resource.get(wire.RUN_ID)
    if not isinstance(run_id, str) or not run_id:
        decoded.foreign_points += sum(_count_points(metric) for scope in resource_metrics.scope_metrics for metric in scope.metrics)
        return
    if not RUN_ID_FORM.fullmatch(run_id):
        raise ValueError(f"{wire.RUN_ID}={run_id[:80]!r} is no run id: it would name files")
    metrics = [metric for scope in resource_metrics.scope_metrics for metric in scope.metrics]
    batch_id = resource.get(wire.BATCH_ID)
    if isinstance(batch_id, str):
        decoded.units += _units(metrics, run_id, batch_id, direct=False, decoded=decoded)
        return
    sender = Sender(
        run_id, str(resource[wire.ROLE]), _int(resource, wire.REPLICA), _int(resource, wire.RANK), _int(resource, wire.WORLD_SIZE),
        _int(resource, wire.ATTEMPT), str(resource.get(wire.NONCE, "")),
    )  # fmt: skip
    if not (0 <= sender.world_size <= MAX_WORLD and 0 <= sender.rank < (sender.world_size or 1 << 31) and 0 <= sender.replica < 1 << 31):
        raise ValueError(f"rank {sender.rank} of {sender.world_size}, replica {sender.replica} is not possible")
    kind = resource.get(wire.PACKET)
    if kind == wire.PACKET_VALUES:
        _decode_packet(metrics, sender, resource, decoded)
    elif kind == wire.PACKET_STREAM:
        decoded.stream += _stream(metrics, sender, decoded)
    elif kind in (wire.PACKET_HELLO, wire.PACKET_RUN_INFO, wire.PACKET_LAST):
        decoded.controls.append(Control(str(kind), sender, _control_body(metrics)))
    else:
        raise ValueError(f"{wire.PACKET}={kind!r} is unknown")


def _decode_packet(metrics: list[Any], sender: Sender, resource: Mapping[str, Any], decoded: Decoded) -> None:
    units = _units(metrics, sender.run_id, str(resource[wire.PACKET_ID]), direct=True, decoded=decoded)
    modes = str(resource.get(wire.MODES, "")).split(",")
    contributes = resource.get(wire.CONTRIBUTE) is not False
    if resource.get(wire.ROUTE) == wire.ROUTE_DIRECT and contributes:
        decoded.units += units
    if "per_rank_reduce" in modes and (not contributes or any(unit.values for unit in units)):
        decoded.per_rank += [(sender, unit) for unit in units]


def _units(metrics: list[Any], run_id: str, payload_id: str, *, direct: bool, decoded: Decoded) -> list[Unit]:
    units: dict[tuple[RowId, int, int], Unit] = {}
    contributors: dict[int, dict[tuple[int, int], dict[int, int]]] = {}
    for metric in metrics:
        kind = metric.WhichOneof("data")
        if kind not in ("sum", "histogram"):
            decoded.bad_points += _count_points(metric)
            continue
        for point in getattr(metric, kind).data_points:
            try:
                _decode_point(metric.name, kind, point, run_id, payload_id, direct, units, contributors)
            except (ValueError, TypeError, KeyError) as error:
                decoded.bad_points += 1
                decoded.complaints.append(f"{metric.name[:80]!r}: {error}")
    for unit in units.values():
        _count_members(unit, contributors.get(id(unit), {}))
    return list(units.values())


def _decode_point(
    name: str,
    kind: str,
    point: Any,
    run_id: str,
    payload_id: str,
    direct: bool,
    units: dict[tuple[RowId, int, int], Unit],
    contributors: dict[int, dict[tuple[int, int], dict[int, int]]],
) -> None:
    attributes = _attributes(point.attributes)
    row = RowId(
        run_id, str(attributes[wire.POINT_ROLE]), _int(attributes, wire.POINT_ATTEMPT), _int(attributes, wire.STEP), _int(attributes, wire.OCCURRENCE)
    )
    part, parts = _int(attributes, wire.PART), _int(attributes, wire.PARTS)
    if row.step < 0 or not 0 <= part < parts <= 100_000:
        raise ValueError(f"step {row.step}, part {part} of {parts} is not possible")
    unit = units.get((row, part, parts))
    if unit is None:
        unit = units[row, part, parts] = Unit(f"{payload_id}/{part}of{parts}", row, part, parts, direct)
    if name == wire.CONTRIBUTORS_METRIC:
        replica, world = _int(attributes, wire.POINT_REPLICA), _int(attributes, wire.POINT_WORLD_SIZE)
        if wire.MEMBER in attributes:
            unit.worlds[replica] = 0
            unit.members[f"{replica}/{attributes[wire.MEMBER]}"] = point.as_int & 0xFFFFFFFF
            unit.consistent &= point.as_int & 0xFFFFFFFF == point.as_int >> 48
            return
        blocks = contributors.setdefault(id(unit), {}).setdefault((replica, world), {})
        block = _int(attributes, wire.BLOCK)
        blocks[block] = blocks.get(block, 0) + point.as_int
        return
    reduction = str(attributes[wire.REDUCTION])
    key = str(attributes.get(wire.KEY, _key_of(name, reduction)))
    found = unit.values.setdefault((key, reduction), [])
    try:
        found.append(_value(kind, point, attributes))
    except (ValueError, TypeError, KeyError):
        found.append(Unreadable())
        raise


def _key_of(name: str, reduction: str) -> str:
    component = reduction.partition(":")[2]
    return name.removesuffix(f".{component}") if component else name


def _value(kind: str, point: Any, attributes: Mapping[str, Any]) -> Value:
    if kind == "histogram":
        _check_histogram(point)
        return Histogram(
            point.count, point.sum, point.min, point.max, tuple(point.explicit_bounds), tuple(point.bucket_counts) if point.explicit_bounds else ()
        )
    if wire.LIMB in attributes:
        if point.WhichOneof("value") != "as_int":
            raise TypeError("limbs must be integers")
        return Limbs({_int(attributes, wire.LIMB): point.as_int})
    return Sum(point.as_double if point.WhichOneof("value") == "as_double" else float(point.as_int))


def _check_histogram(point: Any) -> None:
    if point.count <= 0:
        raise ValueError("a histogram point without values")
    bounds = point.explicit_bounds
    if not bounds:
        return
    if len(point.bucket_counts) != len(bounds) + 1 or sum(point.bucket_counts) != point.count:
        raise ValueError(f"{len(bounds)} bounds, {len(point.bucket_counts)} buckets and a count of {point.count} do not fit")
    edges = [point.min, *bounds, point.max]
    if not all(map(math.isfinite, edges)) or list(bounds) != sorted(set(bounds)):
        raise ValueError("bounds must be finite and go up, and extremes be finite")


def _count_members(unit: Unit, by_replica: Mapping[tuple[int, int], Mapping[int, int]]) -> None:
    if not by_replica and not unit.members:
        unit.consistent = False
    for (replica, world), blocks in by_replica.items():
        counts = wire.decode_contributors(blocks)
        if counts is None or unit.worlds.get(replica, world) != world or max(counts, default=0) >= max(world, 1) or not _is_believed(unit, world):
            unit.consistent = False
            continue
        unit.worlds[replica] = world
        for rank, count in counts.items():
            unit.members[member_id(replica, rank)] = count


def _is_believed(unit: Unit, world: int) -> bool:
    """Whether a world may be added to those of the unit; its missing ranks would be listed one by one."""
    return 0 <= world <= MAX_WORLD - sum(unit.worlds.values())


def _stream(metrics: Iterable[Any], sender: Sender, decoded: Decoded) -> list[StreamValue]:
    values = []
    for metric in metrics:
        for point in metric.gauge.data_points:
            attributes = _attributes(point.attributes)
            try:
                values.append(
                    StreamValue(
                        sender, str(attributes.get(wire.KEY, metric.name)), point.as_double, _int(attributes, wire.STEP),
                        _int(attributes, wire.SEQUENCE), point.time_unix_nano / 1e9,
                    )
                )  # fmt: skip
            except (KeyError, TypeError) as error:
                decoded.bad_points += 1
                decoded.complaints.append(f"{metric.name[:80]!r}: {error}")
    return sorted(values, key=lambda value: value.sequence)


def _control_body(metrics: Iterable[Any]) -> Mapping[str, Any]:
    for metric in metrics:
        for point in metric.gauge.data_points:
            body = json.loads(str(_attributes(point.attributes)[wire.BODY]))
            if not isinstance(body, dict):
                raise ValueError("a control packet's body must be a JSON object")
            return body
    raise ValueError("a control packet without a body")


def _attributes(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found


def _int(attributes: Mapping[str, Any], name: str) -> int:
    value = attributes[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"attribute {name!r} must be an integer, got {value!r}")
    return value


def _count_points(metric: Any) -> int:
    kind = metric.WhichOneof("data")
    return len(getattr(metric, kind).data_points) if kind else 0
