"""A backend of the user's own: found by a dotted path or an entry point, and called so that it can hurt nobody else.

Its class is either a `Backend` (rows, see backend.py) or torchforge's `LoggerBackend` (metrics, see logger_backend.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import ENTRY_POINTS, CustomConfig
from otel_forge.errors import BackendTimeout, ConfigError
from otel_forge_exporters.backend import Backend, RunInfo
from otel_forge_exporters.guard import Guard
from otel_forge_exporters.logger_backend import LoggerBackends
from otel_forge_exporters.rows import Row

ROWS_A_CALL = 50
"""So many rows get one `call_timeout_s`."""


class OwnBackend:
    """Every call of the user's class runs on a thread of its own, with a time limit (`call_timeout_s`)."""

    def __init__(self, name: str, config: CustomConfig, run: RunInfo, work_dir: Path) -> None:
        self._name = name
        self._config = config
        self._run = run
        self._work_dir = work_dir
        self._guard = Guard(name, config.call_timeout_s)
        self._inner: Backend | None = None

    def open(self) -> None:
        """Import the class, make it and open it. Raises ConfigError when it is not found, or is no backend."""
        kind = self._guard.call("import", _load, self._name, self._config.class_)
        if hasattr(kind, "log_batch"):
            options = self._config.model_dump(mode="json", by_alias=True, exclude={"class_"})
            inner: Backend = LoggerBackends(kind, options, self._guard)
        else:
            inner = _Guarded(self._guard.call("__init__", kind, self._config, self._run, self._work_dir), self._guard)
        inner.open()
        self._inner = inner

    def write(self, rows: Sequence[Row]) -> None:
        """Hand them over."""
        assert self._inner is not None
        self._inner.write(rows)

    def has(self, row: Row) -> bool | None:
        """What the class says."""
        assert self._inner is not None
        return self._inner.has(row)

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """End it, unless it hangs: that is not waited for."""
        try:
            if self._guard.hangs:
                raise BackendTimeout("it hangs, and is left alone")
            if self._inner is not None:
                self._inner.close(exit_code, timeout_s)
        finally:
            self._guard.stop(min(timeout_s, self._config.call_timeout_s))

    def location(self) -> str | None:
        """What the class said last."""
        return self._inner.location() if self._inner is not None else None


class _Guarded:
    """A `Backend` behind a guard."""

    def __init__(self, backend: Backend, guard: Guard) -> None:
        self._backend = backend
        self._guard = guard
        self._location: str | None = None
        self._done: set[tuple[str, int]] = set()
        """Rows of a batch that failed in the middle, so that they are not written again."""

    def open(self) -> None:
        self._guard.call("open", self._backend.open)
        self._location = self._guard.call("location", self._backend.location)

    def write(self, rows: Sequence[Row]) -> None:
        waiting = [row for row in rows if (row.key, row.revision) not in self._done]
        for start in range(0, len(waiting), ROWS_A_CALL):
            some = waiting[start : start + ROWS_A_CALL]
            self._guard.call(f"write {some[0].key} r{some[0].revision} and {len(some) - 1} more", self._backend.write, some)
            self._done.update((row.key, row.revision) for row in some)
        self._done.clear()
        if waiting:
            self._location = self._guard.call("location", self._backend.location)

    def has(self, row: Row) -> bool | None:
        found: bool | None = self._guard.call(f"has {row.key} r{row.revision}", self._backend.has, row)
        return found

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        self._guard.call("close", self._backend.close, exit_code, timeout_s, timeout_s=timeout_s)

    def location(self) -> str | None:
        return self._location


def _load(name: str, path: str | None) -> Any:
    """The class of a dotted path `package.module:Class` or, without one, of the entry point of that name."""
    try:
        if path is None:
            (found,) = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
            path = found.value
            kind = found.load()
        else:
            module, _, attribute = path.partition(":")
            kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError([f"metric_logging.{name}: {path or 'its entry point'} cannot be loaded ({error})"]) from error
    missing = [method for method in ("open", "write", "has", "close", "location") if not hasattr(kind, method)]
    lacks = [method for method in ("init", "finish") if not hasattr(kind, method)] if hasattr(kind, "log_batch") else missing
    if lacks or not callable(kind):
        raise ConfigError([f"metric_logging.{name}: {path} is neither a Backend nor a LoggerBackend: it lacks {', '.join(lacks) or 'a constructor'}"])
    return kind
