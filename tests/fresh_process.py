"""A test that needs a process in which nothing else has run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def in_fresh_process(module: str, function: str, *arguments: object) -> None:
    """Call `module.function(*arguments)` (as texts) in a new interpreter; what it raises there fails here."""
    given = ", ".join(repr(str(argument)) for argument in arguments)
    script = f"import {module} as module; module.{function}({given})"
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
