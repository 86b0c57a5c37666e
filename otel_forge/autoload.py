"""Instrumentation without a line of code: what `OTEL_FORGE_INSTRUMENT` and `instrument:` name, and the steps, in a program that knows nothing of it.

Started by `otel-forge run`, by `opentelemetry-instrument` (the entry point `opentelemetry_instrumentor`), or by `init` of a configuration with these
sections. In a launcher and in what is no script nothing happens; see `training_process` for the rest.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from otel_forge import pipeline, training_process
from otel_forge.automatic_steps import AutomaticSteps, Scopes
from otel_forge.errors import ForgeError
from otel_forge.patterns import Watch, with_care
from otel_forge.presets import PRESETS, Preset
from otel_forge.presets import switch_on as switch_on_preset
from otel_forge.script import ScriptWatch

logger = logging.getLogger("otel_forge")

_running: Autoload | None = None


class Autoload:
    """Everything that is put around a program; `stop` takes it away."""

    def __init__(self, instrument: Sequence[str], step_on: str | None, step_method: str | None) -> None:
        """`instrument`: texts and names of presets. `step_on`: `optimizer`, `method` or `manual`; None: optimizer, unless the program names steps."""
        self.steps = None if step_on == "manual" else AutomaticSteps(is_asked_for=step_on is not None)
        self._presets = [text for text in instrument if text in PRESETS]
        self._step_on = step_on or "optimizer"
        self._watches: list[Watch] = []
        if step_method is not None and step_on == "method":
            self._watch((step_method,), Scopes(self.steps, ends_step=True))
        self._watch([text for text in instrument if text not in PRESETS], Scopes(self.steps))
        self._script: ScriptWatch | None = None
        self._undo: list[Callable[[], None]] = []

    def _watch(self, texts: Sequence[str], scopes: Scopes) -> None:
        for text in texts:
            try:
                self._watches.append(Watch((text,), open_scope=scopes))
            except ForgeError as error:
                logger.warning("otel-forge: %s, or a preset (%s)", error, ", ".join(PRESETS))

    def start(self, *, before_script: bool) -> None:
        """Look for what is named, now and as it comes; `before_script`: the script has not begun to run."""
        for preset in self._presets:
            self._undo.append(switch_on_preset(preset, self._context()).stop)
        if self._step_on == "optimizer":
            self._undo.append(switch_on_preset("optimizer_steps", self._context()).stop)
        for watch in self._watches:
            with_care(watch.start)
        if before_script and self._watches:
            self._script = ScriptWatch(self._watches)
            self._script.start()
        atexit.register(self.say_what_matched_nothing)

    def _context(self) -> Preset:
        return Preset(Scopes(self.steps), self.steps)

    def say_what_matched_nothing(self) -> None:
        """Once, in one process of the run: texts that named nothing."""
        unmatched = [text for watch in self._watches for text in watch.unmatched()]
        if unmatched and training_process.is_worth_a_word(sys.orig_argv):
            logger.warning(
                "otel-forge: instrument: nothing was found that is named %s. (The script's own functions are found when it has "
                "`if __name__ == \"__main__\":`.)", ", ".join(repr(text) for text in unmatched),
            )  # fmt: skip

    def stop(self) -> None:
        """Take everything away again."""
        atexit.unregister(self.say_what_matched_nothing)
        if self._script is not None:
            self._script.stop()
        for watch in self._watches:
            watch.stop()
        while self._undo:
            self._undo.pop()()
        if self.steps is not None:
            self.steps.close()


def activate() -> None:
    """Before a program runs: start what the environment or the configuration asks for. Never raises; what is wrong is said."""
    if _running is None and not training_process.is_launcher(sys.orig_argv):
        with_care(_activate)


def _activate() -> None:
    from otel_forge import config

    if config.is_disabled():
        return
    try:
        loaded = config.load_config()
        step, instrument = config.step_settings(loaded, os.environ), config.instrument_texts(loaded, os.environ)
    except ForgeError as error:
        logger.error("otel-forge: nothing is instrumented: %s", error)
        return
    if instrument or step.on != "manual":
        is_given = "on" in step.model_fields_set
        _start(instrument, step.on if is_given else None, step.method, before_script=True)


def configured(config: Any) -> None:
    """`init` was called with a configuration: start what it names, unless that was started before the program."""
    from otel_forge.config import instrument_texts, step_settings

    step, instrument = step_settings(config, os.environ), instrument_texts(config, os.environ)
    if _running is None and (instrument or step.on != "manual"):
        _start(instrument, step.on, step.method, before_script=False)


def _start(instrument: Sequence[str], step_on: str | None, step_method: str | None, *, before_script: bool) -> None:
    global _running
    _running = Autoload(instrument, step_on, step_method)
    _running.start(before_script=before_script)


def stop() -> None:
    """Take everything away again, and forget what was found out about this process."""
    global _running
    running, _running = _running, None
    if running is not None:
        running.stop()
    training_process.reset()


class Instrumentor:
    """What `opentelemetry-instrument` loads, by the entry point `opentelemetry_instrumentor`."""

    def instrument(self, **_options: Any) -> None:
        """Start."""
        activate()

    def uninstrument(self, **_options: Any) -> None:
        """Stop."""
        stop()


pipeline.on_reset.append(stop)
