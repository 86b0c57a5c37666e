"""How long a backward waits for communication after it has computed everything. It must not know who reduces gradients.

The autograd engine runs final callbacks in the order in which they are queued, also those queued by another one. DDP queues its own, which waits for
the buckets, when the last gradient is ready; one that is queued at the begin of the backward comes before it, one queued by that comes after it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from otel_forge import tracing

MAX_OUTPUTS = 16
"""Tensors of a model's output that are looked at; the backward comes through one of the first."""


def watch_backward(output: Any, open_scope: Callable[[], Any]) -> None:
    """Open a scope around what runs at the end of the next backward through `output`."""
    context = contextvars.copy_context()
    queued = False

    def begin(_gradient: torch.Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            _queue(computed)

    def computed() -> None:
        scope = open_scope()
        if tracing.current_span_id():
            enter, leave = scope.__enter__, scope.__exit__
        else:  # a thread of the engine's own, which knows no parent
            enter, leave = lambda: context.run(scope.__enter__), lambda *error: context.run(scope.__exit__, *error)
        enter()
        _queue(lambda: done(leave))

    def done(leave: Callable[..., object]) -> None:
        nonlocal queued
        queued = False
        leave(None, None, None)

    for tensor in pytree.tree_leaves(output)[:MAX_OUTPUTS]:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)
