"""Rows for people at a terminal: a table that grows. Elsewhere (a log file, a pipe) one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from otel_forge.config import ConsoleConfig
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import SLOWEST_RANK, Row

HEADER_EVERY = 20
"""So many rows of a table after its last header there is another one."""
NUMBER_WIDTH = 9
ROWS_ACROSS = 5
"""Rows beside each other, where the keys do not fit beside each other."""


class ConsoleBackend:
    """Prints the first revision of every row."""

    def __init__(self, config: ConsoleConfig, run: RunInfo, work_dir: Path, *, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._is_table = config.style == "table" or (config.style == "auto" and self._console.is_terminal)
        self._columns: tuple[str, ...] = ()
        self._since_header = 0

    def open(self) -> None:
        """Nothing to get ready."""

    def write(self, rows: Sequence[Row]) -> None:
        """Print."""
        first = [row for row in rows if row.revision == 1]
        if not self._is_table:
            for row in first:
                self._console.print(_line(row), soft_wrap=True)
            return
        for keys, alike in groupby(first, key=_keys):
            self._print_table(keys, list(alike))

    def _print_table(self, keys: tuple[str, ...], rows: Sequence[Row]) -> None:
        if 34 + sum(_width(key) + 2 for key in keys) > self._console.width:
            for start in range(0, len(rows), ROWS_ACROSS):
                self._console.print(_upright(keys, rows[start : start + ROWS_ACROSS]))
            self._columns = ()
            return
        show_header = keys != self._columns or self._since_header >= HEADER_EVERY
        self._columns, self._since_header = keys, len(rows) + (0 if show_header else self._since_header)
        self._console.print(_across(keys, rows, show_header=show_header))

    def has(self, row: Row) -> bool | None:
        """A terminal cannot tell."""
        return None

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Nothing to end."""

    def location(self) -> str | None:
        """Nowhere to look later."""
        return None


def _keys(row: Row) -> tuple[str, ...]:
    return tuple(sorted(key for key in row.flat() if key != SLOWEST_RANK))


def _width(key: str) -> int:
    return max(len(key), NUMBER_WIDTH)


def _across(keys: tuple[str, ...], rows: Iterable[Row], *, show_header: bool) -> Table:
    """A line for each row. Widths depend on the keys only, so that the next table stands below this one."""
    table = Table(box=None, show_header=show_header, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, width in (("step", 7), ("who", 14), ("ranks", 9)):
        table.add_column(name, width=width, justify="left" if name == "who" else "right", no_wrap=True)
    for key in keys:
        table.add_column(key, width=_width(key), justify="right", no_wrap=True)
    for row in rows:
        flat = row.flat()
        table.add_row(str(row.step), Text(_who(row), "cyan"), _ranks(row), *(_value(flat[key]) for key in keys))
    return table


def _upright(keys: tuple[str, ...], rows: Sequence[Row]) -> Table:
    """A column for each row."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("\nstep", overflow="fold")
    for row in rows:
        table.add_column(f"{_who(row)}\n{row.step}", justify="right", no_wrap=True)
    table.add_row("ranks", *(_ranks(row) for row in rows))
    flat = [row.flat() for row in rows]
    for key in keys:
        table.add_row(key, *(_value(numbers[key]) for numbers in flat))
    return table


def _line(row: Row) -> Text:
    text = Text.assemble((f"step {row.step:>5} ", "bold"), (f"{_who(row)} ", "cyan"), _ranks(row), (" ranks ", "dim"))
    flat = row.flat()
    for key in _keys(row):
        text.append(f" {key} ", "dim").append(_value(flat[key]))
    if row.ranks_missing:
        text.append(f"  missing: rank {', '.join(row.ranks_missing)}", "red")
    return text


def _who(row: Row) -> str:
    return row.role if row.rank is None else f"{row.role} rank {row.rank}"


def _ranks(row: Row) -> Text:
    return Text(f"{row.ranks_reporting}/{row.world_size}", "dim" if row.ranks_reporting == row.world_size else "bold red")


def _value(value: float | None) -> Text:
    return Text("not finite", "red") if value is None else Text(_number(value))


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
