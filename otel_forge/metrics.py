"""`record_metric` and the series it appends to. It must not know steps, packets or the network; importing it loads nothing but the standard library.

Who may touch what: any thread appends to a series' lists; only `drain` removes from their front. Both are single list operations, atomic under the
interpreter's lock, so that no value is lost or taken twice without a lock of ours.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from otel_forge.errors import InvalidValueError, ReductionConflict, UsageError

if TYPE_CHECKING:
    from otel_forge.blocks import Deferred, DeviceBlocks
    from otel_forge.moments import Chunk

logger = logging.getLogger("otel_forge")

MAX_BEFORE_INIT = 100_000
"""Values that one series keeps while nothing takes them (before `init`); the rest is counted as dropped."""
MAX_KEY_LENGTH = 1024


class Reduce(enum.Enum):
    """How the values of one key become one number per step, over all records of all ranks."""

    MEAN = "mean"
    """Sum over count (or, with `weight=`, over the sum of weights) of all records of all ranks."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    COUNT = "count"
    """How many records there were; their values do not matter."""
    STD = "std"
    """Population standard deviation of all records of all ranks, exact; one value gives 0.0."""

    @staticmethod
    def HISTOGRAM(bounds: Any) -> HistogramReduce:
        """Counts per bucket; the row has `key/p50`, `key/p95`, `key/p99`. Bounds are ascending finite numbers."""
        return HistogramReduce(bounds)


class HistogramReduce:
    """The reduction that `Reduce.HISTOGRAM(bounds)` gives; equal bounds give the same object."""

    _made: dict[tuple[float, ...], HistogramReduce] = {}  # noqa: RUF012 - shared on purpose: identity is what the hot path compares
    bounds: tuple[float, ...]
    value = "histogram"
    name = "HISTOGRAM"

    def __new__(cls, bounds: Any) -> HistogramReduce:
        edges = tuple(float(bound) for bound in bounds)
        if not edges or any(not math.isfinite(edge) for edge in edges) or any(low >= high for low, high in itertools.pairwise(edges)):
            raise ValueError(f"Reduce.HISTOGRAM: bounds must be ascending finite numbers, got {edges}")
        made = cls._made.get(edges)
        if made is None:
            made = super().__new__(cls)
            made.bounds = edges
            made = cls._made.setdefault(edges, made)
        return made

    def __repr__(self) -> str:
        return f"Reduce.HISTOGRAM({list(self.bounds)})"


Reduction: TypeAlias = "Reduce | HistogramReduce"


class Late(Protocol):
    """A measurement whose number is known later, without a kernel that writes it: a device time."""

    stamp: Any
    """When it was recorded, for the backends that want every record."""

    def is_ready(self) -> bool:
        """Whether `read` has its final answer."""
        ...

    def read(self) -> tuple[float | None, None]:
        """(the number, no weight); None where it could not be had. Waits for nothing."""
        ...


class Series:
    """The values of one key and reduction that were recorded and not yet taken."""

    __slots__ = ("chunks", "deferred", "key", "reduction", "values", "weighted")

    def __init__(self, key: str, reduction: Reduction) -> None:
        self.key = key
        self.reduction = reduction
        self.values: list[float] = []
        self.weighted: list[tuple[float, float]] = []
        self.chunks: list[tuple[Chunk, float | None]] = []
        """Large arrays, folded, and their weight."""
        self.deferred: list[Deferred | Late] = []
        """What lies on a device, or is known later, and is read when the step is folded, never at the call."""

    def is_empty(self) -> bool:
        """Whether everything was taken."""
        return not (self.values or self.weighted or self.chunks or self.deferred)


class Taken:
    """What `drain` took of one series."""

    __slots__ = ("chunks", "deferred", "series", "values", "weighted")

    def __init__(self, series: Series, values: list[float]) -> None:
        self.series = series
        self.values = values
        self.weighted: list[tuple[float, float]] = _take(series.weighted)
        self.chunks: list[tuple[Chunk, float | None]] = _take(series.chunks)
        self.deferred: list[Deferred | Late] = _take(series.deferred)

    def is_ready(self) -> bool:
        """Whether what is known later, or lies on a device, is known."""
        return all(item.is_ready() for item in self.deferred)

    def read(self, stream: Callable[[str, float, Any], None] | None = None) -> None:
        """Fetch what lies on a device, which may have to be waited for: the worker's to call. `stream` is given each scalar with its stamp."""
        for item in self.deferred:
            found, weight = item.read()
            if found is None:
                continue
            if stream is not None and item.stamp is not None and isinstance(found, float):
                stream(self.series.key, found, item.stamp)
            if not isinstance(found, float):
                self.chunks.append((found, weight))
            elif weight is None:
                self.values.append(found)
            else:
                self.weighted.append((found, weight))
        self.deferred = []


class Registry:
    """All series of this process. One per process, in `_registry`; tests make their own."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Reduction, Callable[[float], None]]] = {}
        """Key → (its first reduction, append): all that the hot path looks at. Empty while recording is bounded, streamed or off."""
        self.series: dict[tuple[str, Reduction], Series] = {}
        self._first: dict[str, Series] = {}
        """Key → the series of its first reduction, the one that the hot path serves."""
        self.strict = False
        self.off = False
        self.ended = 0
        """1 after `shutdown`: what is recorded from then on is counted as dropped."""
        self.bounded = True
        """True while nothing drains: before `init`, so that a program that never calls it does not fill its memory."""
        self.stream: Callable[[str, float], None] | None = None
        """Called with each key and value while a backend wants every record."""
        self.stamp: Callable[[], Any] | None = None
        """When a record of a device tensor was made, for the backends that want every record; None without them."""
        self.route: Callable[[], Registry | None] | None = None
        """Which registry the current context records to, once there are several roles in the process; None: this one."""
        self.first_record: Callable[[], None] | None = None
        """Called by the next record: how a child process starts what takes its values to its parent."""
        self.dropped = 0
        self.problems: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._converters: dict[type, Callable[[Any], Any]] = {}
        self._blocks: DeviceBlocks | None = None
        self._recomputing = threading.local()
        self._set_aside: dict[str, tuple[Reduction, Callable[[float], None]]] | None = None
        self._recomputes = 0

    # --- recording, the slow way ---------------------------------------------------------------------------------

    def record(self, key: str, value: Any, reduction: Reduction, weight: Any) -> None:
        """Everything that the one-line hot path does not do: first sight of a key, other types, weights, bounds, streams, roles."""
        target = self.route() if self.route is not None else None
        if target is not None:
            target.record(key, value, reduction, weight)
            return
        if self.off:
            self.dropped += self.ended
            return
        if self.is_recomputing():
            return
        try:
            if self.first_record is not None:
                self.first_record()
            series = self.series_of(key, reduction)
            if series is None:
                self.dropped += 1
                return
            self._append(series, value, weight)
        except UsageError:
            if self.strict:
                raise
        except Exception as error:
            self.problem(key, "record", f"{key!r}: could not be recorded: {error!r}", UsageError)

    def _append(self, series: Series, value: Any, weight: Any) -> None:
        if series.reduction is Reduce.COUNT:
            number: Any = 1.0
        else:
            number = self._number(series.key, value)
        if number is None:
            self.dropped += 1
            return
        if weight is not None:
            weight = self._weight(series, weight)
            if weight is None:
                self.dropped += 1
                return
        waiting = len(series.values) + len(series.weighted) + len(series.deferred)
        if self.bounded and waiting >= MAX_BEFORE_INIT:
            self.problem(
                series.key, "full", f"{series.key!r}: {MAX_BEFORE_INIT} values wait for otel_forge.init(); further ones are dropped", UsageError
            )
            self.dropped += 1
        elif getattr(number, "is_late", False):
            number.stamp = self.stamp() if self.stamp is not None else None
            series.deferred.append(number)
        elif hasattr(weight, "device"):
            self._defer(series, number if hasattr(number, "device") else weight.new_tensor(number), weight)
        elif number.__class__ is float:
            self._append_number(series, number, weight)
        elif isinstance(number, list):
            for item in number:
                self._append_number(series, item, weight)
        else:
            self._append_block(series, number, weight)

    def _append_number(self, series: Series, number: float, weight: float | None) -> None:
        if weight is None:
            series.values.append(number)
        else:
            series.weighted.append((number, weight))
        if self.stream is not None:
            self.stream(series.key, number)

    def _append_block(self, series: Series, block: Any, weight: float | None) -> None:
        """A large array, folded now, or a tensor on a device, read later."""
        if hasattr(block, "device") and not hasattr(block, "ctypes"):
            self._defer(series, block, weight)
            return
        from otel_forge.blocks import fold_array

        chunk = fold_array(block, *_fold_of(series.reduction))
        if chunk is not None:
            series.chunks.append((chunk, weight))
        else:
            series.values.extend(block.astype("float64").ravel().tolist())

    def _defer(self, series: Series, tensor: Any, weight: Any) -> None:
        if self._blocks is None:
            from otel_forge.blocks import DeviceBlocks

            self._blocks = DeviceBlocks()
        stamp = self.stamp() if self.stamp is not None else None
        try:
            series.deferred.append(self._blocks.defer(tensor, *_fold_of(series.reduction), weight, stamp))
        except ValueError as error:
            self.dropped += 1
            self.problem(series.key, "capture", f"{series.key!r}: {error}", InvalidValueError)

    def _weight(self, series: Series, weight: Any) -> Any:
        """A float, a tensor on a device, or None for what is none."""
        if series.reduction is not Reduce.MEAN:
            self.problem(series.key, "weight", f"{series.key!r}: weight= has a meaning for Reduce.MEAN only, not {series.reduction}", UsageError)
            return None
        number = self._number(series.key, weight)
        if hasattr(number, "device") and number.numel() == 1:
            return number
        if not isinstance(number, float) or number < 0:
            self.problem(series.key, "weight", f"{series.key!r}: weight must be a number ≥ 0, got {weight!r}", InvalidValueError)
            return None
        return number

    def series_of(self, key: str, reduction: Reduction) -> Series | None:
        """The series of a key and reduction, made if it is new; None when there can be none of that name."""
        return self.series.get((key, reduction)) or self._register(key, reduction)

    def _register(self, key: str, reduction: Reduction) -> Series | None:
        if not isinstance(key, str) or not key.strip():
            self.problem(str(key), "key", f"a key must be a non-empty string, got {key!r}", InvalidValueError)
            return None
        if len(key) > MAX_KEY_LENGTH:
            self.problem(key[:40], "key", f"{key[:40]!r}…: a key may have {MAX_KEY_LENGTH} characters, got {len(key)}", InvalidValueError)
            return None
        if not isinstance(reduction, (Reduce, HistogramReduce)):
            known = ", ".join(f"Reduce.{item.name}" for item in Reduce)
            self.problem(
                key, "reduction", f"{key!r}: reduction must be one of {known} or Reduce.HISTOGRAM(bounds), got {reduction!r}", InvalidValueError
            )
            return None
        # without a lock, because torch.compile cannot trace one: each setdefault is atomic, so a series is made once
        series = self.series.setdefault((key, reduction), Series(key, reduction))
        first = self._first.setdefault(key, series)
        if first is series:
            self._publish(series)
        if first is not series:
            names = f"'{key}/{reduction.value}' and '{key}/{first.reduction.value}'"
            text = f"{key!r} is recorded with {reduction} and with {first.reduction}: they are kept apart, as {names}"
            self.problem(key, "conflict", text, ReductionConflict)
        return series

    def _publish(self, series: Series) -> None:
        """Let the hot path append to the series itself, if nothing else has to happen at a record."""
        if self._is_plain() and series.reduction is not Reduce.COUNT:
            self.known[series.key] = (series.reduction, series.values.append)
            if not self._is_plain():  # `set_mode` came between, from another thread
                self.known.pop(series.key, None)

    def _is_plain(self) -> bool:
        return not (self.bounded or self.off or self.stream is not None or self.route is not None or self._recomputes)

    def _number(self, key: str, value: Any) -> Any:
        """A float, a list of floats, a device scalar to be read later, or None for what is not a number."""
        kind = value.__class__
        convert = self._converters.get(kind)
        if convert is None:
            from otel_forge.values import converter

            convert = self._converters[kind] = converter(kind)
        try:
            return convert(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self.problem(key, "value", f"{key!r}: {error}", InvalidValueError)
            return None

    def problem(self, key: str, kind: str, text: str, error: type[UsageError]) -> None:
        """Say each kind of problem of a key once, count the rest; raise under strict."""
        if self.strict:
            raise error(text)
        count = self.problems.get((key, kind), 0)
        if len(self.problems) < 10_000 or count:
            self.problems[key, kind] = count + 1
        if not count and len(self.problems) < 10_000:
            logger.warning("%s", text)

    # --- taking ----------------------------------------------------------------------------------------------------

    def drain(self) -> list[Taken]:
        """Take what was recorded so far, for one step. What other threads append meanwhile stays for the next."""
        taken = []
        for series in list(self.series.values()):
            values: list[float] = series.values
            count = len(values)
            if count:
                values_taken = values[:count]
                del values[:count]
            elif series.is_empty():
                continue
            else:
                values_taken = []
            taken.append(Taken(series, values_taken))
        if self._blocks is not None:
            self._blocks.mark([item for one in taken for item in one.deferred])
        return taken

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """While this thread runs a checkpointed forward again: what it records was recorded the first time, so it is left out."""
        local = self._recomputing
        local.depth = getattr(local, "depth", 0) + 1
        with self._lock:
            self._recomputes += 1
            if self._set_aside is None:
                self._set_aside = dict(self.known)
                self.known.clear()
        try:
            yield
        finally:
            local.depth -= 1
            with self._lock:
                self._recomputes -= 1
                if not self._recomputes and self._set_aside is not None:
                    if self._is_plain():
                        self.known.update(self._set_aside)
                        for key in self._first.keys() - self._set_aside.keys():
                            self._publish(self._first[key])
                    self._set_aside = None

    def is_recomputing(self) -> bool:
        """Whether this thread runs a checkpointed forward again."""
        return bool(getattr(self._recomputing, "depth", False))

    def set_mode(self, *, off: bool, bounded: bool, stream: Callable[[str, float], None] | None, stamp: Callable[[], Any] | None = None) -> None:
        """Change what happens at a record, and with it which keys the hot path serves."""
        with self._lock:
            self.off, self.bounded, self.stream = off, bounded, stream
            self.stamp = stamp
            self.known.clear()
            for series in self._first.values():
                self._publish(series)

    def set_route(self, route: Callable[[], Registry | None] | None) -> None:
        """Ask for each record which registry it is for; None: all are for this one."""
        self.route = route
        self.set_mode(off=self.off, bounded=self.bounded, stream=self.stream, stamp=self.stamp)

    def is_empty(self) -> bool:
        """Whether everything that was recorded was taken."""
        return all(series.is_empty() for series in list(self.series.values()))

    def after_fork_in_child(self) -> None:
        """Drop the parent's values and every lock that another thread may have held; keep the keys."""
        self._lock = threading.Lock()
        self._blocks = None
        self._recomputing, self._recomputes, self._set_aside = threading.local(), 0, None
        self.route = None
        for series in self.series.values():
            for values in (series.values, series.weighted, series.chunks, series.deferred):
                values.clear()
        self.set_mode(off=self.off, bounded=True, stream=None)

    def clear(self) -> None:
        """Forget every value and key."""
        with self._lock:
            self.known.clear()
            self.series.clear()
            self._first.clear()
            self.problems.clear()
            self.dropped = 0
            self.ended = 0
            self.first_record = None
            self.route = None
            self._blocks = None
            self.off, self.bounded, self.stream, self.strict = False, True, None, False


def _fold_of(reduction: Reduction) -> tuple[str, tuple[float, ...]]:
    """How many measurements at once are folded for it: the kind of the chunk, and bounds."""
    if isinstance(reduction, HistogramReduce):
        return "histogram", reduction.bounds
    return ("std" if reduction is Reduce.STD else "plain"), ()


def _take(items: list[Any]) -> list[Any]:
    if not items:  # nearly always: most series have plain values only
        return []
    count = len(items)
    taken = items[:count]
    del items[:count]
    return taken


_registry = Registry()
_known = _registry.known


def registry() -> Registry:
    """The process's registry."""
    return _registry


def record_metric(
    key: str, value: Any, reduction: Reduction = Reduce.MEAN, *, weight: Any = None, _get: Any = _known.get, _unknown: Any = (None, None)
) -> None:
    """Record one measurement of `key` for the current step.

    `value` is a number: float, int, bool, numpy or torch scalar, Decimal; an array or tensor of several elements is as many measurements.
    A tensor on a device is not read here but when the step is folded. `weight` (for MEAN) gives the mean Σ weight·value / Σ weight.
    Works before `init` (bounded).
    Never raises unless `init(strict=True)`: what is not a number is said once per key, counted and left out.
    """
    expected, append = _get(key, _unknown)
    if expected is reduction and value.__class__ is float and weight is None:
        append(value)
    else:
        _registry.record(key, value, reduction, weight)


def record_metrics(values: Mapping[str, Any], reduction: Reduction = Reduce.MEAN) -> None:
    """Record several keys with one reduction."""
    for key, value in values.items():
        record_metric(key, value, reduction)
