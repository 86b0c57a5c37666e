"""The same seeded job gives the same rows in every shape."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import JOB, clean_environment, rows_of
from tests.integration.job import values


def launch(folder: Path, ranks: int, environ: dict[str, str], *more: str) -> list[subprocess.Popen[str]]:
    """The ranks of the job, each a process."""
    command = [sys.executable, str(JOB), "--world-size", str(ranks), *more]
    return [
        subprocess.Popen([*command, "--rank", str(rank)], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for the ranks; each must end with 0."""
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:] + output


def expected(ranks: int, step: int) -> dict[str, float]:
    """The row's values, from the values that every rank recorded."""
    pooled: dict[str, list[float]] = {}
    for rank in range(ranks):
        for name, items in values(rank, step).items():
            pooled.setdefault(name, []).extend(items)
    return {
        "loss": math.fsum(pooled["loss"]) / len(pooled["loss"]), "tokens": math.fsum(pooled["tokens"]), "peak": max(pooled["peak"]),
        "low": min(pooled["low"]), "spread": statistics.pstdev(pooled["spread"]),
    }  # fmt: skip


def assert_exact(row: dict[str, Any], ranks: int) -> None:
    """MEAN and SUM to 1e-12, extremes exactly, STD to the last bits."""
    want = expected(ranks, row["step"])
    found = {key: row["metrics"][key] for key in want}
    assert found == pytest.approx(want, rel=1e-12), row
    assert (found["peak"], found["low"]) == (want["peak"], want["low"])
    assert (row["ranks_reporting"], row["world_size"]) == (ranks, ranks)


def test_in_process_direct_and_collector_give_the_same_rows(tmp_path: Path, start_stack: Callable[..., Any]) -> None:
    """One rank, because the in-process shape has no more; the two others with three ranks besides."""
    found: dict[str, list[dict[str, Any]]] = {}
    finish(launch(tmp_path, 1, clean_environment(tmp_path / "state"), "--shape", "inprocess"))
    found["inprocess"] = rows_of(tmp_path / "rows.jsonl")
    for shape in ("direct", "collector"):
        for ranks in (1, 3):
            (tmp_path / "rows.jsonl").unlink(missing_ok=True)
            stack, servers = start_stack(shape, folder=f"{shape}{ranks}")
            environ = clean_environment(tmp_path / "state") | {
                "OTEL_FORGE_ENDPOINT": servers.otlp_http, "OTEL_FORGE_SHAPE": servers.shape, "OTEL_FORGE_RUN_ID": f"r-{shape}-{ranks}",
            }  # fmt: skip
            finish(launch(tmp_path, ranks, environ))
            assert stack.stop(drain_timeout_s=30.0)
            rows = found[f"{shape}{ranks}"] = rows_of(tmp_path / "rows.jsonl")
            for row in rows:
                assert_exact(row, ranks)
    for rows in found.values():
        assert [row["step"] for row in rows] == list(range(20))
    for rows in zip(*(found[name] for name in ("inprocess", "direct1", "collector1")), strict=True):
        keys = [{key for key in row["metrics"] if not key.startswith("forge/telemetry/")} for row in rows]
        assert keys[0] == keys[1] == keys[2]
