"""Which step is open, and how often each was flushed. It must not know what is recorded in a step."""

from __future__ import annotations

REMEMBERED_STEPS = 65_536
"""Steps whose occurrences are remembered; a job that goes back further than that starts counting anew."""


class StepTracker:
    """The step protocol of one flushing loop: the opening step, and the occurrence of each flush. Used from the thread that flushes."""

    def __init__(self) -> None:
        self._given: int | None = None
        self._last_flushed: int | None = None
        self._stride = 1
        """How many steps the last flush was after the one before."""
        self._occurrences: dict[int, int] = {}

    @property
    def opening(self) -> int:
        """The step that what leaves before the flush is labelled with: the one given by `set_step`, else last flushed + 1, else 0."""
        if self._given is not None:
            return self._given
        return 0 if self._last_flushed is None else self._last_flushed + 1

    @property
    def is_given(self) -> bool:
        """Whether the opening step was named by the program."""
        return self._given is not None

    @property
    def last_flushed(self) -> int | None:
        """The step of the last flush, None before the first."""
        return self._last_flushed

    def is_sampled(self, every: int) -> bool:
        """Whether the open step, or one that its flush will probably stand for as well, is a multiple of `every`."""
        last = self.opening if self._given is not None else self.opening + self._stride - 1
        return last // every * every >= self.opening

    def set(self, step: int) -> None:
        """Name the opening step."""
        self._given = step

    def seal(self, step: int) -> int:
        """Count a flush of `step` and return its occurrence: 0 the first time, 1 the second, …"""
        occurrence = self._occurrences.pop(step, 0)
        self._occurrences[step] = occurrence + 1
        if len(self._occurrences) > REMEMBERED_STEPS:
            del self._occurrences[next(iter(self._occurrences))]
        if self._last_flushed is not None and step > self._last_flushed:
            self._stride = step - self._last_flushed
        self._last_flushed = step
        self._given = None
        return occurrence
