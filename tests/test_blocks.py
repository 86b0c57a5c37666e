"""Arrays and tensors on a device are folded where they are, and no call waits. The device here is the CPU behind streams that note what is done."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_forge import blocks, metrics, values
from otel_forge.blocks import SLAB_SLOTS, DeviceBlocks
from otel_forge.metrics import Reduce, Taken, record_metric
from otel_forge.moments import bucket, exact_moments, summarize, weigh


class Streams:
    """The seam of DeviceStreams: one device, streams by name, and a log."""

    def __init__(self) -> None:
        self.now = "main"
        self.capturing = False
        self.marked: list[str] = []
        self.kept: list[str] = []
        self.busy: set[str] = set()
        self.fetches = 0

    def current(self, device: Any) -> str:
        return self.now

    def is_capturing(self, device: Any) -> bool:
        return self.capturing

    def keep(self, tensor: Any, stream: str) -> None:
        self.kept.append(stream)

    def event(self, stream: str) -> str:
        self.marked.append(stream)
        return stream

    def is_passed(self, event: str) -> bool:
        return event not in self.busy

    def fetch(self, slots: torch.Tensor) -> list[float]:
        assert self.marked, "read before it was marked"
        self.fetches += 1
        return slots.tolist()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    metrics.registry().set_mode(off=False, bounded=False, stream=None)
    metrics.registry()._blocks = DeviceBlocks(found)
    monkeypatch.setattr(values, "is_host", lambda tensor: False)
    return found


def _drain() -> dict[str, Taken]:
    taken = {item.series.key: item for item in metrics.registry().drain()}
    for item in taken.values():
        item.read()
    return taken


def test_a_flush_s_device_scalars_are_one_transfer(streams: Streams) -> None:
    for value in range(100):
        record_metric(f"key{value % 5}", torch.tensor(float(value), requires_grad=True) * 1)
        record_metric("half", torch.tensor(value, dtype=torch.bfloat16))
    assert streams.fetches == 0
    taken = _drain()
    assert taken["key3"].values == [float(value) for value in range(3, 100, 5)]
    assert taken["half"].values == [float(value) for value in range(100)]
    assert streams.fetches == 1


def test_the_value_is_that_of_the_call_whatever_happens_to_the_tensor_after(streams: Streams) -> None:
    tensor = torch.ones(())
    record_metric("x", tensor)
    tensor.fill_(7.0)
    with torch.inference_mode():
        record_metric("x", torch.tensor(2.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record_metric("x", torch.tensor(1.001, dtype=torch.float64))
    record_metric("x", torch.tensor(3.0))
    assert _drain()["x"].values == [1.0, 2.0, 1.001, 3.0]


def test_every_stream_that_wrote_is_waited_for_and_holds_the_memory(streams: Streams) -> None:
    record_metric("x", torch.tensor(1.0))
    streams.now = "side"
    record_metric("x", torch.tensor(2.0))
    assert _drain()["x"].values == [1.0, 2.0]
    assert (streams.marked, streams.kept) == (["main", "side"], ["side"])


def test_a_step_is_held_until_the_device_has_come_to_it_and_given_up_when_it_never_does(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, expected in (("x", [1.0]), ("lost", [])):
        streams.busy.add("main")
        record_metric(key, torch.tensor(1.0))
        (taken,) = metrics.registry().drain()
        assert not taken.is_ready()
        if expected:
            streams.busy.clear()
            assert taken.is_ready()
        else:
            monkeypatch.setattr(blocks, "GIVEN_UP_AFTER_S", 0.01)
        taken.read()
        assert taken.values == expected


def test_nothing_is_asked_of_the_device_while_a_graph_is_captured(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [True, True, True]
    monkeypatch.setattr(blocks, "outside_capture", lambda read: None if capturing and capturing.pop() else read())
    record_metric("x", torch.tensor(1.0))
    (taken,) = metrics.registry().drain()
    assert not taken.is_ready()
    taken.read()
    assert (taken.values, capturing, streams.fetches) == ([1.0], [], 1)


def test_more_scalars_than_a_slab_has_slots_are_all_there(streams: Streams) -> None:
    for value in range(SLAB_SLOTS + 10):
        record_metric("x", torch.tensor(value))
    assert _drain()["x"].values == [float(value) for value in range(SLAB_SLOTS + 10)]
    assert streams.fetches == 2


def test_inside_a_graph_capture_nothing_is_recorded_and_it_is_said(streams: Streams, caplog: pytest.LogCaptureFixture) -> None:
    streams.capturing = True
    record_metric("x", torch.tensor(1.0))
    record_metric("x", torch.tensor(1.0))
    streams.capturing = False
    record_metric("x", torch.tensor(2.0))
    assert _drain()["x"].values == [2.0]
    assert ["CUDA graph is captured" in record.getMessage() for record in caplog.records] == [True]
    assert metrics.registry().dropped == 2


NUMBERS = [1e8 + 1, 1e8 + 2, 1e8 + 3, math.nan, -5.0, math.inf]


@pytest.mark.parametrize("make", [lambda numbers: torch.tensor(numbers, dtype=torch.float64), np.array])
def test_many_elements_are_folded_as_one_by_one(make: Any, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "LISTED_UP_TO", 0)
    several = make(NUMBERS)
    for key, reduction in (("m", Reduce.MEAN), ("s", Reduce.STD), ("h", Reduce.HISTOGRAM([0.0, 1e8 + 2]))):
        record_metric(key, several, reduction)
        record_metric(key, 4.0, reduction)
    taken = _drain()
    every = [*NUMBERS, 4.0]
    plain = [chunk for chunk, _ in taken["m"].chunks]
    assert summarize(taken["m"].values, plain) == summarize(every)
    found, expected = exact_moments(taken["s"].values, [chunk for chunk, _ in taken["s"].chunks]), exact_moments(every)
    assert (found.n, found.nonfinite) == (expected.n, expected.nonfinite)
    assert math.isclose(_std(found), statistics.pstdev([value for value in every if math.isfinite(value)]), rel_tol=1e-12)
    histogram = bucket(taken["h"].values, [0.0, 1e8 + 2], [chunk for chunk, _ in taken["h"].chunks])
    assert histogram == bucket(every, [0.0, 1e8 + 2])


def test_a_weight_on_the_device_stays_there_until_it_is_read(streams: Streams) -> None:
    record_metric("loss", torch.tensor(2.0), weight=torch.tensor(3))
    record_metric("loss", 5.0, weight=torch.tensor(1.0))
    record_metric("loss", torch.tensor([1.0, 3.0]), weight=torch.tensor(2.0))
    assert streams.fetches == 0
    taken = _drain()["loss"]
    total = weigh(taken.weighted, [(chunk, weight) for chunk, weight in taken.chunks if weight is not None])
    assert (total.weighted_sum, total.weight) == (2.0 * 3 + 5.0 + 4.0 * 2, 3 + 1 + 4)


def _std(moments: Any) -> float:
    unit = Fraction(1, 2**1088)
    mean = Fraction(moments.x, moments.n) * unit
    return math.sqrt(max(0, Fraction(moments.xx, moments.n) * unit * unit - mean * mean))


@given(st.lists(st.floats(-1e150, 1e150).map(lambda value: value if abs(value) > 1e-100 else 0.0), min_size=1, max_size=50), st.floats(-1e6, 1e6))
@settings(max_examples=200)
def test_the_std_of_a_folded_array_is_that_of_its_elements(numbers: list[float], offset: float) -> None:
    metrics.registry().set_mode(off=False, bounded=False, stream=None)
    array = np.array(numbers) + offset
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(values, "LISTED_UP_TO", 0)
        record_metric("x", array, Reduce.STD)
    (taken,) = metrics.registry().drain()
    found = exact_moments(taken.values, [chunk for chunk, _ in taken.chunks])
    exact = exact_moments(array.tolist())
    assert found.n == exact.n
    assert math.isclose(_std(found), statistics.pstdev(array.tolist()), rel_tol=1e-9, abs_tol=1e-15 * max(abs(array)))


def test_a_dtensor_is_recorded_where_it_is_whole_and_refused_where_not(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor

    metrics.registry().set_mode(off=False, bounded=False, stream=None)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        record_metric("norm", distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]))
        record_metric("shard", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        record_metric("partial", torch.distributed.tensor.DTensor.from_local(torch.ones(()), mesh, [Partial()]))
    finally:
        torch.distributed.destroy_process_group()
    assert {item.series.key: item.values for item in metrics.registry().drain()} == {"norm": [3.0]}
    ours = [record.getMessage() for record in caplog.records if record.name == "otel_forge"]
    assert ["full_tensor()" in text for text in ours] == [True, True]
