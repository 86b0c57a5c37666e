"""Steps that end by themselves, for a program that names none. It must not know torch, nor what is traced.

One step lies between two ends: whatever the program does in between belongs to it. An end that comes inside a traced method which began in the same
step, as `optimizer.step()` inside `train_step()`, waits until that method is left, so that its time is in its own step.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

from otel_forge import pipeline, tracing
from otel_forge.notices import warn_once
from otel_forge.tracing import Tracer, span, trace
from otel_forge.training_process import is_training


class AutomaticSteps:
    """The steps of one training loop; the thread in which the first of them begins drives them."""

    def __init__(self, *, is_asked_for: bool = True) -> None:
        """`is_asked_for`: by the configuration, so that the user hears when it does not come to that."""
        self._is_asked_for = is_asked_for
        self._thread = 0
        self._tracer: Tracer | None = None
        self._span: span | None = None
        self._depth = 0
        """Traced methods that are open in the thread."""
        self._base = 0
        """Of them, those that were open when this step began."""
        self._end_due_at: int | None = None
        """The depth at which the end of the step came; None: it did not come yet."""
        self._last: int | None = None
        self.ended = 0
        """Steps that ended."""
        self._is_over = False

    # --- what happens in the program ------------------------------------------------------------------------------------

    def entered(self) -> bool:
        """A traced method begins. False where it has nothing to do with the steps."""
        if not self._is_here():
            return False
        if self._end_due_at is not None and self._depth < self._end_due_at:
            self._end()
        self._depth += 1
        return True

    def left(self, *, ends: bool) -> None:
        """A traced method that `entered` has ended; `ends`: and with it the step."""
        self._depth -= 1
        if ends or (self._end_due_at is not None and self._depth <= self._base):
            self._end()
        if self._depth < self._base:  # it began in an earlier step: what comes is no part of it
            self._base = self._depth
            if self._span is not None and self._span._token is not None:
                tracing._parent.set(self._span._id)

    def waits_for_data(self) -> None:
        """The next batch is asked for: an end that was due has come."""
        if self._is_here() and self._end_due_at is not None:
            self._end()

    def is_complete(self) -> None:
        """The step's work is done."""
        if self._thread and self._thread != threading.get_ident() and not self.ended:
            self._move_here()
        if not self._is_here():
            return
        if self._end_due_at is not None:
            self._end()
        if self._depth <= self._base:
            self._end()
        else:
            self._end_due_at = self._depth

    # --- one step ---------------------------------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        if self._is_over:
            return False
        if not self._thread:
            self._thread = threading.get_ident()
            self._begin()
            atexit.register(self.close)
        return self._thread == threading.get_ident()

    def _move_here(self) -> None:
        """The work is done in another thread than the one that began."""
        self._give_up()
        self._thread = threading.get_ident()
        self._depth = self._base = 0
        self._begin()

    def _begin(self) -> None:
        self._base = self._depth
        self._end_due_at = None
        tracing._parent.set(0)  # a method that lasts over several steps is no parent of one
        self._span = span("rank")
        self._span.__enter__()
        self._tracer = Tracer("step", metrics_only=True)
        self._tracer.start()

    def _end(self) -> None:
        current = pipeline.current()
        if current is None or self._span is None or self._tracer is None:
            return
        if current.steps.is_given or current.steps.last_flushed != self._last:
            self._is_over = True
            self._close_span(current)
            if self._is_asked_for:
                warn_once("steps", "the program names its steps itself: `step:` of the configuration is left out")
            return
        self._last = current.steps.opening
        self._tracer.stop()
        self._close_span(current)
        pipeline.flush(self._last)
        self.ended += 1
        self._begin()

    def _close_span(self, current: pipeline.Pipeline) -> None:
        if self._span is not None:
            self._span._name = f"rank {current.member().rank}"  # known only now: the process group may have been joined meanwhile
            self._span.__exit__(None, None, None)
            self._span = None

    def _give_up(self) -> None:
        """Drop the open step."""
        if self._span is not None and self._span._token is not None:
            tracing._restore(self._span._token)
            self._span._token = None
        self._span = self._tracer = None

    def close(self) -> None:
        """At the end of the program: what came after the last step keeps its span. It is no step, so it has no duration."""
        atexit.unregister(self.close)
        current = pipeline.current()
        if not self._is_over and current is not None and self._thread == threading.get_ident():
            if self._end_due_at is not None:
                self._end()
            self._close_span(current)
        self._is_over = True
        self._give_up()


class Scopes:
    """Opens the scopes of what is traced without the program's knowing: only in a process that trains, and with its steps in view."""

    def __init__(self, steps: AutomaticSteps | None, *, ends_step: bool = False) -> None:
        self._steps = steps
        self._ends_step = ends_step
        self._open = 0

    def __call__(self, prefix: str, options: Any) -> Any:
        """A context manager around one call."""
        if not is_training():
            return _nothing
        if self._steps is None or self._steps._is_over:
            return trace._of(prefix, options)
        return _StepScope(trace._of(prefix, options), self._steps, self if self._ends_step else None)


class _Nothing:
    """A scope where nothing is recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_error: object) -> None:
        return None


_nothing = _Nothing()


class _StepScope:
    """A scope that the steps know of. `ending`: leaving the outermost call ends the step."""

    __slots__ = ("_counts", "_ending", "_steps", "_trace")

    def __init__(self, scope: trace, steps: AutomaticSteps, ending: Scopes | None) -> None:
        self._trace = scope
        self._steps = steps
        self._ending = ending

    def __enter__(self) -> Tracer:
        self._counts = self._steps.entered()
        if self._ending is not None:
            self._ending._open += 1
        return self._trace.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._trace.__exit__(*error)
        is_outermost = False
        if self._ending is not None:
            self._ending._open -= 1
            is_outermost = self._ending._open == 0
        if self._counts:
            self._steps.left(ends=is_outermost)


class Cycle:
    """When the work of one step is done, where several optimizers share it: when each has stepped, or one would step again."""

    def __init__(self) -> None:
        self._expected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def expects(self, optimizer: Any) -> None:
        """One more is there."""
        self._expected.add(optimizer)

    def stepped(self, optimizer: Any) -> bool:
        """One has stepped; whether the step is complete by that. One that steps again first no longer waits for the others."""
        again = optimizer in self._stepped
        self._stepped.add(optimizer)
        if again and not self._stepped >= self._expected:
            self._expected = weakref.WeakSet(self._stepped)
        if again or self._stepped >= self._expected:
            self._stepped = weakref.WeakSet()
            return True
        return False
