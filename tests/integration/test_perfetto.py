"""A trace file of steps, from a real Jaeger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli.jaeger_traces import step_traces
from otel_forge.errors import InputError
from tests.integration.conftest import Cli, clean_environment, wait_for
from tests.integration.test_shapes import finish, launch

RANKS, STEPS = 3, 6


def _train(folder: Path, servers: Any, run_id: str, steps: int = STEPS) -> None:
    environ = clean_environment(folder / "state") | {
        "OTEL_FORGE_ENDPOINT": servers.otlp_http, "OTEL_FORGE_SHAPE": servers.shape, "OTEL_FORGE_RUN_ID": run_id,
    }  # fmt: skip
    finish(launch(folder, RANKS, environ, "--steps", str(steps)))


def _slices(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return processes, [event for event in events if event["ph"] == "X"]


def test_a_step_and_a_range_of_the_living_up_become_trace_files(tmp_path: Path, cli: Cli, start_stack: Callable[..., Any]) -> None:
    _, servers = start_stack("direct", jaeger=True)
    query = servers.jaeger_query
    for run_id in ("first", "second"):
        _train(tmp_path, servers, run_id)
    wait_for(lambda: _spans(query, "second") >= STEPS * (2 + 3 * RANKS), 30, "every span of the second run")
    wait_for(lambda: _spans(query, "first") >= STEPS * (2 + 3 * RANKS), 30, "every span of the first run")
    environ = {"OTEL_FORGE_STATE_DIR": str(tmp_path / "stack")}

    one = cli("report", "--perfetto", "3", "-o", "one.json", "--json", **environ)
    assert one.returncode == 0, one.stderr
    told = json.loads(one.stdout)
    assert (told["run_id"], told["traces"]) == ("second", 1), "the newest run that has the step"
    processes, slices = _slices(tmp_path / "one.json")
    assert [name.partition(" on ")[0] for name in processes.values()] == ["steps", *(f"trainer rank {rank}" for rank in range(RANKS))]
    assert len(slices) == told["slices"] == 2 + 3 * RANKS
    assert {event["name"] for event in slices if event["pid"] == 0} == {"step 3", "trainer (all ranks)"}
    for pid in range(1, RANKS + 1):
        own = {event["name"]: event for event in slices if event["pid"] == pid}
        assert set(own) == {f"rank {pid - 1}", "job", "job/record"}
        outer, inner = own[f"rank {pid - 1}"], own["job/record"]
        assert (outer["tid"], inner["tid"]) == (0, 0)
        assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]

    many = cli("report", "first", "--perfetto", "2-4", "-o", "many.json", "--jaeger", query)
    assert many.returncode == 0, many.stderr
    _, slices = _slices(tmp_path / "many.json")
    assert {event["name"] for event in slices if event["name"].startswith("step")} == {"step 2", "step 3", "step 4"}
    assert json.loads((tmp_path / "many.json").read_text())["otherData"]["run_id"] == "first"

    for arguments, words in ((["--perfetto", "99"], "has no trace of step 99"), (["nix", "--perfetto", "3"], "none of run nix")):
        done = cli("report", *arguments, **environ)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def _spans(query: str, run_id: str) -> int:
    """How many spans of a run there are in the roots' traces."""
    try:
        return sum(len(trace["spans"]) for trace in step_traces(query, 0, STEPS - 1, run_id)[1])
    except InputError:
        return 0


@pytest.mark.parametrize("shape", ["direct"])
def test_something_that_is_no_jaeger_is_named(shape: str, cli: Cli, start_stack: Callable[..., Any]) -> None:
    _, servers = start_stack(shape, jaeger=False)
    done = cli("report", "--perfetto", "3", "--jaeger", servers.otlp_http)
    assert done.returncode == 2
    assert servers.otlp_http in done.stderr
    assert "Traceback" not in done.stderr
