"""Every test starts and ends with a clean process state, and none reads the machine's own configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_forge import pipeline

FOREIGN = ("OTEL_", "FORGE_", "WANDB_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_", "SLURM_", "HTTP_PROXY", "http_proxy")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(FOREIGN) and name not in ("OTEL_FORGE_COLLECTOR_BIN", "OTEL_FORGE_JAEGER_BIN"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_FORGE_STATE_DIR", str(tmp_path / "state"))
    pipeline.reset()
    yield
    pipeline.reset()
