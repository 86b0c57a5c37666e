"""Trackio runs in a local database. Each process has one directory, so each test writes and reads in processes of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trackio")
ROOT = Path(__file__).parents[2]
OPEN = """
import json, sys
from pathlib import Path
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue
from otel_forge_exporters.trackio import TrackioBackend
from otel_forge.config import LoggingMode, TrackioConfig
from tests.exporters.test_backends import row

def opened(**options):
    backend = TrackioBackend(TrackioConfig(project="lab", dir="store", **options), RunInfo("r", {"lr": 0.1}), Path())
    backend.open()
    return backend
"""
READ = """
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({name: SQLiteStorage.get_logs("lab", name) for name in SQLiteStorage.get_runs("lab")}, default=str))
"""


def _python(folder: Path, script: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "exporters"), os.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", OPEN + script], cwd=folder, env=environ, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def _logs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run name → its logs, in the order of their steps."""
    found = json.loads(_python(folder, "opened()\n" + READ))
    return {name: sorted(logs, key=lambda log: log["step"]) for name, logs in found.items()}


def test_a_row_is_a_log_at_its_step_and_nothing_is_printed(tmp_path: Path) -> None:
    script = """
backend = opened(name="mine")
metrics = {"loss": 0.5, "bad": None, "h": HistogramValue((1.0, 2.0), (1, 2, 1), 0.5, 3.0)}
backend.write([row(7, metrics=metrics, nonfinite={"bad": 1}), row(7, revision=2)])
backend.close(0, 30)
"""
    assert _python(tmp_path, script) == ""
    ((name, (log,)),) = _logs(tmp_path).items()
    assert (name, log["step"], log["loss"], log["h/p50"], log["forge/nonfinite/bad"]) == ("mine", 7, 0.5, 1.5, 1)
    assert (log["h"]["values"], log["h"]["bins"]) == ([1, 2, 1], [0.5, 1.0, 2.0, 3.0])
    assert math.isnan(log["bad"])


def test_members_are_runs_that_live_side_by_side(tmp_path: Path) -> None:
    script = """
backend = opened(logging_mode=LoggingMode.PER_RANK_REDUCE)
backend.write([row(step, rank=rank, metrics={"loss": float(rank)}) for step in range(3) for rank in range(2)])
backend.close(0, 30)
"""
    _python(tmp_path, script)
    found = {name: [(log["step"], log["loss"]) for log in logs] for name, logs in _logs(tmp_path).items()}
    assert found == {f"r-trainer_{rank}": [(step, float(rank)) for step in range(3)] for rank in range(2)}


def test_a_restarted_exporter_goes_on_with_the_run_and_knows_what_is_there(tmp_path: Path) -> None:
    _python(tmp_path, "backend = opened()\nbackend.write([row(0), row(1)])\nbackend.close(None, 30)\n")
    script = """
backend = opened()
print([backend.has(row(step)) for step in range(3)])
backend.write([row(2)])
backend.close(0, 30)
"""
    assert _python(tmp_path, script).strip() == "[True, True, False]"
    assert {name: [log["step"] for log in logs] for name, logs in _logs(tmp_path).items()} == {"r": [0, 1, 2]}
