"""`otel-forge report`: one HTML page of a run that needs no network: facts, curves, phases, slow ranks, memory."""

from __future__ import annotations

import dataclasses
import fnmatch
import html
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from otel_forge.cli import curves as data
from otel_forge.cli.run_files import RunRows, StoredRow, without_older_attempts
from otel_forge.errors import ForgeError, InputError

MOST_SCOPES = 12
LAST_STEPS = 20
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<style>
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1200px; padding: 0 1em; color: #222; background: #fff }}
h1 {{ font-size: 1.5em; margin: 0 0 .3em }} h2 {{ font-size: 1.2em; margin: 1.6em 0 .4em; border-bottom: 1px solid #ccc }}
h3 {{ font-size: 1em; margin: 1em 0 .1em; font-weight: 600 }} nav a {{ margin-right: 1.2em }}
table {{ border-collapse: collapse; margin: .4em 0 }} td, th {{ padding: .15em .8em .15em 0; text-align: left; vertical-align: top }}
th {{ font-weight: 600; color: #555 }} td.n {{ text-align: right; font-variant-numeric: tabular-nums }} .bad {{ color: #b00020; font-weight: 600 }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(540px, 1fr)); gap: 0 1.5em }} .wide {{ grid-column: 1 / -1 }}
.note {{ color: #666 }} input {{ font: inherit; padding: .2em .5em; width: 20em }}
</style></head><body>
<h1>{title}</h1>
<nav>{nav}</nav>
{body}
<script>{library}</script>
<script>
"use strict";
const draw = div => Plotly.newPlot(div, ...(f => [f.data, f.layout])(JSON.parse(div.previousElementSibling.textContent)),
  {{responsive: true, displaylogo: false}});
const seen = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(entry => {{
  seen.unobserve(entry.target); draw(entry.target); }}), {{rootMargin: "800px"}});
document.querySelectorAll(".plot").forEach(div => seen.observe(div));
document.getElementById("filter")?.addEventListener("input", event => document.querySelectorAll("section.chart[data-key]").forEach(
  section => {{ section.hidden = !section.dataset.key.includes(event.target.value); }}));
</script>
</body></html>
"""
"""Nothing but what is in the file may be loaded: the policy forbids it."""


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and what is in it."""

    html: str
    charts: int
    steps: tuple[int, ...]
    """Whose phases are shown."""


def make_report(run: RunRows, *, steps: Sequence[int] = (), patterns: Sequence[str] = ("*",)) -> Report:
    """The page of a run. `steps` whose phases are shown (default: the slowest, a usual one, the last); `patterns` choose keys."""
    try:
        from otel_forge.cli import charts
    except ImportError as error:
        raise ForgeError(f"the page needs the plotting library ({error}): pip install 'otel-forge[report]'") from error
    reasons = dict.fromkeys(steps, "") or data.telling_steps(run.rows)
    missing = set(reasons) - {row.step for row in run.rows}
    if missing:
        there = sorted({row.step for row in run.rows})
        raise InputError(f"run {run.run_id} has no step {', '.join(map(str, sorted(missing)))}; it has {there[0]} to {there[-1]}")
    slow = data.slow_steps(run.rows)
    metrics, memory, telemetry = _metric_sections(run.rows, patterns or ("*",), charts)
    sections = {
        "Run": _facts(run),
        "Metrics": _filter_box(metrics) + _grid(metrics) + _summary(run.rows, patterns or ("*",)),
        "Step phases": _phases(run.rows, reasons, charts),
        "Slowest ranks": _slow_ranks(slow, charts),
        "Memory": _grid(memory) or _note("No memory was recorded: <code>track_memory=True</code> does it."),
        "Telemetry": _grid(telemetry),
    }
    body = "\n".join(f'<h2 id="{_anchor(name)}">{name}</h2>\n{text}' for name, text in sections.items())
    nav = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    page = PAGE.format(title=html.escape(f"Run {run.run_id}"), nav=nav, body=body, library=charts.library().replace("</script", "<\\/script"))
    return Report(page, body.count('class="plot"'), tuple(reasons))


# --- sections ----------------------------------------------------------------------------------------------------------


def _metric_sections(rows: Sequence[StoredRow], patterns: Sequence[str], charts: Any) -> tuple[list[str], list[str], list[str]]:
    """Charts of ordinary keys, of memory, and of what otel-forge says of itself."""
    groups: dict[tuple[str, str], list[data.Curve]] = {}
    for curve in data.curves(rows):
        if curve.key.startswith("forge/") or _matches(curve.key, patterns):
            groups.setdefault((curve.role, curve.key), []).append(curve)
    lines = sum(len(curve.ranks) for group in groups.values() for curve in group)
    points_per_rank = min(charts.POINTS, max(50, charts.ALL_RANKS_POINTS // max(1, lines)))
    several_roles = len({role for role, _ in groups}) > 1
    sections: tuple[list[str], list[str], list[str]] = ([], [], [])
    for (role, key), group in sorted(groups.items(), key=lambda item: "duration_" in item[0][1]):
        index = 2 if key.startswith("forge/") else 1 if "memory_" in key or "rss" in key else 0
        title = f"{role} · {key}" if several_roles else key
        attempts = sorted(group, key=lambda curve: curve.attempt)
        sections[index].append(_chart(title, charts.metric_chart(attempts, points_per_rank), key=title))
    return sections


def _phases(rows: Sequence[StoredRow], reasons: dict[int, str], charts: Any) -> str:
    found = data.phase_bars(rows, set(reasons))
    told = ", ".join(f"step {step}" + (f" ({reason})" if reason else "") for step, reason in sorted(reasons.items()))
    parts = [_note(f"{told}. Others: <code>--steps 3,10-12</code>. Phases stand in the order in which they were recorded.")]
    for (role, scope), bars in list(found.items())[:MOST_SCOPES]:
        note = f" (the {charts.MOST_BARS} longest of {len(bars)} bars)" if len(bars) > charts.MOST_BARS else ""
        parts.append(_chart(f"{role} · {scope}{note}", charts.phase_chart(bars), wide=True))
    if not found:
        parts.append(_note("No phases were recorded at these steps: <code>Tracer.step</code> does it."))
    rows_of_scopes = [
        (role, scope, _number(statistics.fmean(values)), _number(max(values)), len(values))
        for (role, scope), values in list(data.totals(rows).items())[:50]
    ]
    if rows_of_scopes:
        parts.append(_table(("role", "scope", "mean s", "longest s", "rows"), rows_of_scopes))
    return "\n".join(parts)


def _slow_ranks(slow: Sequence[data.SlowStep], charts: Any) -> str:
    if not slow:
        return _note("Which rank was the slowest is not in these rows: it is in <code>global_reduce</code> rows, and in rows of several ranks.")
    roles = sorted({step.role for step in slow})
    parts = []
    for role in roles:
        own = [step for step in slow if step.role == role]
        parts.append(_chart(f"{role}: how often each rank was the slowest", charts.slow_rank_chart(own)))
        parts.append(_chart(f"{role}: the step's time at its slowest rank", charts.step_time_chart(own)))
    return _grid(parts)


def _facts(run: RunRows) -> str:
    rows = run.rows
    times = [row.time_unix for row in rows]
    nonfinite: dict[str, int] = {}
    for row in rows:
        for key, count in row.nonfinite.items():
            nonfinite[key] = nonfinite.get(key, 0) + count
    worlds = {row.role: max(other.world_size for other in rows if other.role == row.role) for row in rows}
    incomplete = {(row.role, *row.place) for row in rows if row.ranks_missing}
    facts: list[tuple[str, str]] = [
        ("run", html.escape(run.run_id)),
        ("files", html.escape(", ".join(map(str, run.files)))),
        ("roles", html.escape(", ".join(f"{role} ({size} ranks)" for role, size in worlds.items()))),
        ("modes", ", ".join(sorted({row.mode for row in rows}))),
        ("time", f"{_clock(min(times))} to {_clock(max(times))} UTC, {max(times) - min(times):.1f} s"),
        ("rows", f"{len(rows)}, {sum(row.revision > 1 for row in rows)} of them amended (the newest revision is shown)"),
        ("incomplete steps", _bad(len(incomplete))),
        ("not finite", _bad(html.escape(", ".join(f"{key}: {count}" for key, count in nonfinite.items())) or 0)),
    ]
    if run.unreadable:
        facts.append(("lines that are no rows", _bad(run.unreadable)))
    if run.other_runs:
        facts.append(("other runs in the files", html.escape(", ".join(run.other_runs))))
    text = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts)
    return f"<table>{text}</table>\n{_attempts(rows)}"


def _attempts(rows: Sequence[StoredRow]) -> str:
    listed = []
    for attempt in sorted({row.attempt for row in rows}):
        own = [row for row in rows if row.attempt == attempt]
        steps = {row.step for row in own}
        again = len(steps & {row.step for row in rows if row.attempt < attempt})
        span = f"{_clock(min(row.time_unix for row in own))} to {_clock(max(row.time_unix for row in own))}"
        listed.append((str(attempt), f"{min(steps)} to {max(steps)}", len(steps), again, span))
    return _table(("attempt", "steps", "number", "done again", "UTC"), listed)


def _summary(rows: Sequence[StoredRow], patterns: Sequence[str]) -> str:
    """First, last and extreme values of each key, of the newest attempt of each step."""
    listed = []
    for curve in data.curves(dataclasses.replace(row, attempt=0) for row in without_older_attempts(rows)):
        finite = [value for value in curve.middle.values if value is not None]
        if finite and _matches(curve.key, patterns) and not curve.key.startswith("forge/"):
            last = curve.middle.values[-1]
            recent = statistics.fmean(finite[-LAST_STEPS:])
            shown = [_number(value) for value in (curve.middle.values[0], last, min(finite), max(finite), recent)]
            listed.append((curve.role, curve.key, *shown))
    return _table(("role", "key", "first", "last", "min", "max", f"mean of the last {LAST_STEPS}"), listed)


# --- pieces ------------------------------------------------------------------------------------------------------------


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _chart(title: str, figure: str, *, key: str | None = None, wide: bool = False) -> str:
    named = f' data-key="{html.escape(key)}"' if key is not None else ""
    height = 260 if not wide else 120
    figure = figure.replace("<", "\\u003c")  # no text of a run can end the script element
    return (
        f'<section class="chart{" wide" if wide else ""}"{named}><h3>{html.escape(title)}</h3>'
        f'<script type="application/json">{figure}</script><div class="plot" style="min-height:{height}px"></div></section>'
    )


def _grid(charts: Sequence[str]) -> str:
    return '<div class="charts">\n' + "\n".join(charts) + "\n</div>" if charts else ""


def _filter_box(charts: Sequence[str]) -> str:
    return '<p><input id="filter" placeholder="show keys with …" aria-label="show keys with"></p>\n' if len(charts) > 6 else ""


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = []
    for row in rows:
        cells = (f"<td{' class=n' if index > 1 else ''}>{html.escape(str(value))}</td>" for index, value in enumerate(row))
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return f"<table><tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>"


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _bad(value: object) -> str:
    return f'<span class="bad">{value}</span>' if value else "none"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
