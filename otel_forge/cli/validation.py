"""`otel-forge validate`: every problem of a configuration file or of a JSONL file of rows at once, each with its line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from otel_forge.config import load_config
from otel_forge.errors import ConfigError, InputError
from otel_forge.modes import LoggingMode

INTEGERS = ("step", "occurrence", "attempt", "revision", "ranks_reporting", "world_size")
LOWEST = {"revision": 1, "ranks_reporting": 0, "world_size": 0}
TEXTS = ("run_id", "mode", "role")
REQUIRED = ("run_id", "mode", "role", "replica", "rank", *INTEGERS, "time_unix", "metrics", "nonfinite")
OPTIONAL = ("ranks_missing", "ranks_doubtful", "trace_step", "sequence")
MODES = tuple(mode.value for mode in LoggingMode)


@dataclass
class Verdict:
    """What is to be said of a file."""

    kind: str
    """`config` or `rows`."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no mistake, and good to know."""
    count: int = 0
    """Of rows, or of backends."""


def validate(path: Path) -> Verdict:
    """Check a file by what it holds: rows where its name says JSONL, else a configuration. Raises InputError when it cannot be read."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    is_rows = any(part in (".jsonl", ".ndjson") for part in path.suffixes)
    return check_rows(path) if is_rows else check_config(path)


# --- a configuration -----------------------------------------------------------------------------------------------------


def check_config(path: Path) -> Verdict:
    """Every unknown key with the nearest right one, every value that cannot be, with its line."""
    verdict = Verdict("config")
    try:
        config = load_config(path)
    except ConfigError as error:
        lines = _lines_of_keys(path)
        verdict.problems = [_with_line(problem, lines) for problem in error.problems]
        return verdict
    verdict.count = len(config.metric_logging)
    verdict.notes = [f"{name}: {backend.logging_mode.value}" for name, backend in config.metric_logging.items()]
    return verdict


def _with_line(problem: str, lines: dict[str, int]) -> str:
    key = problem.partition(":")[0]
    while key and key not in lines:  # a key that is missing stands in its section
        key = key.rpartition(".")[0]
    return f"line {lines[key]}: {problem}" if key else problem


def _lines_of_keys(path: Path) -> dict[str, int]:
    """Dotted key → the line where it stands; empty where the file is no YAML."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = f"{prefix}{key.value}"
                found[name] = key.start_mark.line + 1
                walk(value, f"{name}.")
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                found[f"{prefix}{index}"] = value.start_mark.line + 1
                walk(value, f"{prefix}{index}.")

    try:
        walk(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), "")
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found


# --- rows ----------------------------------------------------------------------------------------------------------------


def check_rows(path: Path) -> Verdict:
    """Every line that is no row and why; rows that are there twice; a torn last line is a note, because its writer may be at it."""
    verdict = Verdict("rows")
    seen: dict[tuple[Any, ...], int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    verdict.notes.append(f"line {number}: not finished (its writer was killed, or is at it)")
                    continue
                problems = _line_problems(line, number, seen)
                verdict.problems += [f"line {number}: {problem}" for problem in problems]
                verdict.count += 1
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    runs = sorted({str(key[0]) for key in seen})
    verdict.notes.append(f"runs: {', '.join(runs) or 'none'}")
    return verdict


def _line_problems(line: bytes, number: int, seen: dict[tuple[Any, ...], int]) -> list[str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        return [f"no JSON ({error})"]
    if not isinstance(row, dict):
        return [f"expected an object, got {type(row).__name__}"]
    problems = [*_field_problems(row), *_value_problems(row)]
    if not problems:
        names = ("run_id", "mode", "role", "rank", "step", "occurrence", "attempt", "revision", "sequence")
        key = (*(row.get(name) for name in names), row["replica"] if row["rank"] is not None else None)
        first = seen.setdefault(key, number)
        if first != number:
            problems.append(f"the same row and revision as line {first}")
    return problems


def _field_problems(row: dict[str, Any]) -> Iterator[str]:
    known = (*REQUIRED, *OPTIONAL)
    unknown = [name for name in row if name not in known]
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        yield f"{name}: unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
    for name in REQUIRED:
        if name not in row:
            yield f"{name}: is missing"
    for name in TEXTS:
        if name in row and not (isinstance(row[name], str) and row[name]):
            yield f"{name}: expected a text, got {row[name]!r}"
    for name in (*INTEGERS, "rank", "replica"):
        lowest = LOWEST.get(name, 0)
        is_empty = name in ("rank", "replica") and row.get(name) is None
        if name in row and not is_empty and not (_is_integer(row[name]) and row[name] >= lowest):
            yield f"{name}: expected an integer from {lowest} on, got {row[name]!r}"
    if "time_unix" in row and not _is_number(row["time_unix"]):
        yield f"time_unix: expected seconds, got {row['time_unix']!r}"


def _value_problems(row: dict[str, Any]) -> Iterator[str]:
    mode = row.get("mode")
    if isinstance(mode, str) and mode not in MODES:
        near = difflib.get_close_matches(mode, MODES, n=1)
        yield f"mode: unknown mode {mode!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(MODES)}")
    if mode in MODES and "rank" in row and (row["rank"] is None) != (mode == LoggingMode.GLOBAL_REDUCE.value):
        yield f"rank: {row['rank']!r} does not go with mode {mode}"
    if _is_integer(row.get("ranks_reporting")) and _is_integer(row.get("world_size")) and row["ranks_reporting"] > row["world_size"] > 0:
        yield f"ranks_reporting: {row['ranks_reporting']} of a world of {row['world_size']}"
    metrics, nonfinite = row.get("metrics", {}), row.get("nonfinite", {})
    if not isinstance(metrics, dict) or not isinstance(nonfinite, dict):
        yield "metrics, nonfinite: expected objects"
        return
    for key, value in metrics.items():
        if value is not None and not _is_number(value):
            yield f"metrics.{key}: expected a number or null, got {value!r}"
        if value is None and key not in nonfinite and not key.endswith(("/p50", "/p95", "/p99")):
            yield f"metrics.{key}: is null, and nonfinite does not say why"
    for key, count in nonfinite.items():
        if not (_is_integer(count) and count > 0):
            yield f"nonfinite.{key}: expected a count, got {count!r}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """NaN and infinity are none: a row has null for them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) != float("inf")
