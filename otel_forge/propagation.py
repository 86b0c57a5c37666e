"""The open scope in what runs elsewhere: as W3C trace context for another process or an actor's message, and in the threads of a pool."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TypeVar, cast

from otel_forge import pipeline, tracing, wire

TRACEPARENT = "traceparent"
F = TypeVar("F", bound=Callable[..., object])


def inject(carrier: MutableMapping[str, str]) -> None:
    """Write the open scope into a carrier (a dict of strings, such as headers). Before the first flush there is no run, and nothing is written."""
    ids = current_ids()
    if ids is not None:
        carrier[TRACEPARENT] = f"00-{ids[0].hex()}-{ids[1].hex()}-01"


def current_ids() -> tuple[bytes, bytes] | None:
    """(trace id, span id) of the open scope, or of the step's root where none is open; None before the first flush."""
    current = pipeline.current()
    run = current.run() if current is not None else None
    if run is None:
        return None
    step = pipeline.get_step()
    span_id = tracing.current_span_id()
    parent = span_id.to_bytes(8, "big") if span_id else wire.root_span_id(run.run_id, run.attempt, step)
    return pipeline.remote_trace.get() or wire.trace_id(run.run_id, run.attempt, step), parent


def _open_scope_ids() -> tuple[bytes, bytes] | None:
    return current_ids() if tracing.current_span_id() else None


pipeline.open_scope_ids = _open_scope_ids


@contextlib.contextmanager
def extract(carrier: Mapping[str, str]) -> Iterator[None]:
    """Scopes opened inside hang under the scope that was injected, in its trace; with a carrier that holds none, nothing changes.

    An environment is a carrier, too: `TRACEPARENT`, as other tools set it, is read as well.
    """
    found = _parse(carrier.get(TRACEPARENT) or carrier.get(TRACEPARENT.upper(), ""))
    if found is None:
        yield
        return
    pipeline.has_remote_traces = True
    trace_token = pipeline.remote_trace.set(found[0])
    token = tracing._parent.set(found[1])
    try:
        yield
    finally:
        tracing._restore(token)
        with contextlib.suppress(ValueError):
            pipeline.remote_trace.reset(trace_token)


def _parse(text: str) -> tuple[bytes, int] | None:
    parts = text.split("-")
    try:
        if len(parts) < 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
            return None
        trace_id, parent = bytes.fromhex(parts[1]), int(parts[2], 16)
    except ValueError:
        return None
    return (trace_id, parent) if parent and any(trace_id) else None


def carry(function: F) -> F:
    """`function`, to be called by another thread, in the scope that is open here: `pool.submit(carry(work), item)`. asyncio does this by itself.

    For another process (a process pool, a subprocess, an actor) give it `inject`'s carrier and `extract` it there.
    """
    context = contextvars.copy_context()

    @functools.wraps(function)
    def carried(*args: object, **kwargs: object) -> object:
        return context.copy().run(function, *args, **kwargs)  # a copy, because several threads cannot enter one context at a time

    return cast(F, carried)
