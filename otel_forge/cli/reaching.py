"""What `otel-forge doctor` asks of servers: whether the ranks' packets would be taken, and how far clocks are apart."""

from __future__ import annotations

import email.utils
import http.client
import json
import socket
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from otel_forge import discovery
from otel_forge.cli.servers import fetch
from otel_forge.config import ForgeConfig
from otel_forge.destination import Destination
from otel_forge.otlp_http import Poster, Verdict, is_loopback
from otel_forge.pipeline import ssl_context_of

TIMEOUT_S = 5.0
CLOCK_PROBES = 12
"""Each narrows the offset, because the answers' dates are whole seconds: 12 over a second leave about 0.1 s."""
CLOCK_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's."""

    name: str
    state: str
    """`ok`, `warn` or `fail`."""
    found: str
    mend: str = ""
    """What to do; empty where nothing is to be done."""


def check_endpoint(config: ForgeConfig, destination: Destination) -> Check:
    """Whether an empty request is taken where the ranks' packets go, with their headers, certificates and proxy."""
    url = destination.metrics_url
    if url is None:
        if destination.shape == "inprocess":
            return Check("endpoint", "ok", "none is needed: the only process writes the rows itself")
        return Check(
            "endpoint", "warn", "there is nothing to send to: packets are kept on disk", "start servers: otel-forge up, or otel-forge run -- …"
        )
    if destination.settings.protocol == "grpc":
        return _check_grpc(url)
    settings = destination.settings
    token = config.collector.token
    headers = ({"authorization": f"Bearer {token}"} if token else {}) | settings.headers
    try:
        outcome = Poster(url, headers, min(TIMEOUT_S, settings.timeout_s), "none", ssl_context_of(config, settings.ca_file)).post(b"")
    except (OSError, ValueError) as error:
        return Check("endpoint", "fail", f"{url}: {error}", "mend the certificates of collector.tls, or the URL")
    answer = _get(url, ssl_context_of(config, settings.ca_file)) if outcome.verdict is Verdict.ACCEPTED else None
    if answer is not None and answer.status == 200:  # an OTLP receiver knows no GET; a web page answers whatever it is asked
        return Check(
            "endpoint", "fail", f"{url} does not take packets: it gives a page to read", "check the port: what listens there is a web server"
        )
    if outcome.verdict is Verdict.ACCEPTED:
        return Check("endpoint", "ok", f"{url} takes packets")
    mends = {
        Verdict.FORBIDDEN: "check collector.token or OTEL_EXPORTER_OTLP_HEADERS, and the path of the URL",
        Verdict.NOT_STORED: "is the Collector running, and the address right? otel-forge status; otel-forge up",
        Verdict.UNKNOWN: "what listens there is no OTLP/HTTP receiver, or it is stuck: check the port (OTLP/HTTP is usually 4318, gRPC 4317)",
        Verdict.REJECTED: "what listens there is no OTLP/HTTP receiver: check the port and the path",
    }
    return Check("endpoint", "fail", f"{url} does not take packets: {outcome.detail or outcome.verdict.name.lower()}", mends[outcome.verdict])


def _check_grpc(url: str) -> Check:
    parts = urllib.parse.urlsplit(url if "://" in url else f"//{url}")
    try:
        socket.create_connection((parts.hostname or "", parts.port or 4317), TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return Check("endpoint", "fail", f"{url} (gRPC): {error}", "is the Collector running, and the address right?")
    return Check("endpoint", "ok", f"{url} (gRPC) is listening; whether it takes packets was not tried")


def check_proxy(destination: Destination) -> Check:
    """Whether packets go through a proxy; to this machine they never do."""
    proxies = {name: value for name, value in urllib.request.getproxies().items() if name in ("http", "https")}
    url = destination.metrics_url
    if not proxies or url is None:
        return Check("proxy", "ok", "none" if not proxies else "set, and not used: nothing is sent from here")
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return Check("proxy", "ok", f"set, and not used for {host}")
    proxy = proxies.get(parts.scheme)
    if proxy is None:
        return Check("proxy", "ok", f"none for {parts.scheme}")
    told = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    where = f"{told.hostname}:{told.port}" if told.port else str(told.hostname)  # without the user's name and password
    return Check("proxy", "warn", f"packets to {host} go through {where}", f"a Collector in your own network: NO_PROXY={host}")


def check_servers(servers: discovery.Servers | None, state_dir: Any) -> list[Check]:
    """The servers of `otel-forge up`: one line for each."""
    if servers is None:
        return [Check("servers", "ok", f"none of `otel-forge up` in {state_dir}")]
    checks = []
    urls = {"exporter": f"{servers.exporter_http}/status", "jaeger": f"{servers.jaeger_query}/api/services", "collector": None}
    for process in servers.processes:
        url = urls.get(process.name)
        if not process.is_alive():
            checks.append(Check(process.name, "fail", f"pid {process.pid} is gone; its log is {process.log}", "otel-forge down, then otel-forge up"))
        elif url is not None and not _answers(url):
            checks.append(Check(process.name, "fail", f"{url} does not answer; its log is {process.log}", "otel-forge down, then otel-forge up"))
        else:
            checks.append(Check(process.name, "ok", f"pid {process.pid}" + (f", {url} answers" if url else " runs")))
    failing = _failing_backends(servers)
    return checks + [Check("backend", "warn", text, "the exporter tries again; the log and the message say what is missing") for text in failing]


def _answers(url: str) -> bool:
    try:
        return fetch(url, timeout_s=TIMEOUT_S) is not None
    except OSError:
        return False


def _failing_backends(servers: discovery.Servers) -> list[str]:
    try:
        status = json.loads(fetch(f"{servers.exporter_http}/status", timeout_s=TIMEOUT_S) or b"{}")
    except (OSError, ValueError):
        return []
    runs = (status.get("runs") or {}).items()
    return [f"{name} of run {run_id}: {backend['error']}" for run_id, run in runs for name, backend in run["backends"].items() if backend["error"]]


def check_clock(config: ForgeConfig, destination: Destination) -> Check | None:
    """How far this clock is from the Collector's, by the dates of its answers; None where there is none to ask."""
    url = destination.metrics_url
    if url is None or destination.settings.protocol == "grpc":
        return None
    offset = clock_offset(url, ssl_context_of(config, destination.settings.ca_file))
    if offset is None:
        return Check("clock", "warn", "the Collector's answers have no date: the clocks were not compared", "compare them yourself: date +%s.%N")
    low, high = offset
    told = f"{(low + high) / 2:+.2f} s from the Collector's (± {(high - low) / 2:.2f} s)"
    if low > CLOCK_TOLERANCE_S or high < -CLOCK_TOLERANCE_S:
        return Check("clock", "warn", told, "spans of several hosts will not line up: set the clocks by NTP (chronyc tracking)")
    return Check("clock", "ok", told)


def clock_offset(url: str, ssl_context: Any = None) -> tuple[float, float] | None:
    """Bounds of (their clock - ours) in seconds, from the Date header of several answers; None without one."""
    low, high = float("-inf"), float("inf")
    for _ in range(CLOCK_PROBES):
        asked = time.time()
        answer = _get(url, ssl_context)
        answered = time.time()
        their = _date(answer)
        if answer is None or their is None:
            return None
        age = 2.0 if answer.getheader("server") == "uvicorn" else 1.0  # uvicorn writes the date once a second, at a time of its own
        low, high = max(low, their - answered), min(high, their + age - asked)
        time.sleep(1.1 / CLOCK_PROBES)
    return (low, high) if low <= high else None


def _date(answer: http.client.HTTPResponse | None) -> float | None:
    """Unix seconds of an answer."""
    date = answer.getheader("date") if answer is not None else None
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, TypeError):
        return None


def _get(url: str, ssl_context: Any) -> http.client.HTTPResponse | None:
    """The head of an answer, whatever it says; None without one. It takes no proxy."""
    parts = urllib.parse.urlsplit(url)
    more = {"context": ssl_context} if parts.scheme == "https" and ssl_context is not None else {}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S, **more)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
