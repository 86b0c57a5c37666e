"""What `wandb.init` is told of a row's run: id, names, configuration, settings. Pure but for the environment; it opens nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_forge.config import WandbConfig
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import Row

SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "x_disable_stats": True,  # the exporter is not where the GPUs are
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "symlink": False,
    "stop_on_fatal_error": True,  # else uploading ends without a word, when the key or the project is gone
    "finish_timeout_raises": True,
    "x_transaction_log_flush_interval": 2.0,
}
MEMBERS_SHOWN = 1024


class RunOptions:
    """The arguments of `wandb.init` for each run of one otel-forge run."""

    def __init__(self, config: WandbConfig, info: RunInfo) -> None:
        self._config = config
        self._info = info
        is_global = config.logging_mode.value == "global_reduce"
        self.per_rank = not is_global and not config.per_rank_share_run
        """Whether each member has a run of its own."""
        self.in_keys = not is_global and config.per_rank_share_run
        """Whether all members share a run that has them in its keys."""

    def run_id(self, row: Row) -> str:
        """Deterministic, so that a restarted exporter opens the same run; letters, digits, `-`, `_` and `.` only."""
        own = self._config.id or self._info.wandb_run_id
        if self.per_rank:
            base = f"{self._config.id or self._info.run_id}-{member_of(row)}"
        elif self.in_keys:
            base = self._config.id or f"{self._info.run_id}-ranks"
        else:
            base = own or self._info.run_id
        if self._config.resume == "fork" and row.attempt:
            base += f"-a{row.attempt}"
        return _short(base)

    def arguments(self, row: Row, *, mode: str) -> dict[str, Any]:
        """All but id, resume, dir and settings."""
        config = self._config
        default_group = self._info.run_id if self.per_rank or config.resume == "fork" else None
        return {
            "entity": config.entity,
            "project": config.project,
            "name": self._name(row),
            "group": self._filled(config.group, row) or default_group,
            "tags": [tag[:64] for text in config.tags if (tag := self._filled(text, row))] or None,
            "notes": self._filled(config.notes, row),
            "job_type": self._filled(config.job_type, row) or (row.role if self.per_rank else None),
            "config": self.run_config(row),
            "mode": "shared" if config.shared and mode == "online" else mode,
            "reinit": "create_new",
            **{key: value for key, value in config.extra.items() if key != "settings"},
        }

    def settings(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of wandb, as far as this wandb knows them; those of `extra` win."""
        found = SETTINGS | {"init_timeout": self._config.init_timeout, "finish_timeout": self._config.finish_timeout}
        if self._config.shared:
            found["x_label"] = f"otel-forge-{socket.gethostname()}"
        return {name: value for name, value in found.items() if name in known} | dict(self._config.extra.get("settings", {}))

    def run_config(self, row: Row) -> dict[str, Any]:
        """The training's configuration, and who its members are."""
        members = sorted(self._info.members.items())[:MEMBERS_SHOWN]
        facts: dict[str, Any] = {"run_id": self._info.run_id, "world_size": row.world_size}
        facts["members"] = {name: {key: hello.get(key) for key in ("host", "world_size", "device", "pid")} for name, hello in members}
        if self.per_rank:
            mine = self._info.members.get(_hello_name(row), {})
            facts |= {"role": row.role, "rank": row.rank, "replica": row.replica, "host": self._host(row), "device": mine.get("device")}
        return {**self._info.run_config, "otel_forge": facts}

    def _name(self, row: Row) -> str:
        """A name that would be the same for every member, or every attempt, gets them appended."""
        given = self._config.name or "{name}"
        name = self._filled(given, row) or self._info.run_id
        if self.per_rank and not ("{rank}" in given and ("{role}" in given or self._has_one_role())):
            name += f"-{member_of(row)}"
        elif self.in_keys and not self._config.name:
            name += "-ranks"
        if self._config.resume == "fork" and row.attempt:
            name += f"-a{row.attempt}"
        return name

    def _has_one_role(self) -> bool:
        return len({name.rpartition(".")[0] for name in self._info.members}) <= 1

    def _filled(self, template: str | None, row: Row) -> str | None:
        if template is None:
            return None
        name = self._info.run_id if self.per_rank or self.in_keys else self._info.wandb_name or self._info.run_id
        return template.format(name=name, role=row.role, rank="" if row.rank is None else row.rank, host=self._host(row))

    def _host(self, row: Row) -> str:
        found = self._info.members.get(_hello_name(row)) or next(iter(self._info.members.values()), {})
        return str(found.get("host") or socket.gethostname())


def member_of(row: Row) -> str:
    """`role_rank`, or `role_replica_rank` for replicas but the first."""
    replica = f"{row.replica}_" if row.replica else ""
    return f"{row.role}_{replica}{row.rank}"


def _hello_name(row: Row) -> str:
    return f"{row.role}/{row.replica or 0}.{row.rank or 0}"


def _short(run_id: str) -> str:
    if len(run_id) <= 120:
        return run_id
    return f"{run_id[:100]}-{hashlib.blake2b(run_id.encode(), digest_size=6).hexdigest()}"


def mode_of(config: WandbConfig) -> str:
    """What the configuration says, else WANDB_MODE, else online with an API key and offline without."""
    given = config.mode or os.environ.get("WANDB_MODE")
    if given:
        return {"dryrun": "offline", "run": "online"}.get(given, given)
    return "online" if config.shared or os.environ.get("WANDB_API_KEY") or _in_netrc() else "offline"


def _in_netrc() -> bool:
    import netrc

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC") or str(Path.home() / ".netrc")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


HIDDEN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_RESUME", "WANDB_TAGS", "WANDB_NOTES", "WANDB_JOB_TYPE")


_hiding = threading.Lock()
_hidden: dict[str, str] = {}
_hiders = 0


@contextlib.contextmanager
def without_run_variables() -> Iterator[None]:
    """The environment's run id, name and group would name every run that this process opens. Several threads may be inside at a time."""
    global _hiders
    with _hiding:
        _hiders += 1
        _hidden.update({name: os.environ.pop(name) for name in HIDDEN if name in os.environ})
    try:
        yield
    finally:
        with _hiding:
            _hiders -= 1
            if not _hiders:
                os.environ.update(_hidden)
                _hidden.clear()
