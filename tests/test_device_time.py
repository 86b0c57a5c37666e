"""Device times of scopes, on the fake accelerator."""

from __future__ import annotations

import random
import threading
import time

import pytest

from otel_forge import device_clock, device_time
from otel_forge.device import TorchAccelerator
from otel_forge.device_clock import DeviceClock
from otel_forge.device_time import DeviceTimer, DeviceTimes, Mark
from otel_forge.notices import reset_notices
from tests.fake_accelerator import FakeCuda, Stream, seeded_latency

MS = 1_000_000
S = 1_000_000_000
HOUR_S = 3600


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def timer(cuda: FakeCuda) -> DeviceTimer:
    return DeviceTimer(TorchAccelerator(cuda, "cuda"), clock=lambda: cuda.now_ns, threaded=False)


def _mark(timer: DeviceTimer, device: int = 0) -> Mark:
    mark = timer.mark(device)
    assert mark is not None
    return mark


def test_durations_are_the_device_s_and_arrive_without_a_wait(cuda: FakeCuda, timer: DeviceTimer) -> None:
    """A phase that launches 200 ms of work and returns has 200 ms; one of 50 ms on the host alone has none. The fake's synchronize raises."""
    results: list[DeviceTimes | None] = []
    started_ns = cuda.now_ns
    begin = _mark(timer)
    cuda.current_stream(0).launch(200 * MS)
    after_launch = _mark(timer)
    cuda.advance(50 * MS)
    end = _mark(timer)
    assert cuda.now_ns == started_ns + 50 * MS
    timer.resolve([begin, after_launch, end], results.append)
    timer.poll()
    assert results == []
    cuda.advance(150 * MS)
    timer.poll()
    (times,) = results
    assert times is not None
    assert times.durations_s == pytest.approx((0.2, 0.0), abs=2e-5)
    assert times.total_s == pytest.approx(0.2, abs=2e-5)
    assert times.start_ns == pytest.approx(started_ns, abs=20_000)


def test_each_mark_is_recorded_on_the_stream_that_is_current_then(cuda: FakeCuda, timer: DeviceTimer) -> None:
    """Work on another stream than the default one is seen; a scope that changes streams waits for both."""
    results: list[DeviceTimes | None] = []
    side = Stream(cuda, 0)
    begin = _mark(timer)
    cuda.set_stream(side)
    side.launch(100 * MS)
    timer.resolve([begin, _mark(timer)], results.append)
    cuda.advance(99 * MS)
    timer.poll()
    assert results == []
    cuda.advance(2 * MS)
    timer.poll()
    assert results[0] is not None
    assert results[0].total_s == pytest.approx(0.1, abs=1e-4)


def test_a_busy_stream_does_not_hold_up_another_one(cuda: FakeCuda, timer: DeviceTimer) -> None:
    results: list[str] = []
    begin = _mark(timer)
    cuda.current_stream(0).launch(10 * S)
    timer.resolve([begin, _mark(timer)], lambda times: results.append("slow"))
    cuda.set_stream(Stream(cuda, 0))
    begin = _mark(timer)
    cuda.current_stream(0).launch(MS)
    timer.resolve([begin, _mark(timer)], lambda times: results.append("fast"))
    cuda.advance(2 * MS)
    timer.poll()
    assert results == ["fast"]


def test_only_the_device_that_was_asked_for_is_touched(cuda: FakeCuda, timer: DeviceTimer) -> None:
    begin = _mark(timer, device=1)
    timer.resolve([begin, _mark(timer, device=1)], lambda times: None)
    timer.poll()
    assert cuda.contexts == {1}


def test_events_are_used_again(cuda: FakeCuda, timer: DeviceTimer) -> None:
    first = [_mark(timer), _mark(timer)]
    timer.resolve(first, lambda times: None)
    timer.poll()
    again = [_mark(timer), _mark(timer)]
    assert {id(mark.event) for mark in again} == {id(mark.event) for mark in first}


def test_under_capture_nothing_is_recorded_or_queried(cuda: FakeCuda, timer: DeviceTimer) -> None:
    """And what was pending before is read after it, also when a capture failed to begin or its graph was thrown away."""
    results: list[DeviceTimes | None] = []
    timer.resolve([_mark(timer), _mark(timer)], results.append)
    graph = cuda.CUDAGraph()
    graph.capture_begin()
    assert timer.mark(0) is None
    queries = cuda.queries
    timer.poll()
    assert (results, cuda.queries, cuda.captures_broken) == ([], queries, 0)
    graph.capture_end()
    timer.poll()
    assert len(results) == 1
    with pytest.raises(RuntimeError, match="could not begin"):
        cuda.CUDAGraph().capture_begin(fail=True)
    assert timer.mark(0) is not None
    dropped = cuda.CUDAGraph()
    dropped.capture_begin()
    cuda.capturing_graphs.clear()
    del dropped
    assert timer.mark(0) is not None


def test_captures_beside_the_polling_thread_are_never_broken(cuda: FakeCuda) -> None:
    """The thread polls all the time while another captures; the fake counts each query and record inside a capture."""
    timer = DeviceTimer(TorchAccelerator(cuda, "cuda"))
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.is_set():
            timer.poll()

    _mark(timer)
    cuda.current_stream(0).launch(1 << 60)
    timer.resolve([_mark(timer), _mark(timer)], lambda times: None)
    poller = threading.Thread(target=poll)
    poller.start()
    before = cuda.queries
    for _ in range(2000):
        graph = cuda.CUDAGraph()
        graph.capture_begin()
        graph.capture_end()
    deadline = time.monotonic() + 10
    while cuda.queries == before and time.monotonic() < deadline:
        time.sleep(0.001)
    stopped.set()
    poller.join()
    timer.stop()
    assert cuda.captures_broken == 0
    assert cuda.queries > before


def test_a_lost_device_ends_device_times_and_nothing_else(cuda: FakeCuda, timer: DeviceTimer) -> None:
    results: list[DeviceTimes | None] = []
    timer.resolve([_mark(timer), _mark(timer)], results.append)
    cuda.lost = True
    timer.poll()
    assert results == [None]
    assert timer.mark(0) is None
    assert timer.lost == 1


def test_settle_waits_for_the_thread_s_results_and_give_up_for_nothing() -> None:
    """Real time: the fake's clock runs with the host's, and a kernel of 50 ms is launched just before the end."""
    cuda = FakeCuda()
    cuda.call_ns = lambda: 1000
    timer = DeviceTimer(TorchAccelerator(cuda, "cuda"), clock=lambda: cuda.now_ns)
    results: list[DeviceTimes | None] = []
    begin = _mark(timer)
    cuda.current_stream(0).launch(50 * MS)
    timer.resolve([begin, _mark(timer)], results.append)
    assert not timer.settle(0.02)
    threading.Timer(0.05, cuda.advance, args=(60 * MS,)).start()
    assert timer.settle(10)
    assert results[0] is not None
    assert results[0].total_s == pytest.approx(0.05, abs=1e-3)
    begin = _mark(timer)
    cuda.current_stream(0).launch(10**6 * MS)
    timer.resolve([begin, _mark(timer)], results.append)
    timer.give_up()
    assert results[1:] == [None]
    timer.stop()


def test_the_thread_delivers_by_itself_and_wakes_from_idleness() -> None:
    cuda = FakeCuda()
    timer = DeviceTimer(TorchAccelerator(cuda, "cuda"), clock=lambda: cuda.now_ns)
    for _ in range(2):
        arrived = threading.Event()
        timer.resolve([_mark(timer), _mark(timer)], lambda times, arrived=arrived: arrived.set())  # type: ignore[misc]
        assert arrived.wait(10)
        deadline = time.monotonic() + 10
        while not timer._asleep and time.monotonic() < deadline:
            time.sleep(0.001)
    timer.stop()


class Simulation:
    """An hour of scopes, and how far off they are placed."""

    def __init__(self, *, renewed: bool) -> None:
        self.cuda = FakeCuda()
        self.cuda.call_ns = seeded_latency(5)
        self.draw = random.Random(6)
        self.accelerator = TorchAccelerator(self.cuda, "cuda")
        self.clock = DeviceClock(self.accelerator, 0, lambda: self.cuda.now_ns)
        self.renewed = renewed
        self.renewals = 0

    def worst_error_ns(self) -> float:
        worst = 0.0
        start_ns = self.cuda.now_ns
        self._pass(200 * MS)  # the thread begins with the first mark
        while self.cuda.now_ns < start_ns + HOUR_S * S:
            near = self.clock.latest
            stream = self.cuda.current_stream(0)
            stream.launch(self.draw.randint(0, 1500) * MS)  # the host runs ahead by up to 1.5 s
            event = self.accelerator.new_event()
            self.accelerator.record(event, 0)
            self._pass(self.draw.randint(200, 1700) * MS)
            while not event.query():
                self._pass(200 * MS)
            placed = self.clock.host_ns(event, near)
            assert placed is not None
            worst = max(worst, abs(placed - event.at_ns))
        return worst

    def _pass(self, duration_ns: int) -> None:
        """The thread looks every few milliseconds; every 50 here."""
        for _ in range(0, duration_ns, 50 * MS):
            self._renew()
            self.cuda.advance(50 * MS)

    def _renew(self) -> None:
        """A third of the attempts find the anchor's stream held up, for 150 µs or for longer than an attempt waits."""
        if self.renewed or self.clock.latest is None:
            before = self.clock.latest
            if self.clock._stream is not None:
                held_ns = self.draw.choice([0, 0, 0, 0, 150_000, 1 * S])
                self.clock._stream.busy_until_ns = self.cuda.now_ns + held_ns
            self.clock.renew()
            self.renewals += self.clock.latest is not before


@pytest.mark.parametrize("drift_ppm", [0.0, 30.0, -100.0])
def test_places_on_the_host_s_clock_are_50_microseconds_right_over_an_hour(drift_ppm: float) -> None:
    """With half-microsecond timestamps, float32 milliseconds, slow calls and anchors that fail."""
    simulation = Simulation(renewed=True)
    simulation.cuda.drift_ppm = drift_ppm
    worst = simulation.worst_error_ns()
    assert worst <= 50_000
    assert simulation.renewals > HOUR_S / 10


def test_one_anchor_for_an_hour_would_not_do() -> None:
    assert Simulation(renewed=False).worst_error_ns() > 250_000


def test_a_scope_of_an_hour_is_measured_between_two_places(cuda: FakeCuda, timer: DeviceTimer) -> None:
    """float32 alone would be up to 125 µs off, and by the device's clock, 30 ppm, 108 ms."""
    cuda.call_ns = seeded_latency(9)
    results: list[DeviceTimes | None] = []
    timer.poll()
    begin = _mark(timer)
    started_ns = begin.event.at_ns
    for _ in range(HOUR_S // 5):
        timer.poll()
        cuda.advance(5 * S)
    end = _mark(timer)
    timer.resolve([begin, end], results.append)
    timer.poll()
    assert results[0] is not None
    assert results[0].total_s * 1e9 == pytest.approx(end.event.at_ns - started_ns, abs=100_000)


def test_a_device_that_is_a_minute_behind_is_waited_for_no_longer(cuda: FakeCuda, timer: DeviceTimer, caplog: pytest.LogCaptureFixture) -> None:
    """The spans of a hanging device are to be seen while it hangs."""
    reset_notices()
    results: list[DeviceTimes | None] = []
    begin = _mark(timer)
    cuda.current_stream(0).launch(HOUR_S * S)
    for _ in range(2):
        timer.resolve([begin, _mark(timer)], results.append)
    cuda.advance(59 * S)
    timer.poll()
    assert results == []
    cuda.advance(2 * S)
    timer.poll()
    assert results == [None, None]
    assert (timer.lost, timer.is_pending(), len(caplog.records)) == (2, False, 1)


def test_too_much_pending_stands_back(cuda: FakeCuda, timer: DeviceTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_time, "MAX_PENDING", 3)
    cuda.current_stream(0).launch(10 * S)
    for _ in range(4):
        timer.resolve([_mark(timer), _mark(timer)], lambda times: None)
    assert timer.mark(0) is None
    cuda.advance(11 * S)
    timer.poll()
    assert timer.mark(0) is not None


def test_a_held_up_first_anchor_leaves_the_start_open(cuda: FakeCuda, timer: DeviceTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A duration needs no anchor; the start is None, never a guess."""
    monkeypatch.setattr(device_clock, "SPIN_NS", -1)
    monkeypatch.setattr(TorchAccelerator, "new_stream", lambda self, device: _held(cuda, device))
    results: list[DeviceTimes | None] = []
    timer.resolve([_mark(timer), _mark(timer)], results.append)
    timer.poll()
    assert results == [DeviceTimes(None, (0.0,), 0.0)]


def _held(cuda: FakeCuda, device: int) -> Stream:
    stream = Stream(cuda, device)
    stream.launch(10 * S)
    return stream
