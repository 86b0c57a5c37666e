"""Reading back what wandb keeps on disk of a run, its transaction log (`run-<id>.wandb`) above all: which rows are there. It opens no run."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def run_dirs(folder: Path, run_id: str) -> list[Path]:
    """The directories of a run below `folder/wandb`, oldest first."""
    return sorted({path.parent for path in (folder / "wandb").glob(f"*/run-{glob.escape(run_id)}.wandb")})


_FILE_HEADER = struct.Struct("<4sHB")
_BLOCK_BYTES = 32768
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of one transaction log; a torn end (its writer was killed) ends them.

    The format is LevelDB's log with a header of its own: blocks of 32 KiB, chunks of `crc32, length, kind`, padding of under 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    for data in _chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        try:
            record.ParseFromString(data)
        except Exception:  # torn in the middle: nothing behind it can be trusted
            return
        yield record


def is_finished(path: Path) -> bool:
    """Whether the log ends with the record of the run's exit; only its last blocks are read."""
    from wandb.proto import wandb_internal_pb2

    try:
        with path.open("rb") as log:
            start = max(0, log.seek(0, 2) // _BLOCK_BYTES - 1) * _BLOCK_BYTES
            log.seek(start)
            tail = log.read()
    except OSError:
        return False
    for data in _chunks(tail, at_start=start == 0):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):  # the first one may have begun before the tail
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "exit":
                return True
    return False


def _chunks(log: bytes, *, at_start: bool = True) -> Iterator[bytes]:
    if at_start and (len(log) < _FILE_HEADER.size or _FILE_HEADER.unpack_from(log)[0] != b":W&B"):
        return
    position = _FILE_HEADER.size if at_start else 0
    whole = b""
    while position + _CHUNK.size <= len(log):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _CHUNK.size:
            position += left
            continue
        crc, length, kind = _CHUNK.unpack_from(log, position)
        start, position = position + _CHUNK.size, position + _CHUNK.size + length
        piece = log[start:position]
        if not _FULL <= kind <= _LAST or len(piece) < length or zlib.crc32(bytes([kind]) + piece) != crc:
            return
        whole = piece if kind in (_FULL, _FIRST) else whole + piece
        if kind in (_FULL, _LAST):
            yield whole


START_FILE = "otel-forge.json"
"""Beside a log of ours: at which position of the run it starts, and for which attempt."""


@dataclass(frozen=True)
class LoggedRow:
    """One row of ours in a transaction log."""

    key: str
    revision: int
    position: int
    """Where in the run's history, counted in rows. An offline log starts at 0, whatever the run has already."""
    values: Mapping[str, Any]
    """As they were given to `run.log`."""


@dataclass
class Past:
    """What the logs here say of a run."""

    rows: dict[tuple[str, int], LoggedRow] = field(default_factory=dict)
    """(row key, revision) → the row, from logs of online and of offline runs."""
    online: dict[tuple[str, int], LoggedRow] = field(default_factory=dict)
    """Those that had to be uploaded; a row that was sent again has its last position."""
    end: int = 0
    """The position after the last row that was to be uploaded."""
    is_there: bool = False
    """Whether any log is here."""
    has_online: bool = False
    """Whether any log of an online run is here."""


def wait_for_orphans(timeout_s: float = 15.0) -> None:
    """Wait until no wandb-core of a killed exporter is left.

    It outlives its parent by some seconds, in which it goes on uploading: until then the server's word on what it has is not its last.
    """
    deadline = time.monotonic() + timeout_s
    while any(_is_orphan(process) for process in Path("/proc").glob("[0-9]*")) and time.monotonic() < deadline:
        time.sleep(0.1)


def _is_orphan(process: Path) -> bool:
    """Whether it is a wandb-core whose parent, which it is told with `--pid`, has ended."""
    try:
        if process.stat().st_uid != os.getuid():
            return False
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        parent = Path("/proc") / arguments[arguments.index(b"--pid") + 1].decode()
        return b"wandb-core" in arguments[0] and not _is_running(parent)
    except (OSError, ValueError, IndexError):  # it has ended meanwhile, or is something else
        return False


def _is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def past(folder: Path, run_id: str, attempt: int | None = None) -> Past:
    """Read all logs of a run, or those that were begun for one attempt."""
    found = Past()
    for run_dir in run_dirs(folder, run_id):
        start = _start(run_dir)
        if attempt is not None and start.get("attempt") != attempt:
            continue
        found.is_there = True
        is_online = not run_dir.name.startswith("offline-")
        if is_online:
            found.has_online = True
            found.end = max(found.end, int(start.get("position", 0)))
        for row in _our_rows(run_dir):
            found.rows[row.key, row.revision] = row
            if is_online:
                found.online[row.key, row.revision] = row
                found.end = max(found.end, row.position + 1)
    return found


def _start(run_dir: Path) -> dict[str, int]:
    try:
        return dict(json.loads((run_dir / START_FILE).read_text()))
    except (OSError, ValueError):
        return {}


def _our_rows(run_dir: Path) -> Iterator[LoggedRow]:
    for path in sorted(run_dir.glob("*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") != "history":
                continue
            values = _nested(record.history.item)
            if "forge/row" in values:
                yield LoggedRow(values["forge/row"], int(values["forge/row_revision"]), int(record.history.step.num), values)


def _nested(items: Iterable[Any]) -> dict[str, Any]:
    """A row as it was given to `run.log`: what wandb adds is left out, a histogram is a dict again."""
    values: dict[str, Any] = {}
    for item in items:
        path = list(item.nested_key) or [item.key]
        if path[0] in ("_step", "_runtime"):
            continue
        place = values
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = json.loads(item.value_json)
    return values


def upload_failure(run_dir: Path) -> str | None:
    """Why wandb-core has given up uploading a run, from its own log; None while it has not."""
    with contextlib.suppress(OSError):
        for line in (run_dir / "logs" / "debug-internal.log").read_text(errors="replace").splitlines():
            if "fatal error" in line:
                with contextlib.suppress(ValueError):
                    return str(json.loads(line)["msg"]).rpartition("fatal error: ")[2]
                return line
    return None


def history(folder: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """The logged rows of a run as dicts, over all its directories."""
    for run_dir in run_dirs(folder, run_id):
        for path in sorted(run_dir.glob("*.wandb")):
            for record in records(path):
                if record.WhichOneof("record_type") == "history":
                    yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def logged_rows(folder: Path, run_id: str) -> Iterator[tuple[str, int]]:
    """(row key, revision) of every row of ours in a run."""
    yield from past(folder, run_id).rows
