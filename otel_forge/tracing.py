"""`Tracer`, `trace` and `span`: scopes as spans and metrics. It must not know how spans travel, or how a device is measured.

A scope of host time costs two clock reads, an object and a list append. The parent of a scope is a context variable, so threads and asyncio tasks
nest each on their own, and a copied context carries the parent along.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import random
import sys
import threading
import time
from _asyncio import _get_running_loop as _running_loop  # asyncio itself is not worth loading for it
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, cast

from otel_forge import measuring, pipeline
from otel_forge.decorating import decorate
from otel_forge.finished import Failure, Finished, Phase, emit, failure, kept_keys, make_keys
from otel_forge.measuring import Measurement
from otel_forge.metrics import Reduce, record_metric
from otel_forge.notices import reset_notices, warn_once
from otel_forge.open_spans import open_scopes
from otel_forge.points import AttributeValue
from otel_forge.span_limits import child_id

F = TypeVar("F", bound=Callable[..., Any])

_clock = time.perf_counter_ns
_thread_id = threading.get_ident
_bits = random.Random(os.urandom(16)).getrandbits
BUSY = "forge.busy_time_s"
"""On the span of a coroutine or generator: the time that its body ran, without that in which it was suspended."""
_parent: contextvars.ContextVar[int] = contextvars.ContextVar("otel_forge_parent", default=0)
"""The span id that a new scope hangs under; 0: the step's root."""


def _reseed() -> None:
    global _bits
    _bits = random.Random(os.urandom(16)).getrandbits
    open_scopes.clear()
    _parent.set(0)  # the scope that is open in the parent process may end, and its step too, long before this one's spans do


os.register_at_fork(after_in_child=_reseed)


reset_warnings = reset_notices
"""Forget what was said, for tests."""


def current_span_id() -> int:
    """The id of the scope that is open in this context; 0 when there is none."""
    return _parent.get()


class span:
    """A span and no metric: `with span("load", {"files": 3}): …`. Also a decorator."""

    __slots__ = ("_attributes", "_id", "_name", "_start", "_step", "_token")

    def __init__(self, name: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        self._name = name
        self._attributes: Mapping[str, AttributeValue] = attributes or {}
        self._token: contextvars.Token[int] | None = None

    def __enter__(self) -> span:
        if pipeline.recording_spans and not pipeline.is_compiling():
            self._step = pipeline.get_step()
            parent = _parent.get()
            self._id = span_id = (_bits(58) << 6) | min((parent & 63) + 1, 63)  # child_id, without a call
            self._token = _parent.set(span_id)
            self._start = _clock()
            open_scopes[span_id] = self
        return self

    def describe(self) -> tuple[str, int, int, int, str | None] | None:
        """For the announcement of a span that is still open."""
        token = self._token
        return None if token is None else (self._name, self._start, _old(token), self._step, None)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add an attribute to the open span."""
        self._attributes = {**self._attributes, key: value}

    def set_busy(self, busy_ns: int) -> None:
        """How long the body of a coroutine or generator ran; the rest of the span's time it was suspended."""
        self.set_attribute(BUSY, busy_ns / 1e9)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token = self._token
        if token is None:
            return
        end = _clock()
        self._token = None
        open_scopes.pop(self._id, None)
        parent = _restore(token)
        emit(self._name, self._start, end, self._id, parent, self._step, self._attributes, failure(error))

    def __call__(self, function: F) -> F:
        """Decorate a function: every call is a span."""
        name, attributes = self._name, self._attributes
        return decorate(function, lambda _args: span(name, attributes))


@contextlib.contextmanager
def step(number: int) -> Iterator[None]:
    """One training step: names it, times it as this rank's span, and flushes it at the end, also when it fails (the span is then marked)."""
    pipeline.set_step(number)
    current = pipeline.current()
    if current is not None:
        current.mark_start()
    around = _parent.set(0)  # an epoch's span, say, lies in the trace of the step in which it began
    try:
        with span(f"rank {current.member().rank}" if current is not None else "rank"):
            yield
    finally:
        _restore(around)
        pipeline.flush(number)


def _restore(token: contextvars.Token[int]) -> int:
    """Make the parent current again, and return it; a scope that ends in another context than it began leaves that one alone."""
    try:
        _parent.reset(token)
    except ValueError:
        pass
    return _old(token)


def _old(token: contextvars.Token[int]) -> int:
    return 0 if token.old_value is contextvars.Token.MISSING else token.old_value


def _here() -> object:
    """Who runs now: the asyncio task, else the thread."""
    if _running_loop() is not None:
        return sys.modules["asyncio"].current_task() or _thread_id()
    return _thread_id()


_NO_ATTRIBUTES: dict[str, AttributeValue] = {}


class _Options:
    """What a scope was asked for, looked at once however often the scope is opened."""

    __slots__ = ("asks", "device", "metrics", "spans", "timer", "track_memory")

    def __init__(self, track_memory: bool | str, timer: str, device: Any, metrics_only: bool, span_only: bool) -> None:
        if timer not in measuring.TIMERS:
            warn_once("timer", f"timer must be one of {', '.join(map(repr, measuring.TIMERS))}, got {timer!r}: 'auto' is used")
            timer = "auto"
        if track_memory not in (False, True, "host"):
            warn_once("track_memory", f"track_memory must be True, False or 'host', got {track_memory!r}: False is used")
            track_memory = False
        self.timer = timer
        self.device = getattr(device, "device", device)  # of a tensor, which is not kept, nor ever printed: that would wait for it
        self.track_memory = track_memory
        self.asks = bool(track_memory) or timer in ("gpu", "gpu_sync")
        """Whether there is something to measure, or to say, even where no accelerator was seen."""
        self.spans = not metrics_only
        self.metrics = not span_only


class Tracer:
    """Times a sequence of steps: `t.start(); t.step("forward"); …; t.stop()`.

    `step(name)` ends the phase that began at `start()` or the last `step()` and names it. The time from the last `step` to `stop` is the phase
    `tail`, or the name given to `stop`. Metrics in seconds: `{prefix}/{step}/duration_avg_s`, `{prefix}/{step}/duration_max_s`,
    `{prefix}/total_duration_avg_s` and `{prefix}/total_duration_max_s`. Not to be shared by threads or tasks.
    """

    __slots__ = ("_attributes", "_id", "_mark", "_measured", "_options", "_owner", "_phases", "_prefix", "_start", "_step", "_token")

    def __init__(
        self,
        prefix: str | None = None,
        track_memory: bool | str = False,
        timer: str = "auto",
        device: Any = None,
        *,
        metrics_only: bool = False,
        span_only: bool = False,
    ) -> None:
        """`prefix` None: `{Class}/{function}` of the caller.

        `timer`: `gpu` measures device time by events on the stream that is current at each mark, without waiting for it, and the metrics are of that
        time; `gpu_sync` waits for the device at each mark, for measuring by hand; `cpu` is the host's time; `auto` is `gpu` once the program has
        initialised an accelerator. Spans keep the host's time and have the device's as `forge.device_time_s`. While a graph is captured, the host's
        time is all there is. `device`: an index, `cuda:1`, torch.device or tensor; None: the current one at `start`.

        `track_memory` (experimental): memory allocated on the device, in GiB, as `{prefix}/memory_delta_end_start_avg_gb` and
        `{prefix}/memory_peak_max_gb`, also `{prefix}/{step}/…`. "host": the resident memory of this process, as `host_rss_delta_end_start_avg_gb`
        and `host_rss_end_max_gb`. Where there is no accelerator, it is the host's time and no memory.
        """
        self._prepare(prefix, _Options(track_memory, timer, device, metrics_only, span_only))

    def _prepare(self, prefix: str | None, options: _Options) -> None:
        self._prefix = prefix
        self._options = options
        self._start: int | None = None
        self._token: contextvars.Token[int] | None = None
        self._measured: Measurement | None = None
        self._attributes: dict[str, AttributeValue] = _NO_ATTRIBUTES

    @property
    def prefix(self) -> str | None:
        """The prefix of the metrics' names; known from `start` on when it was left to the caller's name."""
        return self._prefix

    def start(self) -> None:
        """Begin. A run that was never stopped, because an exception came between, is ended here and marked as failed."""
        if self._start is not None:
            if not self._is_running("start"):
                return
            warn_once("start", f"Tracer({self._prefix!r}).start(): it was not stopped before; that run is marked as failed")
            self._end(None, Failure("start() was called again before stop()", "UsageError"))
        if pipeline.scopes_off:
            return
        if self._prefix is None:
            self._prefix = _caller_prefix(sys._getframe(1))
        self._begin()

    def _begin(self) -> None:
        self._phases: list[tuple[str, int, int]] = []
        self._owner = _here()
        options = self._options
        self._token = None
        if options.spans and pipeline.recording_spans:
            self._step = pipeline.get_step()
            self._id = child_id(_parent.get(), _bits)
            self._token = _parent.set(self._id)
            open_scopes[self._id] = self
        elif measuring.look or options.asks:
            self._step, self._id = 0, 0
        if measuring.look or options.asks:
            self._measured = measuring.begin(options.timer, options.device, options.track_memory)
        self._start = self._mark = _clock()

    def step(self, name: str) -> None:
        """End a phase and name it."""
        now = _clock()
        if not self._is_running("step"):
            return
        if self._measured is not None:
            now = self._measured.end_phase(now)
        self._phases.append((name, self._mark, now))
        self._mark = now

    def describe(self) -> tuple[str, int, int, int, str | None] | None:
        """For the announcement of a scope that is still open."""
        token, start = self._token, self._start
        if token is None or start is None:
            return None
        return self._prefix or "trace", start, _old(token), self._step, self._phases[-1][0] if self._phases else None

    def stop(self, name: str | None = None) -> None:
        """End; record what was timed."""
        self._end(name, None)

    def record(self, key: str, value: Any, reduction: Any = Reduce.MEAN) -> None:
        """Record `{prefix}/{key}`."""
        record_metric(f"{self._prefix}/{key}" if self._prefix else key, value, reduction)

    def set_busy(self, busy_ns: int) -> None:
        """How long the body of a coroutine or generator ran, as an attribute and as `{prefix}/busy_duration_avg_s` and `_max_s`."""
        seconds = busy_ns / 1e9
        self._attributes = {BUSY: seconds}
        if self._options.metrics:
            prefix = self._prefix or "trace"
            record_metric(f"{prefix}/busy_duration_avg_s", seconds)
            record_metric(f"{prefix}/busy_duration_max_s", seconds, Reduce.MAX)

    def _is_running(self, what: str) -> bool:
        if self._start is None:
            if pipeline.scopes_off:
                return False
            warn_once(what, f"Tracer({self._prefix!r}).{what}() without start(): ignored")
            return False
        if self._owner != _here():
            warn_once("thread", f"Tracer({self._prefix!r}) is used by two threads or tasks: each needs one of its own; ignored")
            return False
        return True

    def _end(self, tail: str | None, error: Failure | None) -> None:
        end = _clock()
        if not self._is_running("stop"):
            return
        start = cast("int", self._start)
        self._start = None
        if self._measured is not None:
            self._end_measured(self._measured, tail, error, start, end)
            return
        if self._phases or tail is not None:
            self._phases.append((tail or "tail", self._mark, end))
        if self._token is not None:
            parent = self._close()
            for name, began, ended in self._phases:
                emit(f"{self._prefix}/{name}", began, ended, child_id(self._id, _bits), self._id, self._step, {}, None)
            emit(self._prefix or "trace", start, end, self._id, parent, self._step, self._attributes, error)
        if self._options.metrics:
            self._record(start, end)

    def _close(self) -> int:
        """No longer the current scope; its parent is, and is returned."""
        assert self._token is not None
        open_scopes.pop(self._id, None)
        parent = _restore(self._token)
        self._token = None
        return parent

    def _record(self, start: int, end: int) -> None:
        prefix = self._prefix or "trace"
        for name, began, ended in self._phases:
            average, longest = kept_keys.get((prefix, name)) or make_keys(prefix, name)
            seconds = (ended - began) / 1e9
            record_metric(average, seconds)
            record_metric(longest, seconds, Reduce.MAX)
        average, longest = kept_keys.get((prefix, None)) or make_keys(prefix, None)
        total = (end - start) / 1e9
        record_metric(average, total)
        record_metric(longest, total, Reduce.MAX)

    def _end_measured(self, measured: Measurement, tail: str | None, error: Failure | None, start: int, end: int) -> None:
        """The same for a scope with device time or memory; device times come later, to this step's metrics and to the spans."""
        self._measured = None
        end, memory, whole = measured.end(end)
        if self._phases or tail is not None:
            self._phases.append((tail or "tail", self._mark, end))
        parent = None
        if self._token is not None:
            parent = self._close()
        memory_of = itertools.chain(memory, itertools.repeat(None))
        phases = tuple(Phase(*phase, child_id(self._id, _bits), used) for phase, used in zip(self._phases, memory_of, strict=False))
        finished = Finished(
            phases=phases,
            whole=Phase(self._prefix or "trace", start, end, self._id, whole),
            parent_id=parent,
            step=self._step,
            error=error,
            device=measured.device_label(),
            waiting=pipeline.waiting_spans(),
            is_synchronized=measured.is_synchronized,
            attributes=self._attributes,
        )
        interval = measured.resolve(finished.emit)
        if interval is None:
            finished.emit(None)
        if self._options.metrics:
            finished.record(interval)


class trace:
    """A span and metrics of one scope: a context manager, or a decorator of functions, coroutines, generators and async generators.

    `prefix` None: `{Class}/{function}` of the running object. As a context manager it gives the Tracer, for `step` and `record`.
    """

    __slots__ = ("_options", "_prefix", "_tracer")

    def __init__(
        self,
        prefix: str | None = None,
        track_memory: bool | str = False,
        timer: str = "auto",
        device: Any = None,
        *,
        metrics_only: bool = False,
        span_only: bool = False,
    ) -> None:
        """The options are those of `Tracer`."""
        self._prefix = prefix
        self._options = _Options(track_memory, timer, device, metrics_only, span_only)

    @classmethod
    def _of(cls, prefix: str | None, options: _Options) -> trace:
        scope = cls.__new__(cls)
        scope._prefix, scope._options = prefix, options
        return scope

    def __enter__(self) -> Tracer:
        if pipeline.scopes_off or pipeline.is_compiling():
            self._tracer = Tracer(self._prefix or "off")
            return self._tracer
        tracer = self._tracer = Tracer.__new__(Tracer)
        tracer._prepare(self._prefix if self._prefix is not None else _caller_prefix(sys._getframe(1)), self._options)
        tracer._begin()
        return tracer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracer._start is not None:
            self._tracer._owner = _here()  # an event loop closes a generator that was left early in a task of its own
            self._tracer._end(None, failure(error))

    def __call__(self, function: F) -> F:
        """Decorate a function."""
        options = self._options
        if self._prefix is not None:
            prefix = self._prefix
            return decorate(function, lambda _args: trace._of(prefix, options))
        qualified = function.__qualname__.rpartition("<locals>.")[2]
        name, in_class = function.__name__, "." in qualified
        fallback = qualified.replace(".", "/")
        names: dict[type, str] = {}

        def make(args: tuple[Any, ...]) -> Any:
            if in_class and args:
                owner = args[0] if isinstance(args[0], type) else type(args[0])
                return trace._of(names.get(owner) or names.setdefault(owner, f"{owner.__name__}/{name}"), options)
            return trace._of(fallback, options)

        return decorate(function, make)


def _caller_prefix(frame: Any) -> str:
    """`{Class}/{function}` of the code that opened a scope; the class of its `self` or `cls`, if there is one."""
    name = frame.f_code.co_name.strip("<>")
    owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
    if owner is not None:
        return f"{(owner if isinstance(owner, type) else type(owner)).__name__}/{name}"
    module = frame.f_globals.get("__name__", "").rpartition(".")[2].strip("_")
    return f"{module}/{name}" if name == "module" or not name else name
