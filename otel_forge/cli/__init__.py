"""The command line: what each command is called, takes, prints and returns. What they do is in the modules beside it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from otel_forge import __version__
from otel_forge.cli import viewing
from otel_forge.cli.options import FAILED, USAGE_ERROR, F, say, show, with_config, with_json
from otel_forge.cli.options import load as _load
from otel_forge.errors import ConfigError, ForgeError, InputError


class _Group(click.Group):
    """Errors of ours are one message and an exit code, no traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ForgeError as error:
            say(str(error))
            setup_failed = context.invoked_subcommand == "run"
            context.exit(125 if setup_failed else USAGE_ERROR if isinstance(error, (ConfigError, InputError)) else FAILED)


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
    "names",
    nargs=-1,
    type=click.Choice(["record", "flush", "memory", "spans", "threads", "forks", "exit", "slowdown", "cpu", "latency", "wandb", "scale"]),
)
@click.option("--ranks", type=click.IntRange(1, 16_384), default=64, show_default=True, help="Of scale: simulated ranks.")
@click.option("--series", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Of scale: series of each rank.")
@click.option("--steps", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Of scale: steps.")
@click.option("--tiers", type=click.IntRange(1, 2), default=1, show_default=True, help="Of scale: one Collector, or agents and a gateway.")
@click.option("--gateway-mode", type=click.Choice(["forward", "reduce"]), default="forward", show_default=True, help="Of scale with two tiers.")
@click.option("--interval", type=click.FloatRange(0), default=1.0, show_default=True, help="Of scale: seconds from step to step, at least.")
@with_json
def bench(names: tuple[str, ...], ranks: int, series: int, steps: int, tiers: Any, gateway_mode: Any, interval: float, as_json: bool) -> None:
    """Measure what telemetry costs, each figure beside a baseline of the same run. Without NAMES: all but scale (about two minutes).

    `bench scale` simulates many ranks against real Collectors and a real exporter.
    """
    if "scale" in names:
        from otel_forge.cli.bench_scale import Load, describe, measure

        if len(names) > 1:
            raise click.UsageError("scale is measured alone")
        found = measure(Load(ranks, series, steps, tiers=tiers, gateway=gateway_mode, interval_s=interval), say)
        show(as_json, found, describe(found))
        return
    from otel_forge.cli.bench import run_benchmarks, show_benchmarks

    results = run_benchmarks(names, say)
    if as_json:
        click.echo(json.dumps(results))
    else:
        show_benchmarks(results)


for _command in viewing.COMMANDS:
    main.add_command(_command)


# --- the Collector's programs and files ----------------------------------------------------------------------------------


@main.group()
def collector() -> None:
    """The programs and configuration files of Collector and Jaeger."""


@collector.command("install")
@click.option("--with", "extra", type=click.Choice(["loadbalancing"]), help="Get the larger Collector too, for agents in front of several gateways.")
@with_json
def collector_install(extra: str | None, as_json: bool) -> None:
    """Get the Collector and Jaeger: from PATH or cache, else the official release, else a build from Go modules."""
    from otel_forge.cli.binaries import COLLECTOR, JAEGER, LOADBALANCING, install

    wanted = (COLLECTOR, JAEGER, *((LOADBALANCING,) if extra else ()))
    found = {binary.name: str(install(binary, say)) for binary in wanted}
    show(as_json, found, "\n".join(f"{name}: {path}" for name, path in found.items()))


def with_collector_options(function: F) -> F:
    """The options of `collector_config.Options`, by their names."""
    options = [
        click.option("--listen", help="Address that the receivers bind [default: loopback]; another needs TLS or --token."),
        click.option("--window", "window_s", type=float, help="Seconds that packets of one step may be apart [default: FORGE_WINDOW, else 1]."),
        click.option("--deadline", "deadline_s", type=float, help="The exporter's row_deadline_s, that windows have to fit into [default: 10]."),
        click.option("--queue-size", type=int, default=20_000, show_default=True, help="Requests that each persistent queue holds."),
        click.option("--memory-mib", type=int, default=1536, show_default=True, help="Above it the receivers refuse until memory is free again."),
        click.option("--exporter", help="host:port of the exporter [default: FORGE_EXPORTER, else 127.0.0.1:4327]."),
        click.option("--gateway", "gateways", multiple=True, help="host:port of a gateway, for agents; several: the loadbalancing exporter."),
        click.option("--gateway-dns", help="host:port of a DNS name with an address per gateway; also the loadbalancing exporter."),
        click.option("--gateway-mode", "gateway", type=click.Choice(["forward", "reduce"]), help="What gateways do [default: forward]."),
        click.option("--no-jaeger", "jaeger", is_flag=True, flag_value=False, default=True, help="Count spans and drop them."),
        click.option("--jaeger", "jaeger_endpoint", help="host:port of Jaeger's OTLP/gRPC [default: FORGE_JAEGER_OTLP, else 127.0.0.1:4337]."),
        click.option("--tls-cert", help="File of the certificate that the receivers show."),
        click.option("--tls-key", help="File of its key."),
        click.option("--tls-ca", help="File of the authority for the next hop's certificate; turns TLS on towards it."),
        click.option("--token", is_flag=True, default=None, help="Ask for the bearer token in FORGE_TOKEN, and show it to the next hop."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@collector.command("config")
@click.option("--tier", type=click.Choice(["single", "agent", "gateway"]), help="Which Collector's file [default: all files].")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write the files into this folder instead of printing.")
@click.argument("name", required=False, type=click.Choice(["single-node.yaml", "agent.yaml", "gateway.yaml", "jaeger.yaml"]))
@with_collector_options
@with_config
@with_json
def collector_config_command(tier: Any, out: Path | None, name: str | None, config_path: Path | None, as_json: bool, **options: Any) -> None:
    """Print or write the configuration files. What no option says is taken from the `collector` section of --config."""
    from otel_forge.cli.collector_config import FILE_NAMES, RENDERERS, jaeger, options_of

    chosen = options_of(_load(config_path)[0].collector, options)
    wanted = FILE_NAMES[tier] if tier else name
    files = {FILE_NAMES[key]: RENDERERS[key] for key in FILE_NAMES} | {"jaeger.yaml": lambda _: jaeger()}
    texts = {file_name: render(chosen) for file_name, render in files.items() if wanted in (None, file_name)}
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
    from otel_forge.cli.binaries import files_dir, install, program_for
    from otel_forge.cli.collector_config import FILES

    paths = files or tuple(files_dir() / name for name in FILES)
    results = {}
    for path in paths:
        program = install(program_for(path), say)
        done = subprocess.run([str(program), "validate", "--config", str(path)], capture_output=True, text=True, check=False)
        results[str(path)] = {"valid": done.returncode == 0, "message": done.stderr.strip()}
    lines = [f"{path}: {'valid' if result['valid'] else 'NOT valid: ' + str(result['message'])}" for path, result in results.items()]
    show(as_json, results, "\n".join(lines))
    raise SystemExit(0 if all(result["valid"] for result in results.values()) else FAILED)
