"""Instrumented code inside torch.compile is one graph, gives the same result, and its records are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import otel_forge
from otel_forge import Reduce, instrument, record_metric, span, trace
from otel_forge.testing import capture

BACKENDS = ["eager", "aot_eager"]
if shutil.which("g++"):
    BACKENDS.append("inductor")


@instrument
class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@trace("decorated")
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


double = Double()


def records_a_new_key(x: torch.Tensor) -> torch.Tensor:
    record_metric("inside", 2.0, Reduce.SUM)
    return x * 2


def records_a_weight(x: torch.Tensor) -> torch.Tensor:
    record_metric("inside/weighted", 2.0, weight=3.0)
    return x * 2


def records_tensors(x: torch.Tensor) -> torch.Tensor:
    record_metric("inside/mean", x.sum())
    record_metric("inside/std", x, Reduce.STD)
    record_metric("inside/weighted", x.mean(), weight=x.sum())
    return x * 2


def opens_scopes(x: torch.Tensor) -> torch.Tensor:
    with span("inside"), trace("scope", metrics_only=True):
        return plus_one(x) + double(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [records_a_new_key, records_a_weight, records_tensors, opens_scopes])
def test_one_graph_the_same_result_and_every_record(backend: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    x = torch.ones(3)
    with capture() as captured:
        otel_forge.flush(0)
        expected = function(x)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
        otel_forge.flush(1)
        metrics = captured.rows[1]["metrics"]
    if function is records_a_new_key:
        assert metrics["inside"] == 4 * 2.0
    if function is records_a_weight:
        assert metrics["inside/weighted"] == 2.0
    if function is records_tensors:
        assert (metrics["inside/mean"], metrics["inside/std"], metrics["inside/weighted"]) == (3.0, 0.0, 1.0)


@pytest.mark.filterwarnings("ignore")
def test_records_in_a_compiled_region_never_make_it_compile_again() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with capture() as captured:
        record_metric("inside", 1.0, Reduce.SUM)
        compiled = torch.compile(records_a_new_key, fullgraph=True, backend=backend)
        for _ in range(20):
            compiled(torch.ones(3))
            record_metric("inside", 1.0, Reduce.SUM)
        otel_forge.flush(0)
        assert captured.rows[0]["metrics"]["inside"] == 1.0 + 20 * 3.0
    assert len(graphs) == 1


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        record_metric("layer/calls", 1.0, Reduce.SUM)
        record_metric("layer/mean", x.mean(), Reduce.COUNT)
        return self.linear(x).relu()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_records_once(use_reentrant: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    layer = torch.compile(Layer(), backend="aot_eager") if compiled else Layer()
    with capture() as captured:
        for step in range(3):
            x = torch.ones(2, 4, requires_grad=True)
            x.register_hook(lambda gradient: record_metric("backward", 1.0, Reduce.SUM))
            checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
            record_metric("after", 1.0)
            otel_forge.flush(step)
        found = [{key: value for key, value in row["metrics"].items() if not key.startswith("forge/")} for row in captured.rows]
    assert found == [{"layer/calls": 1.0, "layer/mean": 1.0, "backward": 1.0, "after": 1.0}] * 3


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_inside_a_compiled_region_is_one_graph_and_records_once() -> None:
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    with capture() as captured:
        for step in range(2):
            compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
            otel_forge.flush(step)
        assert [row["metrics"]["layer/calls"] for row in captured.rows] == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore")
def test_an_instrumented_module_around_a_compiled_one_is_still_traced() -> None:
    torch._dynamo.reset()
    with capture() as captured:
        double(torch.ones(2))
        assert [item.name for item in captured.spans] == ["Double/forward"]
