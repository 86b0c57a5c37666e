"""What can be recorded, and that each value is taken once."""

from __future__ import annotations

import decimal
import logging
import math
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from otel_forge import metrics
from otel_forge.errors import InvalidValueError, ReductionConflict
from otel_forge.metrics import MAX_BEFORE_INIT, Reduce, record_metric, record_metrics


@pytest.fixture(autouse=True)
def _recording() -> None:
    metrics.registry().set_mode(off=False, bounded=False, stream=None)


def _taken() -> dict[str, list[float]]:
    return {taken.series.key: taken.values for taken in metrics.registry().drain()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5), (2, 2.0), (True, 1.0), (np.bool_(False), 0.0), (np.float32(0.5), 0.5), (np.int64(1), 1.0), (decimal.Decimal("2.25"), 2.25),
        (np.array([2.0]), 2.0), (np.array(3), 3.0), (torch.tensor(4.0), 4.0), (torch.tensor([2.0]), 2.0), (torch.tensor(3, dtype=torch.int32), 3.0),
        (torch.tensor(256.0, dtype=torch.bfloat16), 256.0), (torch.tensor(True), 1.0), (torch.tensor(1.0, requires_grad=True), 1.0),
    ],
)  # fmt: skip
def test_every_kind_of_number_is_recorded(value: Any, expected: float) -> None:
    for _ in range(2):
        record_metric("x", value)
    assert _taken() == {"x": [expected, expected]}


@pytest.mark.parametrize("value", ["1", b"1", None, [1.0], {}, object(), 1j, torch.tensor(1j), np.array(["a"])])
def test_rubbish_is_said_once_with_its_key_and_nothing_else_is_lost(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    record_metric("bad/key", value)
    record_metric("bad/key", value)
    record_metric("loss", 1.0)
    assert _taken() == {"loss": [1.0]}
    assert [record.getMessage().startswith("'bad/key': ") for record in caplog.records] == [True]
    assert metrics.registry().dropped == 2


def test_each_element_of_an_array_is_a_measurement() -> None:
    record_metric("a", np.array([1.0, 2.0]))
    record_metric("a", torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    assert _taken() == {"a": [1.0, 2.0, 3.0, 4.0]}


def test_strict_raises_what_is_otherwise_logged() -> None:
    metrics.registry().strict = True
    with pytest.raises(InvalidValueError, match="'x'"):
        record_metric("x", "1")
    record_metric("y", 1.0, Reduce.SUM)
    with pytest.raises(ReductionConflict, match=r"'y'.*SUM"):
        record_metric("y", 1.0, Reduce.MEAN)


@pytest.mark.parametrize("key", ["", "  ", None, 3, "x" * 2000])
def test_a_key_that_is_none_is_refused(key: Any, caplog: pytest.LogCaptureFixture) -> None:
    record_metric(key, 1.0)
    assert _taken() == {}
    assert len(caplog.records) == 1


def test_one_key_with_two_reductions_is_kept_apart_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        record_metric("g", 1.0, Reduce.SUM)
        record_metric("g", 2.0, Reduce.MEAN)
    taken = {(item.series.key, item.series.reduction): item.values for item in metrics.registry().drain()}
    assert taken == {("g", Reduce.SUM): [1.0] * 3, ("g", Reduce.MEAN): [2.0] * 3}
    assert len(caplog.records) == 1
    assert "Reduce.SUM" in caplog.text
    assert "Reduce.MEAN" in caplog.text


def test_a_weight_belongs_to_a_mean(caplog: pytest.LogCaptureFixture) -> None:
    record_metric("loss", 2.0, weight=3)
    record_metric("loss", torch.tensor(4.0), weight=torch.tensor(1.0))
    record_metric("tokens", 2.0, Reduce.SUM, weight=3)
    record_metric("bad", 2.0, weight=-1.0)
    assert {item.series.key: item.weighted for item in metrics.registry().drain()} == {"loss": [(2.0, 3.0), (4.0, 1.0)]}
    assert "'tokens': weight= has a meaning for Reduce.MEAN only" in caplog.text
    assert "'bad': weight must be" in caplog.text


def test_count_does_not_look_at_values() -> None:
    for value in (7.0, "anything", None):
        record_metric("n", value, Reduce.COUNT)
    assert _taken() == {"n": [1.0, 1.0, 1.0]}


def test_histogram_bounds_are_checked_and_equal_bounds_are_one_series() -> None:
    record_metric("h", 1.0, Reduce.HISTOGRAM([0, 1]))
    record_metric("h", 2.0, Reduce.HISTOGRAM((0.0, 1.0)))
    assert _taken() == {"h": [1.0, 2.0]}
    for bounds in ([], [1, 1], [2, 1], [0, math.inf]):
        with pytest.raises(ValueError, match="bounds"):
            Reduce.HISTOGRAM(bounds)


def test_recording_keeps_neither_the_graph_nor_a_view(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones((), requires_grad=True)
    activation = weight * 2
    alive = weakref.ref(activation)
    record_metric("loss", activation)
    activation.data.fill_(9.0)
    del activation
    assert alive() is None
    assert _taken() == {"loss": [2.0]}
    assert not caplog.records


def test_before_init_values_are_kept_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    metrics.registry().set_mode(off=False, bounded=True, stream=None)
    for _ in range(MAX_BEFORE_INIT + 5):
        record_metric("x", 1.0)
    assert len(_taken()["x"]) == MAX_BEFORE_INIT
    assert metrics.registry().dropped == 5
    assert len(caplog.records) == 1


def test_off_records_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    metrics.registry().set_mode(off=True, bounded=False, stream=None)
    record_metrics({"x": 1.0, "y": "rubbish"})
    assert _taken() == {}
    assert not caplog.records


def test_threads_that_record_while_another_drains_lose_and_double_nothing() -> None:
    """8 threads × 20,000 ones while this one drains as fast as it can."""
    threads = [threading.Thread(target=lambda: [record_metric("n", 1.0, Reduce.SUM) for _ in range(20_000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    total = 0.0
    while any(thread.is_alive() for thread in threads):
        total += sum(map(sum, _taken().values()))
    for thread in threads:
        thread.join()
    assert total + sum(map(sum, _taken().values())) == 160_000


def test_a_broken_tensor_is_no_problem_of_the_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    record_metric("x", torch.tensor(1.0, device="meta"))
    assert "'x': a meta tensor has no value" in caplog.text
