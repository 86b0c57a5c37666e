"""Starting, watching and stopping the servers of one state directory: Collector, Jaeger and exporter, each in a session of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from otel_forge import discovery
from otel_forge.cli import collector_config as files
from otel_forge.cli.binaries import COLLECTOR, JAEGER, install
from otel_forge.config import ForgeConfig
from otel_forge.discovery import ServerProcess, Servers
from otel_forge.errors import BinaryNotFound, ServerError, StateError
from otel_forge.modes import LoggingMode

HEALTH_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
USUAL_PORTS = {
    files.ENV_OTLP_GRPC: 4317,
    files.ENV_OTLP_HTTP: 4318,
    files.ENV_WINDOW_GRPC: 4319,
    files.ENV_EXPORTER: 4327,
    "exporter_http": 4328,
    files.ENV_JAEGER_OTLP: 4337,
    files.ENV_JAEGER_OTLP_HTTP: 4338,
    files.ENV_JAEGER_QUERY: 16686,
    files.ENV_JAEGER_QUERY_GRPC: 16685,
    "collector_health": 13133,
    "jaeger_health": 13134,
    files.ENV_TELEMETRY_PORT: 8888,
}
COLLECTOR_MEMORY = "1GiB"
"""Above it the Collector's garbage collector works harder. A burst of 350,000 points took 2 GiB without a limit, and 2.6 × the CPU at 400 MiB."""
Say = Callable[[str], None]
Shape = Literal["auto", "direct", "collector"]
_direct_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Everything here is on loopback: no proxy, whatever the environment says."""


@dataclass
class Stack:
    """The servers of one state directory while they are being started, or running."""

    state_dir: Path
    config: ForgeConfig
    config_path: Path | None
    work_dir: Path
    say: Say
    private: bool = False
    """Free ports only, and the servers end with this process."""
    exporter_stdout: int | None = subprocess.DEVNULL
    ports: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[ServerProcess, subprocess.Popen[bytes]]] = field(default_factory=list)
    servers: Servers | None = None
    _changing: threading.Lock = field(default_factory=threading.Lock)
    """Held while servers are started again or taken off the list."""
    _commands: dict[str, tuple[list[str], Mapping[str, str], int | None]] = field(default_factory=dict)

    # --- starting ------------------------------------------------------------------------------------------------

    def start(self, shape: Shape = "auto", *, jaeger: bool = True) -> Servers:
        """Start what the shape needs and wait until all of it is healthy; nothing is left running when that fails."""
        collector_bin, jaeger_bin = self._binaries(shape, jaeger)
        self._make_dirs()
        self.ports = pick_ports(usual=not self.private)
        try:
            self._start_all(collector_bin, jaeger_bin)
        except BaseException:
            self.stop(drain_timeout_s=0.0)
            raise
        self.servers = Servers(
            shape="collector" if collector_bin else "direct",
            otlp_http=self._url(files.ENV_OTLP_HTTP if collector_bin else "exporter_http"),
            traces_http=None,
            exporter_http=self._url("exporter_http"),
            jaeger_query=self._url(files.ENV_JAEGER_QUERY) if jaeger_bin else None,
            modes=tuple(sorted({mode.value for mode in self.config.modes()} | {LoggingMode.GLOBAL_REDUCE.value})),
            window_s=self.config.collector.window_s,
            processes=tuple(process for process, _ in self.processes),
        )
        discovery.write(self.state_dir, self.servers)
        return self.servers

    def _binaries(self, shape: Shape, jaeger: bool) -> tuple[Path | None, Path | None]:
        collector_bin = jaeger_bin = None
        if shape != "direct":
            try:
                collector_bin = install(COLLECTOR, self.say)
            except BinaryNotFound as error:
                if shape == "collector":
                    raise
                self.say(f"no Collector ({_short(error)}): shape direct, the ranks send to the exporter")
        if jaeger:
            try:
                jaeger_bin = install(JAEGER, self.say)
            except BinaryNotFound as error:
                self.say(f"no Jaeger ({_short(error)}): spans are not kept")
        return collector_bin, jaeger_bin

    def _make_dirs(self) -> None:
        try:
            (self.state_dir / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self.state_dir / f".probe-{os.getpid()}"
            probe.write_bytes(b"x" * 4096)
            probe.unlink()
        except OSError as error:
            raise StateError(
                f"the state directory {self.state_dir} cannot be written ({error.strerror}); name another with OTEL_FORGE_STATE_DIR"
            ) from error

    def _start_all(self, collector_bin: Path | None, jaeger_bin: Path | None) -> None:
        if jaeger_bin:
            self._start_jaeger(jaeger_bin)
        self._start_exporter(traces=jaeger_bin is not None)
        if collector_bin:
            self._start_collector(collector_bin, jaeger=jaeger_bin is not None)
        for process, _ in self.processes:
            self._wait_healthy(process.name)

    def _start_jaeger(self, program: Path) -> None:
        path = self._write_config("jaeger.yaml", files.jaeger())
        environ = self._addresses(files.ENV_JAEGER_OTLP, files.ENV_JAEGER_OTLP_HTTP, files.ENV_JAEGER_QUERY, files.ENV_JAEGER_QUERY_GRPC)
        self._spawn("jaeger", [str(program), "--config", str(path)], environ | {files.ENV_HEALTH: self._address("jaeger_health")})

    def _start_collector(self, program: Path, *, jaeger: bool) -> None:
        path = self._write_config("collector.yaml", files.single_node(files.Options(jaeger=jaeger)))
        environ = self._addresses(files.ENV_OTLP_GRPC, files.ENV_OTLP_HTTP, files.ENV_WINDOW_GRPC, files.ENV_EXPORTER, files.ENV_JAEGER_OTLP)
        environ |= {
            files.ENV_HEALTH: self._address("collector_health"),
            files.ENV_COLLECTOR_STATE: str(self.state_dir / "collector"),
            files.ENV_WINDOW: f"{int(self.config.collector.window_s * 1000)}ms",
            files.ENV_TELEMETRY_PORT: str(self.ports[files.ENV_TELEMETRY_PORT]),
            "GOMEMLIMIT": os.environ.get("GOMEMLIMIT", COLLECTOR_MEMORY),
        }
        self._spawn("collector", [str(program), "--config", str(path)], environ)

    def _start_exporter(self, *, traces: bool) -> None:
        command = [
            sys.executable, "-m", "otel_forge.cli", "export", "--grpc-endpoint", self._address(files.ENV_EXPORTER),
            "--http-endpoint", self._address("exporter_http"), "--state-dir", str(self.state_dir / "exporter"), "--work-dir", str(self.work_dir),
        ]  # fmt: skip
        if traces:
            command += ["--trace-endpoint", self._url(files.ENV_JAEGER_OTLP_HTTP)]
        if self.config_path is not None:
            command += ["--config", str(self.config_path)]
        self._spawn("exporter", command, {}, stdout=self.exporter_stdout)

    def _spawn(self, name: str, command: list[str], environ: Mapping[str, str], *, stdout: int | None = subprocess.DEVNULL) -> None:
        self._commands[name] = (command, environ, stdout)
        log = self.state_dir / "logs" / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output if stdout == subprocess.DEVNULL else stdout,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent if self.private else None,
            )
        self.processes.append((ServerProcess(name, process.pid, discovery.start_ticks(process.pid) or 0, discovery.boot_id(), str(log)), process))

    def restart_dead(self) -> list[str]:
        """Start every server again that has ended by itself; the names of those. What they had stored is taken up."""
        with self._changing:
            return self._restart_dead()

    def _restart_dead(self) -> list[str]:
        dead = [(server, popen) for server, popen in self.processes if popen.poll() is not None]
        for server, popen in dead:
            self.processes.remove((server, popen))
            command, environ, stdout = self._commands[server.name]
            self._spawn(server.name, command, environ, stdout=stdout)
            self._wait_healthy(server.name)
        if dead and self.servers is not None:
            self.servers = replace(self.servers, processes=tuple(process for process, _ in self.processes))
            discovery.write(self.state_dir, self.servers)
        return [server.name for server, _ in dead]

    def _health_url(self, name: str) -> str:
        urls = {"jaeger": ("jaeger_health", "/status"), "exporter": ("exporter_http", "/health"), "collector": ("collector_health", "/")}
        port, path = urls[name]
        return self._url(port) + path

    def _wait_healthy(self, name: str) -> None:
        url = self._health_url(name)
        deadline = time.monotonic() + HEALTH_TIMEOUT_S
        process = next(process for server, process in self.processes if server.name == name)
        log = self.state_dir / "logs" / f"{name}.log"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerError(f"{name} ended with {process.returncode} while starting; {log} says:\n{_tail(log)}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                if fetch(url, timeout_s=1.0) is not None:
                    return
            time.sleep(0.05)
        raise ServerError(f"{name} did not become healthy within {HEALTH_TIMEOUT_S:.0f} s; {log} says:\n{_tail(log)}")

    def _write_config(self, name: str, text: str) -> Path:
        path = self.state_dir / name
        path.write_text(text, encoding="utf-8")
        return path

    def _address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def _url(self, name: str) -> str:
        return f"http://{self._address(name)}"

    def _addresses(self, *names: str) -> dict[str, str]:
        return {name: self._address(name) for name in names}

    # --- stopping --------------------------------------------------------------------------------------------------

    def stop(self, *, drain_timeout_s: float, exit_code: int | None = None) -> bool:
        """Let the exporter write what is there, then end every server; whether all of it was written."""
        drained = self.servers is None or drain(self.servers, drain_timeout_s, exit_code)
        with self._changing:
            processes, self.processes = self.processes, []
        for process, _ in reversed(processes):
            end_process(process)
        for _, popen in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(1.0)
        discovery.remove(self.state_dir)
        return drained


def _end_with_parent() -> None:
    """In a private stack's server, before its program starts: the kernel ends it when `otel-forge run` is killed.

    To the kernel the parent is the thread that started it: that thread must live as long as the server.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def drain(servers: Servers, timeout_s: float, exit_code: int | None = None) -> bool:
    """Wait until the exporter has written all it got, and nothing more comes from the Collector."""
    query = f"?timeout_s={timeout_s}" + (f"&exit_code={exit_code}" if exit_code is not None else "")
    try:
        answer = fetch(servers.exporter_http + "/drain" + query, timeout_s=timeout_s + 5.0, post=True)
        return bool(json.loads(answer or b"{}").get("drained"))
    except (OSError, ValueError):
        return False


def end_process(process: ServerProcess) -> None:
    """SIGTERM, and SIGKILL when that is not enough. A process that is not the one that was started is left alone."""
    for number, wait_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
        if not process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        deadline = time.monotonic() + wait_s
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)


def pick_ports(*, usual: bool) -> dict[str, int]:
    """A free port for every name; the usual one where it is wanted and free."""
    ports: dict[str, int] = {}
    held: list[socket.socket] = []
    try:
        for name, preferred in USUAL_PORTS.items():
            bound = (usual and _bind(preferred)) or _bind(0)
            assert bound is not None
            held.append(bound)
            ports[name] = bound.getsockname()[1]
    finally:
        for bound in held:
            bound.close()
    return ports


def _bind(port: int) -> socket.socket | None:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        return None
    return bound


def fetch(url: str, *, timeout_s: float, post: bool = False) -> bytes | None:
    """The body of a 2xx answer; None for another answer. Raises OSError when there is none."""
    request = urllib.request.Request(url, method="POST" if post else "GET", data=b"" if post else None)
    try:
        with _direct_opener.open(request, timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError:
        return None


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-8:])


def _short(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(":")


def rank_environment(servers: Servers, state_dir: Path, run_id: str | None, config_path: Path | None) -> dict[str, str]:
    """What tells the ranks where everything is."""
    environ = {
        "OTEL_FORGE_ENDPOINT": servers.otlp_http,
        "OTEL_FORGE_SHAPE": servers.shape,
        "OTEL_FORGE_MODES": ",".join(servers.modes),
        "OTEL_FORGE_STATE_DIR": str(state_dir),
    }
    if run_id:
        environ["OTEL_FORGE_RUN_ID"] = run_id
    if config_path is not None:
        environ["OTEL_FORGE_CONFIG"] = str(config_path)
    return environ


def exporter_status(servers: Servers) -> dict[str, Any] | None:
    """What the exporter says of itself; None when it does not answer."""
    try:
        found: dict[str, Any] = json.loads(fetch(servers.exporter_http + "/status", timeout_s=5.0) or b"null")
        return found
    except (OSError, ValueError):
        return None
