"""Rows as lines of JSON. A later revision of a row is a further line: readers take the highest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from otel_forge.config import JsonlConfig
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import Row


def run_dir(work_dir: Path, run_id: str) -> Path:
    """Where files of a run are kept when no path is configured."""
    return work_dir / "otel-forge-runs" / run_id


class JsonlBackend:
    """Appends to one file; several runs may share it."""

    def __init__(self, config: JsonlConfig, run: RunInfo, work_dir: Path) -> None:
        default = run_dir(work_dir, run.run_id) / (
            "metrics.jsonl" if config.logging_mode.value == "global_reduce" else f"{config.logging_mode.value}.jsonl"
        )
        self._path = (work_dir / config.path) if config.path else default
        self._run_id = run.run_id
        self._file: FileIO | None = None
        self._seen: set[tuple[str, int]] | None = None

    def open(self) -> None:
        """Open for appending; a last line that a crash tore is cut off."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "ab+", buffering=0)  # a buffer would write its lines once more after a disk that was full
        _cut_torn_line(file)
        self._file = file

    def write(self, rows: Sequence[Row]) -> None:
        """Append; the rows are with the operating system when this returns."""
        assert self._file is not None
        start = self._file.seek(0, os.SEEK_END)
        rest = memoryview("".join(row.to_json() + "\n" for row in rows).encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(start)  # disk full in the middle of a line: the rows come again
            raise

    def has(self, row: Row) -> bool | None:
        """Looked up in the file as it was when it was opened."""
        if self._seen is None:
            self._seen = set(_keys(self._path, self._run_id))
        return (row.key, row.revision) in self._seen

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Make it durable."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def location(self) -> str | None:
        """The file."""
        return str(self._path)


def _cut_torn_line(file: FileIO) -> None:
    end = file.seek(0, os.SEEK_END)
    position = end
    while position > 0:
        size = min(65536, position)
        file.seek(position - size)
        found = file.read(size).rfind(b"\n")
        if found >= 0:
            position = position - size + found + 1
            break
        position -= size
    if position < end:
        file.truncate(position)


def _keys(path: Path, run_id: str) -> list[tuple[str, int]]:
    keys = []
    with open(path, "rb") as file:
        for line in file:
            try:
                fields = json.loads(line)
                if fields["run_id"] == run_id:
                    keys.append((_row_key(fields), int(fields["revision"])))
            except (ValueError, KeyError, TypeError):
                continue
    return keys


def _row_key(fields: dict[str, object]) -> str:
    names = ("run_id", "mode", "role", "replica", "rank", "step", "occurrence", "attempt", "revision")
    picked = {name: fields[name] for name in names}
    row = Row(**picked, time_unix=0.0, ranks_reporting=0, world_size=0, metrics={}, sequence=fields.get("sequence"))  # type: ignore[arg-type]
    return row.key
