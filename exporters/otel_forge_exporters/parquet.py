"""Rows as Parquet files, one record per key, so that every file has the same columns whatever a step records. It needs the package pyarrow.

A Parquet file cannot be appended to: each batch of rows becomes a small file, whole under its name or not there, and small files are merged into
larger ones. Files are named for the numbers of the batches in them; one that is contained in another is what a crash during a merge left, and goes.
"""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import ParquetConfig
from otel_forge.errors import ConfigError
from otel_forge_exporters.backend import RunInfo, run_dir
from otel_forge_exporters.rows import HistogramValue, Row

MERGED_FILES = 64
"""So many files of one size class become one of the next."""
_NAME = re.compile(r"(?P<prefix>.+)\.(?P<first>\d{8})-(?P<last>\d{8})\.parquet")


class ParquetBackend:
    """A directory that `pandas.read_parquet`, DuckDB or pyarrow read as one table."""

    def __init__(self, config: ParquetConfig, run: RunInfo, work_dir: Path) -> None:
        mode = config.logging_mode.value
        self._folder = work_dir / config.dir if config.dir else run_dir(work_dir, run.run_id) / "parquet" / mode
        self._prefix = f"{_file_name(run.run_id)}.{mode}"
        self._pa: Any = None
        self._pq: Any = None
        self._schema: Any = None
        self._next = 0
        self._there: set[tuple[str, int]] | None = None

    def open(self) -> None:
        """Import pyarrow, and take away what a crash left half done."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError([f"metric_logging.parquet: pyarrow is not installed ({error}): pip install 'otel-forge[parquet]'"]) from error
        self._pa, self._pq, self._schema = pyarrow, pyarrow.parquet, _schema(pyarrow)
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f".{_escaped(self._prefix)}.*"):
            path.unlink()
        files = self._files()
        for first, last, path in files:
            if any(begin <= first and last <= end and (begin, end) != (first, last) for begin, end, _ in files):
                path.unlink()
        self._next = max((last for _, last, _ in files), default=-1) + 1

    def write(self, rows: Sequence[Row]) -> None:
        """A file for these rows. It is on disk when this returns."""
        records = [record for row in rows for record in _records(row)]
        if records:
            self._put(self._pa.Table.from_pylist(records, schema=self._schema), self._next, self._next)
            self._next += 1
            self._merge()

    def has(self, row: Row) -> bool | None:
        """Looked up in the files as they were when this was first asked."""
        if self._there is None:
            self._there = set()
            for _, _, path in self._files():
                columns = self._pq.read_table(path, columns=["row", "revision"]).to_pydict()
                self._there.update(zip(columns["row"], columns["revision"], strict=True))
        return (row.key, row.revision) in self._there

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Merge what there is into one file, when the run is over."""
        if self._pa is not None and exit_code is not None:
            self._join(self._files())

    def location(self) -> str | None:
        """The directory."""
        return str(self._folder)

    # --- files -------------------------------------------------------------------------------------------------------

    def _files(self) -> list[tuple[int, int, Path]]:
        """(first batch, last batch, path) of this run's files, in order."""
        found = []
        for path in self._folder.glob(f"{_escaped(self._prefix)}.*.parquet"):
            match = _NAME.fullmatch(path.name)
            if match and match["prefix"] == self._prefix:
                found.append((int(match["first"]), int(match["last"]), path))
        return sorted(found)

    def _merge(self) -> None:
        """Merge the newest files while there are enough of one size: like a counter that carries."""
        size = 1
        while self._next % (size * MERGED_FILES) == 0:
            size *= MERGED_FILES
            self._join([file for file in self._files() if file[0] >= self._next - size])

    def _join(self, files: Sequence[tuple[int, int, Path]]) -> None:
        if len(files) < 2:
            return
        table = self._pa.concat_tables([self._pq.read_table(path, schema=self._schema) for _, _, path in files])
        self._put(table, files[0][0], files[-1][1])
        for _, _, path in files:
            path.unlink()

    def _put(self, table: Any, first: int, last: int) -> None:
        """Whole and durable before it has its name."""
        name = f"{self._prefix}.{first:08d}-{last:08d}.parquet"
        hidden = self._folder / f".{name}"
        self._pq.write_table(table, hidden, compression="zstd")
        with open(hidden, "rb") as file:
            os.fsync(file.fileno())
        hidden.rename(self._folder / name)


def _schema(pa: Any) -> Any:
    text, number = pa.dictionary(pa.int32(), pa.string()), pa.float64()
    return pa.schema(
        [
            ("run_id", text), ("mode", text), ("role", text), ("replica", pa.int32()), ("rank", pa.int32()), ("step", pa.int64()),
            ("occurrence", pa.int32()), ("attempt", pa.int32()), ("revision", pa.int32()), ("time_unix", number), ("ranks_reporting", pa.int32()),
            ("world_size", pa.int32()), ("key", text), ("value", number), ("nonfinite", pa.int64()), ("bounds", pa.list_(number)),
            ("counts", pa.list_(pa.int64())), ("row", pa.string()),
        ]
    )  # fmt: skip


def _records(row: Row) -> Iterator[dict[str, Any]]:
    """One for each key; of a histogram one with its buckets, and one for each quantile. `value` is null where it was not finite."""
    shared = {
        name: getattr(row, name)
        for name in ("run_id", "mode", "role", "replica", "rank", "step", "occurrence", "attempt", "revision", "time_unix", "ranks_reporting")
    } | {"world_size": row.world_size, "row": row.key}
    for key, value in row.flat().items():
        yield {**shared, "key": key, "value": value, "nonfinite": row.nonfinite.get(key, 0)}
    for key, metric in row.metrics.items():
        if isinstance(metric, HistogramValue):
            yield {**shared, "key": key, "value": None, "nonfinite": row.nonfinite.get(key, 0), "bounds": metric.bounds, "counts": metric.counts}


def _file_name(run_id: str) -> str:
    """A run id as a part of a file's name: never a path, never too long, never hidden."""
    name = urllib.parse.quote(run_id, safe="").replace(".", "%2E")
    return name if len(name) <= 120 else f"{name[:100]}-{hashlib.blake2b(run_id.encode(), digest_size=6).hexdigest()}"


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
