"""Rows for people at a terminal: one line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from otel_forge.config import ConsoleConfig
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import SLOWEST_RANK, Row


class ConsoleBackend:
    """Prints the first revision of every row."""

    def __init__(self, config: ConsoleConfig, run: RunInfo, work_dir: Path) -> None:
        self._config = config
        self._console = Console(highlight=False, soft_wrap=True)

    def open(self) -> None:
        """Nothing to get ready."""

    def write(self, rows: Sequence[Row]) -> None:
        """Print."""
        for row in rows:
            if row.revision == 1:
                self._console.print(self._line(row))

    def _line(self, row: Row) -> Text:
        member = "" if row.rank is None else f" rank {row.rank}"
        text = Text.assemble((f"step {row.step:>5} ", "bold"), (f"{row.role}{member} ", "cyan"))
        reporting = f"{row.ranks_reporting}/{row.world_size}"
        text.append(f"{reporting} ranks ", "dim" if row.ranks_reporting == row.world_size else "bold red")
        for key, value in sorted(row.flat().items()):
            if key != SLOWEST_RANK:
                text.append(f" {key} ", "dim")
                text.append("not finite" if value is None else _number(value), "red" if value is None else "")
        if row.ranks_missing:
            text.append(f"  missing: rank {', '.join(row.ranks_missing)}", "red")
        return text

    def has(self, row: Row) -> bool | None:
        """A terminal cannot tell."""
        return None

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Nothing to end."""

    def location(self) -> str | None:
        """Nowhere to look later."""
        return None


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
