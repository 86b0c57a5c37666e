"""`otel-forge bench`: what telemetry costs here, each figure with its baseline from the same run. Figures are ratios first: times vary by machine."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import otel_forge
from otel_forge import Reduce, metrics, pipeline, record_metric
from otel_forge.cli.servers import Say, Stack
from otel_forge.config import load_config

Result = dict[str, Any]
ROUNDS = 7
_values: dict[str, float] = {}


def _add(key: str, value: float) -> None:
    """The baseline: what anybody would write who wants a sum by key."""
    _values[key] = _values.get(key, 0.0) + value


def _nanoseconds(call: Callable[[], Any], count: int) -> float:
    """Time of one call, the least disturbed of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter_ns() - started) / count)
    return best


def _per_call(function: Callable[[str, float], Any], count: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        for _ in range(count):
            function("loss", 1.5)
        best = min(best, (time.perf_counter_ns() - started) / count)
        metrics.registry().drain()
    return best


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Recording as after `init`, with nothing behind it."""
    pipeline.reset()
    metrics.registry().set_mode(off=False, bounded=False, stream=None)
    try:
        yield
    finally:
        pipeline.reset()


def record() -> list[Result]:
    """One record: against a dict add, and against the SDK's Histogram.record."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    provider = MeterProvider(metric_readers=[InMemoryMetricReader()])
    instrument = provider.get_meter("bench").create_histogram("loss")
    with _recording():
        record_metric("loss", 1.0)
        baseline, ours = _per_call(_add, 100_000), _per_call(record_metric, 100_000)
        sdk = _nanoseconds(lambda: instrument.record(1.5), 20_000)
        results = [
            _result("record_metric(key, float)", ours, "ns", "dict add in a function", baseline, "≤ 2.0 ×"),
            {**_result("record_metric(key, float)", ours, "ns", "SDK Histogram.record", sdk, "≥ 30 × faster"), "ratio": round(sdk / ours, 1)},
        ]
        with contextlib.suppress(ImportError):
            import torch

            tensor = torch.tensor(1.5)
            tensors = _nanoseconds(lambda: record_metric("loss", tensor), 20_000)
            results.append(_result("record_metric(key, cpu tensor)", tensors, "ns", "dict add in a function", baseline, "≤ 3000 ns"))
    pipeline.reset()
    metrics.registry().set_mode(off=True, bounded=False, stream=None)
    results.append(_result("record_metric while telemetry is off", _per_call(record_metric, 100_000), "ns", "dict add in a function", baseline, ""))
    pipeline.reset()
    provider.shutdown()
    return results + _peers(ours)


def _peers(ours: float) -> list[Result]:
    """What others charge for one value, where they are installed."""
    results = []
    with contextlib.suppress(ImportError), tempfile.TemporaryDirectory() as folder:
        import wandb

        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        run = wandb.init(mode="offline", dir=folder, project="bench", settings=quiet)
        logged = _nanoseconds(lambda: run.log({"loss": 1.5}), 200)
        run.finish()
        results.append({**_result("record_metric(key, float)", ours, "ns", "wandb.log, offline", logged, ""), "ratio": round(logged / ours, 1)})
    with contextlib.suppress(ImportError):
        from forge.observability.metrics import Reduce as PeerReduce  # type: ignore[import-not-found]
        from forge.observability.metrics import record_metric as peer

        theirs = _nanoseconds(lambda: peer("loss", 1.5, PeerReduce.MEAN), 2_000)
        results.append({**_result("record_metric(key, float)", ours, "ns", "torchforge's", theirs, ""), "ratio": round(theirs / ours, 1)})
    return results


def flush() -> list[Result]:
    """`flush(step)` of 50 series × 20 values, in the caller; the packet is folded, encoded and sent by the background thread."""
    pipeline.reset()
    with tempfile.TemporaryDirectory() as folder, _listener() as url:
        otel_forge.init({"collector": {"endpoint": url}, "state_dir": folder, "tracing": {"enabled": False}})
        times, baseline = [], []
        for step in range(300):
            for name in range(50):
                for _ in range(20):
                    record_metric(f"key{name}", 1.5)
            lists = [[1.5] * 20 for _ in range(50)]
            started = time.perf_counter_ns()
            _ = [items[:] for items in lists]
            baseline.append(time.perf_counter_ns() - started)
            started = time.perf_counter_ns()
            otel_forge.flush(step)
            times.append(time.perf_counter_ns() - started)
            time.sleep(0.002)
        otel_forge.shutdown(timeout_s=10.0)
    pipeline.reset()
    own = _self_observation_ns()
    return [
        _result("what telemetry says of itself, per step, in its thread", own, "ns", "0.2 ms of CPU a step", 200_000.0, "≤ 1 %"),
        *_flush_result(times, baseline),
    ]


def _self_observation_ns() -> float:
    """The extra time of folding and encoding a flush of 50 series with the figures in it."""
    from otel_forge.identity import Member, Run
    from otel_forge.packets import PacketBuilder, Sealed
    from otel_forge.self_observation import SelfObservation

    builder = PacketBuilder(Member("t", 0, 0, 1), Run("r", 1), {}, nonce="n", modes="global_reduce", window=True, contribute=True)
    sealed = Sealed(1, 1, 0, 0, 1, [])
    observation = SelfObservation()
    without = _nanoseconds(lambda: builder.values(sealed), 2_000)
    return _nanoseconds(lambda: builder.values(sealed, observation.figures(sealed, {})), 2_000) - without


def _flush_result(times: list[int], baseline: list[int]) -> list[Result]:
    return [_result("flush(step), 50 series × 20 values", statistics.median(times), "ns", "copy 50 lists", statistics.median(baseline), "≤ 50000 ns")]


def memory() -> list[Result]:
    """Bytes kept per record until the flush, and growth over 10,000 steps of 100 keys."""
    with _recording():
        record_metric("loss", 1.0)
        source = random.Random(1)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100_000):
            record_metric("loss", source.random())
        per_record = (tracemalloc.get_traced_memory()[0] - before) / 100_000
        tracemalloc.stop()
    pipeline.reset()
    with tempfile.TemporaryDirectory() as folder, _listener() as url:
        otel_forge.init({"collector": {"endpoint": url}, "state_dir": folder, "tracing": {"enabled": False}})
        sizes = []
        for step in range(10_000):
            for name in range(100):
                record_metric(f"key{name}", 1.5)
            otel_forge.flush(step, wait_s=5.0 if step % 100 == 0 else None)
            if step in (2_000, 9_999):
                gc.collect()
                sizes.append(_rss_bytes())
        otel_forge.shutdown(timeout_s=10.0)
    pipeline.reset()
    return [
        _result("kept per record until flush", per_record, "bytes", "a float and its place in a list", 32.0, "≤ 40 bytes"),
        _result("RSS after 10,000 steps × 100 keys", sizes[1] / 2**20, "MiB", "after 2,000 steps", sizes[0] / 2**20, "≤ 5 MiB more"),
    ]


def spans() -> list[Result]:
    """A span, in the caller; against the SDK's."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    tracer = provider.get_tracer("bench")
    pipeline.reset()

    def ours() -> None:
        with otel_forge.span("x"):
            pass

    def theirs() -> None:
        with tracer.start_as_current_span("x"):
            pass

    def metrics_only() -> None:
        with otel_forge.trace("x", metrics_only=True):
            pass

    with tempfile.TemporaryDirectory() as folder, _listener() as url:
        off = _nanoseconds(ours, 20_000)
        otel_forge.init({"collector": {"endpoint": url}, "state_dir": folder})
        cost = _nanoseconds(ours, 5_000)
        metric_cost = _nanoseconds(metrics_only, 5_000)
        sdk = _nanoseconds(theirs, 5_000)
        pipeline.spans.clear()
        otel_forge.shutdown(timeout_s=5.0)
    provider.shutdown()
    pipeline.reset()
    return [
        {**_result('with span("x")', cost, "ns", "SDK span", sdk, "≤ 4000 ns, ≥ 6 × cheaper"), "ratio": round(sdk / cost, 1)},
        _result("trace, metrics only", metric_cost, "ns", "span", cost, "≤ 1500 ns"),
        _result("span while tracing is off", off, "ns", "span", cost, "≤ 100 ns"),
    ]


def threads() -> list[Result]:
    """Eight threads that record 1,000,000 values each while another takes them: each once."""
    with _recording():
        record_metric("n", 0.0, Reduce.SUM)

        def million() -> None:
            for _ in range(1_000_000):
                record_metric("n", 1.0, Reduce.SUM)

        workers = [threading.Thread(target=million) for _ in range(8)]
        for worker in workers:
            worker.start()
        total = 0.0
        while any(worker.is_alive() for worker in workers):
            total += sum(sum(taken.values) for taken in metrics.registry().drain())
            time.sleep(0.001)
        total += sum(sum(taken.values) for taken in metrics.registry().drain())
    return [_result("values of 8 threads, drained meanwhile", total, "values", "recorded", 8e6, "each once")]


_FORKS = """
import os, sys, time
import otel_forge
from otel_forge import Reduce, record_metric
otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}})
hung = 0
for step in range(int(sys.argv[1])):
    record_metric("n", 1.0, Reduce.SUM)
    child = os.fork()
    if child == 0:
        record_metric("n", 1000.0, Reduce.SUM)
        os._exit(0)
    otel_forge.flush(step)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            hung += 1
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
        time.sleep(0.0002)
otel_forge.shutdown(timeout_s=60.0)
print(hung)
"""


def forks() -> list[Result]:
    """2,000 forks while recording and flushing: none hangs, and nothing of the parent's is there twice."""
    count = 2000
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OTEL_FORGE_STATE_DIR": folder}
        done = subprocess.run([sys.executable, "-c", _FORKS, str(count)], cwd=folder, env=environ, capture_output=True, text=True, check=True)
        rows = [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]
    right = sum(row["metrics"]["n"] == 1.0 for row in rows)
    return [
        _result("hung children of 2,000 forks", float(done.stdout), "children", "forks", count, "0"),
        _result("steps with each value once", right, "steps", "steps", count, "all"),
    ]


def exit_() -> list[Result]:
    """How long a process takes to end when nothing answers; `shutdown` is given 5 s by default."""
    script = (
        "import time, otel_forge\n"
        "otel_forge.init()\n"
        "for step in range(20):\n"
        "    otel_forge.record_metric('loss', 1.0); otel_forge.flush(step)\n"
        "started = time.monotonic()\n"
        "report = otel_forge.shutdown(timeout_s=1.0)\n"
        "print(time.monotonic() - started, report.spilled, report.dropped)\n"
    )
    results = []
    for name, make in (("dead", _closed_port), ("stalled", _stalled_port)):
        with tempfile.TemporaryDirectory() as folder, make() as port:
            environ = {**os.environ, "OTEL_FORGE_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_FORGE_STATE_DIR": folder}
            done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
            seconds, spilled, dropped = done.stdout.split()
            result = _result(f"shutdown(1 s), {name} receiver", float(seconds) * 1000, "ms", "time given", 1000.0, "≤ 2000 ms more")
            results.append({**result, "spilled": int(spilled), "dropped": int(dropped)})
    return results


_STEP_LOOP = """
import json, sys, time
import torch
import otel_forge
from otel_forge import Reduce, record_metric
steps, block, size, products = (int(argument) for argument in sys.argv[1:5])
spans = len(sys.argv) > 5
torch.set_num_threads(1)
a = torch.randn(size, size)
otel_forge.init()
times = {True: [], False: []}
cpu = {True: [], False: []}
step = 0
for number in range(steps // block):
    on = number % 2 == 0
    began = time.process_time()
    for _ in range(block):
        started = time.perf_counter()
        for _ in range(products):
            torch.tanh(a @ a)
        if on:
            if spans:
                for _ in range(200):
                    with otel_forge.span("x"):
                        pass
            else:
                for key in range(10):
                    for _ in range(20):
                        record_metric(f"key{key}", 1.5)
            otel_forge.flush(step)
            step += 1
        times[on].append(time.perf_counter() - started)
    cpu[on].append((time.process_time() - began) / block)
otel_forge.shutdown()
print(json.dumps({"on": times[True], "off": times[False], "cpu_on": cpu[True], "cpu_off": cpu[False]}))
"""


def _stepping(ranks: int, steps: int, size: int, products: int, say: Say, *more: str) -> list[dict[str, Any]]:
    """What each rank measured, with a real Collector and exporter beside."""
    with tempfile.TemporaryDirectory() as folder, _stack(Path(folder), say) as (_, servers):
        environ = {
            **os.environ, "OTEL_FORGE_ENDPOINT": servers.otlp_http, "OTEL_FORGE_SHAPE": servers.shape, "OTEL_FORGE_STATE_DIR": folder,
            "OTEL_FORGE_RUN_ID": "bench", "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", _STEP_LOOP, str(steps), "10", str(size), str(products), *more]
        processes = [subprocess.Popen(command, env=environ | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
        return [json.loads(process.communicate(timeout=300)[0]) for process in processes]


def slowdown(say: Say) -> list[Result]:
    """Steps of 20 ms and more of one rank, blocks of ten with and without telemetry in turn: median of each, and of the blocks' differences."""
    return [
        _slowdown("step with 200 records and a flush", "≤ 5 % slower", *_stepping(1, 1200, 1000, 2, say)),
        _slowdown("step with 200 spans and a flush", "≤ 2 % slower", *_stepping(1, 1200, 1000, 2, say, "spans")),
    ]


def _slowdown(what: str, target: str, found: dict[str, Any]) -> Result:
    with_median, without = statistics.median(found["on"]), statistics.median(found["off"])
    result = _result(what, with_median * 1000, "ms", "the same step without", without * 1000, target)
    pairs = [
        statistics.median(found["on"][i : i + 10]) - statistics.median(found["off"][i : i + 10])
        for i in range(0, min(len(found["on"]), len(found["off"])), 10)
    ]
    low, _, high = statistics.quantiles(pairs, n=4)
    return {
        **result,
        "percent": round(100 * (with_median / without - 1), 2),
        "paired_ms": [round(1000 * item, 3) for item in (low, statistics.median(pairs), high)],
    }


def cpu(say: Say) -> list[Result]:
    """CPU time that telemetry adds to the rank's own process, all its threads, per step; one rank and four."""
    results = []
    for ranks in (1, 4):
        found = _stepping(ranks, 800, 300, 2, say)
        without = statistics.median(statistics.median(item["cpu_off"]) for item in found)
        extra = statistics.median(statistics.median(item["cpu_on"]) - statistics.median(item["cpu_off"]) for item in found)
        results.append(
            _result(
                f"extra CPU of a rank per step, {ranks} rank{'s' if ranks > 1 else ''}",
                extra * 1000,
                "ms",
                "CPU of the step itself",
                without * 1000,
                "≤ 0.2 ms",
            )
        )
    return results


def latency(say: Say) -> list[Result]:
    """From the last rank's flush to the row in the JSONL file, four ranks, window 1 s."""
    script = (
        "import time, otel_forge\n"
        "otel_forge.init()\n"
        "for step in range(60):\n"
        "    time.sleep(0.1); otel_forge.record_metric('loss', 1.0); otel_forge.flush(step)\n"
    )
    with tempfile.TemporaryDirectory() as folder, _stack(Path(folder), say) as (path, servers):
        environ = {
            **os.environ, "OTEL_FORGE_ENDPOINT": servers.otlp_http, "OTEL_FORGE_SHAPE": servers.shape, "OTEL_FORGE_STATE_DIR": folder,
            "OTEL_FORGE_RUN_ID": "bench", "WORLD_SIZE": "4",
        }  # fmt: skip
        processes = [subprocess.Popen([sys.executable, "-c", script], env=environ | {"RANK": str(rank)}) for rank in range(4)]
        delays: list[float] = []
        deadline = time.monotonic() + 60
        while len(delays) < 60 and time.monotonic() < deadline:
            lines = path.read_text().splitlines() if path.exists() else []
            now = time.time()
            delays += [now - json.loads(line)["time_unix"] for line in lines[len(delays) :]]
            time.sleep(0.005)
        for process in processes:
            process.wait()
    return [_result("row latency, median of 60", statistics.median(delays) * 1000, "ms", "the window", 1000.0, "≤ 2000 ms")]


def wandb() -> list[Result]:
    """65 runs of wandb in one process, offline."""
    from otel_forge.cli.bench_wandb import measure

    found = measure()
    return [
        _result("65 wandb runs opened", found["open_s"], "s", "import of wandb", found["load_s"], "≤ 2 s"),
        _result("rows of 20 keys to them, offline", found["rows_per_s"], "rows/s", "asked for", 1000.0, "≥ 1000"),
        _result("65 wandb runs closed", found["close_s"], "s", "opening", found["open_s"], "≤ 5 s"),
        _result("RSS of the process, without wandb-core", found["rss_mb"], "MiB", "allowed", 400.0, "≤ 400 MiB"),
        _result("rows there once", float(found["found"]), "rows", "written", float(found["expected"]), "all"),
    ]


# --- what they stand on ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stack(folder: Path, say: Say) -> Iterator[tuple[Path, Any]]:
    config_path = folder / "forge.yaml"
    path = folder / "rows.jsonl"
    config_path.write_text(f"metric_logging: {{jsonl: {{path: {path}}}}}\ntracing: {{enabled: false}}\n")
    stack = Stack(folder / "state", load_config(config_path), config_path, folder, say, private=True)
    try:
        yield path, stack.start("collector", jaeger=False)
    finally:
        stack.stop(drain_timeout_s=5.0)


@contextlib.contextmanager
def _listener() -> Iterator[str]:
    """A receiver in another process that takes everything."""
    script = (
        "import http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    protocol_version = 'HTTP/1.1'\n"
        "    def do_POST(self):\n"
        "        self.rfile.read(int(self.headers['content-length'])); self.send_response(200)\n"
        "        self.send_header('content-length', '0'); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), H); print(s.server_port, flush=True); s.serve_forever()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _closed_port() -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    yield int(port)


@contextlib.contextmanager
def _stalled_port() -> Iterator[int]:
    """Accepts, reads nothing, answers nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        kept: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(listening.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield int(listening.getsockname()[1])
        for connection in kept:
            connection.close()


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _result(what: str, value: float, unit: str, baseline: str, baseline_value: float, target: str) -> Result:
    return {
        "what": what, "value": round(value, 3), "unit": unit, "baseline": baseline, "baseline_value": round(baseline_value, 3),
        "ratio": round(value / baseline_value, 3) if baseline_value else None, "target": target,
    }  # fmt: skip


def run_benchmarks(names: Sequence[str], say: Say) -> list[Result]:
    """The results of the named benchmarks, or of all."""
    every: dict[str, Callable[[], list[Result]]] = {
        "record": record, "flush": flush, "memory": memory, "spans": spans, "threads": threads, "forks": forks,
        "exit": exit_,
        "slowdown": lambda: slowdown(say), "cpu": lambda: cpu(say), "latency": lambda: latency(say), "wandb": wandb,
    }  # fmt: skip
    results = []
    for name in names or every:
        say(f"measuring: {name}")
        results += every[name]()
    return results


def show_benchmarks(results: Sequence[Result]) -> None:
    """Print them as a table."""
    table = Table(title="What telemetry costs here")
    for column in ("what", "value", "baseline", "ratio", "target", "more"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for result in results:
        more = {key: value for key, value in result.items() if key not in ("what", "value", "unit", "baseline", "baseline_value", "ratio", "target")}
        table.add_row(
            result["what"], f"{result['value']:g} {result['unit']}", f"{result['baseline']}: {result['baseline_value']:g} {result['unit']}",
            str(result["ratio"]), result["target"], json.dumps(more) if more else "",
        )  # fmt: skip
    Console(width=180).print(table)
