"""Calls of code that is not ours: on a thread of its own, with a time limit. It must not know what is called."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

from otel_forge.errors import BackendTimeout

logger = logging.getLogger("otel_forge.exporter")


class _Call:
    """One call: done or not, and what came of it."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Guard:
    """Runs functions, plain or `async`, one after the other on one thread with one event loop, which runs on between the calls. From any thread.

    A call that takes too long is not stopped (nothing can do that to a thread): its result counts when it comes, and until then no other one begins.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._unfinished: _Call | None = None
        threading.Thread(target=self._run, name=f"otel-forge-{name}-calls", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_stopping:
            try:
                self._loop.run_forever()
            except BaseException as error:  # a task that was left running wants to end the process
                logger.warning("a task of a backend raised %r", error)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def call(self, name: Hashable, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """What the function returns or raises; SystemExit and the like come as RuntimeError. Raises BackendTimeout when it takes too long.

        A call of the same name as one that took too long is that one: it is waited for again, not made again.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._lock.acquire(timeout=limit_s):
            raise BackendTimeout(f"{name!r} waits for another call")
        try:
            return self._call(name, function, arguments, options, limit_s)
        finally:
            self._lock.release()

    def _call(self, name: Hashable, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], limit_s: float) -> Any:
        unfinished = self._unfinished
        if unfinished is not None:
            if not unfinished.done.wait(limit_s):
                raise BackendTimeout(_late(unfinished, self._timeout_s))
            self._unfinished = None
            if unfinished.name == name:
                return _outcome(unfinished)
        call = _Call(name)
        self._loop.call_soon_threadsafe(self._begin, call, function, arguments, options)
        if not call.done.wait(limit_s):
            self._unfinished = call
            raise BackendTimeout(_late(call, self._timeout_s))
        return _outcome(call)

    @property
    def hangs(self) -> bool:
        """Whether a call took too long and has not come back."""
        return self._unfinished is not None and not self._unfinished.done.is_set()

    def stop(self, timeout_s: float) -> None:
        """Let tasks that were left running go on for so long, then end the thread, once it comes back from the call that it may be in."""
        if not self.hangs:
            with contextlib.suppress(Exception):
                self.call("tasks", self._wait_for_tasks, timeout_s, timeout_s=timeout_s + 1.0)
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _wait_for_tasks(self, timeout_s: float) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    # --- on the thread -------------------------------------------------------------------------------------------------

    def _begin(self, call: _Call, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            result = function(*arguments, **options)
        except BaseException as error:
            call.error = error
            call.done.set()
            return
        if not inspect.isawaitable(result):
            call.result = result
            call.done.set()
            return
        self._loop.create_task(_settle(call, result))


async def _settle(call: _Call, result: Any) -> None:
    try:
        call.result = await result
    except BaseException as error:
        call.error = error
    finally:
        call.done.set()


def _late(call: _Call, timeout_s: float) -> str:
    return f"its call {call.name!r} takes more than {timeout_s:g} s"


def _outcome(call: _Call) -> Any:
    if isinstance(call.error, Exception):
        raise call.error
    if call.error is not None:
        raise RuntimeError(f"{type(call.error).__name__}: {call.error}") from call.error
    return call.result
