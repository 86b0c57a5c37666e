"""`otel-forge tail`: the last rows of a run as a table that is drawn anew while the file grows. It needs no mouse and no colours."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from otel_forge.cli.following import Follower
from otel_forge.cli.frames import Recent
from otel_forge.cli.run_files import Source, parse_row

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
"""Where the terminal has no UTF-8."""
STALE_S = 30.0
"""Older than this the last row is shown in red."""
SPARK_WIDTH, MIN_SPARK, NUMBER_WIDTH, MIN_KEY, GAP = 32, 12, 10, 12, 2
COLUMNS = {"last": "last", "mean": "last", "lowest": "low", "highest": "high", "min": "min", "max": "max"}
"""Title of a column → what it shows of a metric. `mean`, `lowest` and `highest` are over ranks."""
OTHER_LINES = 12
"""Lines of a role's frame that are not metrics."""


class Tail:
    """Follows the files of one run."""

    def __init__(self, source: Source, patterns: Sequence[str]) -> None:
        self._recent = Recent(source.run_id)
        self._followers = [Follower(path) for path in source.files]
        self._patterns = tuple(patterns) or ("*",)

    def read(self) -> bool:
        """Take up what was written since the last call; whether there was anything."""
        changed = False
        for follower in self._followers:
            for line in follower.lines():
                row = parse_row(line)
                changed = True
                if row is None:
                    self._recent.unreadable += 1
                else:
                    self._recent.add(row)
        return changed

    def frame(self) -> dict[str, Any]:
        """What there is to show now."""
        return self._recent.frame(self._patterns)

    def close(self) -> None:
        """Let go of the files."""
        for follower in self._followers:
            follower.close()


def run_tail(source: Source, patterns: Sequence[str], *, once: bool, as_json: bool, interval_s: float, write: Callable[[str], None]) -> bool:
    """Show frames until it is interrupted, or one; whether there was a row. With `as_json` each frame is a line."""
    tail = Tail(source, patterns)
    try:
        tail.read()
        if once:
            _show_once(tail.frame(), as_json, write)
        elif as_json:
            _follow_as_json(tail, interval_s, write)
        else:
            _follow(tail, interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        tail.close()
    return bool(tail.frame()["roles"])


def _show_once(frame: dict[str, Any], as_json: bool, write: Callable[[str], None]) -> None:
    if as_json:
        write(json.dumps(frame))
    else:
        console = Console(highlight=False)
        console.print(render(frame, console, height=None))


def _follow_as_json(tail: Tail, interval_s: float, write: Callable[[str], None]) -> None:
    write(json.dumps(tail.frame()))
    while True:
        time.sleep(interval_s)
        if tail.read():
            write(json.dumps(tail.frame()))


def _follow(tail: Tail, interval_s: float) -> None:
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(render(tail.frame(), console, height=console.height), refresh=True)
            time.sleep(interval_s)
            tail.read()


# --- drawing -----------------------------------------------------------------------------------------------------------


def render(frame: dict[str, Any], console: Console, *, height: int | None) -> RenderableType:
    """A frame for a terminal; `height` in lines leaves out the metrics that do not fit, and says so."""
    blocks = BLOCKS if (console.encoding or "").lower().startswith("utf") else ASCII_BLOCKS
    if not frame["roles"]:
        return Text(f"run {frame['run_id'] or '?'}: no rows yet", "yellow")
    parts: list[RenderableType] = [_headline(frame)]
    share = None if height is None else max(3, height // len(frame["roles"]) - OTHER_LINES)
    for name, role in frame["roles"].items():
        parts += [
            Text(""),
            _role_line(name, role),
            _metric_table(role, blocks, console.width, share),
            _speed_line(role, blocks),
            *_health_lines(role["health"]),
        ]
    return Group(*parts)


def _headline(frame: dict[str, Any]) -> Text:
    text = Text.assemble(("run ", "dim"), (str(frame["run_id"]), "bold"), ("  last row ", "dim"))
    age = frame["age_s"]
    text.append(f"{_span(age)} ago", "red" if age > STALE_S else "green")
    if frame["unreadable_lines"]:
        text.append(f"  {frame['unreadable_lines']} lines are no rows", "red")
    return text


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _role_line(name: str, role: dict[str, Any]) -> Text:
    whole = role["ranks_reporting"] == role["world_size"]
    text = Text.assemble((name, "bold cyan"), ("  step ", "dim"), (str(role["step"]), "bold"), ("  ranks ", "dim"))
    text.append(f"{role['ranks_reporting']}/{role['world_size']}", "" if whole else "bold red")
    if role["ranks_missing"]:
        text.append(f" missing {', '.join(role['ranks_missing'])}", "red")
    if role["steps_per_s"]:
        text.append("  pace ", "dim").append(f"{role['steps_per_s']:.3g} steps/s")
    if role["attempt"]:
        text.append(f"  attempt {role['attempt']}", "yellow")
    return text


def _metric_table(role: dict[str, Any], blocks: str, width: int, most: int | None) -> Table:
    names, key_width, spark_width = _layout(role, width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("metric", no_wrap=True, width=key_width)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, width=NUMBER_WIDTH)
    table.add_column("", no_wrap=True, width=spark_width)
    shown = role["metrics"][:most]
    for metric in shown:
        spark = Text(sparkline(metric["history"], spark_width, blocks), "cyan" if not metric["nonfinite"] else "red")
        table.add_row(shortened(metric["key"], key_width), *(_number(metric[COLUMNS[name]]) for name in names), spark)
    if len(shown) < len(role["metrics"]):
        table.add_row(Text(f"{len(role['metrics']) - len(shown)} more (--metric)", "dim"))
    return table


def _layout(role: dict[str, Any], width: int) -> tuple[tuple[str, ...], int, int]:
    """Columns of numbers, width of the key and of the sparkline. Numbers are never cut: columns are left out first, then keys are shortened."""
    wanted = max([len("metric"), *(len(metric["key"]) for metric in role["metrics"])])
    by_rank = ("mean", "lowest", "highest") if role["per_rank"] else ("last",)
    for names in ((*by_rank, "min", "max"), by_rank, by_rank[:1]):
        left = width - len(names) * (NUMBER_WIDTH + GAP) - GAP
        if left >= wanted + MIN_SPARK:
            return names, wanted, min(SPARK_WIDTH, left - wanted)
    spark_width = max(1, min(MIN_SPARK, left - MIN_KEY))
    return names, max(MIN_KEY, left - spark_width), spark_width


def shortened(key: str, width: int) -> str:
    """A key without its middle, because keys of one scope begin alike."""
    if len(key) <= width:
        return key
    tail = (width - 1) * 2 // 3
    return f"{key[: width - 1 - tail]}~{key[len(key) - tail :]}"


def _speed_line(role: dict[str, Any], blocks: str) -> Text:
    step_time = role["step_time"]
    if step_time is None:
        return Text("step time: not recorded", "dim")
    text = Text.assemble(("step time ", "dim"), f"{step_time['last']:.4g} s", (" median ", "dim"), f"{step_time['median']:.4g} s ")
    text.append(sparkline(step_time["history"], SPARK_WIDTH, blocks), "cyan").append("  slowest ", "dim")
    ranks = role["stragglers"]
    for item in ranks[:3]:
        is_alone = len(ranks) > 1 and item["slowest"] > 0.5 * item["of"] and item["of"] >= 10
        text.append(f"rank {item['rank']} in {item['slowest']} of {item['of']}  ", "bold yellow" if is_alone else "")
    return text


def _health_lines(health: dict[str, Any]) -> list[Text]:
    bad = ("spilled", "dropped", "values_dropped", "nonfinite", "incomplete_steps")
    text = Text("telemetry", "dim")
    for name, value in health.items():
        if value or name in ("dropped", "records"):
            text.append(f"  {name} ", "dim").append(f"{value:.4g}", "bold red" if name in bad and value else "")
    return [text]


def _number(value: float | None) -> Text:
    if value is None:
        return Text("not finite", "red")
    return Text(f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}")


def sparkline(values: Sequence[float | None], width: int, blocks: str = BLOCKS) -> str:
    """At most `width` characters, each the mean of its share of the values; `x` where none of them was finite."""
    if not values:
        return ""
    size = max(1.0, len(values) / width)
    shares = [values[int(index * size) : int((index + 1) * size)] or [values[-1]] for index in range(min(width, len(values)))]
    means = [sum(finite) / len(finite) if (finite := [v for v in share if v is not None]) else None for share in shares]
    low = min((mean for mean in means if mean is not None), default=0.0)
    high = max((mean for mean in means if mean is not None), default=0.0)
    spread = high - low
    middle = len(blocks) // 2
    return "".join(
        "x" if mean is None else blocks[min(len(blocks) - 1, int((mean - low) / spread * len(blocks))) if spread > 0 else middle] for mean in means
    )
