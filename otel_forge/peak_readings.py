"""Keeps a program's own readings of peak memory right while the allocator's peaks are reset underneath. It must not know why they are.

A peak "since the scope began" can only be read from the allocator by resetting its peak. That must not lower what `torch.cuda.max_memory_allocated()`
tells the program or another tool, so every reset is preceded by a fold into `_kept`, and torch's reading functions give the larger of both. The
functions are replaced in torch's modules (`torch.cuda.memory`, `torch.cuda`, `torch.accelerator`), through which `max_memory_allocated`,
`max_memory_reserved`, `memory_stats` and `memory_summary` all go. What is not covered: a program that kept `reset_peak_memory_stats` or
`memory_stats_as_nested_dict` itself under a name of its own before tracking began.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[str, ...]


class PeakReadings:
    """The outer fold of every device's peaks, and the functions of torch's modules that respect it. Made once, by the first tracked scope."""

    def __init__(self, module: Any, generic: Any, index_of: Callable[[Any], int], before_reset: Callable[[int], None]) -> None:
        """`before_reset` is called with the device before the program's own reset takes effect."""
        self._index_of = index_of
        self._before_reset = before_reset
        self._raw_read: Callable[[int], dict[str, Any]] = module.memory.memory_stats_as_nested_dict
        self._raw_reset: Callable[[int], None] = module.memory.reset_peak_memory_stats
        self._paths: tuple[Path, ...] = ()
        self._kept: dict[int, dict[Path, int]] = {}
        self._lock = threading.RLock()
        """Around each read with its fold, so that no other thread's reading falls between a fold and a reset."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._replace(module.memory, "memory_stats_as_nested_dict", self._nested)
        self._replace(module.memory, "reset_peak_memory_stats", self._reset_by_program)
        self._replace(module, "memory_stats_as_nested_dict", self._nested)
        self._replace(module, "reset_peak_memory_stats", self._reset_by_program)
        for space in (getattr(generic, "memory", None), generic):
            self._replace(space, "memory_stats", self._flat)
            self._replace(space, "reset_peak_memory_stats", self._reset_by_program)

    def _replace(self, space: Any, name: str, make: Callable[[Any], Any]) -> None:
        found = getattr(space, name, None)
        if found is not None:
            ours = functools.wraps(found)(make(found))
            setattr(space, name, ours)
            self._replaced.append((space, name, found, ours))

    def restore(self) -> None:
        """Give torch its own functions back, unless someone else has replaced ours since."""
        for space, name, found, ours in self._replaced:
            if getattr(space, name) is ours:
                setattr(space, name, found)
        self._replaced.clear()

    # --- for the tracker -------------------------------------------------------------------------------------------

    def read(self, device: int) -> dict[str, Any]:
        """The allocator's own figures, kept for the program's readings."""
        with self._lock:
            stats = self._raw_read(device)
            kept = self._kept.setdefault(device, {})
            for path in self._paths or self._learn(stats):
                peak = _at(stats, path)["peak"]
                if peak > kept.get(path, 0):
                    kept[path] = peak
            return stats

    def reset(self, device: int) -> None:
        """Reset the allocator's peaks and not the program's."""
        self._raw_reset(device)

    def _learn(self, stats: dict[str, Any]) -> tuple[Path, ...]:
        self._paths = tuple(_peak_paths(stats, ()))
        return self._paths

    # --- what torch's functions become -----------------------------------------------------------------------------

    def _nested(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
            with self._lock:
                stats = original(device)
                for path, peak in self._kept_of(device, stats):
                    figures = _at(stats, path)
                    figures["peak"] = max(figures["peak"], peak)
                return stats

        return memory_stats_as_nested_dict

    def _flat(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def memory_stats(device_index: Any = None, /) -> dict[str, Any]:
            with self._lock:
                stats = original(device_index)
                for path, peak in self._kept_of(device_index, stats):
                    key = ".".join((*path, "peak"))
                    stats[key] = max(stats.get(key, 0), peak)
                return stats

        return memory_stats

    def _kept_of(self, device: Any, stats: dict[str, Any]) -> list[tuple[Path, int]]:
        index = self._index(device) if stats else None  # no stats: not initialised, and asking for the current device would do that
        return [] if index is None else list(self._kept.get(index, {}).items())

    def _index(self, device: Any) -> int | None:
        """None for what is no device: then torch's own function says so."""
        try:
            return self._index_of(device)
        except ValueError:
            return None

    def _reset_by_program(self, original: Callable[..., None]) -> Callable[..., None]:
        def reset_peak_memory_stats(device: Any = None) -> None:
            index = self._index(device)
            if index is not None:
                self._before_reset(index)
            with self._lock:
                original(device)
                if index is not None:
                    self._kept.pop(index, None)

        return reset_peak_memory_stats


def _at(stats: dict[str, Any], path: Path) -> dict[str, int]:
    found: Any = stats
    for name in path:
        found = found[name]
    return found  # type: ignore[no-any-return]


def _peak_paths(stats: dict[str, Any], path: Path) -> Iterator[Path]:
    if "peak" in stats:
        yield path
    else:
        for name, inner in stats.items():
            if isinstance(inner, dict):
                yield from _peak_paths(inner, (*path, name))
