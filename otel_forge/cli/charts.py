"""Plotly figures of what `curves` found, as JSON texts. The only module that knows the plotting library (the extra `report`)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from otel_forge.cli.curves import Bar, Curve, Line, SlowStep, chosen

POINTS = 2000
"""Of one line, at most about; extremes and gaps are always kept."""
ALL_RANKS_POINTS = 200_000
"""Of all lines of ranks of a page, about: it stays below some 10 MB."""
MOST_BARS = 64
COLORS = ("#2458b3", "#d1602d", "#2f8f5b", "#8d4bb5", "#b3242f", "#6b6b6b", "#b8860b", "#1f9aa8", "#c2488f", "#5a7d2a")
MAIN = COLORS[0]


def library() -> str:
    """The plotting library's JavaScript, whole."""
    text: str = get_plotlyjs()
    return text


def metric_chart(attempts: Sequence[Curve], points_per_rank: int) -> str:
    """Curves of one key, an older attempt dotted; the band is between the lowest and the highest rank."""
    figure = go.Figure()
    for curve in attempts:
        is_newest = curve is attempts[-1]
        color = MAIN if is_newest else COLORS[5]
        suffix = f", attempt {curve.attempt}" if len(attempts) > 1 else ""
        _add_ranks(figure, curve, suffix, points_per_rank)
        _add_band(figure, curve, color, suffix)
        name = ("reduced over ranks" if curve.is_reduced else "mean of the ranks") + suffix
        kept = chosen([curve.middle.values], POINTS)
        line = {"color": color, "width": 2, "dash": "solid" if is_newest else "dot"}
        figure.add_scatter(**_points(curve.middle, kept), mode=_mode(kept), name=name, line=line, connectgaps=False)
        _add_gaps(figure, curve.middle, suffix)
    figure.update_layout(**_layout(260), xaxis_title="step", hovermode="x unified")
    return _json(figure)


def _add_band(figure: go.Figure, curve: Curve, color: str, suffix: str) -> None:
    if len(curve.ranks) < 2:
        return
    there = [index for index, value in enumerate(curve.low) if value is not None]
    low, high = [curve.low[index] for index in there], [curve.high[index] for index in there]
    kept = chosen([low, high], POINTS)
    steps = [curve.middle.steps[there[index]] for index in kept]
    common = {"x": steps, "mode": "lines", "line": {"width": 0, "color": color}, "legendgroup": f"band{suffix}"}
    figure.add_scatter(**common, y=[low[index] for index in kept], name="lowest rank", showlegend=False)
    fill = f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},0.18)"
    figure.add_scatter(**common, y=[high[index] for index in kept], name=f"lowest to highest rank{suffix}", fill="tonexty", fillcolor=fill)


def _add_ranks(figure: go.Figure, curve: Curve, suffix: str, most: int) -> None:
    for index, (rank, line) in enumerate(sorted(curve.ranks.items(), key=lambda item: [int(part) for part in item[0].split(".")])):
        kept = chosen([line.values], most)
        style = {"width": 1, "color": COLORS[(index + 1) % len(COLORS)]}
        figure.add_scatter(**_points(line, kept), mode="lines", name=f"rank {rank}{suffix}", line=style, visible="legendonly" if index > 7 else True)


def _add_gaps(figure: go.Figure, line: Line, suffix: str) -> None:
    """Marks where a value was not finite, at the height of the last finite one."""
    gaps: list[int] = []
    heights: list[float] = []
    height = next((value for value in line.values if value is not None), 0.0)
    for step, value in zip(line.steps, line.values, strict=True):
        height = height if value is None else value
        if value is None:
            gaps.append(step)
            heights.append(height)
    if gaps:
        marker = {"color": "#d00000", "symbol": "x", "size": 9}
        figure.add_scatter(x=gaps[:POINTS], y=heights[:POINTS], mode="markers", name=f"not finite{suffix}", marker=marker)


def _points(line: Line, kept: Sequence[int]) -> dict[str, Any]:
    return {"x": [line.steps[index] for index in kept], "y": [line.values[index] for index in kept]}


def _mode(kept: Sequence[int]) -> str:
    return "lines+markers" if len(kept) <= 30 else "lines"


def phase_chart(bars: Sequence[Bar]) -> str:
    """A bar for each step and rank, its phases one behind the other."""
    shown = sorted(sorted(bars, key=lambda bar: -bar.seconds)[:MOST_BARS], key=bars.index)
    labels = [f"step {bar.step}" + (f" · rank {bar.member}" if bar.member is not None else " · mean of all ranks") for bar in shown]
    names = list(dict.fromkeys(name for bar in shown for name in bar.phases))
    figure = go.Figure()
    for index, name in enumerate(names):
        figure.add_bar(y=labels, x=[bar.phases.get(name) for bar in shown], name=name, orientation="h", marker_color=COLORS[index % len(COLORS)])
    figure.update_layout(**_layout(110 + 26 * len(shown)), barmode="stack", xaxis_title="seconds")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _json(figure)


def slow_rank_chart(steps: Sequence[SlowStep]) -> str:
    """How often each rank was the slowest."""
    counts = Counter(step.rank for step in steps).most_common(MOST_BARS)
    means = [statistics.fmean(step.seconds for step in steps if step.rank == rank) for rank, _ in counts]
    texts = [f"{mean:.4g} s on the mean" for mean in means]
    figure = go.Figure()
    labels = [f"rank {rank}" for rank, _ in counts]
    figure.add_bar(x=labels, y=[count for _, count in counts], text=texts, marker_color=COLORS[1], name="slowest in steps")
    figure.update_layout(**_layout(260), yaxis_title=f"slowest, of {len(steps)} steps")
    return _json(figure)


def step_time_chart(steps: Sequence[SlowStep]) -> str:
    """The step's time at its slowest rank."""
    kept = chosen([[step.seconds for step in steps]], POINTS)
    picked = [steps[index] for index in kept]
    figure = go.Figure()
    figure.add_scatter(
        x=[step.step for step in picked], y=[step.seconds for step in picked], text=[f"rank {step.rank}" for step in picked],
        mode=_mode(kept), name="slowest rank", line={"color": COLORS[1], "width": 2},
    )  # fmt: skip
    figure.update_layout(**_layout(260), xaxis_title="step", yaxis_title="seconds")
    return _json(figure)


def _layout(height: int) -> dict[str, Any]:
    margin = {"l": 60, "r": 44, "t": 10, "b": 45}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    return {
        "template": "none",
        "height": height,
        "margin": margin,
        "legend": legend,
        "font": {"size": 12},
        "showlegend": True,
        "modebar": {"orientation": "v"},
    }


def _json(figure: go.Figure) -> str:
    text: str = figure.to_json()
    return text
