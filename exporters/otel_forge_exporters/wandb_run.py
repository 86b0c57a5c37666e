"""One live wandb run: rows in, and what was lost of them put back.

The step is a metric of its own, so that late rows are kept, and wandb's own counter is a mere position.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from otel_forge_exporters.rows import HistogramValue, Row
from otel_forge_exporters.wandb_files import START_FILE, Past, is_finished, upload_failure
from otel_forge_exporters.wandb_options import member_of

AXIS = "global_step"
ROW, REVISION, ATTEMPT = "forge/row", "forge/row_revision", "forge/attempt"
MARKS = (AXIS, "_timestamp", ROW, REVISION, ATTEMPT)
LOG_CLOSED_WITHIN_S = 10.0
"""`finish` may return before wandb-core has written the end of its log; who reopens the run reads that log."""
SUMMARY_EVERY_S = 10.0
"""A summary costs a record for each key; the highest step's is written so often, and at the end."""
RECENT_S = 30.0
"""wandb-core flushes its log every 2 s. Rows of so long ago are on disk even on a machine that is very busy."""

Recent = deque[tuple[float, int, Row]]
"""(when, position, row) of what was given to wandb-core in the last RECENT_S."""


class OpenRun:
    """A run of wandb, from opening to finishing. One thread uses it."""

    def __init__(
        self, run: Any, *, in_keys: bool, generation: int, attempt: int, stopped: threading.Event, config: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`in_keys`: members are told apart by their keys. `stopped` is set by wandb. `config` gives the run's configuration as it is now."""
        self.generation = generation
        self.attempt = attempt
        """That of the row it was opened for."""
        self.stopped = stopped
        self.recent: Recent = deque()
        self.is_offline = bool(run.offline)
        self.unlogged = 0
        """Rows that the server has and no log here: an earlier process was killed before they reached its log."""
        self._run = run
        self._in_keys = in_keys
        self._config = config
        self._config_shown = dict(config())
        self._dir = Path(run.settings.sync_dir)
        self._position = int(run.starting_step or 0)
        self._defined: set[str] = set()
        self._summary: dict[str, tuple[tuple[int, int], float]] = {}
        """Key → ((attempt, step), value) of the highest step so far."""
        self._summarized = time.monotonic()
        self._told_stop = False
        if self._dir.is_dir():
            with contextlib.suppress(OSError):
                (self._dir / START_FILE).write_text(json.dumps({"position": self._position, "attempt": attempt}))
        run.define_metric(AXIS, hidden=True, summary="none")

    # --- rows --------------------------------------------------------------------------------------------------------

    def log(self, row: Row) -> None:
        """Give one row to wandb-core."""
        now = time.monotonic()
        while self.recent and now - self.recent[0][0] > RECENT_S:
            self.recent.popleft()
        suffix = f"/{member_of(row)}" if self._in_keys else ""
        values = {f"{key}{suffix}": value for key, value in row.flat().items() if value is not None}
        histograms = {f"{key}{suffix}": _histogram(value) for key, value in row.metrics.items() if isinstance(value, HistogramValue)}
        marks: dict[str, Any] = {AXIS: row.step, "_timestamp": row.time_unix, ROW: row.key, REVISION: row.revision}
        if row.attempt:
            marks[ATTEMPT] = row.attempt
        self.recent.append((now, self._position, row))
        self._log({**values, **histograms, **marks})
        self._note((row.attempt, row.step), values)
        if now - self._summarized >= SUMMARY_EVERY_S:
            self.summarize()

    def restore(self, past: Past, recent: Recent, *, by_position: bool) -> int:
        """Give again what was lost: rows of the logs that never reached the server, and rows that never reached a log. How many they were.

        `by_position`: the run's position at the server says which rows it has (not so offline, and not where others write too).
        """
        start = self._position
        for logged in past.rows.values():
            self._note((int(logged.values.get(ATTEMPT, 0)), int(logged.values[AXIS])), _numbers(logged.values))
        if by_position:
            self.unlogged = max(0, start - past.end) if past.has_online else 0
        lost = [row for row in past.online.values() if row.position >= start] if by_position else []
        for logged in sorted(lost, key=lambda row: row.position):
            self._log(dict(logged.values))
        missing = [row for _, position, row in recent if (row.key, row.revision) not in past.rows and not (by_position and position < start)]
        if by_position:
            self.unlogged = max(0, self.unlogged - len(recent))  # of the same process: known by their position
        for row in missing:
            self.log(row)
        return len(lost) + len(missing)

    def _log(self, values: dict[str, Any]) -> None:
        for key in values.keys() - self._defined:
            self._defined.add(key)
            if key not in MARKS:
                self._run.define_metric(_escaped(key), step_metric=AXIS, step_sync=False, summary="none")
        self._run.log(values)
        self._position += 1

    def _note(self, order: tuple[int, int], values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if key not in self._summary or order >= self._summary[key][0]:
                self._summary[key] = (order, value)

    def summarize(self) -> None:
        """Write the summary, and the configuration where it has grown."""
        self._summarized = time.monotonic()
        self._run.summary.update({key: value for key, (_, value) in self._summary.items()})
        config = dict(self._config())
        if config != self._config_shown:
            self._config_shown = config
            self._run.config.update(config, allow_val_change=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def upload_failure(self) -> str | None:
        """Why this run is uploaded no more; None while it is."""
        return None if self.is_offline else upload_failure(self._dir)

    def is_stopped_from_the_web(self) -> bool:
        """True once, after somebody has pressed the run's Stop button."""
        if self._told_stop or not self.stopped.is_set():
            return False
        self._told_stop = True
        return True

    def finish(self, exit_code: int) -> None:
        """End the run. Raises TimeoutError when not all of it was uploaded in time, and whatever wandb raises when wandb-core is gone."""
        self.summarize()
        log = self._dir / f"run-{self._run.id}.wandb"
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            deadline = time.monotonic() + LOG_CLOSED_WITHIN_S
            while log.parent.exists() and not is_finished(log) and time.monotonic() < deadline:
                time.sleep(0.01)

    def location(self) -> str:
        """Its directory, or its page."""
        return str(self._dir) if self.is_offline else str(self._run.url)

    @property
    def directory(self) -> Path:
        """What `wandb sync` takes."""
        return self._dir


def _histogram(value: HistogramValue) -> Any:
    import numpy as np
    import wandb

    edges = [value.min, *value.bounds, value.max]
    edges = [max(edges[: index + 1]) for index in range(len(edges))]  # wandb wants ascending edges also where a value is outside of the bounds
    return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(edges)))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in MARKS and isinstance(value, (int, float))}


def _escaped(key: str) -> str:
    """A key as define_metric takes it: a star anywhere but at the end is refused there, and one at the end is a pattern."""
    return key.replace("*", "_")
