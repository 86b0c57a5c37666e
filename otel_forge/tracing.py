"""`Tracer`, `trace` and `span`: scopes of host time as spans and metrics. It must not know how spans travel.

A scope costs two clock reads, an object and a list append. The parent of a scope is a context variable, so threads and asyncio tasks nest each on
their own, and a copied context carries the parent along.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import os
import random
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, cast

from otel_forge import pipeline
from otel_forge.metrics import Reduce, record_metric, registry
from otel_forge.points import AttributeValue
from otel_forge.spans import SpanRecord

logger = logging.getLogger("otel_forge")

F = TypeVar("F", bound=Callable[..., Any])

_clock = time.perf_counter_ns
_anchor = time.time_ns() - time.perf_counter_ns()
"""Unix time minus the monotonic clock, read once: a jump of the wall clock never makes a duration wrong."""
_new_id = random.Random(os.urandom(16)).getrandbits
_parent: contextvars.ContextVar[int] = contextvars.ContextVar("otel_forge_parent", default=0)
"""The span id that a new scope hangs under; 0: the step's root."""
_said: set[str] = set()
MAX_KEPT_KEYS = 10_000


def _reseed() -> None:
    global _new_id
    _new_id = random.Random(os.urandom(16)).getrandbits


os.register_at_fork(after_in_child=_reseed)


def _warn_once(kind: str, text: str) -> None:
    if kind not in _said:
        _said.add(kind)
        logger.warning("%s", text)


def reset_warnings() -> None:
    """Forget what was said, for tests."""
    _said.clear()


def current_span_id() -> int:
    """The id of the scope that is open in this context; 0 when there is none."""
    return _parent.get()


def _emit(
    name: str,
    start_ns: int,
    end_ns: int,
    span_id: int,
    parent_id: int,
    step: int,
    attributes: Mapping[str, AttributeValue],
    error: BaseException | None,
) -> None:
    waiting = pipeline.waiting_spans()
    if len(waiting) >= pipeline.MAX_WAITING_SPANS:
        registry().dropped += 1
        return
    text, kind = (None, None) if error is None else (str(error) or type(error).__name__, type(error).__qualname__)
    waiting.append(SpanRecord(name, start_ns + _anchor, end_ns + _anchor, span_id, parent_id, step, attributes, text, kind))


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
            self._id = _new_id(63) + 1
            self._token = _parent.set(self._id)
            self._start = _clock()
        return self

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add an attribute to the open span."""
        self._attributes = {**self._attributes, key: value}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token = self._token
        if token is None:
            return
        end = _clock()
        self._token = None
        parent = _restore(token)
        _emit(self._name, self._start, end, self._id, parent, self._step, self._attributes, _failure(error))

    def __call__(self, function: F) -> F:
        """Decorate a function: every call is a span."""
        name, attributes = self._name, self._attributes
        return _decorate(function, lambda _args: span(name, attributes))


@contextlib.contextmanager
def step(number: int) -> Iterator[None]:
    """One training step: names it, times it as this rank's span, and flushes it at the end, also when it fails (the span is then marked)."""
    pipeline.set_step(number)
    current = pipeline.current()
    if current is not None:
        current.mark_start()
    try:
        with span(f"rank {current.member().rank}" if current is not None else "rank"):
            yield
    finally:
        pipeline.flush(number)


def _restore(token: contextvars.Token[int]) -> int:
    """Make the parent current again, and return it; a scope that ends in another context than it began leaves that one alone."""
    parent = 0 if token.old_value is contextvars.Token.MISSING else token.old_value
    try:
        _parent.reset(token)
    except ValueError:
        pass
    return parent


def _failure(error: BaseException | None) -> BaseException | None:
    """What makes a span an error: not a generator that was closed."""
    return None if isinstance(error, (GeneratorExit, StopIteration, StopAsyncIteration)) else error


class Tracer:
    """Times a sequence of steps: `t.start(); t.step("forward"); …; t.stop()`.

    `step(name)` ends the phase that began at `start()` or the last `step()` and names it. The time from the last `step` to `stop` is the phase
    `tail`, or the name given to `stop`. Metrics in seconds: `{prefix}/{step}/duration_avg_s`, `{prefix}/{step}/duration_max_s`,
    `{prefix}/total_duration_avg_s` and `{prefix}/total_duration_max_s`. Not to be shared by threads or tasks.
    """

    def __init__(
        self,
        prefix: str | None = None,
        track_memory: bool = False,
        timer: str = "auto",
        device: Any = None,
        *,
        metrics_only: bool = False,
        span_only: bool = False,
    ) -> None:
        """`prefix` None: `{Class}/{function}` of the caller."""
        self._prefix = prefix
        self._spans = not metrics_only
        self._metrics = not span_only
        self._phases: list[tuple[str, int, int]] = []
        self._start: int | None = None
        self._mark = 0
        self._owner = 0
        self._id = 0
        self._step = 0
        self._token: contextvars.Token[int] | None = None
        if track_memory or timer in ("gpu", "gpu_sync"):
            _warn_once("device", "device timing and memory tracking are not measured yet: host time is recorded")

    @property
    def prefix(self) -> str | None:
        """The prefix of the metrics' names; known from `start` on when it was left to the caller's name."""
        return self._prefix

    def start(self) -> None:
        """Begin."""
        if self._start is not None:
            _warn_once("start", f"Tracer({self._prefix!r}).start(): it is running already; the first start counts")
            return
        if self._prefix is None:
            self._prefix = _caller_prefix(sys._getframe(1))
        self._begin()

    def _begin(self) -> None:
        self._phases.clear()
        self._owner = threading.get_ident()
        self._step = pipeline.get_step()
        self._id = _new_id(63) + 1
        self._token = _parent.set(self._id) if self._spans and pipeline.recording_spans else None
        self._start = self._mark = _clock()

    def step(self, name: str) -> None:
        """End a phase and name it."""
        now = _clock()
        if not self._is_running("step"):
            return
        self._phases.append((name, self._mark, now))
        self._mark = now

    def stop(self, name: str | None = None) -> None:
        """End; record what was timed."""
        self._end(name, None)

    def record(self, key: str, value: Any, reduction: Any = Reduce.MEAN) -> None:
        """Record `{prefix}/{key}`."""
        record_metric(f"{self._prefix}/{key}" if self._prefix else key, value, reduction)

    def _is_running(self, what: str) -> bool:
        if self._start is None:
            _warn_once(what, f"Tracer({self._prefix!r}).{what}() without start(): ignored")
            return False
        if self._owner != threading.get_ident():
            _warn_once("thread", f"Tracer({self._prefix!r}) is used by two threads: each needs one of its own; ignored")
            return False
        return True

    def _end(self, tail: str | None, error: BaseException | None) -> None:
        end = _clock()
        if not self._is_running("stop"):
            return
        start = cast(int, self._start)
        self._start = None
        if self._phases or tail is not None:
            self._phases.append((tail or "tail", self._mark, end))
        if self._token is not None:
            parent = _restore(self._token)
            self._token = None
            for name, began, ended in self._phases:
                _emit(f"{self._prefix}/{name}", began, ended, _new_id(63) + 1, self._id, self._step, {}, None)
            _emit(self._prefix or "trace", start, end, self._id, parent, self._step, {}, error)
        if self._metrics:
            self._record(start, end)

    def _record(self, start: int, end: int) -> None:
        prefix = self._prefix or "trace"
        for name, began, ended in self._phases:
            average, longest = _keys.get((prefix, name)) or _make_keys(prefix, name)
            seconds = (ended - began) / 1e9
            record_metric(average, seconds)
            record_metric(longest, seconds, Reduce.MAX)
        average, longest = _keys.get((prefix, None)) or _make_keys(prefix, None)
        total = (end - start) / 1e9
        record_metric(average, total)
        record_metric(longest, total, Reduce.MAX)


_keys: dict[tuple[str, str | None], tuple[str, str]] = {}
"""(prefix, step; None for the whole) → the two metrics' names: made once, because formatting them costs more than recording."""


def _make_keys(prefix: str, name: str | None) -> tuple[str, str]:
    stem = f"{prefix}/total" if name is None else f"{prefix}/{name}/"
    stem += "_" if name is None else ""
    keys = (f"{stem}duration_avg_s", f"{stem}duration_max_s")
    if len(_keys) < MAX_KEPT_KEYS:
        _keys[prefix, name] = keys
    return keys


class trace:
    """A span and metrics of one scope: a context manager, or a decorator of functions, coroutines, generators and async generators.

    `prefix` None: `{Class}/{function}` of the running object. As a context manager it gives the Tracer, for `step` and `record`.
    """

    __slots__ = ("_options", "_prefix", "_tracer")

    def __init__(
        self,
        prefix: str | None = None,
        track_memory: bool = False,
        timer: str = "auto",
        device: Any = None,
        *,
        metrics_only: bool = False,
        span_only: bool = False,
    ) -> None:
        self._prefix = prefix
        self._options: dict[str, Any] = {
            "track_memory": track_memory, "timer": timer, "device": device, "metrics_only": metrics_only, "span_only": span_only,
        }  # fmt: skip

    def __enter__(self) -> Tracer:
        if pipeline.is_compiling():
            self._tracer = Tracer(self._prefix or "compiled", **self._options)
            return self._tracer
        self._tracer = Tracer(self._prefix if self._prefix is not None else _caller_prefix(sys._getframe(1)), **self._options)
        self._tracer._begin()
        return self._tracer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracer._start is not None:
            self._tracer._end(None, _failure(error))

    def __call__(self, function: F) -> F:
        """Decorate a function."""
        options = self._options
        if self._prefix is not None:
            prefix = self._prefix
            return _decorate(function, lambda _args: trace(prefix, **options))
        qualified = function.__qualname__.rpartition("<locals>.")[2]
        name, in_class = function.__name__, "." in qualified
        fallback = qualified.replace(".", "/")
        names: dict[type, str] = {}

        def make(args: tuple[Any, ...]) -> Any:
            if in_class and args:
                owner = args[0] if isinstance(args[0], type) else type(args[0])
                return trace(names.get(owner) or names.setdefault(owner, f"{owner.__name__}/{name}"), **options)
            return trace(fallback, **options)

        return _decorate(function, make)


def _caller_prefix(frame: Any) -> str:
    """`{Class}/{function}` of the code that opened a scope; the class of its `self` or `cls`, if there is one."""
    name = frame.f_code.co_name.strip("<>")
    owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
    if owner is not None:
        return f"{(owner if isinstance(owner, type) else type(owner)).__name__}/{name}"
    module = frame.f_globals.get("__name__", "").rpartition(".")[2].strip("_")
    return f"{module}/{name}" if name == "module" or not name else name


def _decorate(function: F, make: Callable[[tuple[Any, ...]], Any]) -> F:
    """Wrap a function of any kind so that each call is a scope that `make(args)` gives. Kind, name, signature and docstring stay."""
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _async_generator(function, make)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, make)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, make)
    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if pipeline.is_compiling():
                return function(*args, **kwargs)
            with make(args):
                return function(*args, **kwargs)

    return cast(F, functools.wraps(function)(wrapper))


def _coroutine(function: Callable[..., Any], make: Callable[[tuple[Any, ...]], Any]) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with make(args):
            return await function(*args, **kwargs)

    return wrapper


class _Suspended:
    """A scope whose body runs in pieces: current only while the body runs, so that the consumer's own scopes are no children of it."""

    __slots__ = ("context", "scope")

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.context = contextvars.copy_context()
        self.context.run(scope.__enter__)

    def end(self, error: BaseException | None) -> None:
        kind = None if error is None else type(error)
        self.context.run(self.scope.__exit__, kind, error, None)


def _generator(function: Callable[..., Any], make: Callable[[tuple[Any, ...]], Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        suspended = _Suspended(make(args))
        error: BaseException | None = None
        body = suspended.context.run(function, *args, **kwargs)
        advance, value = body.send, None
        try:
            while True:
                try:
                    item = suspended.context.run(advance, value)
                except StopIteration as done:
                    return done.value
                try:
                    advance, value = body.send, (yield item)
                except GeneratorExit:
                    suspended.context.run(body.close)
                    raise
                except BaseException as thrown:
                    advance, value = body.throw, thrown
        except BaseException as raised:
            error = raised
            raise
        finally:
            suspended.end(error)

    return wrapper


def _async_generator(function: Callable[..., Any], make: Callable[[tuple[Any, ...]], Any]) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        suspended = _Suspended(make(args))
        error: BaseException | None = None
        body = suspended.context.run(function, *args, **kwargs)
        advance, value = body.asend, None
        try:
            while True:
                try:
                    item = await _in_context(suspended.context, advance(value))
                except StopAsyncIteration:
                    return
                try:
                    advance, value = body.asend, (yield item)
                except GeneratorExit:
                    await _in_context(suspended.context, body.aclose())
                    raise
                except BaseException as thrown:
                    advance, value = body.athrow, thrown
        except BaseException as raised:
            error = raised
            raise
        finally:
            suspended.end(error)

    return wrapper


class _in_context:
    """Await something with a context of its own around each of its steps."""

    __slots__ = ("_awaitable", "_context")

    def __init__(self, context: contextvars.Context, awaitable: Any) -> None:
        self._context = context
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        value: Any = None
        send = getattr(steps, "send", None) or (lambda _value: next(steps))
        while True:
            try:
                item = self._context.run(send, value)
            except StopIteration as done:
                return done.value
            try:
                value = yield item
            except BaseException as thrown:
                try:
                    item = self._context.run(steps.throw, thrown)
                except StopIteration as done:
                    return done.value
                value = yield item
