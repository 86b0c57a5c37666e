"""From `init` to `shutdown` in one process: rows and spans as a user's test sees them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import otel_forge
from otel_forge import LoggingMode, Reduce, metrics, points, record_metric, record_metrics
from otel_forge.errors import ConfigError, InvalidValueError
from otel_forge.testing import capture
from tests.fresh_process import in_fresh_process


def _metrics(row: dict[str, object]) -> dict[str, float]:
    found = row["metrics"]
    assert isinstance(found, dict)
    return {key: value for key, value in found.items() if not key.startswith("forge/")}


def test_steps_become_rows_with_one_value_per_key() -> None:
    with capture() as captured:
        for step in range(3):
            with otel_forge.step(step):
                record_metrics({"loss": 1.0 / (step + 1), "lr": 0.1})
                record_metric("tokens", 10, Reduce.SUM)
        rows = captured.rows
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert _metrics(rows[1]) == {"loss": 0.5, "lr": 0.1, "tokens": 10.0}


def test_gradient_accumulation_is_one_row_of_all_micro_batches() -> None:
    with capture() as captured:
        for loss in (4.0, 3.0, 2.0, 1.0):
            record_metric("loss", loss)
            record_metric("tokens", 10, Reduce.SUM)
        otel_forge.flush(0)
        assert _metrics(captured.rows[0]) == {"loss": 2.5, "tokens": 40.0}


def test_a_key_that_was_not_recorded_in_a_step_is_not_in_its_row() -> None:
    with capture() as captured:
        record_metric("queue/wait", 3.0, Reduce.MAX)
        otel_forge.flush(0)
        otel_forge.flush(1)
        assert [list(_metrics(row)) for row in captured.rows] == [["queue/wait"], []]


def test_what_was_recorded_before_init_is_in_the_first_row() -> None:
    record_metric("early", 1.0)
    with capture() as captured:
        record_metric("late", 2.0)
        otel_forge.flush(0)
        assert set(_metrics(captured.rows[0])) == {"late"}, "capture starts from nothing"
    otel_forge.pipeline.reset()
    record_metric("early", 1.0)
    otel_forge.set_step(7)
    assert otel_forge.get_step() == 7


def test_steps_repeat_go_back_and_jump() -> None:
    with capture() as captured:
        for step in (100, 100, 5, 1000):
            record_metric("x", float(step))
            otel_forge.flush(step)
        assert [(row["step"], row["occurrence"]) for row in captured.rows] == [(100, 0), (100, 1), (5, 0), (1000, 0)]
        assert otel_forge.get_step() == 1001


def _record_and_fail() -> None:
    record_metric("loss", 1.0)
    raise ValueError("boom")


def test_a_step_that_fails_is_flushed_and_its_span_marked() -> None:
    with capture() as captured:
        with pytest.raises(ValueError, match="boom"), otel_forge.step(3):
            _record_and_fail()
        assert _metrics(captured.rows[0]) == {"loss": 1.0}
        assert [(span.name, span.error) for span in captured.spans] == [("rank 0", "boom")]


def test_the_three_modes_at_once_each_see_their_own_rows() -> None:
    with capture(modes=list(LoggingMode)) as captured:
        for value in (1.0, 3.0):
            record_metric("loss", value)
        otel_forge.flush(0)
        rows = captured.rows
    by_mode = {mode.value: [_metrics(row) for row in rows if row["mode"] == mode.value] for mode in LoggingMode}
    assert by_mode["global_reduce"] == [{"loss": 2.0}]
    assert by_mode["per_rank_reduce"] == [{"loss": 2.0}]
    assert by_mode["per_rank_no_reduce"] == [{"loss": 1.0}, {"loss": 3.0}]
    assert [row["sequence"] for row in rows if row["mode"] == "per_rank_no_reduce"] == [0, 1]


def test_reductions_end_to_end() -> None:
    with capture() as captured:
        for value in (1e8 + 1, 1e8 + 2, 1e8 + 3):
            record_metric("std", value, Reduce.STD)
            record_metric("h", value - 1e8, Reduce.HISTOGRAM([1.0, 2.0, 3.0]))
        for value, weight in ((1.0, 1.0), (4.0, 3.0)):
            record_metric("w", value, weight=weight)
        record_metric("odd key (%)", -1.5, Reduce.MIN)
        record_metric("k" * 300, 2.0)
        otel_forge.flush(0)
        found = _metrics(captured.rows[0])
    assert found["std"] == pytest.approx((2 / 3) ** 0.5, rel=1e-15)
    assert found["w"] == 3.25
    assert found["odd key (%)"] == -1.5
    assert found["k" * 300] == 2.0
    assert found["h/p50"] == pytest.approx(1.5)


def test_20000_keys_in_one_step_are_one_row() -> None:
    with capture() as captured:
        for number in range(20_000):
            record_metric(f"key/{number}", float(number))
        otel_forge.flush(0)
        assert _metrics(captured.rows[0]) == {f"key/{number}": float(number) for number in range(20_000)}


def test_a_bad_step_is_said_and_the_open_step_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with capture(strict=False) as captured:
        record_metric("x", 1.0)
        otel_forge.flush(-3)
        assert captured.rows[0]["step"] == 0
    assert "a step must be an int ≥ 0, got -3" in caplog.text
    with capture(), pytest.raises(InvalidValueError):
        otel_forge.flush("7")  # type: ignore[arg-type]


def test_wait_tells_whether_the_step_was_acknowledged() -> None:
    with capture() as captured:
        record_metric("x", 1.0)
        assert otel_forge.flush(0, wait_s=5.0)
        assert len(captured.rows) == 1
    assert otel_forge.flush(1) is False, "before init nothing is queued"


def test_init_refuses_a_bad_configuration_and_a_second_one_does_nothing() -> None:
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        otel_forge.init({"metric_logging": {"wanb": {}}})
    with capture():
        before = otel_forge.pipeline.current()
        otel_forge.init({"metric_logging": {"jsonl": {}}})
        assert otel_forge.pipeline.current() is before


def test_disabled_by_the_environment_nothing_is_kept_or_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    threads = threading.active_count()
    otel_forge.init()
    record_metric("x", 1.0)
    assert otel_forge.flush(0) is False
    assert threading.active_count() == threads
    assert otel_forge.shutdown().delivered == 0


def test_importing_loads_no_heavy_package() -> None:
    script = (
        "import sys, otel_forge; print([m for m in ('torch','wandb','grpc','opentelemetry','requests','urllib3','pydantic') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_the_public_names_are_those_of_the_contract() -> None:
    assert set(otel_forge.__all__) >= {
        "init", "record_metric", "record_metrics", "Reduce", "Tracer", "trace", "span", "instrument", "LoggingMode", "step", "flush", "set_step",
        "get_step", "set_run_config", "shutdown", "no_instrument", "uninstrument", "inject", "extract",
    }  # fmt: skip
    assert all(hasattr(otel_forge, name) for name in otel_forge.__all__)


SCRIPT = """
import os, signal, sys, time
import otel_forge
otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}})
otel_forge.record_metric("loss", 1.0); otel_forge.flush(0)
otel_forge.record_metric("loss", 2.0)
how = sys.argv[1]
if how == "raise": raise RuntimeError("boom")
if how == "sigterm": os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("sigterm", -15)])
def test_however_a_program_ends_what_it_recorded_is_written(how: str, code: int, tmp_path: Path) -> None:
    """The value after the last flush goes out under the next step."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["step"], row["metrics"]["loss"]) for row in rows] == [(0, 1.0), (1, 2.0)]


def test_many_ranks_with_nothing_to_send_to_keep_their_packets_and_say_how_to_go_on(tmp_path: Path) -> None:
    script = "import otel_forge as f; f.init(rank=0, world_size=2, run_id='r'); f.record_metric('x', 1.0); f.flush(0); print(f.shutdown())"
    environ = os.environ | {"OTEL_FORGE_STATE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert "otel-forge replay r" in done.stderr
    assert "dropped=0" in done.stdout
    assert list((tmp_path / "spool" / "r").glob("*.spill"))


def test_forked_children_keep_nothing_of_their_parent_s_and_end() -> None:
    in_fresh_process("tests.test_pipeline", "fork_while_recording")


def fork_while_recording() -> None:
    with capture() as captured:
        record_metric("x", 1.0)
        for _ in range(20):
            child = os.fork()
            if child == 0:
                record_metric("x", 100.0)
                otel_forge.flush(0)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        otel_forge.flush(0)
        assert _metrics(captured.rows[0]) == {"x": 1.0}


def test_two_roles_in_one_process_each_flush_their_own_steps() -> None:
    """A trainer and a generator as asyncio tasks: neither sees the other's values, steps or spans."""

    async def loop(name: str, first: int) -> None:
        with otel_forge.role(name):
            for step in range(first, first + 3):
                record_metric("loss", float(step))
                await asyncio.sleep(0)
                with otel_forge.span(f"{name}/work"):
                    await asyncio.sleep(0)
                assert otel_forge.get_step() == (step if step > first else 0)
                otel_forge.flush(step)

    async def both() -> None:
        await asyncio.gather(loop("generator", 0), loop("judge", 100))

    with capture() as captured:
        record_metric("own", 1.0)
        asyncio.run(both())
        record_metric("own", 2.0)
        otel_forge.flush(7)
        rows = captured.rows
        spans = captured.spans
    found = {(row["role"], row["step"]): {k: v for k, v in row["metrics"].items() if not k.startswith("forge/")} for row in rows}
    expected: dict[tuple[str, int], dict[str, float]] = {("generator", step): {"loss": float(step)} for step in range(3)}
    expected |= {("judge", step): {"loss": float(step)} for step in range(100, 103)} | {("trainer", 7): {"own": 1.5}}
    assert found == expected
    assert sorted(span.name for span in spans) == ["generator/work"] * 3 + ["judge/work"] * 3


def test_what_a_role_recorded_after_its_last_flush_goes_out_at_shutdown() -> None:
    with capture() as captured:
        with otel_forge.role("generator"):
            otel_forge.flush(4)
            record_metric("late", 1.0)
        otel_forge.shutdown()
        rows = captured.rows
    assert [(row["role"], row["step"], row["metrics"].get("late")) for row in rows] == [("generator", 4, None), ("generator", 5, 1.0)]


def test_telemetry_says_what_it_costs_once_per_step() -> None:
    with capture(strict=False) as captured:
        for step in range(2):
            for _ in range(5):
                record_metric("loss", 1.0)
            record_metric("loss", "rubbish" if step else 1.0)
            otel_forge.flush(step)
        first, second = ({k.removeprefix("forge/telemetry/"): v for k, v in row["metrics"].items() if "telemetry" in k} for row in captured.rows)
    assert first.keys() == {"records", "flush_time_s", "thread_cpu_s"}
    assert (first["records"], second["records"], second["values_dropped"]) == (6.0, 5.0, 1.0)
    assert 0 < first["flush_time_s"] < 1
    assert 0 < second["thread_cpu_s"] < 1


def test_every_record_of_a_device_scalar_is_streamed_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from otel_forge import values

    monkeypatch.setattr(values, "is_host", lambda tensor: False)
    with capture(modes=(LoggingMode.GLOBAL_REDUCE, LoggingMode.PER_RANK_NO_REDUCE)) as captured:
        for value in (1.0, 2.0, 3.0):
            record_metric("loss", torch.tensor(value))
            time.sleep(0.01)
        otel_forge.flush(0)
        captured.rows  # noqa: B018 - waits until the values were read
        rows = captured.rows
    streamed = [row for row in rows if row["mode"] == "per_rank_no_reduce"]
    assert [row["metrics"] for row in streamed] == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    times = [row["time_unix"] for row in streamed]
    assert times[1] - times[0] > 0.009
    assert times[2] - times[1] > 0.009
    assert [row["metrics"]["loss"] for row in rows if row["mode"] == "global_reduce"] == [2.0]


def test_what_is_recorded_after_shutdown_is_counted_not_raised() -> None:
    with capture():
        record_metric("loss", 1.0)
        otel_forge.flush(0)
        otel_forge.shutdown()
        for _ in range(3):
            record_metric("loss", 1.0)
        assert not otel_forge.flush(1)
        assert metrics.registry().dropped == 3


def test_a_step_too_large_for_one_packet_is_split_and_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PART_BYTES", 20_000)
    with capture() as captured:
        for number in range(500):
            record_metric(f"key/{number}", float(number))
            record_metric(f"std/{number}", float(number), Reduce.STD)
        record_metric("weighted", 2.0, weight=3.0)
        otel_forge.flush(0)
        (row,) = captured.rows
    found = _metrics(row)
    assert len(found) == 1001
    assert found["key/499"] == 499.0
    assert (found["std/3"], found["weighted"]) == (0.0, 2.0)


def test_a_copy_s_values_are_kept_out_of_the_global_row_and_are_in_its_own() -> None:
    """A tensor-parallel copy: contribute=False."""
    with capture(modes=(LoggingMode.GLOBAL_REDUCE, LoggingMode.PER_RANK_REDUCE)) as captured:
        current = otel_forge.pipeline.current()
        assert current is not None
        current.given = {**current.given, "contribute": False}
        record_metric("tokens", 5.0, Reduce.SUM)
        otel_forge.flush(0)
        rows = captured.rows
    found = {row["mode"]: _metrics(row) for row in rows}
    assert found == {"global_reduce": {}, "per_rank_reduce": {"tokens": 5.0}}
