"""The rows of a run, read from its JSONL files. It knows the rows' form and where such files are, and nothing of who shows them.

A later revision replaces an earlier one; a line that is not finished, or no row, is counted and left out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_forge import discovery
from otel_forge.cli.servers import exporter_status
from otel_forge.config import ForgeConfig, JsonlConfig, state_dir
from otel_forge.errors import InputError

RUNS = "otel-forge-runs"
"""Folder in the exporter's working directory where runs are kept that have no configured path."""
Identity = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One line of a JSONL file; the fields have the meaning that the README gives them."""

    run_id: str
    mode: str
    role: str
    replica: int | None
    rank: int | None
    step: int
    occurrence: int
    attempt: int
    revision: int
    time_unix: float
    ranks_reporting: int
    world_size: int
    metrics: dict[str, float | None]
    nonfinite: dict[str, int] = field(default_factory=dict)
    ranks_missing: tuple[str, ...] = ()
    sequence: int | None = None

    @property
    def identity(self) -> Identity:
        """Equal for all revisions of one row."""
        return self.run_id, self.mode, self.role, self.replica if self.rank is not None else None, self.rank, *self.place, self.sequence

    @property
    def place(self) -> tuple[int, int, int]:
        """Orders the rows of one role: attempt, step, occurrence."""
        return self.attempt, self.step, self.occurrence

    @property
    def member(self) -> str | None:
        """The rank as people write it, with the replica where that is not 0; None when reduced over ranks."""
        if self.rank is None:
            return None
        return f"{self.replica}.{self.rank}" if self.replica else str(self.rank)


_NAMES = tuple(name for name in StoredRow.__slots__ if name not in ("nonfinite", "ranks_missing", "sequence"))


def parse_row(line: bytes) -> StoredRow | None:
    """The row that a line holds; None where it holds none."""
    try:
        raw = json.loads(line)
        fields = {name: raw[name] for name in _NAMES}
        more = {"nonfinite": raw.get("nonfinite") or {}, "ranks_missing": tuple(raw.get("ranks_missing") or ()), "sequence": raw.get("sequence")}
        row = StoredRow(**fields, **more)
        return row if isinstance(row.metrics, dict) and isinstance(row.step, int) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def rotated(path: Path) -> list[Path]:
    """A file and the full ones that it was renamed to (`<name>.1`, …), the oldest first."""
    numbered = [(int(other.suffix[1:]), other) for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdigit()]
    return [other for _, other in sorted(numbered, reverse=True)] + [path]


# --- finding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are to be read from."""

    files: tuple[Path, ...]
    run_id: str | None
    """None: the run of the newest row."""


def find(target: str | None, config: ForgeConfig, folder: Path) -> Source:
    """The files of what a user named: a file, a folder with files, `FILE#RUN_ID`, a run id, or nothing (the newest file). Raises InputError."""
    if target is None:
        known = sorted(known_files(config, folder), key=lambda path: path.stat().st_mtime)
        if not known:
            raise InputError(f"no JSONL file of a run was found in {folder / RUNS} or the configuration: name a file, a folder or a run id")
        return Source((known[-1],), None)
    name, _, run_id = target.partition("#")
    path = Path(target if Path(target).exists() else name).expanduser()
    if path.is_dir():
        files = tuple(sorted(path.glob("*.jsonl")))
        if not files:
            raise InputError(f"{path}: there is no .jsonl file in it")
        return Source(files, run_id or None)
    if path.exists():
        return Source((path,), None if str(path) == target else run_id or None)
    return _by_run_id(target, config, folder)


def _by_run_id(run_id: str, config: ForgeConfig, folder: Path) -> Source:
    own = folder / RUNS / run_id
    files = tuple(sorted(own.glob("*.jsonl"))) if own.is_dir() else ()
    if not files:
        files = tuple(path for path in known_files(config, folder) if _holds(path, run_id))
    if not files:
        near = difflib.get_close_matches(run_id, _run_ids(config, folder), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{run_id}: there is no such file, and no run of that id in {folder / RUNS} or the configured JSONL files{hint}")
    return Source(files, run_id)


def known_files(config: ForgeConfig, folder: Path) -> list[Path]:
    """JSONL files that a user need not name: the configured one, those that the living servers write, and what is in `otel-forge-runs`."""
    found = [*folder.glob(f"{RUNS}/*/*.jsonl")]
    found += [folder / backend.path for backend in config.metric_logging.values() if isinstance(backend, JsonlConfig) and backend.path]
    servers = discovery.living(state_dir(config))
    if servers is not None:
        for run in ((exporter_status(servers) or {}).get("runs") or {}).values():
            found += [Path(item["location"]) for item in run["backends"].values() if str(item["location"]).endswith(".jsonl")]
    return [path for path in dict.fromkeys(path.absolute() for path in found) if path.is_file()]


def _holds(path: Path, run_id: str) -> bool:
    marker = json.dumps(run_id, ensure_ascii=False).encode()
    return any(marker in line for file in rotated(path) for line in _lines(file))


def _run_ids(config: ForgeConfig, folder: Path) -> set[str]:
    rows = (row for path in known_files(config, folder) for row in map(parse_row, _lines(path)))
    return {row.run_id for row in rows if row is not None} | {path.name for path in folder.glob(f"{RUNS}/*")}


# --- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRows:
    """The newest revision of every row of one run, in the order of attempts and steps."""

    run_id: str
    rows: tuple[StoredRow, ...]
    files: tuple[Path, ...]
    unreadable: int
    """Lines that are no rows; a torn last line is one."""
    other_runs: tuple[str, ...]
    """Ids of further runs in the same files."""


def read_run(source: Source) -> RunRows:
    """All rows of the source's run. Raises InputError where there are none."""
    newest: dict[Identity, StoredRow] = {}
    unreadable = 0
    last: StoredRow | None = None
    for line in (line for path in source.files for file in rotated(path) for line in _lines(file)):
        row = parse_row(line)
        if row is None:
            unreadable += 1
            continue
        keep(newest, row)
        last = row if last is None or row.time_unix >= last.time_unix else last
    run_id = source.run_id or (last.run_id if last else None)
    rows = sorted((row for row in newest.values() if row.run_id == run_id), key=lambda row: row.place)
    others = tuple(sorted({row.run_id for row in newest.values()} - {str(run_id)}))
    if not rows or run_id is None:
        where = ", ".join(map(str, source.files))
        hint = f"; it has rows of {', '.join(others)}" if others else f"; {unreadable} lines are no rows" if unreadable else ""
        raise InputError(f"{where}: there are no rows" + (f" of run {run_id}" if run_id else "") + hint)
    return RunRows(run_id, tuple(rows), source.files, unreadable, others)


def keep(newest: dict[Identity, StoredRow], row: StoredRow) -> None:
    """Take a row up, where it is not an older revision of one that is there."""
    known = newest.get(row.identity)
    if known is None or row.revision >= known.revision:
        newest[row.identity] = row


def without_older_attempts(rows: Iterable[StoredRow]) -> list[StoredRow]:
    """Of a step that was done again after a restart, only the rows of the newest attempt."""
    listed = list(rows)
    newest: dict[tuple[str, int], int] = {}
    for row in listed:
        newest[row.role, row.step] = max(row.attempt, newest.get((row.role, row.step), row.attempt))
    return [row for row in listed if row.attempt == newest[row.role, row.step]]


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
