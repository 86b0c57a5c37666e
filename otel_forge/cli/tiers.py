"""One tier of Collectors or two, and the exporter behind, on loopback: for the scale bench, and for tests that kill one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from otel_forge.cli import collector_config as files
from otel_forge.cli.binaries import install, program_for
from otel_forge.cli.servers import COLLECTOR_MEMORY, STOP_TIMEOUT_S, fetch, pick_ports
from otel_forge.errors import ServerError

HEALTH_TIMEOUT_S = 60.0


@dataclass
class Server:
    """One process, its command kept so that it can be started again as it was."""

    name: str
    command: list[str]
    environ: Mapping[str, str]
    health: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self.process is not None, "started before it is asked"
        return self.process.pid

    def start(self) -> None:
        """Start it; it may not serve yet."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=dict(self.environ), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_healthy(self) -> None:
        """Return when it serves. Raises ServerError when it ends or does not serve in time."""
        deadline = time.monotonic() + HEALTH_TIMEOUT_S
        while not self._is_healthy():
            if time.monotonic() > deadline or self.process is None or self.process.poll() is not None:
                raise ServerError(f"{self.name} does not serve; {self.log} says:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        try:
            return fetch(self.health, timeout_s=1.0) is not None
        except OSError:
            return False

    def kill_and_start_again(self) -> None:
        """Kill it with -9, then the same command with the same state."""
        assert self.process is not None, "started before it is killed"
        self.process.kill()
        self.process.wait()
        self.start()
        self.wait_healthy()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not enough."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Tiers:
    """Collectors in front of one exporter: `agents` and `gateways`, or without agents the single Collector."""

    folder: Path
    config_path: Path
    """The exporter's configuration."""
    agents: int = 2
    gateways: int = 1
    mode: Literal["forward", "reduce"] = "forward"
    window_s: float = 0.5
    servers: dict[str, Server] = field(default_factory=dict)
    endpoints: list[str] = field(default_factory=list)
    """Where ranks send: the base URL of each Collector of the first tier."""
    exporter_http: str = ""
    _taken: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Start all, and return when all serve."""
        exporter = {files.ENV_EXPORTER: self._add_exporter()}
        if self.agents:
            behind = files.Options(gateway=self.mode, jaeger=False)
            gateways = tuple(self._add_collector(f"gateway{number}", "gateway", behind, exporter) for number in range(self.gateways))
            for number in range(self.agents):
                self._add_collector(f"agent{number}", "agent", files.Options(gateways=gateways, gateway=self.mode), {})
        else:
            self._add_collector("collector", "single", files.Options(jaeger=False), exporter)
        for server in self.servers.values():
            server.start()
        for server in self.servers.values():
            server.wait_healthy()

    def stop(self) -> None:
        """Stop all."""
        for server in reversed(self.servers.values()):
            server.stop()

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that the ranks flushed is written; whether that was so in time."""
        answer = fetch(f"{self.exporter_http}/drain?timeout_s={timeout_s}", timeout_s=timeout_s + 5, post=True)
        return b"true" in (answer or b"")

    def _free_ports(self) -> dict[str, int]:
        """Ports that no server here has yet; those of one call are let go before the next, and can come again."""
        while True:
            ports = pick_ports(usual=False)
            if self._taken.isdisjoint(ports.values()):
                self._taken.update(ports.values())
                return ports

    def _add_exporter(self) -> str:
        ports = self._free_ports()
        grpc, http = f"127.0.0.1:{ports[files.ENV_EXPORTER]}", f"127.0.0.1:{ports['exporter_http']}"
        self.exporter_http = f"http://{http}"
        command = [
            sys.executable, "-m", "otel_forge.cli", "export", "--grpc-endpoint", grpc, "--http-endpoint", http,
            "--state-dir", str(self.folder / "exporter"), "--work-dir", str(self.folder), "--config", str(self.config_path),
        ]  # fmt: skip
        self.servers["exporter"] = Server("exporter", command, os.environ, self.exporter_http + "/health", self.folder / "exporter.log")
        return grpc

    def _add_collector(self, name: str, tier: files.Tier, options: files.Options, more: Mapping[str, str]) -> str:
        """Add one; the host:port of its gRPC receiver."""
        path = self.folder / f"{name}.yaml"
        path.write_text(files.RENDERERS[tier](options), encoding="utf-8")
        ports = self._free_ports()
        environ = {variable: f"127.0.0.1:{ports[variable]}" for variable in (files.ENV_OTLP_GRPC, files.ENV_OTLP_HTTP, files.ENV_WINDOW_GRPC)} | {
            files.ENV_HEALTH: f"127.0.0.1:{ports['collector_health']}", files.ENV_COLLECTOR_STATE: str(self.folder / name),
            files.ENV_TELEMETRY_PORT: str(ports[files.ENV_TELEMETRY_PORT]), files.ENV_WINDOW: f"{round(self.window_s * 1000)}ms",
            "GOMEMLIMIT": os.environ.get("GOMEMLIMIT", COLLECTOR_MEMORY), **more,
        }  # fmt: skip
        command = [str(install(program_for(path), print)), "--config", str(path)]
        health = f"http://{environ[files.ENV_HEALTH]}/"
        self.servers[name] = Server(name, command, {**os.environ, **environ}, health, self.folder / f"{name}.log")
        if tier != "gateway":
            self.endpoints.append(f"http://{environ[files.ENV_OTLP_HTTP]}")
        return environ[files.ENV_OTLP_GRPC]
