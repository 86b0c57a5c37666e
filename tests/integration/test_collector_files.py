"""The Collector's own `validate` takes every file that is rendered, and a Collector that asks for a token refuses who has none."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_forge.cli.binaries import COLLECTOR, LOADBALANCING, find, install, program_for
from otel_forge.cli.collector_config import RENDERERS, Options, single_node
from otel_forge.cli.servers import pick_ports
from tests.exporters.packets import Ranks, mean
from tests.integration.conftest import Cli, wait_for

TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}


def test_the_command_finds_the_committed_files_valid(cli: Cli) -> None:
    done = cli("collector", "validate", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {Path(path).name for path in json.loads(done.stdout)} == {"single-node.yaml", "agent.yaml", "gateway.yaml", "jaeger.yaml"}


def test_the_command_says_what_is_wrong_with_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "single-node.yaml").write_text(single_node().replace("limit_mib: 1536", "limit_mib: many"))
    done = cli("collector", "validate", str(tmp_path / "single-node.yaml"))
    assert done.returncode == 1
    assert "limit_mib" in done.stdout


@pytest.mark.parametrize("tier", ["single", "agent", "gateway"])
def test_every_choice_of_options_is_valid(tier: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    gateways = [("a:1",), ("a:1", "b:1")] if find(LOADBALANCING) else [("a:1",)]
    choices = itertools.product(gateways, ("forward", "reduce"), (True, False), (False, True))
    for names, mode, jaeger, guarded in choices:
        more = {"listen": "0.0.0.0", "token": True, **_certificates(tmp_path)} if guarded else {}
        options = Options(gateways=names, gateway=mode, jaeger=jaeger, window_s=0.5, **more)  # type: ignore[arg-type]
        path = tmp_path / "config.yaml"
        path.write_text(RENDERERS[tier](options))  # type: ignore[index]
        command = [str(install(program_for(path), print)), "validate", "--config", str(path)]
        done = subprocess.run(command, env={**os.environ, "FORGE_TOKEN": "t"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{options}: {done.stderr}"


def _certificates(folder: Path) -> dict[str, str]:
    paths = {name: folder / file for name, file in TLS.items()}
    if not paths["tls_cert"].exists():
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
        subprocess.run([*command, "-keyout", str(paths["tls_key"]), "-out", str(paths["tls_cert"])], check=True, capture_output=True)
        paths["tls_ca"].write_bytes(paths["tls_cert"].read_bytes())
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """The HTTP port of a Collector that asks for the token "right"."""
    ports = pick_ports(usual=False)
    (tmp_path / "single.yaml").write_text(single_node(Options(token=True, jaeger=False)))
    environ = {
        **os.environ, "FORGE_TOKEN": "right", "FORGE_OTLP_HTTP": f"127.0.0.1:{ports['FORGE_OTLP_HTTP']}",
        "FORGE_OTLP_GRPC": f"127.0.0.1:{ports['FORGE_OTLP_GRPC']}", "FORGE_WINDOW_GRPC": f"127.0.0.1:{ports['FORGE_WINDOW_GRPC']}",
        "FORGE_HEALTH": f"127.0.0.1:{ports['collector_health']}", "FORGE_TELEMETRY_PORT": str(ports["FORGE_TELEMETRY_PORT"]),
        "FORGE_COLLECTOR_STATE": str(tmp_path / "queue"),
    }  # fmt: skip
    with (tmp_path / "collector.log").open("wb") as log:
        process = subprocess.Popen([str(install(COLLECTOR, print)), "--config", str(tmp_path / "single.yaml")], env=environ, stderr=log)
    try:
        wait_for(lambda: _status(ports["collector_health"], "/", None, {}) == 200, 30, "the Collector")
        yield ports["FORGE_OTLP_HTTP"]
    finally:
        process.terminate()
        process.wait()


def _status(port: int, path: str, body: bytes | None, headers: dict[str, str]) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/x-protobuf", **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_only_who_has_the_token_can_send(guarded: int) -> None:
    body = Ranks(1).send(0, 0, mean(1.0))
    for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "Bearer right"}, 200)):
        assert _status(guarded, "/v1/metrics", body, headers) == status
