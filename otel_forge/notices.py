"""What is said once per process. It must not know what the notices are about."""

from __future__ import annotations

import logging

logger = logging.getLogger("otel_forge")

_said: set[str] = set()


def warn_once(kind: str, text: str) -> None:
    """Log a warning, the first time for each kind."""
    if kind not in _said:
        _said.add(kind)
        logger.warning("%s", text)


def reset_notices() -> None:
    """Forget what was said, for tests."""
    _said.clear()
