"""`otel-forge demo`: the main job on this machine, and what came of it. It takes the same way as `otel-forge run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from otel_forge.cli.running import Finished, Runner
from otel_forge.cli.servers import Say, Shape, exporter_status, fetch
from otel_forge.config import load_config
from otel_forge.errors import ForgeError, ServerError

SHOWN_ROWS = 8
SHOWN_KEYS = ("loss", "tokens", "grad_norm", "lr", "sample_loss/std", "train/total_duration_avg_s")
TRACE_WAIT_S = 15.0


def example() -> Path:
    """examples/train_ddp.py, in a checkout or inside the installed package."""
    packaged = Path(__file__).parent.parent / "_examples" / "train_ddp.py"
    return packaged if packaged.is_file() else Path(__file__).parents[2] / "examples" / "train_ddp.py"


def run_demo(*, shape: Shape, ranks: int | None, steps: int, as_json: bool, say: Say, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Train, and collect what came of it. Raises ForgeError when the training failed or rows are missing."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ForgeError("the demo trains with torch, which is not installed: pip install 'otel-forge[all]'") from error
    ranks = ranks or (4 if (os.cpu_count() or 1) >= 4 else 2)
    started = time.monotonic()
    folder = Path.cwd() / "otel-forge-runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    config_path = _write_config(folder, quiet=as_json)
    runner = Runner(
        load_config(config_path), config_path, say=say, drain_timeout_s=60.0, shape=shape,
        exporter_stdout=subprocess.DEVNULL if as_json else None,
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    if as_json:  # stdout is for the one object
        command += ["--redirects=3", "--log-dir", str(folder / "torchrun")]
    command += [str(example()), "--steps", str(steps), *extra]
    say(f"training {steps} steps on {ranks} ranks with DDP, a small transformer on Python's own source code")
    try:
        finished = runner.run(command)
        result = _collect(finished, folder, steps)
    finally:
        runner.close()
    result["seconds"] = round(time.monotonic() - started, 2)
    runner.remove_state(finished)
    if finished.exit_code:
        raise ForgeError(f"the training ended with {finished.exit_code}")
    if len(result["rows"]) < steps:
        raise ForgeError(f"{len(result['rows'])} of {steps} rows were written; the servers' logs are in {finished.state_dir}")
    return result


def _write_config(folder: Path, *, quiet: bool) -> Path:
    backends: dict[str, Any] = {
        "wandb": {"logging_mode": "global_reduce", "project": "otel-forge-demo", "name": "demo", "mode": "offline", "dir": str(folder)},
        "jsonl": {"logging_mode": "global_reduce", "path": str(folder / "metrics.jsonl")},
    }
    if not quiet:
        backends["console"] = {"logging_mode": "global_reduce", "every": 5, "include": ["loss", "tokens"]}
    path = folder / "forge.yaml"
    path.write_text(yaml.safe_dump({"metric_logging": backends}, sort_keys=False), encoding="utf-8")
    return path


def _collect(finished: Finished, folder: Path, steps: int) -> dict[str, Any]:
    servers = finished.servers
    if servers is None:
        raise ServerError("the demo starts servers of its own: unset OTEL_FORGE_ENDPOINT, OTEL_FORGE_RUN_ID and OTEL_EXPORTER_OTLP_ENDPOINT")
    path = folder / "metrics.jsonl"
    status = exporter_status(servers) or {}
    runs: dict[str, Any] = status.get("runs") or {}
    backends: dict[str, Any] = runs.get(finished.run_id or "", {}).get("backends") or {}
    location = (backends.get("wandb") or {}).get("location")
    return {
        "shape": servers.shape,
        "rows": latest_rows(path),
        "jsonl": str(path),
        "wandb": [location] if location else [],
        "jaeger": _kept(traces(servers.jaeger_query, steps), folder) if servers.jaeger_query else None,
        "seconds": 0.0,
    }


def latest_rows(path: Path) -> list[dict[str, Any]]:
    """The newest revision of each global row, in the order of steps."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        row = json.loads(line)
        rows[row["role"], row["attempt"], row["step"], row["occurrence"]] = row
    return [rows[key] for key in sorted(rows)]


def traces(query: str, steps: int) -> dict[str, Any]:
    """What Jaeger has: waits until there is a trace with a root for every step, or it takes too long."""
    deadline = time.monotonic() + TRACE_WAIT_S
    while True:
        found = _traces(query, steps)
        if len(found["trace_ids"]) >= steps or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _traces(query: str, steps: int) -> dict[str, Any]:
    services = json.loads(fetch(f"{query}/api/services", timeout_s=5.0) or b"{}").get("data") or []
    parameters = urllib.parse.urlencode({"service": "otel-forge", "limit": max(steps * 2, 100), "lookback": "1h"})
    answer = json.loads(fetch(f"{query}/api/traces?{parameters}", timeout_s=10.0) or b"{}")
    by_step = sorted(answer.get("data") or [], key=_root_start)
    last = by_step[-1] if by_step else None
    return {
        "url": query,
        "services": sorted(services),
        "trace_ids": [trace["traceID"] for trace in by_step],
        "last_trace_spans": len(last["spans"]) if last else 0,
    }


def _kept(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Keep the last step's trace as a file, because the demo's Jaeger ends with it."""
    if found["trace_ids"]:
        text = fetch(f"{found['url']}/api/traces/{found['trace_ids'][-1]}", timeout_s=10.0) or b""
        path = folder / "last-step-trace.json"
        path.write_bytes(text)
        found["last_trace"] = str(path)
    return found


def _root_start(trace: dict[str, Any]) -> int:
    return min(int(span["startTime"]) for span in trace["spans"])


def show_demo(result: dict[str, Any]) -> None:
    """Print it for people."""
    console = Console(highlight=False, soft_wrap=False)
    table = Table(title=f"The last rows, reduced over ranks (shape: {result['shape']})", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("ranks", justify="right")
    for key in SHOWN_KEYS:
        table.add_column(key, justify="right")
    for row in result["rows"][-SHOWN_ROWS:]:
        values = (row["metrics"].get(key) for key in SHOWN_KEYS)
        table.add_row(
            str(row["step"]), f"{row['ranks_reporting']}/{row['world_size']}", *("" if value is None else f"{value:.5g}" for value in values)
        )
    console.print(table)
    console.print(f"rows    {result['jsonl']}", soft_wrap=True)
    for run in result["wandb"]:
        console.print(f"wandb   {run}\n        look at it here: wandb leet {run}\n        or upload it:     wandb sync {run}", soft_wrap=True)
    jaeger = result["jaeger"]
    if jaeger and jaeger["trace_ids"]:
        console.print(
            f"traces  {len(jaeger['trace_ids'])} steps; the last one has {jaeger['last_trace_spans']} spans of {', '.join(jaeger['services'])}"
        )
        console.print(f"        {jaeger['last_trace']}, as {jaeger['url']}/api/traces/{jaeger['trace_ids'][-1]} gave it", soft_wrap=True)
        console.print(
            "        The demo's servers have ended with it. To browse traces: `otel-forge up`, run your training, open the link it prints. A Jaeger "
            "built from Go modules has the query API only; the official release or image has the page too (see collector-config/README.md).",
            soft_wrap=True,
        )
    else:
        console.print("traces  none: Jaeger is not there")
    console.print(f"{len(result['rows'])} rows in {result['seconds']:.1f} s")
