"""Instrumented code inside torch.compile is one graph, gives the same result, and its records are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch

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


def opens_scopes(x: torch.Tensor) -> torch.Tensor:
    with span("inside"), trace("scope", metrics_only=True):
        return plus_one(x) + double(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [records_a_new_key, records_a_weight, opens_scopes])
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


@pytest.mark.filterwarnings("ignore")
def test_an_instrumented_module_around_a_compiled_one_is_still_traced() -> None:
    torch._dynamo.reset()
    with capture() as captured:
        double(torch.ones(2))
        assert [item.name for item in captured.spans] == ["Double/forward"]
