"""The traces of steps, from Jaeger's query API. It knows the names of root spans, and nothing of who draws the spans."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import Any

from otel_forge.cli.servers import fetch
from otel_forge.errors import InputError
from otel_forge.otlp_http import is_loopback

SERVICE = "otel-forge"
"""Of the roots, which the exporter writes."""
MOST_STEPS = 1000
SAME_NAME = 200
"""Traces of one root's name that are asked for: a step of so many runs and attempts."""
TIMEOUT_S = 30.0
Trace = dict[str, Any]


def step_traces(query: str, first: int, last: int, run_id: str | None) -> tuple[str, list[Trace]]:
    """The run, and its traces of these steps in their order; of a step that was done again, the newest attempt's. Raises InputError.

    `run_id` None: the run of the newest of these traces.
    """
    names = [name for name in _get(query, f"/api/services/{SERVICE}/operations") or [] if _covers(name, first, last)]
    if not names:
        raise InputError(f"{query} has no trace of step {first}" + (f" to {last}" if last > first else "") + ": nothing was traced, or it was let go")
    if len(names) > MOST_STEPS:
        raise InputError(f"{len(names)} steps are more than one file can show: ask for {MOST_STEPS} at most")
    found = [trace for name in names for trace in _named(query, name)]
    newest = max(found, key=_start, default=None)
    run = run_id or (_run_of(newest) if newest is not None else None)
    own = [trace for trace in found if _run_of(trace) == run]
    if run is None or not own:
        others = sorted({str(_run_of(trace)) for trace in found})
        raise InputError(f"{query} has these steps of {', '.join(others) or 'no run'}, and none of run {run_id}")
    return run, _newest_attempts(own)


def _newest_attempts(traces: Iterable[Trace]) -> list[Trace]:
    by_name: dict[str, Trace] = {}
    for trace in sorted(traces, key=lambda trace: (int(_tag(root(trace)["tags"], "forge.attempt") or 0), _start(trace))):
        by_name[root(trace)["operationName"]] = trace
    return sorted(by_name.values(), key=_start)


def _covers(name: str, first: int, last: int) -> bool:
    """Whether a root's name (`step 11`, `step 11–20`) is of one of these steps."""
    match = re.fullmatch(r"step (\d+)(?:\u2013(\d+))?", name)
    return match is not None and int(match[1]) <= last and int(match[2] or match[1]) >= first


def _named(query: str, name: str) -> list[Trace]:
    parameters = urllib.parse.urlencode({"service": SERVICE, "operation": name, "limit": SAME_NAME, "lookback": "8760h"})
    return [trace for trace in _get(query, f"/api/traces?{parameters}") or [] if root(trace)["operationName"] == name]


def root(trace: Trace) -> dict[str, Any]:
    """The span that has no parent and was written by the exporter; the earliest span where that is missing."""
    named = [span for span in trace["spans"] if not span.get("references") and _process(trace, span)["serviceName"] == SERVICE]
    return named[0] if named else min(trace["spans"], key=lambda span: int(span["startTime"]))


def _process(trace: Trace, span: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = trace["processes"][span["processID"]]
    return found


def _run_of(trace: Trace) -> str | None:
    found: str | None = _tag(_process(trace, root(trace)).get("tags") or [], "forge.run_id")
    return found


def _tag(tags: Iterable[dict[str, Any]], name: str) -> Any:
    return next((tag["value"] for tag in tags if tag["key"] == name), None)


def _start(trace: Trace) -> int:
    return int(root(trace)["startTime"])


def _get(query: str, path: str) -> Any:
    """The `data` of an answer; to this machine without a proxy. Raises InputError."""
    url = query.rstrip("/") + path
    try:
        if is_loopback(urllib.parse.urlsplit(url).hostname or ""):
            body = fetch(url, timeout_s=TIMEOUT_S)
        else:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                body = answer.read()
        return json.loads(body or b"").get("data")
    except (OSError, urllib.error.URLError) as error:
        raise InputError(f"{query}: Jaeger's query API does not answer ({error})") from error
    except (ValueError, AttributeError) as error:
        raise InputError(f"{url}: the answer is not that of Jaeger's query API") from error
