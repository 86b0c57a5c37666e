"""The servers that `otel-forge up` left running on this host. It reads one small file and /proc; ranks ask it at the first flush."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "servers.json"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """One server process; start time and boot id tell it from a later process with the same pid."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    log: str

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return start_ticks(self.pid) == self.start_ticks and boot_id() == self.boot_id


@dataclass(frozen=True, slots=True)
class Servers:
    """Where everything is."""

    shape: str
    """`collector` or `direct`."""
    otlp_http: str
    """Base URL for the ranks' metrics."""
    traces_http: str | None
    """Base URL for the ranks' spans; None: the same as the metrics'."""
    exporter_http: str
    jaeger_query: str | None
    modes: tuple[str, ...]
    window_s: float
    processes: tuple[ServerProcess, ...] = field(default_factory=tuple)

    def are_alive(self) -> bool:
        """Whether every process still runs."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)


def living(state_dir: Path) -> Servers | None:
    """The servers of a living `otel-forge up` with this state directory; None when there are none, or some of them are gone."""
    servers = read(state_dir)
    return servers if servers is not None and servers.are_alive() else None


def read(state_dir: Path) -> Servers | None:
    """What `up` wrote, whether or not it still runs; None for no file or one of another form."""
    try:
        raw: dict[str, Any] = json.loads((state_dir / FILE_NAME).read_text(encoding="utf-8"))
        processes = tuple(ServerProcess(**process) for process in raw.pop("processes"))
        return Servers(**{**raw, "modes": tuple(raw["modes"])}, processes=processes)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(state_dir: Path, servers: Servers) -> None:
    """Write the file, whole or not at all."""
    path = state_dir / FILE_NAME
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(servers), indent=1), encoding="utf-8")
    unfinished.replace(path)


def remove(state_dir: Path) -> None:
    """Forget the servers."""
    (state_dir / FILE_NAME).unlink(missing_ok=True)


def start_ticks(pid: int) -> int | None:
    """Clock ticks after boot when a process started; None when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Differs after each boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
