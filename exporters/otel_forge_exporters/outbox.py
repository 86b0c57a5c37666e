"""One backend of one run: a thread that takes rows from the spool, in order, and waits where its place is slow or down. Others never wait for it."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from otel_forge.config import BackendConfig
from otel_forge.errors import BackendTimeout, ConfigError, RunNotEnded
from otel_forge_exporters.backend import Backend, RunInfo, make_backend
from otel_forge_exporters.rows import Row, from_stored
from otel_forge_exporters.shaping import Shaper
from otel_forge_exporters.spool import Spool

logger = logging.getLogger("otel_forge.exporter")

BATCH_ROWS = 500
REWIND_ROWS = 5_000
"""After a restart, so many rows before the last known one are looked up in the backend's place."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
GIVE_UP_WAITING = 5
"""A backend that failed so often in a row (over about 8 s) keeps the end of a run no longer from going on."""


class Outbox:
    """Brings the rows of one mode to one backend."""

    def __init__(self, name: str, config: BackendConfig, run: RunInfo, spool: Spool, work_dir: Path, *, recheck_up_to: int) -> None:
        """`recheck_up_to`: revisions up to this sequence number may have been written before a crash, so the backend is asked for them."""
        self.name = name
        self.mode = config.logging_mode.value
        self.written = 0
        """Rows that this process gave to the backend."""
        self.last_error: str | None = None
        self.has_ended = True
        """False after the backend's run could not be ended: the next process tries it again."""
        self._config = config
        self._run = run
        self._spool = spool
        self._work_dir = work_dir
        self._recheck_up_to = recheck_up_to
        self._known = spool.cursor(run.run_id, name)
        """What an earlier process gave to the backend. Its place may have lost the end (wandb flushes every 2 s), so that is asked for again."""
        self._cursor = self._taken = spool.seq_before(run.run_id, self.mode, self._known, REWIND_ROWS)
        self._shaper = Shaper(config, self._stored)
        self._shaped: list[tuple[int | None, Row]] = []
        """What waits to be written: the sequence number that each row was made at (None: at the end), and the row."""
        self._backend: Backend | None = None
        self._is_open = False
        self._wake = threading.Condition()
        self._pending = True
        self._stopping = False
        self._ending = False
        """Whether the run is over, so that steps which wait to be merged with later ones have to be written."""
        self._broken = False
        self._hangs = False
        self._failures = 0
        """How often writing has failed since it last went well."""
        self._thread = threading.Thread(target=self._loop, name=f"otel-forge-{name}", daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def wake(self) -> None:
        """Say that there are new rows."""
        with self._wake:
            self._pending = True
            self._wake.notify_all()

    def backlog(self) -> int:
        """Rows that are not written yet; a backend that can never be opened has none."""
        return 0 if self._broken else self._spool.pending(self._run.run_id, self.mode, self._cursor)

    def is_worth_waiting_for(self) -> bool:
        """Whether there are rows that it will soon have: not when it hangs or fails time after time. Those rows are kept."""
        return not self._hangs and self._failures < GIVE_UP_WAITING and self.backlog() > 0

    def location(self) -> str | None:
        """Where the rows are."""
        return self._backend.location() if self._backend is not None else None

    def stop(self, exit_code: int | None, timeout_s: float) -> None:
        """Write what there is, as long as that goes without failures, then end the backend's run."""
        with self._wake:
            self._ending = exit_code is not None or not self._spool.is_durable
            self._stopping = self._pending = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        if self._backend is None:
            return
        closing = threading.Thread(target=self._close, args=(exit_code, timeout_s), name=f"otel-forge-{self.name}-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self.has_ended = False
            logger.warning("backend %s of run %s did not end within %.0f s; its rows are on disk", self.name, self._run.run_id, timeout_s)

    def _close(self, exit_code: int | None, timeout_s: float) -> None:
        assert self._backend is not None
        try:
            self._backend.close(exit_code, timeout_s)
        except Exception as error:
            self.has_ended = False
            text = str(error) if isinstance(error, RunNotEnded) else repr(error)
            logger.warning("backend %s of run %s could not be ended: %s", self.name, self._run.run_id, text)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending)
                self._pending = False
            while True:
                try:
                    more = self._write_some()
                    backoff = FIRST_BACKOFF_S
                except ConfigError as error:
                    logger.error("%s", error)
                    self.last_error, self._broken = str(error), True
                    return
                except Exception as error:
                    self._failed(error)
                    with self._wake:
                        if self._stopping or self._wake.wait_for(lambda: self._stopping, backoff):
                            return
                    backoff = min(2 * backoff, MAX_BACKOFF_S)
                    continue
                if not more:
                    break
            if self._stopping:
                return

    def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self.last_error:
            logger.warning("backend %s of run %s: %s; its rows are kept and tried again", self.name, self._run.run_id, text)
        self.last_error = text
        self._failures += 1
        self._hangs = isinstance(error, BackendTimeout)

    def _write_some(self) -> bool:
        """Write one batch; whether there may be more."""
        try:
            more = bool(self._shaped) or self._shape_some()
        except sqlite3.ProgrammingError:  # the spool was closed
            return False
        if self._shaped:
            if self._backend is None:
                self._backend = make_backend(self.name, self._config, self._run, self._work_dir)
            if not self._is_open:
                self._backend.open()
                self._is_open = True
            fresh = [row for seq, row in self._shaped if self._is_missing(seq, row)]
            self._backend.write(fresh)
            self._shaped = []
            self.written += len(fresh)
        self._hangs, self._failures = False, 0
        if not more:
            return False
        self._cursor = self._taken
        if self._cursor > self._known:
            self._spool.move_cursor(self._run.run_id, self.name, self._cursor)
        if self.last_error is not None:
            logger.info("backend %s of run %s works again", self.name, self._run.run_id)
            self.last_error = None
        return True

    def _shape_some(self) -> bool:
        """Take the next revisions from the spool; whether there were any. At the end of the run, what waited for later steps comes last."""
        stored = self._spool.rows_after(self._run.run_id, self.mode, self._cursor, BATCH_ROWS)
        for item in stored:
            self._shaped += [(item.seq, row) for row in self._shaper.take(item.seq, from_stored(item.row))]
            self._taken = item.seq
        if not stored and self._ending:
            self._shaped = [(None, row) for row in self._shaper.rest()]
        return bool(stored)

    def _stored(self, row_keys: Sequence[str], before: int | None) -> list[Row]:
        return [from_stored(item.row) for item in self._spool.revisions_of(self._run.run_id, row_keys, before)]

    def _is_missing(self, seq: int | None, row: Row) -> bool:
        """Whether the backend has to get a row: surely when nobody gave it, else when the backend says that it is not there."""
        if seq is not None and seq > max(self._recheck_up_to, self._known):
            return True
        assert self._backend is not None
        has = self._backend.has(row)
        return not has if has is not None else seq is None or seq > self._known


def end_all(outboxes: Sequence[Outbox], exit_code: int | None, timeout_s: float) -> None:
    """End several outboxes side by side, within the time."""
    threads = [threading.Thread(target=outbox.stop, args=(exit_code, timeout_s), daemon=True) for outbox in outboxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s + 1)
