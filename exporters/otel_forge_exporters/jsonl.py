"""Rows as lines of JSON. A later revision of a row is a further line: readers take the highest."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from otel_forge.config import JsonlConfig
from otel_forge_exporters.backend import RunInfo, run_dir
from otel_forge_exporters.rows import Row

RECENT_ROWS = 10_000
"""Rows that this process wrote and still knows: more than come again after a failed write."""


class JsonlBackend:
    """Appends to one file; several runs and processes may share it. At `max_bytes` it becomes `<name>.1`, that `<name>.2`, …"""

    def __init__(self, config: JsonlConfig, run: RunInfo, work_dir: Path) -> None:
        default = run_dir(work_dir, run.run_id) / (
            "metrics.jsonl" if config.logging_mode.value == "global_reduce" else f"{config.logging_mode.value}.jsonl"
        )
        self._path = (work_dir / config.path) if config.path else default
        self._max_bytes = config.max_bytes
        self._keep = config.keep
        self._run_id = run.run_id
        self._file: FileIO | None = None
        self._there: set[int] = set()
        """Hashes of the rows of this run that were there when it was opened."""
        self._recent: dict[int, None] = {}

    def open(self) -> None:
        """Open for appending, cut off a last line that a crash tore, and take down which rows are there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            for path in [self._path, *self._rotated()]:
                self._there.update(map(hash, _keys(path, self._run_id)))

    def write(self, rows: Sequence[Row]) -> None:
        """Append those that are not there; they are with the operating system when this returns."""
        waiting = {hash((row.key, row.revision)): row for row in rows if not self.has(row)}
        with self._locked() as file:
            size = file.seek(0, os.SEEK_END)
            lines: dict[int, bytes] = {}
            for known, row in waiting.items():
                line = row.to_json().encode() + b"\n"
                if self._max_bytes is not None and size and size + len(line) > self._max_bytes:
                    self._append(lines)
                    self._rotate()
                    size, lines = 0, {}
                lines[known] = line
                size += len(line)
            self._append(lines)

    def has(self, row: Row) -> bool | None:
        """Whether it was there when the file was opened, or was written since (of those, the last ten thousand are known)."""
        known = hash((row.key, row.revision))
        return known in self._there or known in self._recent

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Make it durable."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def location(self) -> str | None:
        """The file."""
        return str(self._path)

    def _append(self, lines: dict[int, bytes]) -> None:
        assert self._file is not None
        start = self._file.seek(0, os.SEEK_END)  # unbuffered, so that nothing is left in a buffer when a write fails
        try:
            rest = memoryview(b"".join(lines.values()))
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(start)  # disk full in the middle of a line: the rows come again
            raise
        self._recent.update(dict.fromkeys(lines))
        while len(self._recent) > RECENT_ROWS:
            del self._recent[next(iter(self._recent))]

    # --- the file ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[FileIO]:
        """The file that has the name now, whole and with no other writer, for as long as the block runs."""
        while True:
            if self._file is None:
                self._file = open(self._path, "ab+", buffering=0)
            with contextlib.suppress(OSError):  # file systems without locks: a file is then for one writer
                fcntl.flock(self._file, fcntl.LOCK_EX)
            if _is_at(self._file, self._path):
                break
            self._file.close()  # another writer rotated it, or somebody moved it away
            self._file = None
        file = self._file
        try:
            _cut_torn_line(file)
            yield file
        finally:
            if self._file is not None and not self._file.closed:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _rotated(self) -> list[Path]:
        """The full files, newest first."""
        return [path for path in map(self._numbered, range(1, self._keep + 1)) if path.exists()]

    def _rotate(self) -> None:
        """Give the full file the next name too, and put a new one in its place: at no moment is there no file, so that no writer makes another."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._shift()
        fresh_path = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh = open(fresh_path, "ab+", buffering=0)
        with contextlib.suppress(OSError):
            fcntl.flock(fresh, fcntl.LOCK_EX)
        if self._keep:
            os.link(self._path, self._numbered(1))
        fresh_path.rename(self._path)
        self._file.close()
        self._file = fresh

    def _shift(self) -> None:
        first = self._numbered(1)
        if first.exists() and first.samefile(self._path):  # killed between the two names
            first.unlink()
        for number in range(self._keep, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number - 1).rename(self._numbered(number))
        first.unlink(missing_ok=True)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _is_at(file: FileIO, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _cut_torn_line(file: FileIO) -> None:
    """Cut off what follows the last line break: a writer was killed in the middle of a line."""
    end = file.seek(0, os.SEEK_END)
    position = end
    while position > 0:
        size = min(65536 if position < end else 1, position)
        file.seek(position - size)
        found = file.read(size).rfind(b"\n")
        if found >= 0:
            position = position - size + found + 1
            break
        position -= size
    if position < end:
        file.truncate(position)


def _keys(path: Path, run_id: str) -> Iterator[tuple[str, int]]:
    """(row key, revision) of a run's rows in a file."""
    marker = json.dumps(run_id, ensure_ascii=False).encode()
    with open(path, "rb") as file:
        for line in file:
            try:
                fields = json.loads(line) if marker in line else {}
                if fields.get("run_id") == run_id:
                    yield _row_key(fields), int(fields["revision"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue


def _row_key(fields: dict[str, object]) -> str:
    names = ("run_id", "mode", "role", "replica", "rank", "step", "occurrence", "attempt", "revision")
    picked = {name: fields[name] for name in names}
    row = Row(**picked, time_unix=0.0, ranks_reporting=0, world_size=0, metrics={}, sequence=fields.get("sequence"))  # type: ignore[arg-type]
    return row.key
