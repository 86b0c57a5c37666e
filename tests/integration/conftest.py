"""Real servers, real processes, a state directory of their own, free ports. Every test here is marked `integration`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli.servers import Stack
from otel_forge.config import load_config
from otel_forge.discovery import Servers

HERE = Path(__file__).parent
JOB = HERE / "job.py"
EXAMPLE = HERE.parents[1] / "examples" / "train_ddp.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(300))


@dataclass
class Cli:
    """The command line as a user has it, in a directory and with a state directory of its own."""

    folder: Path
    environ: dict[str, str]

    def __call__(self, *arguments: str, timeout: float = 150, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "otel_forge.cli", *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.environ | more, capture_output=True, text=True, timeout=timeout, check=False)


def clean_environment(state: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "RANK", "WORLD_SIZE"))}
    return environ | {"OTEL_FORGE_STATE_DIR": str(state), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, clean_environment(tmp_path / "state"))


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "forge.yaml"
    path.write_text(
        f"metric_logging:\n  jsonl: {{path: {tmp_path}/rows.jsonl}}\n"
        f"  wandb: {{project: p, mode: offline, dir: {tmp_path}}}\n"
        "collector: {window_s: 1.0, row_deadline_s: 10}\n"
    )
    return path


@pytest.fixture
def start_stack(tmp_path: Path, config_path: Path) -> Iterator[Callable[..., tuple[Stack, Servers]]]:
    """Start servers in this process's care, so that a test can kill one of them."""
    stacks: list[Stack] = []

    def start(shape: Any = "collector", *, jaeger: bool = False, folder: str = "stack") -> tuple[Stack, Servers]:
        stack = Stack(tmp_path / folder, load_config(config_path), config_path, tmp_path, print, private=True)
        stacks.append(stack)
        return stack, stack.start(shape, jaeger=jaeger)

    yield start
    for stack in stacks:
        stack.stop(drain_timeout_s=0.0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until it holds; the test fails with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
