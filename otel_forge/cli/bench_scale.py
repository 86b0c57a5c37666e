"""`otel-forge bench scale`: many simulated ranks against real Collectors and the real exporter. Their packets are those of the rank side's own code.

Values are small multiples of 1/8, so that sums of any order are exact and every value of every row can be compared bit by bit.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from otel_forge.cli.servers import Say
from otel_forge.cli.tiers import Tiers
from otel_forge.delivery import Packet
from otel_forge.errors import ServerError
from otel_forge.identity import Member, Run
from otel_forge.metrics import Reduce, Registry
from otel_forge.otlp_http import Poster, Verdict
from otel_forge.packets import PacketBuilder, Sealed

OWN_POINTS = 5
"""Points of each packet besides the series: contributors, step start and end, trace step, slowest."""
SENDERS_PER_COLLECTOR = 4
"""Connections at a time; real ranks have one each, which costs the Collector memory and not CPU."""
ROWS_TIMEOUT_S = 120.0
RETRY_S = 0.2
_REDUCTIONS = (Reduce.MEAN, Reduce.SUM, Reduce.MAX, Reduce.MIN)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """What is simulated."""

    ranks: int
    series: int
    steps: int = 10
    tiers: Literal[1, 2] = 1
    agents: int = 2
    gateway: Literal["forward", "reduce"] = "forward"
    window_s: float = 1.0
    interval_s: float = 1.0
    """From the first packet of a step to the first of the next, unless sending takes longer."""


def _value(rank: int, series: int, step: int) -> float:
    return rank % 97 + series / 8 + step


def expected(load: Load, step: int) -> dict[str, float]:
    """The metrics that the row of a step must have."""
    row = {}
    for series in range(load.series):
        values = [_value(rank, series, step) for rank in range(load.ranks)]
        total = sum(values)
        row[f"key{series}"] = (total / load.ranks, total, max(values), min(values))[series % len(_REDUCTIONS)]
    return row


class _Ranks:
    """Makes the packets of every rank."""

    def __init__(self, load: Load) -> None:
        self._load = load
        run = Run("bench", 1)
        self._builders = [
            PacketBuilder(Member("trainer", 0, rank, load.ranks), run, {}, nonce=f"n{rank}", modes="global_reduce", window=True, contribute=True)
            for rank in range(load.ranks)
        ]

    def packets(self, rank: int, step: int) -> list[Packet]:
        registry = Registry()
        registry.set_mode(off=False, bounded=False, stream=None)
        for series in range(self._load.series):
            registry.record(f"key{series}", _value(rank, series, step), _REDUCTIONS[series % len(_REDUCTIONS)], None)
        now = time.time_ns()
        return self._builders[rank].values(Sealed(step, step, 0, now - 1000, now, registry.drain()))


class _Senders:
    """Threads that post packets, by the senders' rules: once by the window, again only when it was surely not stored, else direct."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._queues: list[queue.SimpleQueue[Packet | None]] = [queue.SimpleQueue() for _ in endpoints]
        self._left = threading.Condition()
        self._waiting = 0
        self._threads = [
            threading.Thread(target=self._post, args=(endpoint, packets), daemon=True)
            for endpoint, packets in zip(endpoints, self._queues, strict=True)
            for _ in range(SENDERS_PER_COLLECTOR)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, rank: int, packet: Packet) -> None:
        with self._left:
            self._waiting += 1
        self._queues[rank % len(self._queues)].put(packet)

    def wait(self) -> None:
        """Until all is acknowledged."""
        with self._left:
            self._left.wait_for(lambda: not self._waiting)

    def stop(self) -> None:
        for packets in self._queues:
            for _ in range(SENDERS_PER_COLLECTOR):
                packets.put(None)
        for thread in self._threads:
            thread.join(10.0)

    def _post(self, endpoint: str, packets: queue.SimpleQueue[Packet | None]) -> None:
        poster = Poster(endpoint + "/v1/metrics", {}, 30.0, "none", None)
        while (packet := packets.get()) is not None:
            while (outcome := poster.post(packet.payload)).verdict is not Verdict.ACCEPTED:
                if outcome.verdict is not Verdict.NOT_STORED:
                    packet = packet.direct()
                time.sleep(RETRY_S)
            with self._left:
                self._waiting -= 1
                self._left.notify_all()
        poster.close()


@dataclass
class _Watch:
    """Reads rows as they are written, and when."""

    path: Path
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The newest revision of each step."""
    lines: int = 0
    seen_at: dict[int, float] = field(default_factory=dict)
    _offset: int = 0

    def look(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        for line in text.splitlines():
            row = json.loads(line)
            self.lines += 1
            self.rows[row["step"]] = row
            self.seen_at.setdefault(row["step"], time.monotonic())

    def run(self, done: threading.Event, steps: int) -> None:
        while not done.is_set() and len(self.rows) < steps:
            self.look()
            time.sleep(0.005)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak_mb(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(load: Load, say: Say) -> dict[str, Any]:
    """Run the load and say what it cost. Raises ServerError when a server cannot be started."""
    with tempfile.TemporaryDirectory(prefix="otel-forge-bench-") as name:
        folder = Path(name)
        config = folder / "forge.yaml"
        config.write_text(
            f"metric_logging: {{jsonl: {{path: {folder}/rows.jsonl}}}}\n"
            f"collector: {{window_s: {load.window_s}, row_deadline_s: 60, gateway: {load.gateway}}}\n"
        )
        tiers = Tiers(folder, config, agents=load.agents if load.tiers == 2 else 0, mode=load.gateway, window_s=load.window_s)
        try:
            tiers.start()
            return _measure(load, tiers, folder / "rows.jsonl", say)
        finally:
            tiers.stop()


def _measure(load: Load, tiers: Tiers, path: Path, say: Say) -> dict[str, Any]:
    pids = {name: server.pid for name, server in tiers.servers.items()}
    before = {name: _cpu_s(pid) for name, pid in pids.items()}
    watch, done = _Watch(path), threading.Event()
    watching = threading.Thread(target=watch.run, args=(done, load.steps), daemon=True)
    watching.start()
    started = time.monotonic()
    sent_at = _send(load, tiers.endpoints, say)
    watching.join(ROWS_TIMEOUT_S)
    done.set()
    watching.join()
    for name, server in tiers.servers.items():
        if server.process is None or server.process.poll() is not None:
            raise ServerError(f"{name} ended during the run; {server.log.read_text(errors='replace')[-1000:]}")
    cpu = {name: _cpu_s(pid) - before[name] for name, pid in pids.items()}
    peak = {name: _peak_mb(pid) for name, pid in pids.items()}
    return _result(load, watch, sent_at, started, cpu, peak)


def _send(load: Load, endpoints: Sequence[str], say: Say) -> dict[int, float]:
    """Send every step; when each was acknowledged whole. The packets of a step are made before its time, as ranks would all at once."""
    ranks, senders = _Ranks(load), _Senders(endpoints)
    sent_at = {}
    due = time.monotonic()
    for step in range(load.steps):
        made = [(rank, packet) for rank in range(load.ranks) for packet in ranks.packets(rank, step)]
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + load.interval_s
        for rank, packet in made:
            senders.put(rank, packet)
        senders.wait()
        sent_at[step] = time.monotonic()
        say(f"step {step + 1} of {load.steps} of {load.ranks} ranks is sent")
    senders.stop()
    return sent_at


def _result(load: Load, watch: _Watch, sent_at: dict[int, float], started: float, cpu: dict[str, float], peak: dict[str, float]) -> dict[str, Any]:
    points = load.ranks * load.steps * (load.series + OWN_POINTS)
    collectors = [name for name in cpu if name != "exporter"]
    collector_cpu = sum(cpu[name] for name in collectors)
    exact = marked = 0
    for step, row in watch.rows.items():
        is_marked = bool(row.get("ranks_missing") or row.get("ranks_doubtful") or "forge/inconsistent" in row["metrics"])
        marked += is_marked
        wanted = expected(load, step)
        exact += not is_marked and row["ranks_reporting"] == load.ranks and {key: row["metrics"].get(key) for key in wanted} == wanted
    latencies = [max(0.0, watch.seen_at[step] - at) for step, at in sent_at.items() if step in watch.seen_at]
    passed = max(watch.seen_at.values(), default=time.monotonic()) - started
    return {
        "ranks": load.ranks, "series": load.series, "steps": load.steps, "tiers": load.tiers, "gateway": load.gateway if load.tiers == 2 else None,
        "rows": len(watch.rows), "exact_rows": exact, "marked_rows": marked, "revisions": watch.lines,
        "points_in": points, "points_per_s": round(points / passed),
        "collector_cpu_us_per_point": round(1e6 * collector_cpu / points, 2),
        "collector_cpu_s_per_1000_points": round(1e3 * collector_cpu / points, 5),
        "collector_rss_mb": round(max(peak[name] for name in collectors), 1), "exporter_rss_mb": round(peak["exporter"], 1),
        "exporter_cpu_s": round(cpu["exporter"], 2),
        "exporter_cpu_s_per_1000_rows": round(1000 * cpu["exporter"] / max(1, len(watch.rows)), 2),
        "row_latency_s_median": round(statistics.median(latencies), 3) if latencies else None,
        "row_latency_s_max": round(max(latencies), 3) if latencies else None,
        "processes": {name: {"cpu_s": round(cpu[name], 2), "rss_mb": round(peak[name], 1)} for name in cpu},
    }  # fmt: skip


def describe(result: dict[str, Any]) -> str:
    """The result as lines for people."""
    lines = [
        f"{result['ranks']} ranks × {result['series']} series × {result['steps']} steps, {result['tiers']} tier(s)",
        f"  rows            {result['rows']}, {result['exact_rows']} exact, {result['marked_rows']} marked",
        f"  points in       {result['points_in']}, {result['points_per_s']} a second",
        f"  Collector(s)    {result['collector_cpu_us_per_point']} µs CPU a point, {result['collector_rss_mb']} MB RSS at most",
        f"  exporter        {result['exporter_cpu_s']} s CPU, {result['exporter_rss_mb']} MB RSS at most",
        f"  row latency     {result['row_latency_s_median']} s median, {result['row_latency_s_max']} s at most (the window is in it)",
    ]
    return "\n".join(lines)
