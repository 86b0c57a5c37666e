"""Backends of a user's own: both interfaces, and what one that misbehaves does to the others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.guard import Guard
from otel_forge_exporters.logger_backend import BackendRole, LoggerBackend, Metric
from otel_forge_exporters.own import ROWS_A_CALL
from otel_forge_exporters.rows import Row
from otel_forge_exporters.service import Service

from otel_forge.config import load_config
from otel_forge.errors import BackendTimeout, ConfigError
from otel_forge.metrics import Reduce
from tests.exporters.packets import Ranks, mean
from tests.integration.conftest import rows_of, wait_for

STEPS = 4


@contextlib.contextmanager
def _service(folder: Path, *, state: str | None = None, exit_code: int | None = 0, **backends: dict[str, Any]) -> Iterator[Service]:
    sections = {name: {"class": f"{__name__}:{options.pop('kind')}", **options} for name, options in backends.items()}
    config = load_config({"metric_logging": {"jsonl": {"path": str(folder / "rows.jsonl")}, **sections}})
    service = Service(config, state_dir=folder / state if state else None, work_dir=folder)
    service.start()
    yield service
    service.stop(5.0, exit_code)


def _train(service: Service, *, ranks: int = 1, steps: Sequence[int] = range(STEPS), modes: str = "global_reduce") -> None:
    senders = Ranks(ranks, modes=modes)
    for step in steps:
        for rank in range(ranks):
            service.accept_metrics(senders.send(rank, step, [*mean(float(step + rank)), ("tokens", 10, Reduce.SUM)]))


class Told(LoggerBackend):
    """Keeps what it is told, by the label of its section."""

    calls: ClassVar[dict[str, list[Any]]] = {}

    def __init__(self, logger_backend_config: dict[str, Any]) -> None:
        super().__init__(logger_backend_config)
        self.told = self.calls.setdefault(logger_backend_config["label"], [])
        self.process_name: str | None = None

    def init(self, role: BackendRole, primary_logger_metadata: dict[str, Any] | None = None, process_name: str | None = None) -> None:
        self.process_name = process_name
        self.told.append(("init", role, primary_logger_metadata, process_name))

    def log_batch(self, metrics: list[Metric], global_step: int, *args: Any, **kwargs: Any) -> None:
        self.told.append((self.process_name, global_step, {metric.key: (metric.value, metric.reduction) for metric in metrics}))

    def log_stream(self, metric: Metric, global_step: int, *args: Any, **kwargs: Any) -> None:
        self.told.append((self.process_name, global_step, metric.key, metric.value))

    def finish(self) -> None:
        self.told.append(("finish", self.process_name))

    def get_metadata_for_secondary_ranks(self) -> dict[str, Any] | None:
        return {"shared_run_id": "abc"}


class AsyncTold:
    """The same interface with coroutines, by duck type, as older backends of torchforge are: no process name."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, logger_backend_config: dict[str, Any]) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    async def init(self, role: str, primary_logger_metadata: dict[str, Any] | None = None) -> None:
        await asyncio.sleep(0)
        self.calls.append(("init", role))

    async def log_batch(self, metrics: list[Metric], global_step: int) -> None:
        await asyncio.sleep(0)
        self.tasks.append(asyncio.create_task(self._later(global_step)))

    async def _later(self, step: int) -> None:
        await asyncio.sleep(0.01)
        self.calls.append(step)

    async def finish(self) -> None:
        await asyncio.gather(*self.tasks)
        self.calls.append("finish")


def test_a_global_instance_gets_every_step_reduced_over_the_ranks(tmp_path: Path) -> None:
    with _service(tmp_path, mine={"kind": "Told", "label": "global"}) as service:
        _train(service, ranks=2, steps=[0, 1])
        assert service.drain(10)
    init, *steps, finish = Told.calls["global"]
    assert init == ("init", BackendRole.GLOBAL, {}, None)
    assert init[1] == "global"
    assert [(name, step, told["loss"], told["tokens"]) for name, step, told in steps] == [
        (None, 0, (0.5, Reduce.MEAN), (20.0, Reduce.SUM)),
        (None, 1, (1.5, Reduce.MEAN), (20.0, Reduce.SUM)),
    ]
    assert finish == ("finish", None)


def test_each_member_has_an_instance_of_its_own_in_per_rank_modes(tmp_path: Path) -> None:
    with _service(tmp_path, mine={"kind": "Told", "label": "ranks", "logging_mode": "per_rank_reduce"}) as service:
        _train(service, ranks=2, steps=[0], modes="global_reduce,per_rank_reduce")
        assert service.drain(10)
    told = Told.calls["ranks"]
    assert told[0] == ("init", BackendRole.LOCAL, {}, "trainer_0_0")
    assert [(name, step, values["loss"][0]) for name, step, values in (item for item in told if item[0] in ("trainer_0_0", "trainer_0_1"))] == [
        ("trainer_0_0", 0, 0.0),
        ("trainer_0_1", 0, 1.0),
    ]
    assert told[-2:] == [("finish", "trainer_0_0"), ("finish", "trainer_0_1")]


def test_a_shared_run_begins_with_the_global_instance_whose_metadata_the_others_get(tmp_path: Path) -> None:
    options = {"kind": "Told", "label": "shared", "logging_mode": "per_rank_reduce", "per_rank_share_run": True}
    with _service(tmp_path, mine=options) as service:
        _train(service, ranks=1, steps=[0], modes="global_reduce,per_rank_reduce")
        assert service.drain(10)
    told = Told.calls["shared"]
    assert told[:2] == [("init", "global", {}, None), ("init", "local", {"shared_run_id": "abc"}, "trainer_0_0")]
    assert told[-2:] == [("finish", "trainer_0_0"), ("finish", None)]


def test_single_records_are_streamed(tmp_path: Path) -> None:
    script = f"""
import otel_forge
from tests.exporters.test_own import Told
config = {{"class": "tests.exporters.test_own:Told", "label": "stream", "logging_mode": "per_rank_no_reduce"}}
otel_forge.init({{"collector": {{"shape": "inprocess"}}, "state_dir": {str(tmp_path)!r}, "metric_logging": {{"mine": config}}}})
for step in range(2):
    with otel_forge.step(step):
        for value in (1.0, float("nan")):
            otel_forge.record_metric("loss", value)
otel_forge.shutdown()
print([call for call in Told.calls["stream"] if call[0] == "trainer_0_0" and call[2] == "loss"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True, env=_environment())
    assert eval(done.stdout, {"nan": None}) == [
        ("trainer_0_0", 0, "loss", 1.0), ("trainer_0_0", 0, "loss", None), ("trainer_0_0", 1, "loss", 1.0), ("trainer_0_0", 1, "loss", None),
    ]  # fmt: skip


def test_coroutines_run_in_one_loop_with_the_tasks_they_leave_behind(tmp_path: Path) -> None:
    with _service(tmp_path, mine={"kind": "AsyncTold"}) as service:
        _train(service)
        assert service.drain(10)
    assert AsyncTold.calls == [("init", "global"), *range(STEPS), "finish"]


class Broken(LoggerBackend):
    """Raises where its section says."""

    def init(self, role: BackendRole, primary_logger_metadata: dict[str, Any] | None = None, process_name: str | None = None) -> None:
        self._maybe("init")

    def log_batch(self, metrics: list[Metric], global_step: int, *args: Any, **kwargs: Any) -> None:
        self._maybe("log_batch")

    def finish(self) -> None:
        self._maybe("finish")

    def _maybe(self, where: str) -> None:
        if self.logger_backend_config["where"] == where:
            raise {"error": ValueError, "exit": SystemExit, "interrupt": KeyboardInterrupt}[self.logger_backend_config["how"]]("on purpose")


@pytest.mark.parametrize("where", ["init", "log_batch", "finish"])
@pytest.mark.parametrize("how", ["error", "exit", "interrupt"])
def test_one_that_raises_hurts_only_itself(tmp_path: Path, where: str, how: str) -> None:
    with _service(tmp_path, mine={"kind": "Broken", "where": where, "how": how}, healthy={"kind": "Told", "label": f"{where}{how}"}) as service:
        _train(service)
        wait_for(
            lambda: len(rows_of(tmp_path / "rows.jsonl")) == STEPS and len(Told.calls.get(f"{where}{how}", [])) == 1 + STEPS, 10, "the others' rows"
        )
        if where != "finish":
            wait_for(lambda: "on purpose" in str(service.status()["runs"]["r"]["backends"]["mine"]["error"]), 10, "its error")


class Hanging(LoggerBackend):
    """Hangs where its section says, until it is released."""

    released = threading.Event()
    steps: ClassVar[list[int]] = []

    def init(self, role: BackendRole, primary_logger_metadata: dict[str, Any] | None = None, process_name: str | None = None) -> Any:
        return self._maybe("init")

    def log_batch(self, metrics: list[Metric], global_step: int, *args: Any, **kwargs: Any) -> Any:
        self._maybe("log_batch")
        self.steps.append(global_step)

    async def finish(self) -> None:
        if self.logger_backend_config["where"] == "finish":
            await asyncio.get_running_loop().run_in_executor(None, self.released.wait, 30)

    def _maybe(self, where: str) -> None:
        if self.logger_backend_config["where"] == where:
            self.released.wait(30)


@pytest.fixture
def _release() -> Iterator[None]:
    Hanging.released.clear()
    Hanging.steps.clear()
    yield
    Hanging.released.set()


@pytest.mark.usefixtures("_release")
@pytest.mark.parametrize("where", ["init", "log_batch", "finish"])
def test_the_end_of_a_run_does_not_wait_for_one_that_hangs(tmp_path: Path, where: str) -> None:
    """Drained and stopped while it still hangs: that it hangs on until after is what `released` shows."""
    with _service(tmp_path, mine={"kind": "Hanging", "where": where, "call_timeout_s": 0.2}) as service:
        _train(service)
        assert service.drain(10)
        assert len(rows_of(tmp_path / "rows.jsonl")) == STEPS
    assert not Hanging.released.is_set()


@pytest.mark.usefixtures("_release")
def test_one_that_hung_and_comes_back_gets_every_row_once(tmp_path: Path) -> None:
    with _service(tmp_path, mine={"kind": "Hanging", "where": "log_batch", "call_timeout_s": 0.1}) as service:
        _train(service)
        wait_for(lambda: "takes more than 0.1 s" in str(service.status()["runs"]["r"]["backends"]["mine"]["error"]), 10, "the time limit")
        assert Hanging.steps == []
        Hanging.released.set()
        wait_for(lambda: len(Hanging.steps) == STEPS, 10, "its rows")
    assert Hanging.steps == list(range(STEPS))


@pytest.mark.usefixtures("_release")
def test_rows_of_one_that_hung_until_the_end_are_there_for_the_next_exporter(tmp_path: Path) -> None:
    with _service(tmp_path, state="state", mine={"kind": "Hanging", "where": "init", "call_timeout_s": 0.1}) as service:
        _train(service)
        assert service.drain(10)
    assert Hanging.steps == []
    Hanging.released.set()
    with _service(tmp_path, state="state", mine={"kind": "Hanging", "where": "init", "call_timeout_s": 0.1}) as service:
        wait_for(lambda: len(Hanging.steps) == STEPS, 10, "its rows")
    assert Hanging.steps == list(range(STEPS))
    assert len(rows_of(tmp_path / "rows.jsonl")) == STEPS


class Slow:
    """A backend of rows that takes its time; fails once in the middle."""

    steps: ClassVar[list[int]] = []
    failed = False

    def __init__(self, config: Any, run: RunInfo, work_dir: Path) -> None: ...

    def open(self) -> None: ...

    def write(self, rows: Sequence[Row]) -> None:
        for item in rows:
            if len(self.steps) == 120 and not Slow.failed:
                Slow.failed = True
                raise ConnectionError("once")
            threading.Event().wait(0.001)
            self.steps.append(item.step)

    def has(self, row: Row) -> bool | None:
        return None

    def close(self, exit_code: int | None, timeout_s: float) -> None: ...

    def location(self) -> str | None:
        return f"{len(self.steps)} steps"


def test_one_that_is_slow_and_fails_once_gets_every_row_and_at_most_one_call_again(tmp_path: Path) -> None:
    with _service(tmp_path, mine={"kind": "Slow"}) as service:
        _train(service, steps=range(200))
        assert service.drain(30)
        assert service.status()["runs"]["r"]["backends"]["mine"]["location"] == f"{len(Slow.steps)} steps"
    assert sorted(set(Slow.steps)) == list(range(200))
    assert Slow.failed
    assert len(Slow.steps) < 200 + ROWS_A_CALL


def test_a_class_that_is_not_there_or_no_backend_is_said_and_nothing_waits_for_it(tmp_path: Path) -> None:
    config = load_config({"metric_logging": {"a": {"class": "no.such:Thing"}, "b": {"class": "pathlib:Path"}, "c": {"class": "pathlib:nothing"}}})
    service = Service(config, state_dir=None, work_dir=tmp_path)
    service.start()
    _train(service)
    assert service.drain(10)
    errors = {name: backend["error"] for name, backend in service.status()["runs"]["r"]["backends"].items()}
    service.stop(5.0, 0)
    assert "metric_logging.a: no.such:Thing cannot be loaded (No module named 'no')" in errors["a"]
    assert "metric_logging.b: pathlib:Path is neither a Backend nor a LoggerBackend: it lacks write, has, close, location" in errors["b"]
    assert "metric_logging.c: pathlib:nothing cannot be loaded" in errors["c"]


def test_a_path_that_is_none_is_refused_with_its_field() -> None:
    with pytest.raises(ConfigError, match=r"metric_logging.mine.class: must be a dotted path such as my.package:Backend \(got 'nonsense'\)"):
        load_config({"metric_logging": {"mine": {"class": "nonsense"}}})


def test_an_installed_package_s_entry_point_is_a_name_for_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "my_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[otel_forge.backends]\nplugged = {__name__}:Told\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = load_config({"metric_logging": {"plugged": {"label": "plugged"}}})
    service = Service(config, state_dir=None, work_dir=tmp_path)
    service.start()
    _train(service, steps=[0])
    assert service.drain(10)
    service.stop(5.0, 0)
    assert [call[1] for call in Told.calls["plugged"] if call[0] is None] == [0]
    with pytest.raises(ConfigError, match="did you mean 'plugged'"):
        load_config({"metric_logging": {"pluged": {}}})


def test_a_value_that_is_not_finite_is_nan_for_it(tmp_path: Path) -> None:
    with _service(tmp_path, mine={"kind": "Told", "label": "nan"}) as service:
        service.accept_metrics(Ranks(1).send(0, 0, mean(math.inf)))
        assert service.drain(10)
    told = Told.calls["nan"][1][2]
    assert math.isnan(told["loss"][0])
    assert told["forge/nonfinite/loss"] == (1, None)


def test_a_call_that_took_too_long_is_not_made_again_and_its_result_counts() -> None:
    guard = Guard("x", 0.05)
    gate = threading.Event()
    made: list[int] = []

    def slow() -> int:
        made.append(1)
        gate.wait(30)
        return len(made)

    for _ in range(2):
        with pytest.raises(BackendTimeout):
            guard.call("slow", slow)
    with pytest.raises(BackendTimeout):
        guard.call("other", slow)
    gate.set()
    assert guard.call("slow", slow, timeout_s=10) == 1
    assert guard.call("slow", slow, timeout_s=10) == 2
    guard.stop(1.0)


@pytest.mark.parametrize(("mode", "name"), [("global_reduce", "global"), ("per_rank_reduce", "trainer_0_0")])
def test_the_example_writes_what_it_says(tmp_path: Path, mode: str, name: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_backend.py"
    done = subprocess.run(
        [sys.executable, str(example), mode], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=_environment(), check=True
    )
    assert f"csv/{name}.csv" in done.stdout
    assert (tmp_path / "csv" / f"{name}.csv").read_text().split() == [
        line for step in range(5) for line in (f"{step},loss,{1.0 / (step + 1)}", f"{step},tokens,512.0")
    ]


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "exporters"), os.environ.get("PYTHONPATH", "")])}
