"""The commands that look at a run, or at what a run needs: what each takes, prints and returns. What they do is in the modules beside it."""

from __future__ import annotations

from pathlib import Path

import click

from otel_forge.cli.options import FAILED, load, with_config, with_json


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


COMMANDS = (tail,)
