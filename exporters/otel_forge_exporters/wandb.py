"""Rows as wandb runs: one process owns every run. The step is a metric of its own, so that late rows are kept and wandb's counter does not matter."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import WandbConfig
from otel_forge.errors import ConfigError
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue, Row
from otel_forge_exporters.wandb_files import is_finished, logged_rows

AXIS = "global_step"
INIT_TIMEOUT_S = 30
LOG_CLOSED_WITHIN_S = 10.0
"""`finish` may return before wandb-core has written the end of its log; who reopens the run reads that log."""
SUMMARY_EVERY_S = 10.0
"""A summary costs a record for each key; the highest step's is written so often, and at the end."""
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "x_disable_stats": True,  # the exporter is not where the GPUs are
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "symlink": False,
    "init_timeout": INIT_TIMEOUT_S,
    "stop_fn": lambda: None,  # the web page's stop button would raise KeyboardInterrupt in this process
    "x_transaction_log_flush_interval": 2.0,
}
_import_lock = threading.Lock()


class WandbBackend:
    """The runs of one otel-forge run: one, or in per-rank modes one for each member."""

    def __init__(self, config: WandbConfig, run: RunInfo, work_dir: Path) -> None:
        self._config = config
        self._info = run
        self._dir = Path(config.dir or os.environ.get("WANDB_DIR") or work_dir)
        if not self._dir.is_absolute():
            self._dir = work_dir / self._dir
        self._per_rank = config.logging_mode.value != "global_reduce" and not config.per_rank_share_run
        self._share = config.logging_mode.value != "global_reduce" and config.per_rank_share_run
        self._wandb: Any = None
        self._runs: dict[str, _OpenRun] = {}
        self._seen: dict[str, set[tuple[str, int]]] = {}

    def open(self) -> None:
        """Import wandb; the runs are opened by their first rows."""
        with _import_lock:
            os.environ.pop("WANDB_SERVICE", None)
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else the user's OTLP headers travel to the W&B server
            try:
                import wandb
            except ImportError as error:
                raise ConfigError([f"metric_logging.wandb: wandb is not installed ({error}): pip install 'otel-forge[wandb]'"]) from error
            self._wandb = wandb
        self._dir.mkdir(parents=True, exist_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Log each row, one call a row."""
        for row in rows:
            self._run_of(row).log(row)

    def has(self, row: Row) -> bool | None:
        """Looked up in the transaction logs that earlier processes left; None for an online run whose log is not here."""
        run_id = self._run_id(row)
        if run_id not in self._seen:
            self._seen[run_id] = set(logged_rows(self._dir, run_id))
        return (row.key, row.revision) in self._seen[run_id]

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Finish every run, side by side. `exit_code` None: the run goes on later, in another process, under the same id."""
        threads = [threading.Thread(target=run.finish, args=(exit_code or 0,), daemon=True) for run in self._runs.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(min(timeout_s, self._config.finish_timeout))
        self._runs.clear()

    def location(self) -> str | None:
        """Where the first run is: its directory, or its page."""
        first = next(iter(self._runs.values()), None)
        return first.location() if first else None

    # --- runs --------------------------------------------------------------------------------------------------------

    def _run_of(self, row: Row) -> _OpenRun:
        run_id = self._run_id(row)
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _OpenRun(self._init(row, run_id), member_key=_member(row) if self._share else None)
        return run

    def _run_id(self, row: Row) -> str:
        """Deterministic, so that a restarted exporter opens the same run; letters, digits, `-`, `_` and `.` only."""
        if not self._per_rank:
            own = self._config.id or (self._info.wandb_run_id if not self._share else None)
            base = own or self._info.run_id
            return base if own or not self._share else f"{base}-ranks"
        return _short(f"{self._config.id or self._info.run_id}-{_member(row)}")

    def _init(self, row: Row, run_id: str) -> Any:
        config = self._config
        settings = {name: value for name, value in _SETTINGS.items() if name in self._wandb.Settings.model_fields}
        options: dict[str, Any] = {
            "entity": config.entity,
            "project": config.project[:128],
            "dir": str(self._dir),
            "id": run_id,
            "name": self._name(row),
            "group": config.group or (self._info.run_id if self._per_rank else None),
            "tags": [tag[:64] for tag in config.tags] or None,
            "notes": config.notes,
            "job_type": config.job_type or (row.role if self._per_rank else None),
            "config": self._run_config(row),
            "mode": _mode(config),
            "resume": "allow",
            "reinit": "create_new",
            "settings": self._wandb.Settings(**settings),
        }
        with _without_run_variables():
            return self._wandb.init(**{**options, **config.extra})

    def _name(self, row: Row) -> str:
        given = self._config.name or (None if self._per_rank else self._info.wandb_name) or self._info.run_id
        fields = {"name": self._info.run_id, "role": row.role, "rank": "" if row.rank is None else row.rank, "host": self._host(row)}
        try:
            named = given.format(**fields)
        except (KeyError, IndexError, ValueError):
            named = given
        return named if not self._per_rank or named != given else f"{named}-{_member(row)}"

    def _host(self, row: Row) -> str:
        member = self._info.members.get(f"{row.role}/{row.replica or 0}.{row.rank or 0}", {})
        return str(member.get("host") or socket.gethostname())

    def _run_config(self, row: Row) -> dict[str, Any]:
        facts = {
            "run_id": self._info.run_id,
            "world_size": row.world_size,
            "members": {
                name: {key: hello.get(key) for key in ("host", "device", "pid")} for name, hello in sorted(self._info.members.items())[:1024]
            },
        }
        if self._per_rank:
            facts |= {"role": row.role, "rank": row.rank, "replica": row.replica, "host": self._host(row)}
        return {**self._info.run_config, "otel_forge": facts}


class _OpenRun:
    """One live wandb run: which keys it knows, and its summary from the highest step."""

    def __init__(self, run: Any, *, member_key: str | None) -> None:
        self._run = run
        self._defined: set[str] = set()
        self._summary: dict[str, tuple[tuple[int, int], float]] = {}
        """Key → ((attempt, step), value) of the highest step so far."""
        self._summarized = time.monotonic()
        self._shared = member_key is not None
        run.define_metric(AXIS, hidden=True, summary="none")

    def log(self, row: Row) -> None:
        suffix = f"/{_member(row)}" if self._shared else ""
        values = {f"{key}{suffix}": value for key, value in row.flat().items() if value is not None}
        histograms = {f"{key}{suffix}": self._histogram(value) for key, value in row.metrics.items() if isinstance(value, HistogramValue)}
        for key in [*values, *histograms]:
            if key not in self._defined:
                self._defined.add(key)
                self._run.define_metric(_escaped(key), step_metric=AXIS, step_sync=False, summary="none")
        marks: dict[str, Any] = {AXIS: row.step, "_timestamp": row.time_unix, "forge/row": row.key, "forge/row_revision": row.revision}
        if row.attempt:
            marks["forge/attempt"] = row.attempt
        self._run.log({**values, **histograms, **marks})
        order = (row.attempt, row.step)
        for key, value in values.items():
            if key not in self._summary or order >= self._summary[key][0]:
                self._summary[key] = (order, value)
        if time.monotonic() - self._summarized >= SUMMARY_EVERY_S:
            self._summarize()

    def _summarize(self) -> None:
        self._summarized = time.monotonic()
        self._run.summary.update({key: value for key, (_, value) in self._summary.items()})

    def _histogram(self, value: HistogramValue) -> Any:
        import numpy as np
        import wandb

        edges = [value.min, *value.bounds, value.max]
        edges = [max(edges[: index + 1]) for index in range(len(edges))]  # wandb wants ascending edges also where a value is outside of the bounds
        return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(edges)))

    def finish(self, exit_code: int) -> None:
        self._summarize()
        settings = self._run.settings
        log = Path(settings.sync_dir) / f"run-{self._run.id}.wandb"
        self._run.finish(exit_code=exit_code)
        deadline = time.monotonic() + LOG_CLOSED_WITHIN_S
        while log.parent.exists() and not is_finished(log) and time.monotonic() < deadline:
            time.sleep(0.01)

    def location(self) -> str | None:
        settings = self._run.settings
        return str(Path(settings.sync_dir)) if self._run.offline else str(self._run.url)


def _member(row: Row) -> str:
    replica = f"{row.replica}_" if row.replica else ""
    return f"{row.role}_{replica}{row.rank}"


def _short(run_id: str) -> str:
    if len(run_id) <= 120:
        return run_id
    return f"{run_id[:100]}-{hashlib.blake2b(run_id.encode(), digest_size=6).hexdigest()}"


def _escaped(key: str) -> str:
    """A key as define_metric takes it: a star anywhere but at the end is refused there, and one at the end is a pattern."""
    return key.replace("*", "_")


def _mode(config: WandbConfig) -> str:
    """What the configuration says, else WANDB_MODE, else online with an API key and offline without."""
    if config.mode:
        return config.mode
    given = os.environ.get("WANDB_MODE")
    if given:
        return given
    has_key = bool(os.environ.get("WANDB_API_KEY")) or _in_netrc()
    return "online" if has_key else "offline"


def _in_netrc() -> bool:
    import netrc

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC") or str(Path.home() / ".netrc")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@contextlib.contextmanager
def _without_run_variables() -> Iterator[None]:
    """The environment's run id, name and group would name every run that this process opens."""
    hidden: Mapping[str, str] = {name: os.environ.pop(name) for name in ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RUN_GROUP") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
