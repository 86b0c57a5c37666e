"""The commands that look at a run, or at what a run needs: what each takes, prints and returns. What they do is in the modules beside it."""

from __future__ import annotations

import os
from pathlib import Path

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
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="The file to write [default: report.html].")
@click.option(
    "--steps", "steps_text", metavar="STEPS", help="Steps whose phases are shown, as in 3,10-12 [default: the slowest, a usual one, the last]."
)
@click.option("--metric", "patterns", multiple=True, metavar="PATTERN", help="Only these keys (`train/*`; may be repeated).")
@with_config
@with_json
def report(run: str | None, output: Path | None, steps_text: str | None, patterns: tuple[str, ...], config_path: Path | None, as_json: bool) -> None:
    """Write one HTML page of a run that opens without network: curves over ranks, phases of steps, slow ranks, memory.

    RUN is a JSONL file, a folder with such files, FILE#RUN_ID or a run id [default: the file that was written last].
    """
    from otel_forge.cli.report import make_report
    from otel_forge.cli.run_files import find, read_run

    rows = read_run(find(run, load(config_path)[0], Path.cwd()))
    made = make_report(rows, steps=parse_steps(steps_text) if steps_text else (), patterns=patterns)
    path = output or Path("report.html")
    write_file(path, made.html)
    data = {"path": str(path.absolute()), "run_id": rows.run_id, "rows": len(rows.rows), "charts": made.charts, "steps": made.steps}
    show(as_json, data, f"{path}: run {rows.run_id}, {len(rows.rows)} rows, {made.charts} charts")


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


COMMANDS = (tail, report)
