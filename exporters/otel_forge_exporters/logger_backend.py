"""torchforge's interface of a metric backend, so that one written for it works here unchanged; and what calls it with rows.

A backend need not derive from `LoggerBackend`: a class with a method `log_batch` is one. Each method may be plain or `async`.
"""

from __future__ import annotations

import enum
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otel_forge.metrics import Reduce
from otel_forge_exporters.guard import Guard
from otel_forge_exporters.rows import Row


class BackendRole(str, enum.Enum):
    """What an instance is for."""

    LOCAL = "local"
    """One member's rows, in the per-rank modes."""
    GLOBAL = "global"
    """The rows reduced over all ranks; in a per-rank mode, the one that secondary instances get their metadata from."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of one key."""

    key: str
    value: float
    """NaN where a value was not finite."""
    reduction: Reduce | None
    """How it was reduced; None for what was not: a single record, a quantile, a mark of otel-forge."""
    timestamp: float
    """Seconds since 1970."""


class LoggerBackend:
    """A place for metrics of one run (global), or of one member (per-rank modes). Override what you need; every method may be `async`."""

    def __init__(self, logger_backend_config: dict[str, Any]) -> None:
        """The backend's section of the configuration: `logging_mode` and every key of your own."""
        self.logger_backend_config = logger_backend_config

    def init(
        self, role: BackendRole, primary_logger_metadata: dict[str, Any] | None = None, process_name: str | None = None
    ) -> Awaitable[None] | None:
        """Get ready. `process_name` is the member's `role_replica_rank`; None for the global instance. May raise: a new instance is tried later."""
        return None

    def log_batch(self, metrics: list[Metric], global_step: int, *args: Any, **kwargs: Any) -> Awaitable[None] | None:
        """The metrics of one step. May raise: the same step comes again later."""
        return None

    def log_stream(self, metric: Metric, global_step: int, *args: Any, **kwargs: Any) -> Awaitable[None] | None:
        """One record, in the mode per_rank_no_reduce."""
        return None

    def finish(self) -> Awaitable[None] | None:
        """The run is over, or this process is."""
        return None

    def get_metadata_for_secondary_ranks(self) -> dict[str, Any] | None:
        """With `per_rank_share_run: true` the global instance is asked for this, and every other one gets it as `primary_logger_metadata`."""
        return None


class LoggerBackends:
    """The instances of one run: the global one, or one for each member."""

    def __init__(self, kind: Callable[[dict[str, Any]], Any], options: Mapping[str, Any], guard: Guard) -> None:
        self._kind = kind
        self._options = dict(options)
        self._guard = guard
        self._is_global = options.get("logging_mode") == "global_reduce"
        self._instances: dict[str | None, Any] = {}
        """By `process_name`; None is the global one."""
        self._metadata: dict[str, Any] = {}
        self._done: set[tuple[str, int]] = set()
        """Rows of a batch that failed in the middle, so that they are not logged again."""
        self._is_ending = False

    def open(self) -> None:
        """Make the global instance, where there is one; a member's is made with its first row."""
        if self._is_global:
            self._instance(None, BackendRole.GLOBAL)
        elif self._options.get("per_rank_share_run"):
            primary = self._instance(None, BackendRole.GLOBAL)
            self._metadata = dict(self._guard.call("get_metadata_for_secondary_ranks", primary.get_metadata_for_secondary_ranks) or {})

    def write(self, rows: Sequence[Row]) -> None:
        """One call for each row."""
        for row in rows:
            if (row.key, row.revision) not in self._done:
                if self._is_ending:
                    raise RuntimeError("it has been ended")
                self._log(row)
                self._done.add((row.key, row.revision))
        self._done.clear()

    def _log(self, row: Row) -> None:
        instance = self._instance(None, BackendRole.GLOBAL) if self._is_global else self._instance(_process_name(row), BackendRole.LOCAL)
        metrics = _metrics(row)
        if row.sequence is None:
            self._guard.call(f"log_batch {row.key} r{row.revision}", instance.log_batch, metrics, row.step)
        elif metrics:
            self._guard.call(f"log_stream {row.key}", instance.log_stream, metrics[0], row.step)

    def _instance(self, process_name: str | None, role: BackendRole) -> Any:
        if process_name not in self._instances:
            start = _starter(self._kind, dict(self._options), role, dict(self._metadata), process_name)
            self._instances[process_name] = self._guard.call(f"init {process_name or role.value}", start)
        return self._instances[process_name]

    def has(self, row: Row) -> bool | None:
        """The interface has no way to tell: after a crash a few steps may be logged twice."""
        return None

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Finish every instance within the time, the one that others depend on last."""
        self._is_ending = True
        deadline = time.monotonic() + timeout_s
        problems = []
        for name in sorted(self._instances, key=lambda name: (name is None, name)):
            try:
                self._guard.call(f"finish {name or 'global'}", self._instances[name].finish, timeout_s=max(deadline - time.monotonic(), 0.1))
            except Exception as error:
                problems.append(f"{name or 'global'}: {error!r}")
        if problems:
            raise RuntimeError(f"{len(problems)} of {len(self._instances)} instances: {'; '.join(problems[:3])}")

    def location(self) -> str | None:
        """Unknown."""
        return None


def _starter(
    kind: Callable[[dict[str, Any]], Any], options: dict[str, Any], role: BackendRole, metadata: dict[str, Any], process_name: str | None
) -> Callable[[], Awaitable[Any]]:
    async def start() -> Any:
        instance = kind(options)
        given = {"role": role, "primary_logger_metadata": metadata, "process_name": process_name}
        result = instance.init(**_taken(instance.init, given))
        if inspect.isawaitable(result):
            await result
        return instance

    return start


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes: older backends know no `process_name`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _process_name(row: Row) -> str:
    return f"{row.role}_{row.replica or 0}_{row.rank}"


def _metrics(row: Row) -> list[Metric]:
    by_name = {reduce.value: reduce for reduce in Reduce}
    return [
        Metric(key, math.nan if value is None else value, by_name.get(str(row.parts.get(key, ("",))[0])), row.time_unix)
        for key, value in row.flat().items()
    ]
