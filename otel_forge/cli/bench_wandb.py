"""`otel-forge bench wandb`: what it costs to own 65 wandb runs in one process, offline; and that every row is there, in each mode."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_forge.config import LoggingMode, WandbConfig

RANKS, STEPS, KEYS = 64, 200, 20
GLOBAL, PER_RANK = "global_reduce", "per_rank_reduce"


def measure(ranks: int = RANKS, steps: int = STEPS) -> dict[str, Any]:
    """Seconds to open and to close a run for each rank and a global one, rows per second meanwhile, memory, and how many rows were found."""
    rows = importlib.import_module("otel_forge_exporters.rows")
    backends = importlib.import_module("otel_forge_exporters.wandb")
    info = importlib.import_module("otel_forge_exporters.backend").RunInfo("bench")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        owned = [backends.WandbBackend(WandbConfig(mode="offline", logging_mode=LoggingMode(mode)), info, folder) for mode in (PER_RANK, GLOBAL)]
        started = time.perf_counter()
        for backend in owned:
            backend.open()
        loaded = time.perf_counter()
        _write(owned, [_rows(rows, ranks, 0), _rows(rows, None, 0)])
        opened = time.perf_counter()
        for step in range(1, steps):
            _write(owned, [_rows(rows, ranks, step), _rows(rows, None, step)])
        written = time.perf_counter()
        memory_mb = _rss_mb()
        for backend in owned:
            backend.close(0, 60.0)
        closed = time.perf_counter()
        return {
            "load_s": loaded - started, "open_s": opened - loaded, "rows_per_s": (ranks + 1) * (steps - 1) / (written - opened),
            "close_s": closed - written, "rss_mb": memory_mb, "expected": (ranks + 1) * steps, "found": _found(folder),
        }  # fmt: skip


def _rows(rows: Any, ranks: int | None, step: int) -> list[Any]:
    metrics = {f"train/key{number}": float(step + number) for number in range(KEYS)}
    fields = {"run_id": "bench", "role": "trainer", "replica": 0, "step": step, "occurrence": 0, "attempt": 0, "revision": 1, "metrics": metrics}
    fields |= {"time_unix": time.time(), "ranks_reporting": ranks or RANKS, "world_size": ranks or RANKS}
    return [rows.Row(**fields, mode=GLOBAL if rank is None else PER_RANK, rank=rank) for rank in ([None] if ranks is None else range(ranks))]


def _write(backends: Sequence[Any], batches: Sequence[list[Any]]) -> None:
    for backend, batch in zip(backends, batches, strict=True):
        backend.write(batch)


def _found(folder: Path) -> int:
    """Rows that are there exactly once."""
    files = importlib.import_module("otel_forge_exporters.wandb_files")
    seen: Counter[tuple[str, str]] = Counter()
    for path in (folder / "wandb").glob("*/run-*.wandb"):
        run_id = path.stem.removeprefix("run-")
        seen.update((run_id, row["forge/row"]) for row in files.history(folder, run_id) if "forge/row" in row)
    return sum(count == 1 for count in seen.values())


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0
