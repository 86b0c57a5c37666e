"""What the fake accelerator stands for, on a real one. `make gpu-check` runs it and shows the figures; without a GPU it is skipped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import otel_forge
from otel_forge import measuring, record_metric, trace
from otel_forge.device_clock import DeviceClock
from otel_forge.testing import Captured, capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.filterwarnings("ignore::otel_forge.errors.ExperimentalWarning"),
]

MB = 1 << 20
GIB = 1 << 30
CYCLES_200_MS = 400_000_000
"""At 2 GHz, which no GPU of today passes by much."""


@pytest.fixture
def captured() -> Iterator[Captured]:
    torch.cuda.init()
    torch.cuda.synchronize()
    with capture() as captured:
        yield captured


def _say(name: str, figure: str) -> None:
    sys.stdout.write(f"\n  {name:<70} {figure}")


def _work(milliseconds: int = 20) -> None:
    torch.cuda._sleep(CYCLES_200_MS // 200 * milliseconds)


def _span(captured: Captured, name: str) -> dict[str, Any]:
    return next(item.attributes for item in captured.spans if item.name == name)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cost_us(call: Callable[[], None], *, count: int = 2000, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begun) / count * 1e6)
        measuring.settle(10)
        otel_forge.flush(0, wait_s=10)
    return best


# --- time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("milliseconds", [1, 20, 200])
def test_device_time_lies_between_events_inside_and_outside(milliseconds: int, captured: Captured) -> None:
    outer_begin = _event()
    with trace("t", timer="gpu"):
        inner_begin = _event()
        _work(milliseconds)
        inner_end = _event()
    outer_end = _event()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    _work(milliseconds)
    torch.cuda.synchronize()
    waited_ms = (time.perf_counter() - begun) * 1e3
    measured_ms = _span(captured, "t")["forge.device_time_s"] * 1e3
    rounding_ms = 1e-3
    assert inner_begin.elapsed_time(inner_end) - rounding_ms <= measured_ms <= outer_begin.elapsed_time(outer_end) + rounding_ms
    _say(f"device time of {milliseconds} ms of work", f"{measured_ms:.3f} ms; host with synchronize {waited_ms:.3f} ms")


def test_the_start_is_on_the_host_s_clock(captured: Captured) -> None:
    """On an idle device the work begins between the call and the end of a synchronize."""
    worst = 0.0
    with trace("warm", timer="gpu"):
        pass
    measuring.settle(10)
    time.sleep(0.2)  # for the second and third anchor
    for number in range(50):
        torch.cuda.synchronize()
        before = time.time_ns()
        with trace(f"t{number}", timer="gpu"):
            pass
        torch.cuda.synchronize()
        after = time.time_ns()
        start = _span(captured, f"t{number}")["forge.device_start_unix_nano"]
        worst = max(worst, before - start, start - after)
    assert worst <= 50_000
    _say("start outside of the host's bounds, worst of 50", f"{max(0.0, worst) / 1e3:.1f} µs")
    timer = measuring._timer
    assert timer is not None
    clock: DeviceClock = timer._clocks[torch.cuda.current_device()]
    assert clock.latest is not None
    _say("anchor's error; rate of the clocks", f"{clock.latest.error_ns / 1e3:.1f} µs; {(clock.latest.rate - 1) * 1e6:+.1f} ppm")


def test_work_on_the_current_stream_is_seen(captured: Captured) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with trace("t", timer="gpu"):
            inner_begin = _event()
            _work()
            inner_end = _event()
    torch.cuda.synchronize()
    assert _span(captured, "t")["forge.device_time_s"] * 1e3 >= inner_begin.elapsed_time(inner_end) - 1e-3


def test_the_host_does_not_wait(captured: Captured) -> None:
    """The scope is over while the device still works in it."""
    with trace("t", timer="gpu"):
        _work(200)
        last = _event()
    assert not last.query()
    assert _span(captured, "t")["forge.device_time_s"] > 0.1


def test_a_graph_is_captured_while_times_are_pending(captured: Captured) -> None:
    static = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        static.mul(2)
    torch.cuda.synchronize()
    for _ in range(20):
        with trace("before", timer="gpu"):
            static.add(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with trace("inside", timer="gpu", track_memory=True):
                result = static * 3
            time.sleep(0.02)  # the thread would look several times
        graph.replay()
        torch.cuda.synchronize()
        assert result.sum().item() == 24
    assert "forge.device_time_s" not in _span(captured, "inside")
    assert "forge.device_time_s" in _span(captured, "before")


def test_a_scope_that_ends_right_before_the_process_is_delivered(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    program = (
        "import torch, otel_forge\n"
        f"otel_forge.init({{'metric_logging': {{'jsonl': {{'path': {str(path)!r}}}}}}}, rank=0, world_size=1)\n"
        "torch.cuda.init()\n"
        f"with otel_forge.trace('t'): torch.cuda._sleep({CYCLES_200_MS})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, cwd=tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = rows[-1]["metrics"]["t/total_duration_avg_s"]
    assert seconds > 0.1
    _say("kernel of about 200 ms at exit", f"{seconds * 1e3:.1f} ms")


def test_a_tracer_before_the_first_use_does_not_initialise_the_device(tmp_path: Path) -> None:
    """So that a forked worker can still use it."""
    program = (
        "import os, torch, otel_forge, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "otel_forge.init(rank=0, world_size=1)\n"
        "t = otel_forge.Tracer('t', track_memory=True, timer='gpu'); t.start()\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if torch.ones(1, device='cuda').item() == 1 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "x = torch.ones(1 << 20, device='cuda'); t.stop()\n"
        "series = {key for key, _ in otel_forge.metrics.registry().series}\n"
        "assert 't/memory_peak_max_gb' in series, series\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, cwd=tmp_path)


# --- memory --------------------------------------------------------------------------------------------------------------


def test_peaks_of_nested_scopes_and_the_program_s_own(captured: Captured) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with trace("outer", track_memory=True):
        block = torch.empty(400 * MB, dtype=torch.uint8, device="cuda")
        del block
        with trace("inner", track_memory=True):
            block = torch.empty(100 * MB, dtype=torch.uint8, device="cuda")
            del block
        own = torch.cuda.max_memory_allocated()
    assert own == before + 400 * MB
    assert torch.cuda.max_memory_allocated() == own
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == own
    assert torch.accelerator.max_memory_allocated() == own if hasattr(torch.accelerator, "max_memory_allocated") else True
    outer, inner = _span(captured, "outer"), _span(captured, "inner")
    assert outer["forge.memory_peak_gb"] * GIB == before + 400 * MB
    assert inner["forge.memory_peak_gb"] * GIB == before + 100 * MB
    _say("peak of a scope against the allocator's", f"{outer['forge.memory_peak_gb'] * GIB - own:+.0f} bytes")
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


def test_out_of_memory_is_reported_and_passes(captured: Captured) -> None:
    free, _ = torch.cuda.mem_get_info()

    @trace("t", track_memory=True)
    def fill() -> None:
        block = torch.empty(200 * MB, dtype=torch.uint8, device="cuda")
        torch.empty(block.numel() + 2 * free, dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        fill()
    attributes = _span(captured, "t")
    assert attributes["forge.memory_peak_gb"] * GIB >= 200 * MB
    assert next(item.error for item in captured.spans if item.name == "t")


# --- figures -----------------------------------------------------------------------------------------------------------------


def test_figures_of_the_host_s_cost(captured: Captured) -> None:
    def events() -> None:
        _event()
        _event()

    def host() -> None:
        with trace("host", timer="cpu"):
            pass

    def device() -> None:
        with trace("device", timer="gpu"):
            pass

    def memory() -> None:
        with trace("memory", timer="cpu", track_memory=True):
            pass

    value = torch.ones((), device="cuda")
    for name, call in {
        "two bare events": events, "scope of host time": host, "scope of device time": device, "scope with memory": memory,
        "record of a device tensor": lambda: record_metric("tensor", value), "record of a float": lambda: record_metric("float", 1.0),
    }.items():  # fmt: skip
        _say(name, f"{_cost_us(call):.2f} µs")
    assert {"host/total_duration_avg_s", "device/total_duration_avg_s", "tensor", "float"} <= set(captured.rows[-1]["metrics"]) | {
        key for row in captured.rows for key in row["metrics"]
    }
