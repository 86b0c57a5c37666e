"""Rows as MLflow runs, by a tracking server or a local database. It needs the package mlflow.

MLflow stores a metric that has the same key, step, time and value once, so what is sent again after a crash doubles nothing.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import MlflowConfig
from otel_forge.errors import ConfigError
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import Row

TAG = "otel_forge.run"
"""Names a run of ours, so that a restarted exporter goes on with it."""
METRICS_A_CALL = 1000
PARAMS_A_CALL = 100
"""MLflow refuses more."""
MAX_VALUE = 6000
_NOT_IN_KEYS = re.compile(r"[^\w\-./ :]")


class MlflowBackend:
    """One run; in per-rank modes a run per member, nested below one of the whole. First revisions only: MLflow replaces no value."""

    def __init__(self, config: MlflowConfig, run: RunInfo, work_dir: Path) -> None:
        self._config = config
        self._run = run
        self._uri = config.tracking_uri or f"sqlite:///{work_dir.absolute() / 'mlflow.db'}"
        self._artifacts = None if config.tracking_uri else (work_dir.absolute() / "mlartifacts").as_uri()
        self._mlflow: Any = None
        self._client: Any = None
        self._experiment = ""
        self._runs: dict[str, str] = {}
        """`otel_forge.run` tag → MLflow's run id."""

    def open(self) -> None:
        """Connect, and find or make the experiment."""
        try:
            import mlflow
            import mlflow.entities
        except ImportError as error:
            raise ConfigError([f"metric_logging.mlflow: mlflow is not installed ({error}): pip install 'otel-forge[mlflow]'"]) from error
        self._mlflow = mlflow
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._config.experiment)
        self._experiment = found.experiment_id if found else self._client.create_experiment(self._config.experiment, self._artifacts)

    def write(self, rows: Sequence[Row]) -> None:
        """Send the metrics of each row, many in one call."""
        waiting: dict[str, list[Any]] = {}
        for row in rows:
            if row.revision == 1:
                waiting.setdefault(self._run_of(row), []).extend(self._metrics(row))
        for run_id, metrics in waiting.items():
            for start in range(0, len(metrics), METRICS_A_CALL):
                self._client.log_batch(run_id, metrics=metrics[start : start + METRICS_A_CALL])

    def _metrics(self, row: Row) -> list[Any]:
        time_ms = int(row.time_unix * 1000)
        metric = self._mlflow.entities.Metric
        return [metric(_key(key), math.nan if value is None else float(value), time_ms, row.step) for key, value in row.flat().items()]

    def has(self, row: Row) -> bool | None:
        """Not asked: MLflow leaves out by itself what it has."""
        return row.revision > 1 or None

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """End the runs; they stay open where the run goes on in another process."""
        if exit_code is not None:
            for run_id in reversed(self._runs.values()):
                self._client.set_terminated(run_id, "FAILED" if exit_code else "FINISHED")

    def location(self) -> str | None:
        """The tracking server's address, or the database's."""
        return self._uri

    # --- runs --------------------------------------------------------------------------------------------------------

    def _run_of(self, row: Row) -> str:
        whole = self._open_run(self._run.run_id, self._config.name or self._run.run_id, {})
        if row.rank is None:
            return whole
        member = f"{row.role}_{row.replica}_{row.rank}" if row.replica else f"{row.role}_{row.rank}"
        return self._open_run(f"{self._run.run_id}/{member}", member, {"mlflow.parentRunId": whole, "role": row.role, "rank": str(row.rank)})

    def _open_run(self, name: str, title: str, tags: Mapping[str, str]) -> str:
        if name not in self._runs:
            quoted = name.replace("\\", "\\\\").replace("'", "\\'")
            found = self._client.search_runs([self._experiment], filter_string=f"tags.`{TAG}` = '{quoted}'", max_results=1)
            if found:
                self._runs[name] = found[0].info.run_id
                self._client.update_run(self._runs[name], status="RUNNING")
            else:
                created = self._client.create_run(self._experiment, run_name=title, tags={TAG: name, **tags})
                self._runs[name] = created.info.run_id
                if not tags:
                    self._log_params(created.info.run_id)
        return self._runs[name]

    def _log_params(self, run_id: str) -> None:
        """The run's configuration, flat; what is longer than MLflow takes is cut."""
        param = self._mlflow.entities.Param
        params = [param(_key(key), str(value)[:MAX_VALUE]) for key, value in _flat(self._run.run_config)]
        for start in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_A_CALL])


def _flat(config: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{before}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return found


def _key(key: str) -> str:
    """The key where MLflow allows it, else a cleaned one with a hash, so that two never become one."""
    parts = key.split("/")
    if not _NOT_IN_KEYS.search(key) and len(key) <= 250 and not any(part in ("", ".", "..") for part in parts):
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{_NOT_IN_KEYS.sub('_', key).strip('/.').replace('//', '/')[:230].rstrip('/.')}.{digest}"
