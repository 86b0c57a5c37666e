"""The command line: what each command is called, takes, prints and returns. What they do is in the modules beside it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from otel_forge import __version__
from otel_forge.errors import ConfigError, ForgeError

F = TypeVar("F", bound=Callable[..., Any])
USAGE_ERROR = 2
FAILED = 1


def say(text: str) -> None:
    """A line of progress for people: on stderr, so that stdout holds results only."""
    click.echo(f"otel-forge: {text}", err=True)


class _Group(click.Group):
    """Errors of ours are one message and an exit code, no traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ForgeError as error:
            say(str(error))
            setup_failed = context.invoked_subcommand == "run"
            context.exit(125 if setup_failed else USAGE_ERROR if isinstance(error, ConfigError) else FAILED)


def with_json(function: F) -> F:
    """The option that every command has."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")(function)


def with_config(function: F) -> F:
    """The option that names the configuration file."""
    return click.option("--config", "config_path", type=click.Path(path_type=Path), help="Configuration file [default: $OTEL_FORGE_CONFIG].")(
        function
    )


def show(as_json: bool, data: dict[str, Any], text: str) -> None:
    """Print a result in the form that was asked for."""
    click.echo(json.dumps(data) if as_json else text)


def _load(config_path: Path | None) -> tuple[Any, Path | None]:
    import os

    from otel_forge.config import ENV_CONFIG, load_config

    path = config_path or (Path(os.environ[ENV_CONFIG]) if os.environ.get(ENV_CONFIG) else None)
    return load_config(path), path.absolute() if path else None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def main() -> None:
    """Telemetry of distributed PyTorch training: metrics reduced over ranks, wandb runs, one trace per step.

    `otel-forge demo` shows all of it. `otel-forge run -- torchrun train.py` runs your training with everything it needs.
    """
    logging.basicConfig(format="otel-forge: %(message)s", level=logging.WARNING)


@main.command()
@with_json
def version(as_json: bool) -> None:
    """Versions of otel-forge and of the programs it starts."""
    from otel_forge.cli.binaries import COLLECTOR, JAEGER, find

    data: dict[str, Any] = {"otel-forge": __version__, "python": sys.version.split()[0]}
    for binary in (COLLECTOR, JAEGER):
        found = find(binary)
        data[binary.name] = {"version": binary.version, "path": str(found) if found else None}
    lines = [f"otel-forge {__version__} (Python {data['python']})"]
    lines += [f"{b.name} {b.version}: {data[b.name]['path'] or 'not installed (otel-forge collector install)'}" for b in (COLLECTOR, JAEGER)]
    show(as_json, data, "\n".join(lines))


@main.command()
@click.option("--shape", type=click.Choice(["auto", "direct", "collector"]), default="auto", show_default=True, help="With or without a Collector.")
@click.option("--ranks", type=click.IntRange(1, 64), help="Training processes [default: 4, or 2 on fewer than 4 cores].")
@click.option("--steps", type=click.IntRange(1, 10_000), default=20, show_default=True)
@with_json
def demo(shape: Any, ranks: int | None, steps: int, as_json: bool) -> None:
    """Train a small language model with DDP; show its rows, its wandb run and its traces."""
    from otel_forge.cli.demo import run_demo, show_demo

    result = run_demo(shape=shape, ranks=ranks, steps=steps, as_json=as_json, say=say)
    if as_json:
        click.echo(json.dumps(result))
    else:
        show_demo(result)


# --- servers ---------------------------------------------------------------------------------------------------------


def _describe(servers: Any) -> str:
    lines = [f"shape {servers.shape}; ranks send to {servers.otlp_http}"]
    lines += [f"  {process.name:<10} pid {process.pid:<8} log {process.log}" for process in servers.processes]
    if servers.jaeger_query:
        lines.append(f"  traces: {servers.jaeger_query} (query API under /api/traces)")
    return "\n".join(lines)


def _as_data(servers: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(servers)


@main.command()
@with_config
@click.option("--shape", type=click.Choice(["auto", "direct", "collector"]), default="auto", show_default=True, help="With or without a Collector.")
@click.option("--no-jaeger", is_flag=True, help="Do not keep traces.")
@with_json
def up(config_path: Path | None, shape: Any, no_jaeger: bool, as_json: bool) -> None:
    """Start Collector, Jaeger and exporter in the background; training on this host finds them by itself."""
    from otel_forge.cli.binaries import only_one
    from otel_forge.config import state_dir

    config, path = _load(config_path)
    home = state_dir(config)
    with only_one(home / "up.lock", say):
        _up(home, config, path, shape, no_jaeger, as_json)


def _up(home: Path, config: Any, path: Path | None, shape: Any, no_jaeger: bool, as_json: bool) -> None:
    from otel_forge import discovery
    from otel_forge.cli.servers import Stack, end_process

    known = discovery.read(home)
    if known is not None and known.are_alive():
        show(as_json, _as_data(known) | {"started": False}, "already running: " + _describe(known))
        return
    if known is not None:
        say("the servers of an earlier `up` are gone or broken: starting anew")
        for process in known.processes:
            end_process(process)
        discovery.remove(home)
    servers = Stack(home, config, path, Path.cwd(), say).start(shape, jaeger=not no_jaeger)
    show(as_json, _as_data(servers) | {"started": True}, "running: " + _describe(servers))


@main.command()
@click.option("--drain-timeout", default=60.0, show_default=True, help="Seconds to wait for rows that are still on their way.")
@with_config
@with_json
def down(config_path: Path | None, drain_timeout: float, as_json: bool) -> None:
    """Write what is on its way and stop what `up` started."""
    from otel_forge import discovery
    from otel_forge.cli.servers import drain, end_process
    from otel_forge.config import state_dir

    home = state_dir(_load(config_path)[0])
    servers = discovery.read(home)
    if servers is None:
        show(as_json, {"stopped": [], "drained": True}, "nothing is running")
        return
    drained = drain(servers, drain_timeout) if servers.are_alive() else False
    stopped = [process.name for process in servers.processes if process.is_alive()]
    for process in reversed(servers.processes):
        end_process(process)
    discovery.remove(home)
    text = f"stopped: {', '.join(stopped) or 'nothing, all of it was gone'}" + (
        "" if drained else "; some rows were not written yet, the next `up` does it"
    )
    show(as_json, {"stopped": stopped, "drained": drained}, text)


@main.command()
@with_config
@with_json
def status(config_path: Path | None, as_json: bool) -> None:
    """What runs, and what the exporter has written. Exit code 3 when nothing runs."""
    from otel_forge import discovery
    from otel_forge.cli.servers import exporter_status
    from otel_forge.config import state_dir

    home = state_dir(_load(config_path)[0])
    servers = discovery.read(home)
    if servers is None:
        show(as_json, {"running": False}, f"nothing runs here (state directory {home})")
        raise SystemExit(3)
    alive = {process.name: process.is_alive() for process in servers.processes}
    exporter = exporter_status(servers)
    lines = [_describe(servers)] + [f"  {name} is NOT running" for name, lives in alive.items() if not lives]
    for run_id, run in ((exporter or {}).get("runs") or {}).items():
        for name, backend in run["backends"].items():
            error = f", {backend['error']}" if backend["error"] else ""
            lines.append(f"  run {run_id}: {name} ({backend['mode']}) {backend['written']} rows {backend['location'] or ''}{error}")
    show(as_json, {"running": all(alive.values()), "alive": alive, **_as_data(servers), "exporter": exporter}, "\n".join(lines))
    raise SystemExit(0 if all(alive.values()) else 3)


@main.command(context_settings={"ignore_unknown_options": True})
@with_config
@click.option("--shape", type=click.Choice(["auto", "direct", "collector"]), default="auto", show_default=True, help="With or without a Collector.")
@click.option("--drain-timeout", default=60.0, show_default=True, help="Seconds to wait, after the command, for rows that are still on their way.")
@with_json
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(config_path: Path | None, shape: Any, drain_timeout: float, as_json: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND with servers of its own, or with those of `otel-forge up`, and write all its rows before returning.

    Returns the command's exit code; 125 when it was not started. Example: otel-forge run -- torchrun --nproc_per_node 4 train.py
    """
    from otel_forge.cli.running import Runner

    config, path = _load(config_path)
    runner = Runner(config, path, say=say, drain_timeout_s=drain_timeout, shape=shape, exporter_stdout=subprocess.DEVNULL if as_json else None)
    try:
        finished = runner.run(command)
    finally:
        runner.close()
    if not finished.drained:
        say(f"not all rows were written within {drain_timeout:.0f} s; what is left is in {finished.state_dir}")
    runner.remove_state(finished)
    if as_json:  # the last line on stdout, behind whatever the command printed
        click.echo(json.dumps({"exit_code": finished.exit_code, "run_id": finished.run_id, "drained": finished.drained}))
    raise SystemExit(finished.exit_code)


@main.command()
@with_config
@click.option("--grpc-endpoint", default="127.0.0.1:4327", show_default=True, help="Where the Collector sends rows.")
@click.option("--http-endpoint", default="127.0.0.1:4328", show_default=True, help="Where ranks may send without a Collector; also /health, /status.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Where the spool is kept [default: the state directory].")
@click.option("--work-dir", type=click.Path(path_type=Path, exists=True), default=".", help="What relative paths of backends are relative to.")
@click.option("--trace-endpoint", help="Base URL of an OTLP/HTTP receiver for spans (Jaeger's, http://127.0.0.1:4338).")
def export(
    config_path: Path | None, grpc_endpoint: str, http_endpoint: str, state_dir: Path | None, work_dir: Path, trace_endpoint: str | None
) -> None:
    """The exporter process in the foreground: from partials to rows, from rows to backends."""
    try:
        from otel_forge_exporters import process
    except ImportError as error:
        raise ForgeError(f"the exporter's packages are not installed ({error}): pip install 'otel-forge[exporter]'") from error
    from otel_forge import config as configuration

    config, path = _load(config_path)
    try:
        code = process.run(
            config,
            grpc_endpoint=grpc_endpoint,
            http_endpoint=http_endpoint,
            state_dir=state_dir or configuration.state_dir(config) / "exporter",
            work_dir=work_dir.absolute(),
            trace_endpoint=trace_endpoint,
            explicit=path is not None,
        )
    except OSError as error:
        raise ForgeError(str(error)) from error
    raise SystemExit(code)


@main.command()
@click.argument("run_id", required=False)
@click.option("--endpoint", help="Base URL to send to [default: the servers of `otel-forge up`].")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds for each run.")
@with_config
@with_json
def replay(run_id: str | None, endpoint: str | None, timeout: float, config_path: Path | None, as_json: bool) -> None:
    """Send packets that training processes could only keep on disk: those of RUN_ID, or of every run. Exit code 1 when some are left."""
    from dataclasses import asdict

    from otel_forge import discovery
    from otel_forge.cli.running import replay_run
    from otel_forge.config import state_dir

    home = state_dir(_load(config_path)[0])
    servers = discovery.living(home)
    if endpoint is None and servers is None:
        raise ForgeError("nothing to send to: start servers with `otel-forge up`, or name an --endpoint")
    target, to_window = (endpoint, True) if endpoint else (servers.otlp_http, servers.shape == "collector")  # type: ignore[union-attr]
    folders = sorted([*home.glob("spool/*"), *home.glob("runs/*/spool/*")])
    found = [folder for folder in folders if folder.is_dir() and run_id in (None, folder.name)]
    if run_id and not found:
        raise ForgeError(f"no packets of run {run_id} are kept in {home}")
    reports = {folder.name: replay_run(folder.parent, folder.name, str(target), to_window=to_window, timeout_s=timeout) for folder in found}
    lines = [f"{name}: {report.delivered} packets sent, {report.spilled} still kept, {report.dropped} refused" for name, report in reports.items()]
    show(as_json, {name: asdict(report) for name, report in reports.items()}, "\n".join(lines) or "nothing is kept")
    raise SystemExit(FAILED if any(report.spilled or report.dropped for report in reports.values()) else 0)


@main.command()
@click.argument(
    "names", nargs=-1, type=click.Choice(["record", "flush", "memory", "spans", "threads", "forks", "exit", "slowdown", "cpu", "latency", "wandb"])
)
@with_json
def bench(names: tuple[str, ...], as_json: bool) -> None:
    """Measure what telemetry costs, each figure beside a baseline of the same run. Without NAMES: all of them (about two minutes)."""
    from otel_forge.cli.bench import run_benchmarks, show_benchmarks

    results = run_benchmarks(names, say)
    if as_json:
        click.echo(json.dumps(results))
    else:
        show_benchmarks(results)


# --- the Collector's programs and files ----------------------------------------------------------------------------------


@main.group()
def collector() -> None:
    """The programs and configuration files of Collector and Jaeger."""


@collector.command("install")
@with_json
def collector_install(as_json: bool) -> None:
    """Get the Collector and Jaeger: from PATH or cache, else the official release, else a build from Go modules."""
    from otel_forge.cli.binaries import COLLECTOR, JAEGER, install

    found = {binary.name: str(install(binary, say)) for binary in (COLLECTOR, JAEGER)}
    show(as_json, found, "\n".join(f"{name}: {path}" for name, path in found.items()))


@collector.command("config")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write the files into this folder instead of printing.")
@click.argument("name", required=False, type=click.Choice(["single-node.yaml", "jaeger.yaml"]))
@with_json
def collector_config_command(out: Path | None, name: str | None, as_json: bool) -> None:
    """Print or write the configuration files."""
    from otel_forge.cli.collector_config import FILES

    texts = {file_name: FILES[file_name]() for file_name in ([name] if name else list(FILES))}
    if out is None:
        show(as_json, texts, "\n".join(texts.values()))
        return
    out.mkdir(parents=True, exist_ok=True)
    for file_name, text in texts.items():
        (out / file_name).write_text(text, encoding="utf-8")
    show(as_json, {"files": [str(out / file_name) for file_name in texts]}, "\n".join(str(out / file_name) for file_name in texts))


@collector.command("validate")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@with_json
def collector_validate(files: tuple[Path, ...], as_json: bool) -> None:
    """Let the Collector's own `validate` check its configuration (jaeger.yaml: Jaeger's). Exit code 1 when one is wrong."""
    from otel_forge.cli.binaries import COLLECTOR, JAEGER, files_dir, install

    paths = files or tuple(files_dir() / name for name in ("single-node.yaml", "jaeger.yaml"))
    results = {}
    for path in paths:
        program = install(JAEGER if path.name == "jaeger.yaml" else COLLECTOR, say)
        done = subprocess.run([str(program), "validate", "--config", str(path)], capture_output=True, text=True, check=False)
        results[str(path)] = {"valid": done.returncode == 0, "message": done.stderr.strip()}
    lines = [f"{path}: {'valid' if result['valid'] else 'NOT valid: ' + str(result['message'])}" for path, result in results.items()]
    show(as_json, results, "\n".join(lines))
    raise SystemExit(0 if all(result["valid"] for result in results.values()) else FAILED)
