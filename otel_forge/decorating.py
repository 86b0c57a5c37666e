"""Functions of every kind in a scope: plain ones, coroutines, generators and async generators. It must not know what a scope does."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar, cast

from otel_forge import pipeline

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
