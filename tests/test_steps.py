"""The step protocol of one loop."""

from __future__ import annotations

from otel_forge.steps import REMEMBERED_STEPS, StepTracker


def test_the_opening_step_follows_the_last_flush_unless_it_is_named() -> None:
    steps = StepTracker()
    assert (steps.opening, steps.last_flushed) == (0, None)
    steps.seal(10)
    assert steps.opening == 11
    steps.set(5)
    assert steps.opening == 5
    steps.seal(5)
    assert steps.opening == 6


def test_a_repeated_step_is_another_occurrence() -> None:
    steps = StepTracker()
    assert [steps.seal(step) for step in (100, 100, 101, 100)] == [0, 1, 0, 2]


def test_what_is_remembered_is_bounded() -> None:
    steps = StepTracker()
    for step in range(REMEMBERED_STEPS + 10):
        steps.seal(step)
    assert steps.seal(REMEMBERED_STEPS) == 1
    assert steps.seal(0) == 0
