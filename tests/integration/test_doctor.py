"""`otel-forge doctor` against real servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli.reaching import clock_offset
from tests.integration.conftest import Cli


@pytest.mark.parametrize("shape", ["collector", "direct"])
def test_living_servers_take_packets_and_their_clock_is_ours(
    shape: str, cli: Cli, start_stack: Callable[..., Any], config_path: Path, tmp_path: Path
) -> None:
    _, servers = start_stack(shape, jaeger=shape == "direct")
    done = cli("doctor", "--config", str(config_path), "--json", OTEL_FORGE_STATE_DIR=str(tmp_path / "stack"))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["endpoint"] == {"name": "endpoint", "state": "ok", "found": f"{servers.otlp_http}/v1/metrics takes packets", "mend": ""}
    assert {name: checks[name]["state"] for name in ("exporter", "clock", "shape")} == {"exporter": "ok", "clock": "ok", "shape": "ok"}
    assert checks["jaeger" if shape == "direct" else "collector"]["state"] == "ok"
    assert shape in checks["shape"]["found"]
    low, high = clock_offset(f"{servers.otlp_http}/v1/metrics") or (9.0, 9.0)
    assert low <= 0.0 <= high, "the same clock"
    assert high - low <= (2.0 if shape == "direct" else 1.0)


def test_a_port_that_is_no_otlp_receiver_is_not_taken_for_one(cli: Cli, start_stack: Callable[..., Any]) -> None:
    _, servers = start_stack("direct", jaeger=True)
    done = cli("doctor", OTEL_FORGE_ENDPOINT=servers.jaeger_query)
    assert done.returncode == 1
    assert "does not take packets" in done.stdout


def test_an_offset_of_a_clock_is_found_to_a_fraction_of_a_second() -> None:
    """A server whose clock is 40 s ahead."""

    class Ahead(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(404)
            self.send_header("Date", formatdate(time.time() + 40.0, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Ahead) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            low, high = clock_offset(f"http://127.0.0.1:{server.server_address[1]}/v1/metrics") or (0.0, 0.0)
        finally:
            server.shutdown()
    assert low <= 40.0 <= high
    assert high - low < 1.0
