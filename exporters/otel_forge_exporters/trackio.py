"""Rows as Trackio runs: a dashboard without an account (`trackio show`). It needs the package trackio."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import TrackioConfig
from otel_forge.errors import ConfigError
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue, Row

ROW = "forge/row"
"""With each row goes its key, by which a restarted exporter knows what is there."""


class TrackioBackend:
    """One run; in per-rank modes a run for each member, in one group. First revisions only: Trackio replaces no value."""

    def __init__(self, config: TrackioConfig, run: RunInfo, work_dir: Path) -> None:
        self._config = config
        self._info = run
        self._is_per_rank = config.logging_mode.value != "global_reduce"
        self._dir = work_dir / config.dir if config.dir else None
        self._trackio: Any = None
        self._storage: Any = None
        self._runs: dict[str, Any] = {}
        self._there: dict[str, set[str]] = {}

    def open(self) -> None:
        """Import trackio. Its directory is one for the whole process, so a second `dir` has no effect."""
        if self._dir is not None:
            os.environ.setdefault("TRACKIO_DIR", str(self._dir.absolute()))
        try:
            import trackio
            import trackio.run
            import trackio.utils
            from trackio.sqlite_storage import SQLiteStorage
        except ImportError as error:
            raise ConfigError([f"metric_logging.trackio: trackio is not installed ({error}): pip install 'otel-forge[trackio]'"]) from error
        for module in (trackio, trackio.run, trackio.utils):
            module.print = _quiet  # hints for somebody at a terminal; there is no setting for it
        self._trackio, self._storage = trackio, SQLiteStorage

    def write(self, rows: Sequence[Row]) -> None:
        """Log each row, one call a row; Trackio stores them within half a second."""
        for row in rows:
            if row.revision == 1:
                self._run_of(row).log(self._values(row), step=row.step)

    def _values(self, row: Row) -> dict[str, Any]:
        values: dict[str, Any] = {key: float("nan") if value is None else value for key, value in row.flat().items()}
        for key, value in row.metrics.items():
            if isinstance(value, HistogramValue):
                edges = [min(value.min, *value.bounds), *value.bounds, max(value.max, *value.bounds)]
                values[key] = self._trackio.Histogram(np_histogram=(list(value.counts), edges))
        return values | {ROW: row.key}

    def has(self, row: Row) -> bool | None:
        """Looked up in Trackio's database; None where that is on a server."""
        name = self._name(row)
        if self._config.space_id or os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"):
            return None
        if name not in self._there:
            self._there[name] = {str(log.get(ROW)) for log in self._storage.get_logs(self._config.project, name)}
        return row.revision > 1 or row.key in self._there[name]

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Finish every run, side by side."""
        threads = [threading.Thread(target=run.finish, daemon=True) for run in self._runs.values()]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def location(self) -> str | None:
        """The command that shows it."""
        return f"trackio show --project {self._config.project}"

    # --- runs --------------------------------------------------------------------------------------------------------

    def _run_of(self, row: Row) -> Any:
        name = self._name(row)
        if name not in self._runs:
            # in a context of its own, because trackio ends the run that is the current one in the context
            self._runs[name] = contextvars.Context().run(self._init, name, row)
        return self._runs[name]

    def _init(self, name: str, row: Row) -> Any:
        facts = {"run_id": self._info.run_id, "role": row.role, "rank": row.rank, "world_size": row.world_size}
        return self._trackio.init(
            project=self._config.project,
            name=name,
            group=(self._config.name or self._info.run_id) if self._is_per_rank else None,
            space_id=self._config.space_id,
            config={**self._info.run_config, "otel_forge": facts},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _name(self, row: Row) -> str:
        name = self._config.name or self._info.run_id
        if row.rank is None:
            return name
        return f"{name}-{row.role}_{row.replica}_{row.rank}" if row.replica else f"{name}-{row.role}_{row.rank}"


def _quiet(*values: object, **options: object) -> None:
    pass
