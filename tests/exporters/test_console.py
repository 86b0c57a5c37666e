"""What a person sees."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.console import ConsoleBackend
from rich.console import Console

from otel_forge.config import ConsoleConfig
from tests.exporters.test_backends import row


def _printed(*batches: list[Any], width: int = 100, **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    backend = ConsoleBackend(ConsoleConfig(**options), RunInfo("r"), Path(), console=console)
    for batch in batches:
        backend.write(batch)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_away_from_a_terminal_each_row_is_a_line() -> None:
    missing = row(10, ranks_reporting=1, ranks_missing=("1",), metrics={"loss": None, "tokens": 4096.0}, nonfinite={"loss": 1})
    assert _printed([row(0), missing, row(10, revision=2)], width=20) == [
        "step     0 trainer 2/2 ranks  loss 0.5",
        "step    10 trainer 1/2 ranks  forge/nonfinite/loss 1 forge/ranks_missing 1 loss not finite tokens 4096  missing: rank 1",
    ]


def test_a_table_has_one_header_and_its_columns_stand_below_each_other() -> None:
    rows = [row(step, metrics={"loss": 0.5 / step, "tokens": 10.0**step}) for step in (1, 2, 3)]
    lines = _printed(rows[:1], rows[1:], style="table")
    assert lines == [
        "   step  who                 ranks       loss     tokens",
        "      1  trainer               2/2        0.5         10",
        "      2  trainer               2/2       0.25        100",
        "      3  trainer               2/2     0.1667       1000",
    ]


def test_the_header_comes_again_when_the_keys_change_and_after_twenty_rows() -> None:
    rows = [row(step) for step in range(41)]
    lines = _printed(*([item] for item in rows), [row(50, metrics={"eval": 1.0})], style="table")
    assert [line.split()[3] for line in lines if "step" in line] == ["loss", "loss", "loss", "eval"]


def test_keys_that_do_not_fit_beside_each_other_stand_below_each_other() -> None:
    keys = [f"Trainer/train_step/phase_{number}/duration_avg_s" for number in range(4)]
    lines = _printed([row(step, metrics=dict.fromkeys(keys, 0.25 * step)) for step in (1, 2)], style="table", width=80)
    assert next(line for line in lines if keys[3] in line).split() == [keys[3], "0.25", "0.5"]
    assert [line.split() for line in lines if "step" in line and "Trainer" not in line] == [["step", "1", "2"]]
