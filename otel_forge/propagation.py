"""The open scope as W3C trace context, for what runs elsewhere: another process, an actor's message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping

from otel_forge import pipeline, tracing, wire

TRACEPARENT = "traceparent"


def inject(carrier: MutableMapping[str, str]) -> None:
    """Write the open scope into a carrier (a dict of strings, such as headers). Before the first flush there is no run, and nothing is written."""
    current = pipeline.current()
    run = current.run() if current is not None else None
    if run is None:
        return
    step = pipeline.get_step()
    span_id = tracing.current_span_id()
    parent = span_id.to_bytes(8, "big") if span_id else wire.root_span_id(run.run_id, run.attempt, step)
    carrier[TRACEPARENT] = f"00-{wire.trace_id(run.run_id, run.attempt, step).hex()}-{parent.hex()}-01"


@contextlib.contextmanager
def extract(carrier: Mapping[str, str]) -> Iterator[None]:
    """Scopes opened inside hang under the scope that was injected; with a carrier that holds none, nothing changes."""
    parts = carrier.get(TRACEPARENT, "").split("-")
    try:
        parent = int(parts[2], 16) if len(parts) >= 4 and len(parts[1]) == 32 and len(parts[2]) == 16 else 0
    except ValueError:
        parent = 0
    if not parent:
        yield
        return
    token = tracing._parent.set(parent)
    try:
        yield
    finally:
        tracing._restore(token)
