"""Rows as TensorBoard event files: a sub-run per role, or per member in per-rank modes. It needs the package tensorboard, and no torch."""

from __future__ import annotations

import io
import math
import os
import socket
import struct
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_forge.config import TensorboardConfig
from otel_forge.errors import ConfigError
from otel_forge_exporters.backend import RunInfo, run_dir
from otel_forge_exporters.rows import HistogramValue, Row

MARK_TAG = "forge/row"
"""With each row goes its key, as a tensor of a plugin that no TensorBoard has: pages do not show it, a restarted exporter reads it back."""
MARK_PLUGIN = "otel_forge"
_LENGTH = struct.Struct("<Q")
_FRAME_BYTES = 16
"""A record is its length (8 bytes), the length's checksum (4), the data, and the data's checksum (4)."""


@dataclass
class _SubRun:
    """One directory of event files."""

    folder: Path
    file: Path | None = None
    """What this process appends to; made with the first row."""
    seen: set[str] = field(default_factory=set)
    """Keys of the rows that earlier processes wrote."""
    attempt: int = 0
    starts: int | None = None
    """The first step of the newest attempt; None before there is any row."""


class TensorboardBackend:
    """Writes the first revision of each row; TensorBoard has no way to replace a value.

    A newer attempt starts with TensorBoard's own mark of a restart: from that step on the older attempt's values are in the file, not in the curves.
    """

    def __init__(self, config: TensorboardConfig, run: RunInfo, work_dir: Path) -> None:
        self._folder = work_dir / config.dir if config.dir else run_dir(work_dir, run.run_id) / "tensorboard"
        self._sub_runs: dict[str, _SubRun] = {}
        self._pb: Any = None

    def open(self) -> None:
        """Import tensorboard; files are made with their first rows."""
        try:
            self._pb = _Protobuf()
        except ImportError as error:
            message = f"metric_logging.tensorboard: tensorboard is not installed ({error}): pip install 'otel-forge[tensorboard]'"
            raise ConfigError([message]) from error
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Append each row as one event, so that it is there whole or not at all."""
        by_name: dict[str, list[Row]] = {}
        for row in rows:
            if row.revision == 1:
                by_name.setdefault(_name(row), []).append(row)
        for name, own in by_name.items():
            self._append(self._sub_run(name), own)

    def has(self, row: Row) -> bool | None:
        """Looked up in the files that earlier processes left. A later revision is never written, so there is nothing to do about it."""
        return row.revision > 1 or row.key in self._sub_run(_name(row)).seen

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Make the files durable."""
        for sub_run in self._sub_runs.values():
            if sub_run.file is not None:
                with open(sub_run.file, "rb") as file:
                    os.fsync(file.fileno())

    def location(self) -> str | None:
        """The directory to give to `tensorboard --logdir`."""
        return str(self._folder)

    def _sub_run(self, name: str) -> _SubRun:
        found = self._sub_runs.get(name)
        if found is None:
            found = self._sub_runs[name] = _SubRun(self._folder / name)
            for path in sorted(found.folder.glob("events.out.tfevents.*")):
                for event in self._pb.events(path):
                    self._take_up(found, event)
        return found

    def _take_up(self, sub_run: _SubRun, event: Any) -> None:
        for value in event.summary.value:
            if value.tag == MARK_TAG and value.tensor.string_val:
                sub_run.seen.add(value.tensor.string_val[0].decode())
                attempt = int(value.tensor.string_val[1])
                if sub_run.starts is None or attempt > sub_run.attempt:
                    sub_run.attempt, sub_run.starts = attempt, event.step

    def _append(self, sub_run: _SubRun, rows: Sequence[Row]) -> None:
        """One write for all rows of a sub-run; a file is open only meanwhile, so that a thousand ranks need no thousand descriptors."""
        attempt, starts = sub_run.attempt, sub_run.starts
        events = [] if sub_run.file else [self._pb.head()]
        for row in rows:
            if starts is not None and row.attempt < attempt and row.step >= starts:
                continue  # a newer attempt has this step
            if starts is None or row.attempt > attempt:
                events += [] if starts is None else [self._pb.restart(row)]
                attempt, starts = row.attempt, row.step
            events.append(self._pb.event(row))
        path = sub_run.file or _new_file(sub_run.folder)
        _append_whole(path, self._pb.framed(events))
        sub_run.file, sub_run.attempt, sub_run.starts = path, attempt, starts


class _Protobuf:
    """tensorboard's messages. Made when the backend is opened, because importing them takes a moment."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._tensor, self._types, self._writer = event_pb2, summary_pb2, tensor_pb2, types_pb2, RecordWriter

    def head(self) -> Any:
        """The first event of a file."""
        return self._event.Event(wall_time=time.time(), file_version="brain.Event:2")

    def restart(self, row: Row) -> Any:
        """From this step on, what is in the files so far is not shown."""
        return self._event.Event(wall_time=row.time_unix, step=row.step, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def event(self, row: Row) -> Any:
        """The row: scalars (NaN where a value was not finite), histograms, its key."""
        values = [self._summary.Summary.Value(tag=key, simple_value=math.nan if value is None else value) for key, value in row.flat().items()]
        for key, metric in row.metrics.items():
            if isinstance(metric, HistogramValue):
                values.append(self._summary.Summary.Value(tag=key, histo=self._histogram(metric)))
        values.append(self._mark(row))
        return self._event.Event(wall_time=row.time_unix, step=row.step, summary=self._summary.Summary(value=values))

    def _histogram(self, value: HistogramValue) -> Any:
        limits = [*value.bounds, max(value.max, *value.bounds)]
        middles = [(max(low, value.min) + min(high, value.max)) / 2 for low, high in zip([value.min, *limits], limits, strict=False)]
        total = value.sum if value.sum is not None else math.fsum(count * middle for count, middle in zip(value.counts, middles, strict=True))
        squares = math.fsum(count * middle**2 for count, middle in zip(value.counts, middles, strict=True))
        return self._summary.HistogramProto(
            min=value.min, max=value.max, num=sum(value.counts), sum=total, sum_squares=squares, bucket_limit=limits, bucket=value.counts
        )

    def _mark(self, row: Row) -> Any:
        metadata = self._summary.SummaryMetadata(plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name=MARK_PLUGIN))
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[row.key.encode(), str(row.attempt).encode()])
        tensor.tensor_shape.dim.add(size=2)
        return self._summary.Summary.Value(tag=MARK_TAG, metadata=metadata, tensor=tensor)

    def framed(self, events: Sequence[Any]) -> bytes:
        """Events as they stand in a file."""
        buffer = io.BytesIO()
        writer = self._writer(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        return buffer.getvalue()

    def events(self, path: Path) -> Iterator[Any]:
        """The whole events of a file; one that a crash tore ends them."""
        data = path.read_bytes()
        position = 0
        while position + _FRAME_BYTES <= len(data):
            (length,) = _LENGTH.unpack_from(data, position)
            start, position = position + 12, position + _FRAME_BYTES + length
            if position > len(data):
                return
            event = self._event.Event()
            event.ParseFromString(data[start : start + length])
            yield event


def _name(row: Row) -> str:
    """The sub-run: the role, with the replica where there are several, and the rank."""
    role = urllib.parse.quote(row.role, safe="") if row.role.strip(".") else "%2E" * len(row.role)  # a role is not a path
    if row.rank is None:
        return role
    return f"{role}_{row.replica}_{row.rank}" if row.replica else f"{role}_{row.rank}"


def _new_file(folder: Path) -> Path:
    """A name behind those that are there: TensorBoard reads them in the order of their names, which begin with a time in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    stamps = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*") if path.name.split(".")[3].isdigit()]
    stamp = max([int(time.time()), *(known + 1 for known in stamps)])
    return folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"


def _append_whole(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)  # disk full in the middle of an event: the rows come again
            raise
