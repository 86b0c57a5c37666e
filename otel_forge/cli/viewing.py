"""The commands that look at a run, or at what a run needs: what each takes, prints and returns. What they do is in the modules beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from otel_forge.cli.options import FAILED, load, show, with_config, with_json
from otel_forge.errors import InputError


@click.command()
@click.argument("run", required=False)
@click.option("--metric", "patterns", multiple=True, metavar="PATTERN", help="Only these keys (`train/*`; may be repeated).")
@click.option("--once", is_flag=True, help="One frame, and end.")
@click.option("--interval", type=click.FloatRange(min=0.05), default=0.5, show_default=True, help="Seconds between two frames.")
@with_config
@with_json
def tail(run: str | None, patterns: tuple[str, ...], once: bool, interval: float, config_path: Path | None, as_json: bool) -> None:
    """Watch a run: its last values with sparklines, its slow ranks, and how telemetry does. Ends with Ctrl-C.

    RUN is a JSONL file, a folder with such files, FILE#RUN_ID or a run id [default: the file that was written last]. With --json each frame is a
    line. With --once exit code 1 when there is no row yet.
    """
    from otel_forge.cli.run_files import find
    from otel_forge.cli.tail import run_tail

    source = find(run, load(config_path)[0], Path.cwd())
    found = run_tail(source, patterns, once=once, as_json=as_json, interval_s=interval, write=click.echo)
    raise SystemExit(FAILED if once and not found else 0)


@click.command()
@click.argument("run", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="The file [default: report.html, trace.json].")
@click.option(
    "--steps", "steps_text", metavar="STEPS", help="Steps whose phases are shown, as in 3,10-12 [default: the slowest, a usual one, the last]."
)
@click.option("--metric", "patterns", multiple=True, metavar="PATTERN", help="Only these keys (`train/*`; may be repeated).")
@click.option("--perfetto", metavar="STEP|A-B", help="Instead of the page: the traces of these steps as a file for ui.perfetto.dev.")
@click.option("--jaeger", metavar="URL", help="Jaeger's query API, for --perfetto [default: that of `otel-forge up`].")
@with_config
@with_json
def report(
    run: str | None, output: Path | None, steps_text: str | None, patterns: tuple[str, ...], perfetto: str | None, jaeger: str | None,
    config_path: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write one HTML page of a run that opens without network: curves over ranks, phases of steps, slow ranks, memory.

    RUN is a JSONL file, a folder with such files, FILE#RUN_ID or a run id [default: the file that was written last]. With --perfetto
    it is a run id [default: the newest run that Jaeger has of the step], and each rank is a process of the trace, with its device's time beside.
    """
    if perfetto is not None:
        _write_trace(run, perfetto, jaeger, output or Path("trace.json"), config_path, as_json)
        return
    from otel_forge.cli.report import make_report
    from otel_forge.cli.run_files import find, read_run

    rows = read_run(find(run, load(config_path)[0], Path.cwd()))
    made = make_report(rows, steps=parse_steps(steps_text) if steps_text else (), patterns=patterns)
    path = output or Path("report.html")
    write_file(path, made.html)
    data = {"path": str(path.absolute()), "run_id": rows.run_id, "rows": len(rows.rows), "charts": made.charts, "steps": made.steps}
    show(as_json, data, f"{path}: run {rows.run_id}, {len(rows.rows)} rows, {made.charts} charts")


def _write_trace(run: str | None, steps_text: str, jaeger: str | None, path: Path, config_path: Path | None, as_json: bool) -> None:
    from otel_forge import discovery
    from otel_forge.cli.jaeger_traces import step_traces
    from otel_forge.cli.perfetto import chrome_trace
    from otel_forge.config import state_dir

    steps = parse_steps(steps_text)
    if steps != tuple(range(steps[0], steps[-1] + 1)):
        raise InputError(f"--perfetto {steps_text}: one step or a range A-B is one trace file")
    servers = discovery.living(state_dir(load(config_path)[0])) if jaeger is None else None
    query = jaeger or (servers.jaeger_query if servers is not None else None)
    if query is None:
        raise InputError("no Jaeger to ask: `otel-forge up` runs none here; name one with --jaeger http://host:16686")
    run_id, traces = step_traces(query, steps[0], steps[-1], run)
    trace = chrome_trace(run_id, traces)
    write_file(path, json.dumps(trace))
    spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
    data = {"path": str(path.absolute()), "run_id": run_id, "traces": len(traces), "slices": spans}
    show(as_json, data, f"{path}: run {run_id}, {len(traces)} traces, {spans} slices: open it at ui.perfetto.dev or chrome://tracing")


def parse_steps(text: str) -> tuple[int, ...]:
    """The steps of `3,10-12`. Raises InputError."""
    steps: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise InputError(f"{text!r} is no list of steps: write it as in 3,10-12")
        steps.extend(range(int(first), int(last or first) + 1))
    return tuple(steps)


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises InputError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


@click.command()
@click.argument("base")
@click.argument("new")
@click.option("--metric", "patterns", multiple=True, metavar="PATTERN", help="Only these keys (may be repeated); the bounds are for them.")
@click.option("--max-increase", metavar="BOUND", help="Higher is worse: by more than this (5%, or an amount) than BASE, exit code 1.")
@click.option("--max-decrease", metavar="BOUND", help="Lower is worse: by more than this (5%, or an amount) than BASE, exit code 1.")
@click.option("--figure", type=click.Choice(["mean", "last", "best"]), default="mean", show_default=True, help="What the bounds are for.")
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="The mean is that of so many last steps.")
@with_config
@with_json
def compare(
    base: str, new: str, patterns: tuple[str, ...], max_increase: str | None, max_decrease: str | None, figure: Any, last: int,
    config_path: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """The metrics of run NEW beside those of run BASE: last value, best, mean of the last steps.

    Exit code 1 when one of the metrics is worse by more than a bound, or not finite; 2 for bad input. A run is a JSONL file, a folder with such
    files, FILE#RUN_ID or a run id. Example: otel-forge compare main.jsonl new.jsonl --metric loss --max-increase 5%
    """
    from otel_forge.cli import compare as comparing
    from otel_forge.cli.run_files import find, read_run

    increase, decrease = (comparing.parse_bound(text) if text is not None else None for text in (max_increase, max_decrease))
    if (increase or decrease) and not patterns:
        raise InputError("a bound needs the metrics it is for: --metric loss --max-increase 5%")
    question = comparing.Question(patterns, increase, decrease, figure, last)
    config = load(config_path)[0]
    first, second = (read_run(find(name, config, Path.cwd())) for name in (base, new))
    found = comparing.compare(first, second, question)
    if as_json:
        click.echo(json.dumps(comparing.as_data(first, second, found, question)))
    else:
        comparing.show_comparison(first, second, found, question)
    raise SystemExit(FAILED if any(item.verdict == "worse" for item in found) else 0)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--most", type=click.IntRange(min=1), default=50, show_default=True, help="Problems that are printed.")
@with_json
def validate(file: Path, most: int, as_json: bool) -> None:
    """Check a configuration (forge.yaml) or a JSONL file of rows, and name all problems at once. Exit code 1 when there are any, 2 without a file."""
    from dataclasses import asdict

    from otel_forge.cli.validation import validate as check

    verdict = check(file)
    lines = [f"{file}: {problem}" for problem in verdict.problems[:most]]
    if len(verdict.problems) > most:
        lines.append(f"{file}: {len(verdict.problems) - most} problems more")
    what = f"{verdict.count} {'rows' if verdict.kind == 'rows' else 'backends'}"
    lines += [f"{file}: {note}" for note in verdict.notes]
    lines.append(f"{file}: {what}, {len(verdict.problems) or 'no'} problem{'s' if len(verdict.problems) != 1 else ''}")
    show(as_json, {"file": str(file), **asdict(verdict)}, "\n".join(lines))
    raise SystemExit(FAILED if verdict.problems else 0)


@click.command()
@with_config
@with_json
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Check what a run needs on this host: configuration, state directory, programs, servers, endpoint, clock, proxies, and what `init` would decide.

    A line for each, with what to do about it. Exit code 1 when one of them fails; warnings do not count. Under a launcher it tells of that rank:
    srun otel-forge doctor, or torchrun --no-python --nproc_per_node 2 otel-forge doctor
    """
    from dataclasses import asdict

    from otel_forge.cli.doctor import as_text, examine

    given = config_path or (Path(os.environ["OTEL_FORGE_CONFIG"]) if os.environ.get("OTEL_FORGE_CONFIG") else None)
    checks = examine(given)
    failed = [check.name for check in checks if check.state == "fail"]
    show(as_json, {"failed": failed, "checks": [asdict(check) for check in checks]}, as_text(checks))
    raise SystemExit(FAILED if failed else 0)


COMMANDS = (tail, report, compare, validate, doctor)
