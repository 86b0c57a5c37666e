"""Rows as wandb runs: one process owns every run. Which run a row belongs to, and how a run is opened, opened again and ended."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import WandbConfig
from otel_forge.errors import BackendTimeout, RunNotEnded, RunNotOpened
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import Row
from otel_forge_exporters.wandb_core import core
from otel_forge_exporters.wandb_files import Past, past, run_dirs, wait_for_orphans
from otel_forge_exporters.wandb_options import RunOptions, mode_of, without_run_variables
from otel_forge_exporters.wandb_run import OpenRun, Recent

logger = logging.getLogger("otel_forge.exporter")

KILLED = 255
"""The exit code that wandb's own client gives an interrupted script."""
GRACE_S = 3.0
"""wandb keeps to the time for finishing by itself; so much later it is left alone."""
SYNC = "wandb sync --include-online"
SIGNALS = (130, 137, 143)
"""Exit codes of a program that SIGINT, SIGKILL or SIGTERM has ended."""


class WandbBackend:
    """The runs of one otel-forge run: one, or in per-rank modes one for each member."""

    def __init__(self, config: WandbConfig, run: RunInfo, work_dir: Path) -> None:
        self._config = config
        self._options = RunOptions(config, run)
        self._mode = mode_of(config)
        self._dir = work_dir / (config.dir or os.environ.get("WANDB_DIR") or "")
        self._wandb: Any = None
        self._runs: dict[str, OpenRun] = {}
        self._last_row: dict[str, Row] = {}
        self._lost: dict[str, Recent] = {}
        """What was given to runs that wandb-core took with it, until they are open again."""
        self._seen: dict[str, Past] = {}
        self._ended: set[str] = set()
        self._failures: dict[str, str] = {}
        """Run → why it could not be ended."""
        self._half_written: set[tuple[str, int]] = set()
        """Rows of a batch in which a later one failed: the batch comes again."""

    def open(self) -> None:
        """Import wandb; the runs are opened by their first rows."""
        if self._mode == "disabled":
            return
        self._wandb = core.load()
        self._dir.mkdir(parents=True, exist_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Log each row, one call a row. A run that wandb-core took with it, or that is uploaded no more, is opened again first."""
        if self._mode == "disabled":
            return
        self._heed()
        done = set(self._half_written)
        for row in rows:
            if (row.key, row.revision) in done or self._is_replaced(row):
                continue
            self._write(row)
            self._half_written.add((row.key, row.revision))
        self._half_written.clear()

    def _is_replaced(self, row: Row) -> bool:
        """Whether a later attempt has taken the row's run over."""
        run = self._runs.get(self._options.run_id(row))
        return self._config.resume == "overwrite" and run is not None and row.attempt < run.attempt

    def _write(self, row: Row) -> None:
        run = self._run_of(row)
        try:
            run.log(row)
        except Exception:
            if not core.is_dead():
                run.recent.pop()
                raise
            self._drop_dead()
            self._run_of(row)  # puts back what was lost, this row too

    def has(self, row: Row) -> bool | None:
        """From the logs that earlier processes left; of an online run, also from how many rows its server has."""
        if self._mode == "disabled":
            return True
        run_id = self._options.run_id(row)
        if self._by_position(self._mode) and run_id not in self._runs:
            self._run_of(row)
        if run_id not in self._seen:
            self._seen[run_id] = past(self._dir, run_id, row.attempt if self._config.resume == "overwrite" else None)
        if (row.key, row.revision) in self._seen[run_id].rows:
            return True
        run = self._runs.get(run_id)
        if run is None or not run.unlogged:
            return False
        run.unlogged -= 1  # the rows come in the order in which they were written
        return True

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Finish every run, side by side. `exit_code` None: the run goes on later, in another process, under the same id."""
        deadline = time.monotonic() + min(timeout_s, self._config.finish_timeout + GRACE_S)
        code = KILLED if exit_code in SIGNALS or (exit_code or 0) < 0 else exit_code or 0
        runs = dict(self._runs)
        known = list(runs)
        if self._drop_dead():
            runs = self._open_again(list(runs))
        threads = [threading.Thread(target=self._finish, args=(run_id, run, code), daemon=True) for run_id, run in runs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._runs.clear()
        core.forget_if_dead()
        unsent = [run_id for run_id in known if run_id not in self._ended]
        if unsent:
            reasons = "; ".join(dict.fromkeys(self._failures.values())) or "they did not end in time"
            raise RunNotEnded(
                f"{len(unsent)} of {len(known)} wandb runs were not uploaded whole ({reasons}). All rows are on disk in {self._dir / 'wandb'}: "
                f"the next exporter on this state directory sends what is missing; or `{SYNC} DIRECTORY`, which may repeat rows that had arrived"
            )

    def _finish(self, run_id: str, run: OpenRun, code: int) -> None:
        try:
            run.finish(code)
            failure = run.upload_failure()
        except TimeoutError:
            failure = "the time for finishing is over"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if failure is None:
            self._ended.add(run_id)
        else:
            self._failures[run_id] = failure

    def location(self) -> str | None:
        """Where the first run is: its directory, or its page."""
        first = next(iter(self._runs.values()), None)
        return first.location() if first else None

    # --- runs --------------------------------------------------------------------------------------------------------

    def _heed(self) -> None:
        """What has happened to the runs since the last rows."""
        self._drop_dead()
        for run_id, run in list(self._runs.items()):
            if not run.stopped.is_set():
                continue
            failure = run.upload_failure()
            if failure is not None:
                self._drop(run_id, failure)
            elif run.is_stopped_from_the_web():
                logger.warning("wandb run %s: its Stop button was pressed. That stops no training here; rows are still uploaded", run_id)

    def _drop(self, run_id: str, failure: str) -> None:
        """Let go of a run that wandb-core does not upload any more; opened again, it gets what the server lacks."""
        run = self._runs.pop(run_id)
        logger.info("wandb run %s is uploaded no more (%s): it is opened again", run_id, failure)
        try:
            run.finish(1)
        except Exception as error:
            logger.info("wandb run %s could not be ended: %r", run_id, error)
        self._lost[run_id] = run.recent

    def _drop_dead(self) -> bool:
        """Let go of runs whose wandb-core has ended, and start another one if nobody has; whether there were any."""
        if core.is_dead():
            logger.warning("wandb-core has ended unexpectedly: it is started again, and its runs are opened again")
            core.revive()
        dead = {run_id: run for run_id, run in self._runs.items() if run.generation != core.generation}
        for run_id, run in dead.items():
            self._lost.setdefault(run_id, deque()).extend(run.recent)
            del self._runs[run_id]
        return bool(dead)

    def _open_again(self, run_ids: Sequence[str]) -> dict[str, OpenRun]:
        """Those that can be."""
        for run_id in run_ids:
            try:
                self._run_of(self._last_row[run_id])
            except Exception as error:
                self._failures[run_id] = str(error)
        return dict(self._runs)

    def _run_of(self, row: Row) -> OpenRun:
        run_id = self._options.run_id(row)
        self._last_row[run_id] = row
        run = self._runs.get(run_id)
        if run is not None and self._config.resume == "overwrite" and row.attempt > run.attempt:
            del self._runs[run_id]
            self._finish(run_id, run, 0)
            run = None
        return run if run is not None else self._open(row, run_id)

    def _open(self, row: Row, run_id: str) -> OpenRun:
        if run_dirs(self._dir, run_id):
            wait_for_orphans()
        known = past(self._dir, run_id, row.attempt if self._config.resume == "overwrite" else None)
        stopped = threading.Event()
        live, mode = self._init(row, run_id, known, stopped)
        run = OpenRun(
            live,
            in_keys=self._options.in_keys,
            generation=core.generation,
            attempt=row.attempt,
            stopped=stopped,
            config=functools.partial(self._options.run_config, row),
        )
        self._runs[run_id] = run
        self._seen[run_id] = known
        again = run.restore(known, self._lost.pop(run_id, deque()), by_position=self._by_position(mode))
        if again:
            logger.info("wandb run %s: %d rows that had been lost were sent again", run_id, again)
        return run

    def _by_position(self, mode: str) -> bool:
        """Whether a run's position at the server tells which rows it has: not where other processes write to it too."""
        return mode == "online" and not self._config.shared

    def _init(self, row: Row, run_id: str, known: Past, stopped: threading.Event) -> tuple[Any, str]:
        """A run of wandb, and whether it is online or offline."""
        if self._mode != "online" or not self._config.offline_fallback:
            return self._call_init(row, run_id, known, stopped, self._mode), self._mode
        try:
            return self._call_init(row, run_id, known, stopped, "online"), "online"
        except (RunNotOpened, BackendTimeout) as error:
            logger.warning("%s; runs are written offline from here on: wandb sync %s", error, self._dir / "wandb" / "offline-run-*")
            self._mode = "offline"
            return self._call_init(row, run_id, known, stopped, "offline"), "offline"

    def _call_init(self, row: Row, run_id: str, known: Past, stopped: threading.Event, mode: str) -> Any:
        arguments = self._options.arguments(row, mode=mode)
        arguments |= {"id": run_id, "dir": str(self._dir), "resume": self._resume(row, known)}
        if {"resume_from", "fork_from"} & arguments.keys():
            del arguments["resume"]  # wandb takes one of them
        settings = {"stop_fn": lambda: stopped.set()} | self._options.settings(self._wandb.Settings.model_fields)
        before = set(run_dirs(self._dir, run_id))
        started = time.monotonic()
        try:
            with without_run_variables():
                return self._wandb.init(**arguments, settings=self._wandb.Settings(**settings))
        except Exception as error:
            core.release(run_id)
            for left in set(run_dirs(self._dir, run_id)) - before:  # it holds no row
                shutil.rmtree(left, ignore_errors=True)
            if time.monotonic() - started >= self._config.init_timeout:
                raise BackendTimeout(f"run {run_id} could not be opened within {self._config.init_timeout:g} s") from error
            raise RunNotOpened(f"run {run_id} could not be opened: {error}") from error

    def _resume(self, row: Row, known: Past) -> str | None:
        """`allow` goes on where the run was; None replaces it, for the first row of an attempt under `resume: overwrite`."""
        return None if self._config.resume == "overwrite" and not known.is_there else "allow"
