"""What torch is asked to tell: that code is being compiled, and that a checkpointed forward runs again. Imported once torch is there.

Inside torch.compile a record of a tensor becomes one operator in the graph. It says that it changes a token, so that no compiler removes, reorders or
repeats it, and it records when the graph runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint

from otel_forge.metrics import HistogramReduce, Reduce, Reduction, record_metric, registry

_token = torch.zeros(())


def _record(
    token: torch.Tensor,
    key: str,
    value: torch.Tensor | None,
    number: float | None,
    reduction: str,
    bounds: list[float],
    weight: torch.Tensor | None,
    weight_number: float | None,
) -> None:
    found: Reduction = Reduce.HISTOGRAM(bounds) if bounds else Reduce(reduction)
    registry().record(key, number if value is None else value, found, weight if weight is not None else weight_number)


_SCHEMA = "(Tensor(a!) token, str key, Tensor? value, float? number, str reduction, float[] bounds, Tensor? weight, float? weight_number) -> ()"
_operator = torch.library.custom_op("otel_forge::record", _record, mutates_args=("token",), schema=_SCHEMA)
_operator.register_fake(lambda *_arguments: None)


def _in_graph(key: str, value: Any, reduction: Reduction = Reduce.MEAN, *, weight: Any = None, _get: Any = None, _unknown: Any = None) -> None:
    """What torch.compile traces in place of `record_metric`."""
    tensor, number = _split(value)
    weight_tensor, weight_number = _split(weight)
    bounds = list(reduction.bounds) if isinstance(reduction, HistogramReduce) else []
    torch.ops.otel_forge.record(_token, key, tensor, number, reduction.value, bounds, weight_tensor, weight_number)


def _split(value: Any) -> tuple[Any, Any]:
    if value is None:
        return None, None
    return (value.detach(), None) if isinstance(value, torch.Tensor) else (None, float(value))


_substituted = False


def record_in_graphs() -> None:
    """Let torch.compile trace a record as an operator; does nothing the second time."""
    global _substituted
    if not _substituted:
        _substituted = True
        _in_graph.__signature__ = inspect.signature(record_metric)  # type: ignore[attr-defined]
        torch.compiler.substitute_in_graph(record_metric)(_in_graph)


def watch_recomputation() -> None:
    """Say when a checkpointed forward runs again, in both forms of torch.utils.checkpoint; does nothing the second time."""
    hook = getattr(checkpoint, "_recomputation_hook", None)
    if hook is not None and not hasattr(hook, "otel_forge"):
        hook.otel_forge = True
        enter, leave = hook.__enter__, hook.__exit__

        def entering(self: Any) -> Any:
            self.otel_forge_scope = registry().recomputing()
            self.otel_forge_scope.__enter__()
            return enter(self)

        def leaving(self: Any, *error: Any) -> Any:
            self.otel_forge_scope.__exit__(None, None, None)
            return leave(self, *error)

        hook.__enter__, hook.__exit__ = entering, leaving
    function: Any = checkpoint.CheckpointFunction
    if not hasattr(function, "otel_forge"):
        function.otel_forge = True
        function.backward = staticmethod(_marking(function.backward))


def _marking(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        run = ctx.run_function

        def again(*inputs: Any) -> Any:
            with registry().recomputing():
                return run(*inputs)

        ctx.run_function = again
        try:
            return backward(ctx, *gradients)
        finally:
            ctx.run_function = run

    return wrapper
