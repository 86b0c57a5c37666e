"""A training script that knows nothing of otel-forge, on two ranks, with the real Collector and Jaeger."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli.servers import fetch
from tests.integration.conftest import HERE, Cli, clean_environment, rows_of, wait_for

SCRIPTS = HERE.parent / "scripts"
STEPS, RANKS = 6, 2
TRAIN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", str(SCRIPTS / "train_plain.py")]


def _config(folder: Path, *more: str) -> Path:
    path = folder / "forge.yaml"
    path.write_text("\n".join([f"metric_logging:\n  jsonl: {{path: {folder}/rows.jsonl}}", *more]))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("zero_code")
    config = _config(folder, 'instrument: ["torch", "train_plain:Trainer.*"]', "step: {on: optimizer}")
    cli = Cli(folder, clean_environment(folder / "state"))
    started = cli("up", "--config", str(config), "--json")
    assert started.returncode == 0, started.stderr
    try:
        done = cli("run", "--config", str(config), "--", *TRAIN, "--steps", str(STEPS), "--workers", "1")
        assert done.returncode == 0, done.stderr[-3000:]
        yield folder, json.loads(started.stdout)
    finally:
        assert cli("down").returncode == 0


def test_every_step_is_a_row_of_all_ranks_with_step_time_and_data_wait(trained: Any) -> None:
    """One row a step, and one for what comes after the last: the checkpoint."""
    folder, _ = trained
    rows = rows_of(folder / "rows.jsonl")
    assert [(row["step"], row["ranks_reporting"], row["world_size"]) for row in rows] == [(step, RANKS, RANKS) for step in range(STEPS + 1)]
    for row in rows[:STEPS]:
        metrics = row["metrics"]
        for scope in ("step", "data/wait", "ddp/forward", "ddp/backward_wait", "optimizer/step", "Trainer/train_step", "Trainer/loss_of"):
            assert 0 < metrics[f"{scope}/total_duration_avg_s"] <= metrics[f"{scope}/total_duration_max_s"]
        assert metrics["Trainer/train_step/total_duration_avg_s"] < metrics["step/total_duration_avg_s"]
    assert rows[STEPS]["metrics"].keys() >= {"checkpoint/save/total_duration_avg_s", "Trainer/fit/total_duration_avg_s"}


def test_every_step_is_a_trace_over_all_ranks_with_no_parent_missing(trained: Any) -> None:
    _, servers = trained

    def traces() -> dict[str, Any]:
        answer = json.loads(fetch(f"{servers['jaeger_query']}/api/traces?service=otel-forge&limit=100&lookback=1h", timeout_s=5) or b"")
        named = {span["operationName"]: trace for trace in answer["data"] for span in trace["spans"] if not span["references"]}
        return {name: trace for name, trace in named.items() if {span["operationName"] for span in trace["spans"]} >= {"rank 0", "rank 1"}}

    wait_for(lambda: len(traces()) > STEPS, 30, "a trace of both ranks for every step")
    found = traces()
    assert set(found) == {f"step {step}" for step in range(STEPS + 1)}
    for trace in found.values():
        ids = {span["spanID"] for span in trace["spans"]}
        assert all(reference["spanID"] in ids for span in trace["spans"] for reference in span["references"])
    tree = _parents(found["step 3"])
    assert {child for child, parent in tree if parent == "rank 1"} == {"data/wait", "Trainer/train_step"}
    assert {child for child, parent in tree if parent == "Trainer/train_step"} >= {"Trainer/loss_of", "ddp/backward_wait", "optimizer/step"}
    assert ("ddp/forward", "Trainer/loss_of") in tree


def _parents(trace: dict[str, Any]) -> set[tuple[str, str]]:
    names = {span["spanID"]: span["operationName"] for span in trace["spans"]}
    return {(span["operationName"], names[span["references"][0]["spanID"]]) for span in trace["spans"] if span["references"]}


SPAWNING = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from train_plain import Numbers, Trainer, Settings
from plain_model import Network
from torch.nn.parallel import DistributedDataParallel


def worker(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    trainer = Trainer(DistributedDataParallel(Network(4)), Settings(3))
    trainer.fit(torch.utils.data.DataLoader(Numbers(6), batch_size=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(int(sys.argv[1]),), nprocs=2)
"""


def test_ranks_that_the_script_spawns_itself(cli: Cli, tmp_path: Path) -> None:
    """The parent is no rank; its children are, though they are children of multiprocessing."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "spawning.py").write_text(SPAWNING)
    config = _config(tmp_path, 'instrument: ["torch", "train_plain:Trainer.train_step", "spawning:worker"]')
    cli.environ["PYTHONPATH"] = ":".join([cli.environ.get("PYTHONPATH", ""), str(SCRIPTS)])
    done = cli("run", "--config", str(config), "--shape", "direct", "--", sys.executable, "spawning.py", str(port))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in rows_of(tmp_path / "rows.jsonl") if "step/total_duration_avg_s" in row["metrics"]]
    assert [(row["step"], row["ranks_reporting"], row["world_size"]) for row in rows] == [(0, 2, 2), (1, 2, 2), (2, 2, 2)]
    assert all("Trainer/train_step/total_duration_avg_s" in row["metrics"] for row in rows)
