"""Who this process is: member (role, replica, rank), run and attempt. It must not send anything.

Where a run id comes from decides who can share it: the launcher's process (one node), the store of torch.distributed (many nodes), or nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_forge.config import ENV_ROLE, ENV_RUN_ID
from otel_forge.discovery import boot_id, start_ticks

logger = logging.getLogger("otel_forge")

AGREE_TIMEOUT_S = 30.0
"""How long the sending thread waits for rank 0 to publish the run id; nothing else waits with it."""
ENV_RANK = "RANK"
"""Set by torchrun."""
_STORE_KEY = "otel_forge/run"


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of one replica of one role."""

    role: str
    replica: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Run:
    """The run and the incarnation of the group: equal on every member."""

    run_id: str
    attempt: int
    """Orders the incarnations of a group: unix milliseconds when it started (plus the restart count)."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts of this process for resources and hellos."""

    host: str
    pid: int
    start_time_unix: float
    nonce: str


def process_facts() -> ProcessFacts:
    """Facts of this process, with a fresh nonce."""
    return ProcessFacts(socket.gethostname(), os.getpid(), process_start_unix(os.getpid()) or time.time(), uuid.uuid4().hex[:16])


def process_start_unix(pid: int) -> float | None:
    """Unix seconds when a process started, to 10 ms; None where /proc does not tell."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            boot = next(int(line.split()[1]) for line in stat if line.startswith("btime"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _group() -> Any:
    """torch.distributed.distributed_c10d when a default process group exists; torch is never imported for it."""
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return sys.modules["torch.distributed.distributed_c10d"]
    return None


def resolve_member(role: str | None, replica: int, rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Member:
    """Rank and world by precedence: arguments, torch.distributed, RANK/WORLD_SIZE, a SLURM step's variables, else 0 of 1."""
    found_rank, found_world = _rank_and_world(environ)
    rank = found_rank if rank is None else rank
    world_size = max(found_world, rank + 1) if world_size is None else world_size
    return Member(role or environ.get(ENV_ROLE) or "trainer", replica, rank, world_size)


def _rank_and_world(environ: Mapping[str, str]) -> tuple[int, int]:
    group = _group()
    if group is not None:
        return int(group.get_rank()), int(group.get_world_size())
    for rank_name, world_name in ((ENV_RANK, "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        rank, world = environ.get(rank_name, ""), environ.get(world_name, "")
        if rank.isdigit() and world.isdigit() and int(rank) < int(world):
            return int(rank), int(world)
    return 0, 1


def resolve_node(member: Member, environ: Mapping[str, str]) -> tuple[int, int]:
    """(number of the node, rank within it), as the launcher says; without a launcher that does, all ranks are on one node."""
    for rank_name, node_name, size_name in (("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_NODEID", "")):
        local, node, size = environ.get(rank_name, ""), environ.get(node_name, ""), environ.get(size_name, "")
        if local.isdigit():
            by_size = member.rank // int(size) if size.isdigit() and int(size) else 0
            return (int(node) if node.isdigit() else by_size), int(local)
    return 0, member.rank


def resolve_run(
    run_id: str | None,
    member: Member,
    environ: Mapping[str, str],
    facts: ProcessFacts,
    *,
    launches_dir: Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Run:
    """The run's id and attempt. May wait for rank 0's word in the process group's store, at most AGREE_TIMEOUT_S: call it off the training thread.

    Precedence of the id: argument, OTEL_FORGE_RUN_ID, one node's launcher (its pid and start time tell two launches apart), the store, a launcher's
    job and step id, else a warning and an id of this host alone. `launches_dir` is where the ranks of one node agree (node-local).
    """
    given = run_id or environ.get(ENV_RUN_ID)
    local = _launch_on_one_node(member, environ, facts, launches_dir)
    if local is not None:
        return Run(clean_id(given or local.run_id), local.attempt)
    agreed = _agree_by_store(given, member, facts, stopped)
    if agreed is not None:
        return agreed
    return _without_agreement(given, member, environ, facts)


def _launch_on_one_node(member: Member, environ: Mapping[str, str], facts: ProcessFacts, launches_dir: Path | None) -> Run | None:
    if member.world_size == 1:
        return Run(_readable_id(facts.start_time_unix, facts.host, facts.pid), int(facts.start_time_unix * 1000))
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not restart.isdigit() or environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE") or str(member.world_size) != environ.get("WORLD_SIZE"):
        return None
    agent = os.getppid()
    started = process_start_unix(agent)
    if started is None:
        return None
    proposed = Run(_readable_id(started, facts.host, agent), int(started * 1000))
    launch = _first_word(launches_dir, agent, proposed) if launches_dir else proposed
    return Run(launch.run_id, launch.attempt + int(restart))


def _first_word(launches_dir: Path, agent: int, proposed: Run) -> Run:
    """What the first rank of this launch proposed. The kernel's boot time can differ by a second between two readings, so they must agree on one."""
    ticks = start_ticks(agent)
    path = launches_dir / hashlib.blake2b(f"{agent}\0{ticks}\0{boot_id()}".encode(), digest_size=8).hexdigest()
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        launches_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine.write_text(f"{proposed.attempt} {proposed.run_id}", encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()
        attempt, _, run_id = path.read_text(encoding="utf-8").partition(" ")
        return Run(run_id, int(attempt))
    except (OSError, ValueError):
        return proposed


def _agree_by_store(given: str | None, member: Member, facts: ProcessFacts, stopped: Callable[[], bool]) -> Run | None:
    """Rank 0 of the process group publishes, the others poll: `check` holds no lock that a collective of the training could wait for."""
    group = _group()
    if group is None or group.get_world_size() != member.world_size:
        return None
    try:
        store = group._get_default_store()
        if group.get_rank() == 0:
            now = time.time()
            run = Run(clean_id(given or _readable_id(now, facts.host, facts.pid)), int(now * 1000))
            store.set(_STORE_KEY, f"{run.attempt} {run.run_id}")
            return run
        deadline = time.monotonic() + AGREE_TIMEOUT_S
        while not store.check([_STORE_KEY]):
            if time.monotonic() > deadline or stopped():
                return None
            time.sleep(0.02)
        attempt, _, agreed_id = store.get(_STORE_KEY).decode().partition(" ")
        return Run(agreed_id, int(attempt))
    except Exception as error:  # a store that is gone, or another torch: nothing of it may reach the training
        logger.warning("the run id could not be agreed through the process group's store: %r", error)
        return None


def _without_agreement(given: str | None, member: Member, environ: Mapping[str, str], facts: ProcessFacts) -> Run:
    restart = environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or "0"
    attempt = int(restart) if restart.isdigit() else 0
    if given:
        return Run(clean_id(given), attempt)
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    if job and step and environ.get("SLURM_STEP_NUM_TASKS") == str(member.world_size):
        return Run(clean_id(f"slurm-{job}.{step}"), attempt)
    agent = os.getppid()
    started = process_start_unix(agent) or facts.start_time_unix
    run_id = _readable_id(started, facts.host, agent)
    logger.warning(
        "%d ranks, but nothing to agree on a run id with: this host's ranks use %r. Set OTEL_FORGE_RUN_ID to the same value on every rank, "
        "or call init_process_group before the first flush.",
        member.world_size,
        run_id,
    )
    return Run(run_id, attempt)


def _readable_id(started_unix: float, host: str, pid: int) -> str:
    digest = hashlib.blake2b(f"{host}\0{pid}\0{started_unix:.2f}\0{boot_id()}".encode(), digest_size=4).hexdigest()
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(started_unix)) + f"-{digest}"


def clean_id(run_id: str) -> str:
    """A run id that every place can hold (wandb's ids, file names): others than letters, digits, `_`, `.`, `-` become `-`; 120 characters."""
    cleaned = re.sub(r"[^A-Za-z0-9_.\-]+", "-", run_id).strip("-.")[:120]
    return cleaned or "run"
