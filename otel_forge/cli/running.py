"""`otel-forge run`: servers up, the command with its environment, drain, servers down. It must not print rows; the exporter does."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from otel_forge import discovery
from otel_forge.cli.servers import Say, Shape, Stack, drain, rank_environment
from otel_forge.config import ENV_ENDPOINT, ENV_RUN_ID, ForgeConfig, instrument_texts, otlp_settings, state_dir, step_settings
from otel_forge.delivery import DeliveryReport, Sender
from otel_forge.discovery import Servers
from otel_forge.errors import ServerError
from otel_forge.identity import clean_id

WATCH_EVERY_S = 0.5
STARTUP = Path(__file__).parents[1] / "startup"
"""The folder whose `sitecustomize.py` starts instrumentation without code."""
RECIPE = """this command runs on several nodes, and no endpoint is given. One node keeps the servers, the others join them:
  on one node:   otel-forge up
  on every node: OTEL_FORGE_ENDPOINT=http://<that node>:4318 OTEL_FORGE_RUN_ID=<one id for the run> otel-forge run -- <command>
(the Collector listens on loopback unless FORGE_OTLP_HTTP says otherwise; see collector-config/README.md)"""


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a run."""

    exit_code: int
    run_id: str | None
    drained: bool
    servers: Servers | None
    state_dir: Path | None


class Runner:
    """Runs one command under telemetry."""

    def __init__(
        self, config: ForgeConfig, config_path: Path | None, *, say: Say, drain_timeout_s: float, shape: Shape, exporter_stdout: int | None = None
    ) -> None:
        self._config = config
        self._config_path = config_path
        self._say = say
        self._drain_timeout_s = drain_timeout_s
        self._shape: Shape = shape
        self._exporter_stdout = exporter_stdout
        self._child: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._closed = threading.Event()
        self.stack: Stack | None = None
        self.run_id: str | None = None

    def run(self, command: Sequence[str]) -> Finished:
        """Run it. Raises ServerError when the command could not be started with its servers."""
        if not shutil.which(command[0]):
            raise ServerError(f"{command[0]}: there is no such command")
        if os.environ.get(ENV_ENDPOINT) or os.environ.get(ENV_RUN_ID) or otlp_settings().metrics_url:
            return Finished(self._execute(command, {}), None, True, None, None)
        if is_on_several_nodes(command, os.environ):
            raise ServerError(RECIPE)
        living = discovery.living(state_dir(self._config))
        self.run_id = clean_id(time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6])
        if living is not None:
            return self._join(living, command)
        return self._alone(command)

    def _join(self, servers: Servers, command: Sequence[str]) -> Finished:
        self._say(f"joining the servers of `otel-forge up` (run {self.run_id})")
        base = state_dir(self._config)
        code = self._execute(command, rank_environment(servers, base, self.run_id, self._config_path))
        self._replay(servers, base)
        drained = drain(servers, self._drain_timeout_s)
        return Finished(code, self.run_id, drained, servers, base)

    def _alone(self, command: Sequence[str]) -> Finished:
        assert self.run_id is not None
        home = state_dir(self._config) / "runs" / self.run_id
        self.stack = stack = Stack(home, self._config, self._config_path, Path.cwd(), self._say, private=True, exporter_stdout=self._exporter_stdout)
        previous = signal.signal(signal.SIGTERM, self._forward)
        try:
            servers = stack.start(self._shape)
            threading.Thread(target=self._watch, args=(stack,), name="otel-forge-watch", daemon=True).start()
            code = self._execute(command, rank_environment(servers, home, self.run_id, self._config_path))
            self._replay(servers, home)
            drained = drain(servers, self._drain_timeout_s, code)
            return Finished(code, self.run_id, drained, servers, home)
        except BaseException:
            self.close()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _watch(self, stack: Stack) -> None:
        """Start servers again that die. The thread lives as long as they do: the kernel ends a private server with the thread that started it."""
        while not self._closing.wait(WATCH_EVERY_S):
            try:
                for name in stack.restart_dead():
                    self._say(f"{name} had ended and was started again; what it had stored is taken up")
            except ServerError as error:
                self._say(f"a server cannot be started again: {error}")
                break
        self._closed.wait()

    def close(self) -> None:
        """Stop the private servers; what they kept is removed when all of it was written."""
        stack, self.stack = self.stack, None
        self._closing.set()
        if stack is not None:
            stack.stop(drain_timeout_s=0.0)
        self._closed.set()

    def remove_state(self, finished: Finished) -> None:
        """Remove the state of a run whose rows are all written."""
        if finished.drained and finished.state_dir is not None and finished.state_dir.parent.name == "runs":
            shutil.rmtree(finished.state_dir, ignore_errors=True)

    def _execute(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        previous = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self._child = subprocess.Popen(list(command), env={**os.environ, **environ, **self._instrumentation()})
            code = self._child.wait()
            return 128 - code if code < 0 else code
        except OSError as error:
            raise ServerError(f"{command[0]}: cannot be started: {error.strerror}") from error
        finally:
            self._child = None
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _instrumentation(self) -> dict[str, str]:
        """What makes every Python that the command starts look for what is to be instrumented, where something is."""
        if not instrument_texts(self._config, os.environ) and step_settings(self._config, os.environ).on == "manual":
            return {}
        path = [str(STARTUP), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C reaches the command by the terminal itself; everything else is passed on."""
        child = self._child
        if child is None:
            raise KeyboardInterrupt
        if number != signal.SIGINT or os.getpgid(child.pid) != os.getpgrp() or not os.isatty(0):
            child.send_signal(number)

    def _replay(self, servers: Servers, base: Path) -> None:
        """Packets that the ranks could only keep on disk."""
        assert self.run_id is not None
        replay_run(base / "spool", self.run_id, servers.otlp_http, to_window=servers.shape == "collector", timeout_s=self._drain_timeout_s)


def replay_run(spool_dir: Path, run_id: str, endpoint: str, *, to_window: bool, timeout_s: float) -> DeliveryReport:
    """Send what processes of a run could only keep on disk. What cannot be sent within the time is kept again."""
    if not (spool_dir / run_id).is_dir():
        return DeliveryReport()
    sender = Sender(metrics_url=endpoint + "/v1/metrics", traces_url=endpoint + "/v1/traces", spool_dir=spool_dir, run_id=run_id, to_window=to_window)
    sender.flush(timeout_s)
    report = sender.shutdown(1.0)
    with contextlib.suppress(OSError):
        (spool_dir / run_id).rmdir()
    return report


def is_on_several_nodes(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command is a part of a job on several hosts."""
    if int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1) > 1:
        return True
    match = re.search(r"--nnodes[= ](\d+)(?::(\d+))?", " ".join(command))
    return match is not None and int(match.group(2) or match.group(1)) > 1
