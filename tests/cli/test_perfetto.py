"""Traces as a Chrome trace file: processes, tracks, device time. The traces have the form of Jaeger's query API."""

from __future__ import annotations

import random
from typing import Any

import pytest

from otel_forge.cli.jaeger_traces import _covers
from otel_forge.cli.perfetto import Piece, chrome_trace, lanes
from tests.cli.rows import run


def _process(service: str, **tags: Any) -> dict[str, Any]:
    return {"serviceName": service, "tags": [{"key": key.replace("_", "."), "value": value} for key, value in tags.items()]}


def _span(process: str, name: str, start: int, duration: int, **tags: Any) -> dict[str, Any]:
    listed = [{"key": f"forge.{key}", "value": value} for key, value in tags.items()]
    return {"processID": process, "operationName": name, "startTime": start, "duration": duration, "tags": listed, "references": []}


TRACE = {
    "processes": {
        "p1": _process("otel-forge", forge_run="r"),
        "p2": _process("trainer", forge_role="trainer", forge_rank="1", host_name="b"),
        "p3": _process("my-service", forge_role="trainer", forge_rank="0", host_name="a"),
    },
    "spans": [
        _span("p1", "step 7", 1_000_000, 900),
        _span("p2", "train", 1_000_100, 500, device_time_s=0.0004, device_start_unix_nano=1_000_250_500, device="cuda:1"),
        _span("p3", "train", 1_000_050, 600, device_time_s=0.0002),
        _span("p3", "train/forward", 1_000_060, 100),
    ],
}


def _named(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in trace["traceEvents"] if event["name"] == kind}


def test_ranks_are_processes_in_order_behind_the_steps() -> None:
    trace = chrome_trace("r", [TRACE])
    assert list(_named(trace, "process_name").values()) == ["steps", "trainer rank 0 on a", "trainer rank 1 on b"]
    assert trace["otherData"] == {"run_id": "r", "start_unix_us": 1_000_000.0}


def test_device_time_is_a_track_of_its_own_at_the_devices_start_or_else_the_hosts() -> None:
    trace = chrome_trace("r", [TRACE])
    assert _named(trace, "thread_name") == {(0, 0): "host", (1, 0): "host", (1, 1000): "device", (2, 0): "host", (2, 1000): "device"}
    device = {event["pid"]: event for event in trace["traceEvents"] if event.get("cat") == "device"}
    assert (device[2]["ts"], device[2]["dur"], device[2]["args"]) == (250.5, 400.0, {"device": "cuda:1"})
    assert (device[1]["ts"], device[1]["dur"]) == (50.0, 200.0)
    assert device[1]["args"] == {"start": "the host's: the device's was not recorded"}


def test_a_rank_is_one_process_over_several_steps() -> None:
    trace = chrome_trace("r", [TRACE, TRACE])
    assert len(_named(trace, "process_name")) == 3


@pytest.mark.parametrize("seed", range(10))
def test_slices_of_a_track_are_inside_each_other_or_apart(seed: int) -> None:
    """Spans of several tasks overlap; the form has no place for that on one track."""
    source = random.Random(seed)
    pieces = [Piece(str(i), start, start + source.randrange(1, 50), {}) for i in range(200) for start in [source.randrange(500)]]
    found = lanes(pieces)
    assert sorted((piece.name for lane in found for piece in lane), key=int) == [str(i) for i in range(200)]
    for lane in found:
        for one in lane:
            for other in lane:
                apart = one.end_us <= other.start_us or other.end_us <= one.start_us
                nested = (one.start_us <= other.start_us and other.end_us <= one.end_us) or (
                    other.start_us <= one.start_us and one.end_us <= other.end_us
                )
                assert apart or nested


def test_nested_spans_need_one_track() -> None:
    assert len(lanes([Piece("b", 1, 5, {}), Piece("a", 0, 10, {}), Piece("c", 5, 9, {}), Piece("d", 10, 12, {})])) == 1


@pytest.mark.parametrize(
    ("name", "first", "last", "does"),
    [
        ("step 7", 7, 7, True),
        ("step 7", 8, 9, False),
        ("step 11–20", 15, 15, True),
        ("step 11–20", 21, 30, False),
        ("step 70", 7, 7, False),
        ("x 7", 7, 7, False),
    ],
)
def test_a_root_covers_the_steps_in_its_name(name: str, first: int, last: int, does: bool) -> None:
    assert _covers(name, first, last) is does


def test_what_cannot_be_done_is_said(tmp_path: Any) -> None:
    for arguments, words in (
        (["--perfetto", "7"], "no Jaeger to ask"),
        (["--perfetto", "x"], "'x' is no list of steps"),
        (["--perfetto", "1,5"], "one step or a range A-B"),
        (["--perfetto", "7", "--jaeger", "http://127.0.0.1:9"], "Jaeger's query API does not answer"),
    ):
        done = run("report", "-o", tmp_path / "trace.json", *arguments)
        assert (done.exit_code, words in done.output) == (2, True), done.output
    assert not (tmp_path / "trace.json").exists()
