"""The logging modes: what a backend gets to see of the ranks' values."""

from __future__ import annotations

import enum


class LoggingMode(enum.Enum):
    """What a backend gets to see of the ranks' values."""

    GLOBAL_REDUCE = "global_reduce"
    """One row per step and role, reduced over all ranks."""
    PER_RANK_REDUCE = "per_rank_reduce"
    """One row per step and rank."""
    PER_RANK_NO_REDUCE = "per_rank_no_reduce"
    """One row per record, as it happens."""
