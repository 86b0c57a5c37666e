"""`step: {on: optimizer}`: a step ends when its optimizers have stepped."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from otel_forge import pipeline
from otel_forge.automatic_steps import Cycle
from otel_forge.presets import Preset
from otel_forge.training_process import is_training


def put(preset: Preset) -> None:
    """Watch every optimizer, from its making on. Gradient accumulation needs nothing: the optimizer steps once for it."""
    steps, cycle = preset.steps, Cycle()
    if steps is None:
        return
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        cycle.expects(self)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not pipeline.is_compiling() and is_training() and cycle.stepped(optimizer):
            steps.is_complete()

    def undo() -> None:
        handle.remove()
        if Optimizer.__init__ is init:
            Optimizer.__init__ = original  # type: ignore[method-assign]

    Optimizer.__init__ = init  # type: ignore[method-assign]
    handle = register_optimizer_step_post_hook(after_step)
    preset.undo_with(undo)
