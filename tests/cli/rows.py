"""Rows for tests, written by the code that writes them in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.jsonl import JsonlBackend
from otel_forge_exporters.rows import Row

from otel_forge.cli import main
from otel_forge.config import JsonlConfig


def row(step: int, metrics: dict[str, float | None] | None = None, **more: Any) -> Row:
    """A reduced row of two ranks, or with `rank=` one of that rank."""
    mode = "global_reduce" if more.get("rank") is None else "per_rank_reduce"
    fields: dict[str, Any] = {
        "run_id": "r", "mode": mode, "role": "trainer", "replica": 0, "rank": None, "step": step, "occurrence": 0, "attempt": 0, "revision": 1,
        "time_unix": 1000.0 + step, "ranks_reporting": 2 if mode == "global_reduce" else 1, "world_size": 2, "metrics": metrics or {"loss": 1.0},
    }  # fmt: skip
    return Row(**fields | more)


def write(path: Path, rows: list[Row], **config: Any) -> Path:
    """Append rows as the JSONL backend does."""
    backend = JsonlBackend(JsonlConfig(path=path, **config), RunInfo(rows[0].run_id), path.parent)
    backend.open()
    backend.write(rows)
    backend.close(0, 1.0)
    return path


def two_ranks(path: Path, steps: int = 30, *, slow: int = 1) -> Path:
    """A run with its reduced rows in `path` and those of each rank beside it; one rank is slow."""
    reduced, own = [], []
    for step in range(steps):
        losses = [2.0 / (step + 1) + 0.1 * rank for rank in range(2)]
        totals = [0.2 if rank == slow else 0.1 for rank in range(2)]
        reduced.append(
            row(
                step,
                {
                    "loss": sum(losses) / 2, "train/memory_peak_max_gb": 3.5, "train/forward/duration_avg_s": sum(totals) / 4,
                    "train/backward/duration_avg_s": sum(totals) / 4, "train/total_duration_avg_s": sum(totals) / 2,
                    "train/total_duration_max_s": max(totals), "forge/step_time_s/max": max(totals), "forge/slowest_rank": float(slow),
                    "forge/telemetry/records": 20.0, "forge/telemetry/thread_cpu_s": 0.001,
                },
            )
        )  # fmt: skip
        for rank in range(2):
            metrics = {"loss": losses[rank], "train/forward/duration_avg_s": totals[rank] * 0.4, "train/backward/duration_avg_s": totals[rank] * 0.6}
            metrics |= {"train/total_duration_avg_s": totals[rank], "train/total_duration_max_s": totals[rank]}
            own.append(row(step, metrics, rank=rank))
    write(path, reduced)
    write(path.with_name("per_rank_reduce.jsonl"), own)
    return path


def run(*arguments: str | Path) -> Result:
    """A command of the command line, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
