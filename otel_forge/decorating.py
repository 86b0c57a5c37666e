"""Functions of every kind in a scope: plain ones, coroutines, generators and async generators. It must not know what a scope does."""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, TypeVar, cast

from otel_forge import pipeline

_clock = time.perf_counter_ns
F = TypeVar("F", bound=Callable[..., Any])


def decorate(function: F, make: Callable[[tuple[Any, ...]], Any], *, call: Callable[..., Any] | None = None) -> F:
    """Wrap a function of any kind so that each call is a scope that `make(args)` gives. Kind, name, signature and docstring stay.

    `call` is what runs in the scope, where that is not the function itself but something that stands for it.
    """
    run: Callable[..., Any] = call or function
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _async_generator(run, make)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(run, make)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(run, make)
    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if pipeline.is_compiling():
                return run(*args, **kwargs)
            with make(args):
                return run(*args, **kwargs)

    return cast(F, functools.wraps(function)(wrapper))


def _coroutine(function: Callable[..., Any], make: Callable[[tuple[Any, ...]], Any]) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with make(args) as opened:
            body = _Pieces(function(*args, **kwargs), None)
            try:
                return await body
            finally:
                opened.set_busy(body.busy_ns)

    return wrapper


class _Suspended:
    """A scope whose body runs in pieces: current only while the body runs, so that the consumer's own scopes are no children of it."""

    __slots__ = ("busy_ns", "context", "opened", "scope")

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.busy_ns = 0
        self.context = contextvars.copy_context()
        self.opened = self.context.run(scope.__enter__)

    def run(self, piece: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a piece of the body."""
        began = _clock()
        try:
            return self.context.run(piece, *arguments, **options)
        finally:
            self.busy_ns += _clock() - began

    async def wait(self, awaitable: Any) -> Any:
        """Run a piece of the body that is awaited."""
        pieces = _Pieces(awaitable, self.context)
        try:
            return await pieces
        finally:
            self.busy_ns += pieces.busy_ns

    def __enter__(self) -> _Suspended:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.opened.set_busy(self.busy_ns)
        self.context.run(self.scope.__exit__, kind, error, None)


def _generator(function: Callable[..., Any], make: Callable[[tuple[Any, ...]], Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with _Suspended(make(args)) as suspended:
            body = suspended.run(function, *args, **kwargs)
            advance, value = body.send, None
            while True:
                try:
                    item = suspended.run(advance, value)
                except StopIteration as done:
                    return done.value
                try:
                    advance, value = body.send, (yield item)
                except GeneratorExit:
                    suspended.run(body.close)
                    raise
                except BaseException as thrown:
                    advance, value = body.throw, thrown

    return wrapper


def _async_generator(function: Callable[..., Any], make: Callable[[tuple[Any, ...]], Any]) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with _Suspended(make(args)) as suspended:
            body = suspended.run(function, *args, **kwargs)
            advance, value = body.asend, None
            while True:
                try:
                    item = await suspended.wait(advance(value))
                except StopAsyncIteration:
                    return
                try:
                    advance, value = body.asend, (yield item)
                except GeneratorExit:
                    await suspended.wait(body.aclose())
                    raise
                except BaseException as thrown:
                    advance, value = body.athrow, thrown

    return wrapper


class _Pieces:
    """Awaits something, and adds up the time of its steps; each runs in the given context, if there is one."""

    __slots__ = ("_awaitable", "_context", "busy_ns")

    def __init__(self, awaitable: Any, context: contextvars.Context | None) -> None:
        self._awaitable = awaitable
        self._context = context
        self.busy_ns = 0

    def _run(self, step: Callable[..., Any], argument: Any) -> Any:
        began = _clock()
        try:
            return step(argument) if self._context is None else self._context.run(step, argument)
        finally:
            self.busy_ns += _clock() - began

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        value: Any = None
        send = getattr(steps, "send", None) or (lambda _value: next(steps))
        while True:
            try:
                item = self._run(send, value)
            except StopIteration as done:
                return done.value
            try:
                value = yield item
            except BaseException as thrown:
                try:
                    item = self._run(steps.throw, thrown)
                except StopIteration as done:
                    return done.value
                value = yield item
