"""What a backend is, and how one is found by its name. It must not import any of them before it is asked to."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from otel_forge.config import BackendConfig, CustomConfig
from otel_forge.errors import ConfigError
from otel_forge_exporters.rows import Row


@dataclass
class RunInfo:
    """What is known of a run; it grows while packets arrive, and backends see the latest."""

    run_id: str
    run_config: dict[str, Any] = field(default_factory=dict)
    """The configuration that rank 0 gave to `init(run_config=…)` or `set_run_config`."""
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`role/replica.rank` → its hello: host, pid, device, start time, world size, …"""
    wandb_run_id: str | None = None
    """WANDB_RUN_ID of the training's environment: names the global run only."""
    wandb_name: str | None = None
    namespace: str | None = None


def run_dir(work_dir: Path, run_id: str) -> Path:
    """Where files of a run are kept when no path is configured."""
    return work_dir / "otel-forge-runs" / run_id


class Backend(Protocol):
    """A place for rows. One instance per run and configured name; every call comes from one thread, its own."""

    def __init__(self, config: Any, run: RunInfo, work_dir: Path) -> None:
        """`config` is the backend's section, `work_dir` what relative paths are relative to. Must not block."""

    def open(self) -> None:
        """Get ready to write. May raise: it is tried again later, the rows wait."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows in order. May raise: the same rows come again later."""

    def has(self, row: Row) -> bool | None:
        """After a crash: whether this row and revision was already written. None: this place cannot tell."""

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """End the run within the time; `exit_code` None: the run goes on later, in another process."""

    def location(self) -> str | None:
        """Where the rows can be looked at: a path or a URL."""


_BUILT_IN = {
    "jsonl": "otel_forge_exporters.jsonl:JsonlBackend",
    "console": "otel_forge_exporters.console:ConsoleBackend",
    "wandb": "otel_forge_exporters.wandb:WandbBackend",
    "tensorboard": "otel_forge_exporters.tensorboard:TensorboardBackend",
    "otlp": "otel_forge_exporters.otlp:OtlpBackend",
    "parquet": "otel_forge_exporters.parquet:ParquetBackend",
    "mlflow": "otel_forge_exporters.mlflow:MlflowBackend",
    "trackio": "otel_forge_exporters.trackio:TrackioBackend",
}
_OWN = "otel_forge_exporters.own:OwnBackend"


def make_backend(name: str, config: BackendConfig, run: RunInfo, work_dir: Path) -> Backend:
    """The backend of a configured name. Raises ConfigError when its package is not installed."""
    is_own = isinstance(config, CustomConfig)
    module, _, attribute = (_OWN if is_own else _BUILT_IN[name]).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError([f"metric_logging.{name}: it cannot be loaded ({error}): pip install 'otel-forge[{name}]'"]) from error
    backend: Backend = found(name, config, run, work_dir) if is_own else found(config, run, work_dir)
    return backend
