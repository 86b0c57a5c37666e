"""Figures of a node's GPUs and host as ordinary metrics (`system/node0/gpu3/power_w`, `system/node0/cpu_percent`), recorded by one of its ranks.

A thread of its own, which sleeps; it knows neither ranks nor where metrics go. NVML's figures are of the whole GPU, whoever uses it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("otel_forge")

GIB = 1024**3


class SystemMetrics:
    """Records the figures every so often, until it is stopped."""

    def __init__(self, node: int, record: Callable[[str, float], None], *, interval_s: float, modules: tuple[Any, Any] | None = None) -> None:
        """`modules`: psutil and pynvml, each None where it is not installed; by default they are looked for."""
        self._prefix = f"system/node{node}"
        self._record = record
        self._interval_s = interval_s
        self._psutil, self._nvml = (_module("psutil"), _module("pynvml")) if modules is None else modules
        self._gpus: list[Any] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="otel-forge-system", daemon=True)

    def start(self) -> None:
        """Start the thread; the first figures come after one interval. Without psutil and nvidia-ml-py it stays off."""
        if self._psutil is None and self._nvml is None:
            logger.info("figures of GPUs and host are off: pip install 'otel-forge[system]'")
            return
        self._thread.start()

    def stop(self) -> None:
        """Record no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def figures(self) -> Iterator[tuple[str, float]]:
        """Key and value of each figure that can be read now; what a device does not tell is left out."""
        if self._psutil is not None:
            memory = self._psutil.virtual_memory()
            yield f"{self._prefix}/cpu_percent", float(self._psutil.cpu_percent())  # since the last call
            yield f"{self._prefix}/memory_percent", float(memory.percent)
            yield f"{self._prefix}/memory_used_gb", (memory.total - memory.available) / GIB
        for index, gpu in enumerate(self._gpus):
            yield from self._gpu_figures(f"{self._prefix}/gpu{index}", gpu)

    def _gpu_figures(self, prefix: str, gpu: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        readings: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory_used_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }
        for name, read in readings.items():
            with contextlib.suppress(Exception):  # NVMLError: this device does not tell, or not now
                yield f"{prefix}/{name}", float(read())

    def _loop(self) -> None:
        self._find_gpus()
        if self._psutil is not None:
            self._psutil.cpu_percent()  # the first call has nothing to compare with
        try:
            while not self._stopping.wait(self._interval_s):
                for key, value in self.figures():
                    self._record(key, value)
        except Exception as error:  # a figure is never worth a trace in the training's output
            logger.warning("figures of GPUs and host are recorded no more: %r", error)
        finally:
            if self._gpus:
                with contextlib.suppress(Exception):
                    self._nvml.nvmlShutdown()

    def _find_gpus(self) -> None:
        if self._nvml is None:
            return
        with contextlib.suppress(Exception):  # no driver: no GPU
            self._nvml.nvmlInit()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:
        return None
