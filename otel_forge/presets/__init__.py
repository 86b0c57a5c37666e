"""Ready sets of hooks around other packages, by name. Each is switched on when its package is imported, and taken away without a trace."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

from otel_forge.automatic_steps import AutomaticSteps, Scopes
from otel_forge.patterns import with_care

PRESETS = ("torch",)
"""Names that `instrument:` and OTEL_FORGE_INSTRUMENT know."""


@dataclass(slots=True)
class Preset:
    """What the hooks of one preset are told, and how they are taken away."""

    scopes: Scopes
    steps: AutomaticSteps | None
    """None: the program names its steps itself."""
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _is_over: bool = False

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Remember how to take a hook away."""
        self._undo.append(undo)

    def when_imported(self, module: str, put: Callable[[], None]) -> None:
        """Put a hook once a module is there. What fails is said once."""
        import wrapt

        wrapt.register_post_import_hook(lambda _module: None if self._is_over else with_care(put), module)

    def stop(self) -> None:
        """Take every hook away."""
        self._is_over = True
        while self._undo:
            self._undo.pop()()


def switch_on(name: str, preset: Preset) -> Preset:
    """Switch a preset on; its module is imported only when torch is."""
    module = f"otel_forge.presets.{name}"
    preset.when_imported("torch.optim", lambda: importlib.import_module(module).put(preset))
    return preset
