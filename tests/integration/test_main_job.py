"""The main job: DDP training through a real Collector, to JSONL, a wandb run, and one Jaeger trace a step."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from otel_forge_exporters.wandb_files import records, run_dirs

from otel_forge.cli.servers import fetch
from tests.integration.conftest import EXAMPLE, Cli, rows_of, wait_for

STEPS, RANKS = 20, 4


def _train(*more: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", str(EXAMPLE), "--steps", str(STEPS), *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One training, looked at by every test of this module while its servers still run."""
    from tests.integration.conftest import clean_environment

    folder = tmp_path_factory.mktemp("main_job")
    config = folder / "forge.yaml"
    config.write_text(f"metric_logging:\n  jsonl: {{path: {folder}/rows.jsonl}}\n  wandb: {{project: p, mode: offline, dir: {folder}}}\n")
    cli = Cli(folder, clean_environment(folder / "state"))
    started = cli("up", "--config", str(config), "--json")
    assert started.returncode == 0, started.stderr
    servers = json.loads(started.stdout)
    try:
        done = cli("run", "--config", str(config), "--", *_train("--record-truth", str(folder / "truth")), HTTP_PROXY="http://127.0.0.1:9")
        assert done.returncode == 0, done.stderr[-3000:]
        status = json.loads(cli("status", "--json").stdout)
        yield folder, servers, status
    finally:
        stopped = cli("down")
        assert stopped.returncode == 0, stopped.stderr


def _truth(folder: Path) -> list[list[dict[str, Any]]]:
    return [json.loads((folder / "truth" / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_each_step_is_one_row_of_all_ranks_and_its_values_are_those_the_ranks_trained_on(trained: Any) -> None:
    """Loss to 1e-9 of the mean over all samples of all ranks, tokens exactly; HTTP_PROXY to a dead address changes nothing."""
    folder, _, _ = trained
    rows = rows_of(folder / "rows.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row, *ranks in zip(rows, *_truth(folder), strict=True):
        assert (row["ranks_reporting"], row["world_size"], row["rank"], row["revision"], row["mode"]) == (RANKS, RANKS, None, 1, "global_reduce")
        losses = [loss for rank in ranks for loss in rank["losses"]]
        assert row["metrics"]["tokens"] == sum(rank["tokens"] for rank in ranks)
        assert math.isclose(row["metrics"]["loss"], math.fsum(losses) / len(losses), rel_tol=1e-9)
        assert row["metrics"]["grad_norm"] == max(rank["grad_norm"] for rank in ranks)
        assert math.isclose(row["metrics"]["sample_loss/std"], statistics.pstdev(losses), rel_tol=1e-12)
    assert rows[-1]["metrics"]["loss"] < rows[0]["metrics"]["loss"]


def test_the_wandb_run_has_the_same_rows_and_no_system_metrics(trained: Any) -> None:
    folder, _, _ = trained
    rows = rows_of(folder / "rows.jsonl")
    wait_for(lambda: len(_history(folder, rows[0]["run_id"])) == STEPS, 10, "20 rows in the offline file")
    history = _history(folder, rows[0]["run_id"])
    assert [row["global_step"] for row in history] == list(range(STEPS))
    for row, logged in zip(rows, history, strict=True):
        assert {key: logged[key] for key in row["metrics"]} == pytest.approx(row["metrics"], rel=1e-15)
        assert logged["_timestamp"] == pytest.approx(row["time_unix"])
    kinds = {record.WhichOneof("record_type") for path in _logs(folder, rows[0]["run_id"]) for record in records(path)}
    assert "history" in kinds
    assert "stats" not in kinds


def _logs(folder: Path, run_id: str) -> list[Path]:
    return [path for run_dir in run_dirs(folder, run_id) for path in run_dir.glob("*.wandb")]


def _history(folder: Path, run_id: str) -> list[dict[str, Any]]:
    from otel_forge_exporters.wandb_files import history

    return [row for row in history(folder, run_id) if "global_step" in row]


def test_jaeger_has_one_trace_a_step_with_a_root_and_spans_of_every_rank(trained: Any) -> None:
    _, servers, _ = trained
    query = servers["jaeger_query"]
    assert set(json.loads(fetch(f"{query}/api/services", timeout_s=5) or b"")["data"]) >= {"trainer", "otel-forge"}

    def traces() -> list[dict[str, Any]]:
        answer = json.loads(fetch(f"{query}/api/traces?service=otel-forge&limit=500&lookback=1h", timeout_s=5) or b"")
        return [trace for trace in answer["data"] if _ranks(trace) == {str(rank) for rank in range(RANKS)}]

    wait_for(lambda: len(traces()) >= STEPS, 20, "a trace of all ranks for every step")
    by_name = {}
    for trace in traces():
        ids = {span["spanID"] for span in trace["spans"]}
        roots = [span for span in trace["spans"] if not span["references"]]
        assert len(roots) == 1
        by_name[roots[0]["operationName"]] = trace
        for span in trace["spans"]:
            assert all(reference["spanID"] in ids for reference in span["references"]), "a parent is missing"
    assert set(by_name) == {f"step {step}" for step in range(STEPS)}
    names = {span["operationName"] for span in by_name["step 7"]["spans"]}
    assert names >= {
        "step 7",
        "trainer (all ranks)",
        "rank 0",
        "rank 3",
        "train",
        "train/data",
        "train/forward",
        "train/optimizer",
        "Corpus/next_batch",
    }


def _ranks(trace: dict[str, Any]) -> set[str]:
    return {str(tag["value"]) for process in trace["processes"].values() for tag in process["tags"] if tag["key"] == "forge.rank"}
