"""`otel-forge compare`: the metrics of two runs beside each other, and whether one of them became worse than it may."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from otel_forge.cli.curves import Value, curves
from otel_forge.cli.run_files import RunRows, without_older_attempts
from otel_forge.cli.tail import shortened
from otel_forge.errors import InputError

CELL = 12
"""Width of a number and what is beside it."""
Figure = Literal["mean", "last", "best"]


@dataclass(frozen=True, slots=True)
class Bound:
    """How far a figure may move: a share of the first run's (`5%`), or an amount in the metric's own unit."""

    amount: float
    is_share: bool

    def allows(self, base: float, change: float) -> bool:
        """Whether a change in the bad direction (positive: worse) is within the bound."""
        limit = abs(base) * self.amount if self.is_share else self.amount
        return change <= limit or math.isclose(change, limit, rel_tol=1e-9)  # 2.1 is 5 % more than 2.0, whatever its last bit


def parse_bound(text: str) -> Bound:
    """The bound of `5%` or `0.02`. Raises InputError."""
    is_share = text.strip().endswith("%")
    try:
        amount = float(text.strip().removesuffix("%"))
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount >= 0):
        raise InputError(f"{text!r} is no bound: write a share as in 5%, or an amount of the metric's own unit as in 0.02")
    return Bound(amount / 100 if is_share else amount, is_share)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one key in one run, of the newest attempt of each step. None: it was not finite."""

    last: Value
    best: Value
    """The lowest; the highest where a decrease is what is worse."""
    mean: Value
    """Of the last n steps that have the key; None where a value among them was not finite."""
    steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One key in both runs."""

    role: str
    key: str
    base: Summary | None
    new: Summary | None
    verdict: str
    """`ok` or `worse` where a bound was given for the key, else empty."""

    def figures(self, name: Figure) -> tuple[Value, Value]:
        """One figure of both runs."""
        return getattr(self.base, name, None), getattr(self.new, name, None)


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared, and what counts as worse."""

    patterns: tuple[str, ...] = ()
    """Keys that are shown, and bounded where there is a bound; empty: all are shown."""
    increase: Bound | None = None
    decrease: Bound | None = None
    figure: Figure = "mean"
    last: int = 20
    """n, of the mean of the last n steps."""


def compare(base: RunRows, new: RunRows, question: Question) -> list[Difference]:
    """Every key of either run that is asked for. Raises InputError for a pattern that fits none, or a bounded key that a run lacks."""
    first, second = (_summaries(run, question) for run in (base, new))
    names = dict.fromkeys([*first, *second])
    for pattern in question.patterns:
        if not any(fnmatch.fnmatchcase(key, pattern) for _, key in names):
            raise InputError(f"--metric {pattern}: neither run has such a key; there are {', '.join(sorted({key for _, key in names})[:20])}")
    wanted = [name for name in names if not question.patterns or any(fnmatch.fnmatchcase(name[1], pattern) for pattern in question.patterns)]
    is_bounded = question.increase is not None or question.decrease is not None
    for role, key in wanted if is_bounded else ():
        for run, found in ((base, first), (new, second)):
            if (role, key) not in found:
                raise InputError(f"run {run.run_id} has no {key} of role {role}: there is nothing to hold the bound against")
    return [Difference(*name, first.get(name), second.get(name), _verdict(first.get(name), second.get(name), question)) for name in wanted]


def _summaries(run: RunRows, question: Question) -> dict[tuple[str, str], Summary]:
    rows = [dataclasses.replace(row, attempt=0) for row in without_older_attempts(run.rows)]
    found = {}
    for curve in curves(rows):
        values = curve.middle.values
        if not values or (curve.key.startswith("forge/") and not any(fnmatch.fnmatchcase(curve.key, item) for item in question.patterns)):
            continue
        finite = [value for value in values if value is not None]
        recent = values[-question.last :]
        mean = None if None in recent else statistics.fmean(value for value in recent if value is not None)
        best = max if question.decrease is not None else min
        found[curve.role, curve.key] = Summary(values[-1], best(finite) if finite else None, mean, len(values))
    return found


def _verdict(base: Summary | None, new: Summary | None, question: Question) -> str:
    if question.increase is None and question.decrease is None:
        return ""
    before, after = getattr(base, question.figure, None), getattr(new, question.figure, None)
    if after is None:
        return "worse"  # it is not finite: whatever it was before, that is no result
    if before is None:
        return "ok"
    is_within = (question.increase is None or question.increase.allows(before, after - before)) and (
        question.decrease is None or question.decrease.allows(before, before - after)
    )
    return "ok" if is_within else "worse"


# --- showing -----------------------------------------------------------------------------------------------------------


def as_data(base: RunRows, new: RunRows, found: Sequence[Difference], question: Question) -> dict[str, Any]:
    """All of it, for `--json`."""
    return {
        "runs": [base.run_id, new.run_id],
        "figure": question.figure,
        "worse": [difference.key for difference in found if difference.verdict == "worse"],
        "metrics": [asdict(difference) for difference in found],
    }


def show_comparison(base: RunRows, new: RunRows, found: Sequence[Difference], question: Question) -> None:
    """Print it for people; a narrow terminal gets the figure that the bounds are for, and numbers are never cut."""
    console = Console(highlight=False)
    several = len({difference.role for difference in found}) > 1
    names = [f"{item.role} · {item.key}" if several else item.key for item in found]
    wanted = max(map(len, names), default=0)
    figures: tuple[Figure, ...] = ("last", "best", "mean")
    if wanted + len(figures) * 2 * CELL + 20 > console.width:
        figures = (question.figure,)
    width = max(12, min(wanted, console.width - len(figures) * 2 * CELL - 20))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("metric", no_wrap=True, width=width)
    for title in (f"mean of {question.last}" if name == "mean" else name for name in figures):
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, item in zip(names, found, strict=True):
        cells = [_number(value, summary) for figure in figures for value, summary in _pair(item, figure)]
        verdict = Text(item.verdict, "bold red" if item.verdict == "worse" else "green")
        table.add_row(shortened(name, width), *cells, _change(*item.figures(question.figure)), verdict)
    console.print(f"{base.run_id} → {new.run_id}", soft_wrap=True)
    console.print(table)


def _pair(item: Difference, name: Figure) -> tuple[tuple[Value, Summary | None], tuple[Value, Summary | None]]:
    first, second = item.figures(name)
    return (first, item.base), (second, item.new)


def _number(value: Value, summary: Summary | None) -> Text:
    if summary is None:
        return Text("–", "dim")
    return Text("not finite", "red") if value is None else Text(f"{value:.5g}")


def _change(before: Value, after: Value) -> str:
    if before is None or after is None:
        return ""
    return f"{(after - before) / abs(before):+.2%}" if before else f"{after - before:+.4g}"
