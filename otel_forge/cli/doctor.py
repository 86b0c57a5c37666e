"""`otel-forge doctor`: what stands in the way of a run on this host, and how to mend it. It changes nothing and starts nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from otel_forge import __version__, discovery
from otel_forge.cli.binaries import COLLECTOR, JAEGER, find
from otel_forge.cli.reaching import Check, check_clock, check_endpoint, check_proxy, check_servers
from otel_forge.config import (
    ENV_RUN_ID,
    CustomConfig,
    ForgeConfig,
    is_disabled,
    load_config,
    state_dir,
)
from otel_forge.destination import Destination, resolve
from otel_forge.errors import BinaryNotFound, ConfigError
from otel_forge.identity import Member, clean_id, resolve_member

PACKAGES = ("opentelemetry-sdk", "opentelemetry-proto", "protobuf", "pydantic", "torch", "wandb", "grpcio", "plotly")
NEEDS = {"wandb": "wandb", "tensorboard": "tensorboard", "otlp": "grpc", "parquet": "pyarrow", "mlflow": "mlflow", "trackio": "trackio"}
"""Backend → the module that it needs."""
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "glusterfs", "9p", "fuse.sshfs", "afs", "panfs", "wekafs", "pvfs", "orangefs")
"""Beginnings of names of file systems that several hosts share: SQLite's log and file locks are not safe there."""
LOW_SPACE_BYTES = 1 << 30


def examine(config_path: Path | None, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Every check, in the order in which they matter."""
    checks: list[Check] = []
    try:
        config = load_config(config_path)
        checks.append(Check("config", "ok", str(config_path or "defaults")))
    except ConfigError as error:
        checks.append(Check("config", "fail", "; ".join(error.problems), f"otel-forge validate {config_path}"))
        config = ForgeConfig()
    if is_disabled():
        checks.append(Check("switch", "warn", "all telemetry is turned off", "unset OTEL_SDK_DISABLED and FORGE_DISABLE_METRICS"))
    home = state_dir(config)
    checks += [_versions(), *_backends(config), *_state(home), *_binaries(), *check_servers(discovery.read(home), home)]
    member = resolve_member(None, 0, None, None, environ)
    checks += [_member(member, environ), _run_id(member, environ)]
    try:
        destination = resolve(config, explicit=False, world_size=member.world_size, environ=environ)
    except ConfigError as error:
        return [*checks, Check("shape", "fail", "; ".join(error.problems), "change collector.shape, or the environment variable that is named")]
    clock = check_clock(config, destination) if (reached := check_endpoint(config, destination)).state == "ok" else None
    return [*checks, _shape(destination), reached, *([clock] if clock else []), check_proxy(destination)]


def _versions() -> Check:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return Check("versions", "ok", f"otel-forge {__version__}, Python {sys.version.split()[0]}, {', '.join(found)}")


def _backends(config: ForgeConfig) -> Iterator[Check]:
    """Of the configured backends, those whose package is not there."""
    for name, backend in config.metric_logging.items():
        needed = backend.class_.partition(":")[0] if isinstance(backend, CustomConfig) and backend.class_ else NEEDS.get(name)
        if needed and not _is_there(needed):
            extra = f"pip install 'otel-forge[{name}]'" if name in NEEDS else f"put {needed} on PYTHONPATH of the exporter"
            yield Check(f"backend {name}", "fail", f"the module {needed} is not installed", extra)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# --- the state directory -----------------------------------------------------------------------------------------------


def _state(home: Path) -> Iterator[Check]:
    there = next(path for path in (home, *home.parents) if path.exists())
    mend = "name a node-local directory of yours: OTEL_FORGE_STATE_DIR, or state_dir in the file"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK) or not _can_write(there, home):
        yield Check("state", "fail", f"{home} cannot be written", mend)
        return
    kind = file_system(there)
    if kind.startswith(SHARED):
        yield Check("state", "warn", f"{home} is on {kind}, which several hosts share: the spool is not safe there", mend)
        return
    free = shutil.disk_usage(there).free
    if free < LOW_SPACE_BYTES:
        yield Check("state", "warn", f"{home} has {free / 2**20:.0f} MiB left", "make room, or " + mend)
        return
    yield Check("state", "ok", f"{home} ({kind}, {free / 2**30:.0f} GiB left)")


def _can_write(there: Path, home: Path) -> bool:
    if there != home:
        return True  # it will be made
    probe = home / f".doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
        return True
    except OSError:
        return False


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds a path, as in /proc/self/mountinfo; `unknown` where that does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace") if mounts is None else mounts
    except OSError:
        return "unknown"
    target, best, kind = path.resolve(), -1, "unknown"
    for line in text.splitlines():
        fields, _, more = line.partition(" - ")
        point = Path(fields.split()[4].replace("\\040", " ")) if len(fields.split()) > 4 else None
        if point is not None and more and (target == point or point in target.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), more.split()[0]
    return kind


def _binaries() -> Iterator[Check]:
    for binary in (COLLECTOR, JAEGER):
        try:
            found = find(binary)
        except BinaryNotFound as error:
            yield Check(binary.name, "fail", str(error), f"unset {binary.env}, or set it to a program")
            continue
        if found is None:
            yield Check(binary.name, "warn", f"{binary.version} is not installed", "otel-forge collector install")
        else:
            yield Check(binary.name, "ok", f"{found} (made for {binary.version})")


# --- what init would decide ----------------------------------------------------------------------------------------------


def _member(member: Member, environ: Mapping[str, str]) -> Check:
    sources = {"RANK": "RANK and WORLD_SIZE", "SLURM_PROCID": "SLURM_PROCID and SLURM_STEP_NUM_TASKS"}
    is_given = member.world_size > 1
    source = next((text for name, text in sources.items() if is_given and name in environ), "nothing says otherwise")
    found = f"{member.role} rank {member.rank} of {member.world_size} ({source})"
    if not is_given and int(environ.get("SLURM_NTASKS") or 1) > 1 and "SLURM_STEP_NUM_TASKS" not in environ:
        return Check(
            "rank",
            "warn",
            found + f"; the job has {environ['SLURM_NTASKS']} tasks",
            "start the training with srun or torchrun, or init(rank=, world_size=)",
        )
    return Check("rank", "ok", found)


def _run_id(member: Member, environ: Mapping[str, str]) -> Check:
    if environ.get(ENV_RUN_ID):
        return Check("run id", "ok", f"{clean_id(environ[ENV_RUN_ID])} ({ENV_RUN_ID})")
    if member.world_size == 1:
        return Check("run id", "ok", "a new one for each process (of its host, pid and start)")
    if environ.get("TORCHELASTIC_RESTART_COUNT", "").isdigit() and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        return Check("run id", "ok", "a new one for each launch of torchrun on this host")
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID") and environ.get("SLURM_STEP_NUM_TASKS") == str(member.world_size):
        return Check(
            "run id", "ok", clean_id(f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}") + ", unless the process group agrees on one"
        )
    found = "what the process group's store agrees on; without one each host has its own"
    return Check("run id", "warn", found, f"set {ENV_RUN_ID} to one value on every rank, or call init_process_group before the first flush")


def _shape(destination: Destination) -> Check:
    modes = f"; logging modes {', '.join(destination.modes)}"
    target = f", to {destination.metrics_url}" if destination.metrics_url else ""
    if destination.shape == "spill":
        return Check(
            "shape", "warn", f"packets are kept on disk{modes}", "otel-forge run -- …, otel-forge up, or an endpoint; afterwards otel-forge replay"
        )
    return Check("shape", "ok", f"{destination.shape}{target}{modes}")


def as_text(checks: list[Check]) -> str:
    """A line each, and one below it where something is to be done."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<5} {check.name:<{width}}  {check.found}")
        if check.mend:
            lines.append(f"{'':<5} {'':<{width}}  → {check.mend}")
    return "\n".join(lines)
