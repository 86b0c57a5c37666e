"""Figures of GPUs and host: once per node, as ordinary metrics, never in the way."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import otel_forge
from otel_forge.identity import Member, resolve_node
from otel_forge.system_metrics import SystemMetrics
from tests.integration.conftest import wait_for


class FakeNvml:
    """NVML of a node with GPUs, the last of which does not tell its power."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        self.closed = threading.Event()

    def nvmlInit(self) -> None:
        if not self.gpus:
            raise RuntimeError("driver not loaded")

    def nvmlShutdown(self) -> None:
        self.closed.set()

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=50 + gpu, memory=1)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=(gpu + 1) * 1024**3, total=80 * 1024**3)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == self.gpus - 1:
            raise RuntimeError("not supported")
        return 350_000

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 40 + gpu


class FakePsutil:
    def cpu_percent(self) -> float:
        return 12.5

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=8 * 1024**3, available=6 * 1024**3, percent=25.0)


HOST = {"cpu_percent": 12.5, "memory_percent": 25.0, "memory_used_gb": 2.0}


def _recorded(nvml: Any, psutil: Any, node: int = 0) -> dict[str, float]:
    found: dict[str, float] = {}
    system = SystemMetrics(node, found.__setitem__, interval_s=0.01, modules=(psutil, nvml))
    system.start()
    wait_for(lambda: bool(found), 5, "figures")
    system.stop()
    return found


def test_each_gpu_and_the_host_have_their_figures_once() -> None:
    """Seed TODO 4: with eight GPUs there are eight curves of a kind, not eight times eight."""
    nvml = FakeNvml()
    found = _recorded(nvml, FakePsutil(), node=1)
    gpus = {
        "gpu0/utilization_percent": 50.0, "gpu0/memory_used_gb": 1.0, "gpu0/power_w": 350.0, "gpu0/temperature_c": 40.0,
        "gpu1/utilization_percent": 51.0, "gpu1/memory_used_gb": 2.0, "gpu1/temperature_c": 41.0,
    }  # fmt: skip
    assert found == {f"system/node1/{key}": value for key, value in (HOST | gpus).items()}
    assert nvml.closed.is_set()


def test_without_a_gpu_there_are_the_host_s_figures_only() -> None:
    assert _recorded(FakeNvml(gpus=0), FakePsutil()) == {f"system/node0/{key}": value for key, value in HOST.items()}


def test_without_the_packages_it_is_off_and_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "otel_forge"):
        SystemMetrics(0, {}.__setitem__, interval_s=0.01, modules=(None, None)).start()
    assert [record.getMessage() for record in caplog.records] == ["figures of GPUs and host are off: pip install 'otel-forge[system]'"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 9)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "3"}, (3, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (1, 1)),
        ({"SLURM_LOCALID": "0", "SLURM_NODEID": "2"}, (2, 0)),
    ],
)
def test_the_launcher_says_which_node_a_rank_is_on(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert resolve_node(Member("trainer", 0, 9, 16), environ) == expected


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", FakePsutil())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]


def _train(folder: Path, until: Callable[[list[dict[str, float]]], bool], **system: Any) -> list[dict[str, float]]:
    path = folder / "rows.jsonl"
    otel_forge.init(
        {"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": str(path)}}, "system_metrics": {"interval_s": 0.1, **system}}
    )
    rows: list[dict[str, float]] = []

    def step() -> bool:
        otel_forge.record_metric("loss", 1.0)
        otel_forge.flush(len(rows), wait_s=5.0)
        rows[:] = [json.loads(line)["metrics"] for line in path.read_text().splitlines()] if path.exists() else []
        return until(rows)

    wait_for(step, 10, "rows")
    otel_forge.shutdown()
    return rows


@pytest.mark.usefixtures("_fakes")
def test_the_figures_are_in_the_rows_of_a_training(tmp_path: Path) -> None:
    rows = _train(tmp_path, lambda rows: any("system/node0/gpu1/temperature_c" in row for row in rows))
    (first, *_) = [row for row in rows if "system/node0/cpu_percent" in row]
    assert (first["system/node0/cpu_percent"], first["system/node0/gpu0/power_w"]) == (12.5, 350.0)


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize(("system", "local_rank"), [({"enabled": False}, "0"), ({}, "1")])
def test_no_thread_runs_where_it_is_off_or_another_rank_of_the_node_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: dict[str, bool], local_rank: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    threads: set[str] = set()

    def enough(rows: list[dict[str, float]]) -> bool:
        threads.update(thread.name for thread in threading.enumerate())
        return len(rows) >= 3

    _train(tmp_path, enough, **system)
    assert "otel-forge" in threads
    assert "otel-forge-system" not in threads


def test_the_real_packages_are_read() -> None:
    """psutil and nvidia-ml-py as they are; a machine without a GPU has the host's figures."""
    psutil = pytest.importorskip("psutil")
    pynvml = pytest.importorskip("pynvml")
    found = _recorded(pynvml, psutil)
    assert {"system/node0/cpu_percent", "system/node0/memory_percent", "system/node0/memory_used_gb"} <= found.keys()
    assert 0 < found["system/node0/memory_percent"] < 100
