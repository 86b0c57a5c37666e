"""Traces of steps as a Chrome trace file, for ui.perfetto.dev or chrome://tracing: ranks as processes, device time as tracks of their own.

The form: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events `X`, metadata events `M`; microseconds).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_forge.cli.jaeger_traces import SERVICE, Trace

DEVICE_TIME, DEVICE_START = "forge.device_time_s", "forge.device_start_unix_nano"
DEVICE_TRACKS = 1000
"""Tracks from this number on are of the device."""
LEFT_OUT = ("span.kind", "otel.scope.name", "otel.scope.version", "internal.span.format", "otel.status_code")
Order = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice of a track; times in microseconds of unix time."""

    name: str
    start_us: float
    end_us: float
    args: dict[str, Any]


@dataclass
class Member:
    """What one process of the training did, on its host and on its device."""

    name: str
    order: Order
    host: list[Piece] = field(default_factory=list)
    device: list[Piece] = field(default_factory=list)


def chrome_trace(run_id: str, traces: Iterable[Trace]) -> dict[str, Any]:
    """The file's content. Times count from the first span, whose unix time is in `otherData`."""
    members: dict[str, Member] = {}
    for trace in traces:
        processes = {name: _member(process, members) for name, process in trace["processes"].items()}
        for span in trace["spans"]:
            _add(processes[span["processID"]], span)
    base_us = min((piece.start_us for member in members.values() for piece in (*member.host, *member.device)), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, member in enumerate(sorted(members.values(), key=lambda member: member.order)):
        events += [_meta("process_name", pid, 0, name=member.name), _meta("process_sort_index", pid, 0, sort_index=pid)]
        events += _tracks(member.host, pid, 0, "host", base_us) + _tracks(member.device, pid, DEVICE_TRACKS, "device", base_us)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run_id": run_id, "start_unix_us": base_us}}


def _member(process: dict[str, Any], members: dict[str, Member]) -> Member:
    """The member that a trace's process is; the same in every trace."""
    tags = {tag["key"]: tag["value"] for tag in process.get("tags") or []}
    role = str(process["serviceName"] if tags.get("forge.role") is None else tags["forge.role"])
    if process["serviceName"] == SERVICE and "forge.rank" not in tags:
        return members.setdefault(SERVICE, Member("steps", (0, "", 0, 0)))
    rank, replica = int(tags.get("forge.rank", 0)), int(tags.get("forge.replica", 0))
    host = f" on {tags['host.name']}" if "host.name" in tags else ""
    name = f"{role} rank {rank}" + (f" replica {replica}" if replica else "") + host
    return members.setdefault(f"{role}/{replica}.{rank}", Member(name, (1, role, replica, rank)))


def _add(member: Member, span: dict[str, Any]) -> None:
    args = {tag["key"]: tag["value"] for tag in span.get("tags") or [] if tag["key"] not in LEFT_OUT}
    start_us, name = float(span["startTime"]), str(span["operationName"])
    member.host.append(Piece(name, start_us, start_us + float(span["duration"]), args))
    seconds = args.get(DEVICE_TIME)
    if seconds is not None:
        began_us = float(args[DEVICE_START]) / 1000 if DEVICE_START in args else start_us
        named = {"device": args["forge.device"]} if "forge.device" in args else {}
        where = named | ({} if DEVICE_START in args else {"start": "the host's: the device's was not recorded"})
        member.device.append(Piece(name, began_us, began_us + float(seconds) * 1e6, where))


def _tracks(pieces: Sequence[Piece], pid: int, first: int, name: str, base_us: float) -> list[dict[str, Any]]:
    """The events of as many tracks as it takes that on each one slices are inside each other or apart, as the form asks."""
    events: list[dict[str, Any]] = []
    for number, lane in enumerate(lanes(pieces)):
        tid = first + number
        events.append(_meta("thread_name", pid, tid, name=name if not number else f"{name} ({number + 1})"))
        events.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
        for piece in lane:
            times = {"ts": round(piece.start_us - base_us, 3), "dur": round(piece.end_us - piece.start_us, 3)}
            events.append({"ph": "X", "cat": name, "name": piece.name, "pid": pid, "tid": tid, **times, "args": piece.args})
    return events


def lanes(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Slices on tracks: each on the first where it lies within what is open there, or nothing is open."""
    found: list[list[Piece]] = []
    open_ends: list[list[float]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.start_us, -piece.end_us)):
        for lane, ends in zip(found, open_ends, strict=True):
            while ends and ends[-1] <= piece.start_us:
                ends.pop()
            if not ends or piece.end_us <= ends[-1]:
                lane.append(piece)
                ends.append(piece.end_us)
                break
        else:
            found.append([piece])
            open_ends.append([piece.end_us])
    return found


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
