"""Device time and memory in `Tracer` and `trace`, from the program's call to the row and the span, on the fake accelerator."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import otel_forge
from otel_forge import LoggingMode, Tracer, device, measuring, metrics, pipeline, span, trace
from otel_forge.device import TorchAccelerator
from otel_forge.device_time import DeviceTimer
from otel_forge.errors import ExperimentalWarning
from otel_forge.metrics import Registry
from otel_forge.notices import reset_notices
from otel_forge.relay import RelayClient, RelayServer
from otel_forge.spans import SpanRecord
from otel_forge.testing import Captured, capture
from tests.fake_accelerator import FakeCuda, FakeOutOfMemoryError, Stream

MS = 1_000_000
S = 1_000_000_000
GIB = 1024**3

tracks_memory = pytest.mark.filterwarnings("ignore::otel_forge.errors.ExperimentalWarning")


@pytest.fixture(autouse=True)
def _fresh_notices() -> None:
    reset_notices()


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def captured(cuda: FakeCuda) -> Iterator[Captured]:
    """A process with the fake accelerator in use. Its clock runs with the host's from now on, for the poller's sake."""
    with capture() as captured:
        measuring.use(TorchAccelerator(cuda, "cuda"))
        measuring._timer = DeviceTimer(TorchAccelerator(cuda, "cuda"), clock=lambda: cuda.now_ns)
        yield captured


def _flush(captured: Captured, step: int = 0) -> dict[str, Any]:
    otel_forge.flush(step)
    row = captured.rows[-1]
    assert row["step"] == step
    return _own(row)


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """What the program recorded, without what otel-forge says of itself."""
    return {key: value for key, value in row["metrics"].items() if not key.startswith("forge/")}


def _spans(captured: Captured) -> dict[str, dict[str, Any]]:
    return {item.name: item.attributes for item in captured.spans}


# --- time ----------------------------------------------------------------------------------------------------------------


def test_the_device_s_time_drives_the_metrics_and_is_an_attribute_beside_the_host_s(cuda: FakeCuda, captured: Captured) -> None:
    """A launches 200 ms of device work and returns; B is host work alone. By the host A took no time."""
    tracer = Tracer("t")
    tracer.start()
    cuda.current_stream(0).launch(200 * MS)
    tracer.step("a")
    cuda.advance(50 * MS)
    tracer.step("b")
    tracer.stop()
    cuda.advance(S)
    metrics = _flush(captured)
    assert metrics["t/a/duration_avg_s"] == metrics["t/a/duration_max_s"] == pytest.approx(0.2, abs=1e-4)
    assert metrics["t/b/duration_avg_s"] == pytest.approx(0, abs=1e-4)
    assert metrics["t/total_duration_avg_s"] == pytest.approx(0.2, abs=1e-4)
    spans = {item.name: item for item in captured.spans}
    assert set(spans) == {"t", "t/a", "t/b", "t/tail"}
    assert spans["t/a"].attributes["forge.device_time_s"] == metrics["t/a/duration_avg_s"]
    assert spans["t/a"].attributes["forge.device"] == "cuda:0"
    assert spans["t/a"].duration_s < 0.1
    assert spans["t/a"].parent_id == spans["t"].span_id
    begun = spans["t/a"].attributes["forge.device_start_unix_nano"]
    assert spans["t/b"].attributes["forge.device_start_unix_nano"] == pytest.approx(begun + 200 * MS, abs=MS)


def test_the_host_s_time_of_the_same_code_is_that_of_the_launch(cuda: FakeCuda, captured: Captured) -> None:
    with trace("t", timer="cpu"):
        cuda.current_stream(0).launch(200 * MS)
    assert _flush(captured)["t/total_duration_avg_s"] < 0.1
    assert "forge.device_time_s" not in _spans(captured)["t"]


def test_a_flush_waits_for_the_device_off_the_training_thread_and_keeps_the_step(cuda: FakeCuda, captured: Captured) -> None:
    """Three steps are flushed while the device is still at the first: each row has its own durations, in order."""
    otel_forge.flush(100)  # so that the rows' thread is there
    for step in range(3):
        with trace("t", metrics_only=True):
            cuda.current_stream(0).launch((step + 1) * 100 * MS)
        started = time.monotonic()
        otel_forge.flush(step)
        assert time.monotonic() - started < 2
    threading.Timer(0.3, cuda.advance, args=(S,)).start()
    rows = {row["step"]: row["metrics"] for row in captured.rows}
    assert [rows[step]["t/total_duration_avg_s"] for step in range(3)] == pytest.approx([0.1, 0.2, 0.3], abs=1e-4)


def test_a_flush_is_not_acknowledged_before_its_device_times_are_known(cuda: FakeCuda, captured: Captured) -> None:
    current = pipeline.current()
    assert current is not None
    otel_forge.record_metric("loss", 1.0)
    assert otel_forge.flush(0, wait_s=10)
    with trace("t"):
        cuda.current_stream(0).launch(3600 * S)
    otel_forge.record_metric("loss", 2.0)
    assert not otel_forge.flush(1, wait_s=0.1)
    cuda.advance(3600 * S)
    assert current.settle(10)
    assert _flush(captured, 2) == {}
    assert [row["metrics"].get("loss") for row in captured.rows] == [1.0, 2.0, None]


def test_a_scope_that_ends_right_before_the_process_does_is_not_lost(cuda: FakeCuda) -> None:
    """The kernel of 200 ms is running when shutdown begins, and finishes meanwhile."""
    from otel_forge.testing import MemoryBackend

    with capture() as captured:
        measuring.use(TorchAccelerator(cuda, "cuda"))
        with trace("t"):
            cuda.current_stream(0).launch(200 * MS)
        threading.Timer(0.1, cuda.advance, args=(S,)).start()
        otel_forge.shutdown(timeout_s=5)
        (row,) = MemoryBackend.kept
        assert row["metrics"]["t/total_duration_avg_s"] == pytest.approx(0.2, abs=1e-3)
        assert _spans(captured)["t"]["forge.device_time_s"] == pytest.approx(0.2, abs=1e-3)


def test_a_device_that_hangs_does_not_hold_up_the_end(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """The span is there without a device time; the row has what was known, and no duration of another kind."""
    from otel_forge.testing import MemoryBackend

    with capture() as captured:
        measuring.use(TorchAccelerator(cuda, "cuda"))
        with trace("t"):
            cuda.current_stream(0).launch(10**9 * S)
        otel_forge.record_metric("loss", 1.0)
        started = time.monotonic()
        otel_forge.shutdown(timeout_s=1)
        assert time.monotonic() - started < 5
        assert _own(MemoryBackend.kept[0]) == {"loss": 1.0}
        assert "forge.device_time_s" not in _spans(captured)["t"]
    assert "1 scopes" in caplog.text


def test_the_device_is_the_one_given_else_the_current_one_at_start(cuda: FakeCuda, captured: Captured) -> None:
    cuda.device = 1
    tracer = Tracer("current")
    tracer.start()
    cuda.device = 0
    tracer.stop()
    with trace("given", device="cuda:1"):
        pass
    attributes = _spans(captured)
    assert {name: values["forge.device"] for name, values in attributes.items()} == {"current": "cuda:1", "given": "cuda:1"}
    assert cuda.contexts == {1}


def test_work_on_another_stream_is_seen(cuda: FakeCuda, captured: Captured) -> None:
    with trace("t"):
        cuda.set_stream(Stream(cuda, 0))
        cuda.current_stream(0).launch(100 * MS)
    cuda.advance(S)
    assert _flush(captured)["t/total_duration_avg_s"] == pytest.approx(0.1, abs=1e-4)


def test_gpu_sync_waits_at_both_ends(cuda: FakeCuda, captured: Captured) -> None:
    """Only when it is asked for: everywhere else the fake's synchronize raises."""
    with pytest.raises(AssertionError, match="would have waited"):
        cuda.synchronize(0)
    cuda.may_synchronize = True
    cuda.current_stream(0).launch(S)
    with trace("t", timer="gpu_sync"):
        assert cuda.now_ns >= 2 * S
        cuda.current_stream(0).launch(S)
    assert cuda.now_ns >= 3 * S
    seconds = _flush(captured)["t/total_duration_avg_s"]
    assert _spans(captured)["t"]["forge.device_time_s"] == seconds


def test_under_capture_the_host_s_time_is_taken(cuda: FakeCuda, captured: Captured) -> None:
    graph = cuda.CUDAGraph()
    graph.capture_begin()
    with trace("inside", timer="gpu"), trace("inside_sync", timer="gpu_sync"):
        pass
    with trace("across", timer="gpu"):
        graph.capture_end()
    metrics = _flush(captured)
    assert {key for key in metrics if "avg" in key} == {f"{name}/total_duration_avg_s" for name in ("inside", "inside_sync", "across")}
    assert cuda.captures_broken == 0
    assert not any("forge.device_time_s" in attributes for attributes in _spans(captured).values())


def test_nested_scopes_and_their_spans_keep_their_parents(cuda: FakeCuda, captured: Captured) -> None:
    with trace("outer"), span("between"), trace("inner"):
        pass
    ids = {item.name: (item.span_id, item.parent_id) for item in captured.spans}
    assert ids["inner"][1] == ids["between"][0]
    assert ids["between"][1] == ids["outer"][0]


def test_an_exception_passes_and_marks_the_span(cuda: FakeCuda, captured: Captured) -> None:
    error = FakeOutOfMemoryError("full")
    with pytest.raises(FakeOutOfMemoryError) as caught, trace("t"):
        raise error
    assert caught.value is error
    assert [(item.name, item.error) for item in captured.spans] == [("t", "full")]


def test_a_broken_device_leaves_the_host_s_time(cuda: FakeCuda, captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    def broken(device: int) -> Any:
        raise RuntimeError("device-side assert triggered")

    cuda.current_stream = broken  # type: ignore[method-assign]
    for _ in range(3):
        with trace("t"):
            pass
    assert "t/total_duration_avg_s" in _flush(captured)
    assert len([record for record in caplog.records if "device-side assert" in record.getMessage()]) == 1


def test_a_timer_of_another_name_is_said_once_and_is_auto(cuda: FakeCuda, captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with trace("t", timer="cuda"):
            pass
    (text,) = [record.getMessage() for record in caplog.records]
    assert text == "timer must be one of 'auto', 'cpu', 'gpu', 'gpu_sync', got 'cuda': 'auto' is used"
    assert "forge.device_time_s" in _spans(captured)["t"]


@pytest.mark.parametrize("given", ["cuda:7", "tpu:0", 2, 1.5])
def test_a_device_that_is_none_is_said_once(given: Any, cuda: FakeCuda, captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with trace("t", device=given):
            pass
    assert len(caplog.records) == 1
    assert "t/total_duration_avg_s" in _flush(captured)


def test_the_configuration_s_timer_is_what_auto_means(cuda: FakeCuda) -> None:
    with capture() as captured:
        measuring.use(TorchAccelerator(cuda, "cuda"))
        measuring.configure(timer="cpu", track_memory=False)
        with trace("host"):
            pass
        with trace("device", timer="gpu"):
            pass
        attributes = _spans(captured)
    assert ["forge.device_time_s" in attributes[name] for name in ("host", "device")] == [False, True]


def test_a_tensor_names_its_device_and_is_neither_printed_nor_kept(cuda: FakeCuda, captured: Captured) -> None:
    """Printing it would wait for the device; keeping it would keep its memory."""

    class Tensor:
        device = "cuda:1"

        def __str__(self) -> str:
            raise AssertionError("a tensor was read")

    tensor = Tensor()
    kept = weakref.ref(tensor)
    scope = trace("t", device=tensor)
    del tensor
    assert kept() is None
    with scope:
        pass
    assert _spans(captured)["t"]["forge.device"] == "cuda:1"


def test_streams_have_the_device_s_times_too(cuda: FakeCuda) -> None:
    with capture(modes=[LoggingMode.PER_RANK_NO_REDUCE]) as captured:
        measuring.use(TorchAccelerator(cuda, "cuda"))
        tracer = Tracer("t", span_only=False)
        tracer.start()
        cuda.current_stream(0).launch(200 * MS)
        tracer.step("a")
        tracer.stop()
        with trace("quiet", span_only=True):
            pass
        cuda.advance(S)
        otel_forge.flush(0, wait_s=10)
        current = pipeline.current()
        assert current is not None
        assert current.settle(10)
        values = {key: value for row in captured.rows for key, value in row["metrics"].items() if not key.startswith("forge/")}
    assert values["t/a/duration_avg_s"] == pytest.approx(0.2, abs=1e-3)
    assert values["t/total_duration_max_s"] == pytest.approx(0.2, abs=1e-3)
    assert not any(key.startswith("quiet") for key in values)


def test_a_child_process_relays_device_times_once_they_are_known(cuda: FakeCuda) -> None:
    """The client's side of the relay, in this process: what it drains it also waits for."""
    member, child = Registry(), metrics.registry()
    spans: list[SpanRecord] = []
    server = RelayServer(member, spans.append)
    measuring.use(TorchAccelerator(cuda, "cuda"))
    with trace("t"):
        cuda.current_stream(0).launch(200 * MS)
    threading.Timer(0.1, cuda.advance, args=(S,)).start()
    client = RelayClient(child, server.path, pipeline.spans)
    client.send()
    client.close()
    server.close()
    (series,) = [series for series in member.series.values() if series.key == "t/total_duration_avg_s"]
    assert series.values == pytest.approx([0.2], abs=1e-3)


def test_a_scope_s_spans_and_metrics_go_to_the_role_it_ended_in(cuda: FakeCuda, captured: Captured) -> None:
    """Although the device's time is known when another role is open."""
    with otel_forge.role("generator"):
        with trace("t"):
            cuda.current_stream(0).launch(200 * MS)
        otel_forge.flush(0)
    otel_forge.flush(0)
    cuda.advance(S)
    deadline = time.monotonic() + 10
    while len(captured.rows) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    rows = {row["role"]: _own(row) for row in captured.rows}
    assert set(rows) == {"trainer", "generator"}
    assert rows["generator"]["t/total_duration_avg_s"] == pytest.approx(0.2, abs=1e-3)
    assert rows["trainer"] == {}
    current = pipeline.current()
    assert current is not None
    assert pipeline.spans == []
    (generator,) = current.roles.values()
    assert generator.settle(10)
    assert [item.name for item in captured.spans] == ["t"]


# --- memory --------------------------------------------------------------------------------------------------------------


@tracks_memory
def test_memory_of_scopes_and_their_steps_is_in_metrics_and_attributes(cuda: FakeCuda, captured: Captured) -> None:
    with trace("t", track_memory=True) as tracer:
        cuda.allocate(3 * GIB)
        cuda.free(1 * GIB)
        tracer.step("forward")
        with trace("inner", track_memory=True):
            cuda.allocate(2 * GIB)
            cuda.free(3 * GIB)
        tracer.step("backward")
    metrics = {key: value for key, value in _flush(captured).items() if "memory" in key}
    assert metrics == {
        "t/forward/memory_delta_end_start_avg_gb": 2.0, "t/forward/memory_peak_max_gb": 3.0,
        "t/backward/memory_delta_end_start_avg_gb": -1.0, "t/backward/memory_peak_max_gb": 4.0,
        "t/tail/memory_delta_end_start_avg_gb": 0.0, "t/tail/memory_peak_max_gb": 1.0,
        "t/memory_delta_end_start_avg_gb": 1.0, "t/memory_peak_max_gb": 4.0,
        "inner/memory_delta_end_start_avg_gb": -1.0, "inner/memory_peak_max_gb": 4.0,
    }  # fmt: skip
    whole = {key: value for key, value in _spans(captured)["t"].items() if "memory" in key}
    assert whole == {"forge.memory_start_gb": 0.0, "forge.memory_end_gb": 1.0, "forge.memory_delta_gb": 1.0, "forge.memory_peak_gb": 4.0}
    assert cuda.max_memory_allocated() == 4 * GIB


@tracks_memory
def test_a_scope_that_runs_out_of_memory_reports_it(cuda: FakeCuda, captured: Captured) -> None:
    cuda.capacity_bytes = 4 * GIB

    @trace("t", track_memory=True)
    def fill() -> None:
        cuda.allocate(3 * GIB)
        cuda.allocate(2 * GIB)

    with pytest.raises(FakeOutOfMemoryError):
        fill()
    assert _flush(captured)["t/memory_peak_max_gb"] == 3.0
    assert [item.error for item in captured.spans] == ["tried to allocate 2147483648 bytes"]


@tracks_memory
def test_memory_counts_from_before_the_device_was_initialised(cuda: FakeCuda) -> None:
    """The tracer does not initialise it; scopes that were open then see everything since."""
    cuda.initialized = False
    with capture() as captured:
        measuring._watching, measuring._absent = True, False
        outer = Tracer("outer", track_memory=True, timer="gpu")
        outer.start()
        outer.step("before")
        measuring.use(TorchAccelerator(cuda, "cuda"))
        cuda.initialize()
        cuda.allocate(2 * GIB)
        with trace("inner", track_memory=True):
            cuda.free(2 * GIB)
        outer.stop()
        with trace("later", timer="gpu"):
            pass
        metrics = _flush(captured)
    assert [metrics[f"{name}/memory_peak_max_gb"] for name in ("outer", "outer/before", "outer/tail", "inner")] == [2.0, 0.0, 2.0, 2.0]
    assert metrics["outer/memory_delta_end_start_avg_gb"] == 0.0


def test_the_experimental_warning_comes_once_and_is_raised_into_no_loop(cuda: FakeCuda, captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(ExperimentalWarning, match="track_memory is experimental"), trace("t", track_memory=True):
        pass
    for _ in range(10):
        with trace("t", track_memory=True):
            pass
    measuring.reset()
    measuring.use(TorchAccelerator(cuda, "cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            with trace("t", track_memory=True):
                pass
    assert [record.getMessage()[:12] for record in caplog.records] == ["track_memory"]


def test_the_host_s_memory_has_its_own_names_and_only_if_asked(cuda: FakeCuda, captured: Captured) -> None:
    with trace("t", track_memory="host"):
        pass
    metrics = _flush(captured)
    assert {key for key in metrics if "duration" not in key} == {"t/host_rss_delta_end_start_avg_gb", "t/host_rss_end_max_gb"}
    assert 0.01 < metrics["t/host_rss_end_max_gb"] < 1024
    assert "forge.host_rss_end_gb" in _spans(captured)["t"]


# --- no accelerator ----------------------------------------------------------------------------------------------------------


def test_without_an_accelerator_host_time_no_memory_and_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "is_absent", lambda: True)
    with capture() as captured:
        for _ in range(3):
            with trace("t", timer="gpu", track_memory=True) as tracer:
                time.sleep(0.01)
                tracer.step("x")
        metrics = _flush(captured)
    assert not any("memory" in key for key in metrics)
    assert metrics["t/x/duration_avg_s"] >= 0.01
    assert len([record for record in caplog.records if "accelerator" in record.getMessage()]) == 1


def test_without_torch_nothing_is_imported_and_nothing_breaks() -> None:
    """In a process of its own, because torch cannot be unloaded here."""
    program = (
        "import sys, otel_forge\n"
        "with otel_forge.trace('t', timer='gpu', track_memory=True): pass\n"
        "with otel_forge.trace('t', timer='gpu_sync', device='cuda:1'): pass\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "print(sorted(otel_forge.metrics.registry().known or {key for key, _ in otel_forge.metrics.registry().series}))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['t/total_duration_avg_s', 't/total_duration_max_s']"
    assert done.stderr.count("need an accelerator") == 1


def test_auto_asks_torch_once_and_is_told_when_the_device_is_there(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Until then a scope costs one look at a flag; the device is not initialised by us."""
    import torch

    cuda.initialized = False
    monkeypatch.setattr(device, "_backend", lambda torch: (cuda, "cuda"))
    with capture() as captured:
        assert "torch" in sys.modules
        assert torch is sys.modules["torch"]
        with trace("before"):
            pass
        assert not measuring.look
        cuda.initialize()
        with trace("after"):
            pass
        attributes = _spans(captured)
    assert ["forge.device_time_s" in attributes[name] for name in ("before", "after")] == [False, True]


def test_torch_s_own_functions_are_replaced_while_memory_is_tracked_and_given_back() -> None:
    """With the real modules of torch, whatever it was built for: the names that PeakReadings relies on are there."""
    import torch

    spaces = [torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory, torch.cuda.CUDAGraph]
    before = [dict(vars(space)) for space in spaces]
    accelerator = TorchAccelerator(torch.cuda, "cuda", torch.accelerator)
    accelerator.keep_readings(lambda device: None)
    assert torch.cuda.memory.memory_stats_as_nested_dict is not before[1]["memory_stats_as_nested_dict"]
    assert torch.cuda.reset_peak_memory_stats is not before[0]["reset_peak_memory_stats"]
    assert torch.cuda.CUDAGraph.capture_begin is not before[4]["capture_begin"]
    if not torch.cuda.is_initialized():
        assert torch.cuda.max_memory_allocated() == 0
    accelerator.restore()
    for space, names in zip(spaces, before, strict=True):
        assert {name for name, value in vars(space).items() if value is not names.get(name)} <= {"__annotations__"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_measures_nothing_of_its_parent(cuda: FakeCuda, captured: Captured) -> None:
    import os

    with trace("parent"):
        pid = os.fork()
        if pid == 0:
            try:
                with trace("child"):
                    pass
                os._exit(0 if measuring._timer is None and measuring._accelerator is None else 1)
            except BaseException:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert set(_spans(captured)) == {"parent"}
