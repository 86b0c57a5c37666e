"""Memory of scopes against a brute-force model, and the program's own readings of the peak."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass

import pytest

from otel_forge.device import TorchAccelerator
from otel_forge.memory import Frame, MemoryTracker, Usage, host_rss_bytes
from tests.fake_accelerator import FakeCuda, FakeOutOfMemoryError

MB = 1 << 20
SCOPES = 31_000


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def tracker(cuda: FakeCuda) -> MemoryTracker:
    return MemoryTracker(TorchAccelerator(cuda, "cuda"))


@dataclass(eq=False)
class Truth:
    """What a scope's figures are, from seeing every allocation."""

    start: int
    peak: int
    phase_start: int
    phase_peak: int


class Program:
    """Allocates and frees at random on one device, and sees everything."""

    def __init__(self, cuda: FakeCuda, device: int, draw: random.Random) -> None:
        self.cuda, self.device, self.draw = cuda, device, draw
        self.blocks: list[int] = []
        self.allocated = 0
        self.own_peak = 0
        """What torch.cuda.max_memory_allocated() would say if nobody tracked."""
        self.truths: list[Truth] = []

    def move(self) -> None:
        if self.blocks and self.draw.random() < 0.55:
            size = self.blocks.pop(self.draw.randrange(len(self.blocks)))
            self.cuda.free(size, self.device)
            self.allocated -= size
            return
        size = self.draw.randint(1, 500)
        self.cuda.allocate(size, self.device)
        self.blocks.append(size)
        self.allocated += size
        self.own_peak = max(self.own_peak, self.allocated)
        for truth in self.truths:
            truth.peak = max(truth.peak, self.allocated)
            truth.phase_peak = max(truth.phase_peak, self.allocated)

    def open(self) -> Truth:
        truth = Truth(self.allocated, self.allocated, self.allocated, self.allocated)
        self.truths.append(truth)
        return truth


def test_31000_random_nested_and_overlapping_scopes_are_all_exact(cuda: FakeCuda, tracker: MemoryTracker) -> None:
    """Scopes close in any order, on two devices; in between the program reads and resets the peak itself."""
    draw = random.Random(8)
    programs = [Program(cuda, device, draw) for device in range(2)]
    open_scopes: list[tuple[Program, Frame, Truth]] = []
    closed = wrong = 0
    while closed < SCOPES:
        program = draw.choice(programs)
        for _ in range(draw.randint(0, 4)):
            program.move()
        action = draw.random()
        if action < 0.45 and len(open_scopes) < 12:
            open_scopes.append((program, tracker.open(program.device), program.open()))
        elif action < 0.55 and open_scopes:
            program, frame, truth = draw.choice(open_scopes)
            wrong += tracker.end_phase(frame) != Usage(truth.phase_start, program.allocated, truth.phase_peak)
            truth.phase_start = truth.phase_peak = program.allocated
        elif action < 0.98 and open_scopes:
            program, frame, truth = open_scopes.pop(draw.randrange(len(open_scopes)))
            phase, whole = tracker.close(frame)
            program.truths.remove(truth)
            closed += 1
            wrong += phase != Usage(truth.phase_start, program.allocated, truth.phase_peak)
            wrong += whole != Usage(truth.start, program.allocated, truth.peak)
        elif action > 0.99:
            cuda.reset_peak_memory_stats(program.device)
            program.own_peak = program.allocated
        wrong += cuda.max_memory_allocated(program.device) != program.own_peak
    assert wrong == 0


def test_resetting_and_reading_alone_would_be_wrong_for_nested_scopes(cuda: FakeCuda) -> None:
    """The usual way, over the same kind of program: the model does find errors where there are some."""
    draw = random.Random(8)
    program = Program(cuda, 0, draw)
    open_scopes: list[Truth] = []
    wrong = closed = 0
    while closed < 3000:
        for _ in range(draw.randint(0, 4)):
            program.move()
        if draw.random() < 0.5 and len(open_scopes) < 12:
            cuda.reset_peak_memory_stats(0)
            open_scopes.append(program.open())
        elif open_scopes:
            truth = open_scopes.pop()
            program.truths.remove(truth)
            closed += 1
            wrong += cuda.max_memory_allocated(0) != truth.peak
    assert wrong > closed / 20


def test_an_inner_scope_erases_neither_the_outer_peak_nor_the_program_s_reading(cuda: FakeCuda, tracker: MemoryTracker) -> None:
    outer = tracker.open(0)
    cuda.allocate(400 * MB)
    cuda.free(400 * MB)
    inner = tracker.open(0)
    cuda.allocate(100 * MB)
    cuda.free(100 * MB)
    assert tracker.close(inner)[1] == Usage(0, 0, 100 * MB)
    assert tracker.close(outer)[1] == Usage(0, 0, 400 * MB)
    assert cuda.max_memory_allocated() == 400 * MB
    assert cuda.memory.memory_stats_as_nested_dict(0)["oversize_allocations"]["peak"] == 400 * MB


def test_the_program_s_own_reset_counts_for_its_reading_and_not_for_open_scopes(cuda: FakeCuda, tracker: MemoryTracker) -> None:
    frame = tracker.open(0)
    cuda.allocate(300)
    cuda.free(200)
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == 100
    assert tracker.close(frame)[1] == Usage(0, 100, 300)
    assert cuda.max_memory_allocated() == 100


def test_a_scope_that_ran_out_of_memory_has_its_figures(cuda: FakeCuda, tracker: MemoryTracker) -> None:
    cuda.capacity_bytes = 1000
    frame = tracker.open(0)
    cuda.allocate(700)
    with pytest.raises(FakeOutOfMemoryError):
        cuda.allocate(700)
    assert tracker.close(frame)[1] == Usage(0, 700, 700)


def test_devices_are_kept_apart(cuda: FakeCuda, tracker: MemoryTracker) -> None:
    first, second = tracker.open(0), tracker.open(1)
    cuda.allocate(500, device=1)
    assert tracker.close(first)[1] == Usage(0, 0, 0)
    assert tracker.close(second)[1] == Usage(0, 500, 500)


def test_a_frame_that_was_dropped_open_is_forgotten(tracker: MemoryTracker) -> None:
    kept = tracker.open(0)
    tracker.open(0)
    gc.collect()
    assert list(tracker._open[0]) == [kept]


def test_torch_gets_its_own_functions_back(cuda: FakeCuda) -> None:
    read, reset = cuda.memory.memory_stats_as_nested_dict, cuda.reset_peak_memory_stats
    accelerator = TorchAccelerator(cuda, "cuda")
    MemoryTracker(accelerator)
    assert cuda.memory.memory_stats_as_nested_dict is not read
    accelerator.restore()
    assert (cuda.memory.memory_stats_as_nested_dict, cuda.reset_peak_memory_stats) == (read, reset)


def test_the_host_s_resident_memory_is_what_the_system_says() -> None:
    rss = host_rss_bytes()
    if rss is None:
        assert not os.path.exists("/proc/self/statm")
    else:
        assert 1 * MB < rss < 1 << 40
