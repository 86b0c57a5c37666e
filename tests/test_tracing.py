"""Scopes of every kind: right parents, right durations, the exception unchanged."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import enum
import functools
import inspect
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

import otel_forge
from otel_forge import Tracer, instrument, no_instrument, span, trace, uninstrument
from otel_forge.errors import UsageError
from otel_forge.testing import Captured, capture
from otel_forge.tracing import reset_warnings


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    reset_warnings()


def _tree(captured: Captured) -> dict[str, str]:
    """Name of each span → name of its parent ("" for the step's root)."""
    spans = captured.spans
    names = {item.span_id: item.name for item in spans}
    return {item.name: names.get(item.parent_id, "") for item in spans}


def test_a_tracer_s_steps_are_metrics_and_spans_in_their_order() -> None:
    with capture() as captured:
        tracer = Tracer("train")
        tracer.start()
        time.sleep(0.01)
        tracer.step("forward")
        tracer.step("backward")
        tracer.stop()
        otel_forge.flush(0)
        metrics = captured.rows[0]["metrics"]
        assert _tree(captured) == {"train/forward": "train", "train/backward": "train", "train/tail": "train", "train": ""}
    expected = {f"train/{step}/duration_{kind}_s" for step in ("forward", "backward", "tail") for kind in ("avg", "max")}
    expected |= {"train/total_duration_avg_s", "train/total_duration_max_s"}
    assert {key for key in metrics if key.startswith("train")} == expected
    assert metrics["train/forward/duration_avg_s"] >= 0.01
    parts = sum(metrics[f"train/{step}/duration_avg_s"] for step in ("forward", "backward", "tail"))
    assert parts == pytest.approx(metrics["train/total_duration_avg_s"], abs=1e-6)


def test_misuse_is_said_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with capture():
        tracer = Tracer("t")
        tracer.stop()
        tracer.step("x")
        tracer.start()
        tracer.start()
        other = threading.Thread(target=tracer.step, args=("stolen",))
        other.start()
        other.join()
        tracer.stop()
        tracer.stop()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 4
    assert "stop() without start()" in texts[0]


def test_a_tracer_that_an_exception_left_running_ends_as_failed_and_starts_anew() -> None:
    """The second run has its own spans."""
    failed = "start() was called again before stop()"
    tracer = Tracer("t")
    with capture() as captured:
        with contextlib.suppress(ValueError):
            tracer.start()
            tracer.step("a")
            time.sleep(0.05)
            raise ValueError
        tracer.start()
        tracer.step("b")
        tracer.stop()
        spans = [(item.name, item.error, _tree(captured)[item.name]) for item in captured.spans]
        seconds = [item.duration_s for item in captured.spans if item.error == failed]
    assert spans == [("t/a", None, "t"), ("t/tail", None, "t"), ("t", failed, ""), ("t/b", None, "t"), ("t/tail", None, "t"), ("t", None, "")]
    assert seconds[0] >= 0.05


def test_a_jump_of_the_wall_clock_changes_no_duration() -> None:
    real = time.time_ns
    with capture() as captured:
        with pytest.MonkeyPatch.context() as patch, span("s"), trace("t"):
            time.sleep(0.01)
            patch.setattr(time, "time_ns", lambda: real() - 5_000_000_000)
            patch.setattr(time, "time", lambda: real() / 1e9 - 5)
        durations = [item.duration_s for item in captured.spans]
    assert [duration >= 0.01 for duration in durations] == [True, True]


def test_spans_nest_and_an_exception_passes_unchanged() -> None:
    error = KeyError("gone")
    with capture() as captured:
        with pytest.raises(KeyError) as caught, span("outer"), span("inner", {"files": 3}):
            raise error
        assert caught.value is error
        assert _tree(captured) == {"inner": "outer", "outer": ""}
        inner = next(item for item in captured.spans if item.name == "inner")
        assert (inner.error, inner.attributes["files"]) == ("'gone'", 3)


def test_every_rank_s_span_of_a_step_shares_a_trace_and_steps_do_not() -> None:
    with capture() as captured:
        for step in range(2):
            with otel_forge.step(step), span("work"):
                pass
        traces = {(item.attributes["step"], item.trace_id) for item in captured.spans}
    assert len(traces) == 2


def test_a_step_is_no_child_of_what_lasts_over_many_steps() -> None:
    """The epoch is in the trace of the step in which it began, and is the parent again after each step."""
    with capture() as captured:
        with span("epoch"):
            for number in range(2):
                with otel_forge.step(number), span(f"work {number}"):
                    pass
            with span("between"):
                pass
        spans = {(item.name, item.attributes["step"]): item for item in captured.spans}
    for number in range(2):
        parents = {item.span_id: item.name for (_, step), item in spans.items() if step == number}
        assert parents[spans[f"work {number}", number].parent_id] == "rank 0"
        assert spans["rank 0", number].parent_id not in parents
    assert spans["between", 2].parent_id == spans["epoch", 0].span_id


def test_a_generator_is_current_only_while_it_runs() -> None:
    """Two generators and a consumer's span are siblings; a consumer that stops early ends the span without an error."""

    @trace("gen")
    def items(name: str) -> Iterator[int]:
        with span(f"inside {name}"):
            yield 1
        yield 2

    with capture() as captured:
        with span("caller"):
            first, second = items("a"), items("b")
            assert (next(first), next(second)) == (1, 1)
            with span("consumer"):
                pass
            assert next(first) == 2
            first.close()  # type: ignore[attr-defined]
            second.close()  # type: ignore[attr-defined]
        tree = _tree(captured)
        errors = [item.error for item in captured.spans]
    assert tree["consumer"] == "caller"
    assert (tree["inside a"], tree["gen"]) == ("gen", "caller")
    assert errors == [None] * len(errors)


def test_a_generator_gives_and_takes_what_it_did_before() -> None:
    @trace("echo")
    def echo() -> Iterator[object]:
        try:
            got = yield 1
            got = yield got
        except ValueError as error:
            got = yield error
        return got

    with capture():
        running = echo()
        assert next(running) == 1
        assert running.send("a") == "a"  # type: ignore[attr-defined]
        error = ValueError()
        assert running.throw(error) is error  # type: ignore[attr-defined]
        with pytest.raises(StopIteration) as done:
            running.send("end")  # type: ignore[attr-defined]
        assert done.value.value == "end"


def test_coroutines_run_side_by_side_are_siblings() -> None:
    @trace("task")
    async def task() -> None:
        await asyncio.sleep(0.01)
        with span("part"):
            await asyncio.sleep(0)

    async def main() -> None:
        with span("parent"):
            await asyncio.gather(task(), task(), task())

    with capture() as captured:
        asyncio.run(main())
        spans = captured.spans
    parent = next(item for item in spans if item.name == "parent")
    tasks = [item for item in spans if item.name == "task"]
    assert {item.parent_id for item in tasks} == {parent.span_id}
    assert {item.parent_id for item in spans if item.name == "part"} == {item.span_id for item in tasks}


def test_an_async_generator_keeps_its_items_and_its_time() -> None:
    @trace("ticks")
    async def ticks() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0.02)
            yield number

    async def main() -> list[int]:
        return [item async for item in ticks()]

    with capture() as captured:
        assert asyncio.run(main()) == [0, 1, 2]
        (only,) = captured.spans
    assert only.duration_s >= 0.06
    assert inspect.isasyncgenfunction(ticks)


def test_cancellation_ends_the_span_and_marks_it() -> None:
    @trace("slow")
    async def slow() -> None:
        await asyncio.sleep(10)

    async def main() -> None:
        task = asyncio.create_task(slow())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with capture() as captured:
        asyncio.run(main())
        (only,) = captured.spans
    assert only.error == "CancelledError"


def test_a_copied_context_carries_the_parent_into_a_thread() -> None:
    def work() -> None:
        with span("in thread"):
            pass

    with capture() as captured:
        with span("caller"):
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(work,))
            thread.start()
            thread.join()
        assert _tree(captured)["in thread"] == "caller"


def test_context_travels_by_traceparent() -> None:
    with capture() as captured:
        otel_forge.flush(0, wait_s=5)
        carrier: dict[str, str] = {}
        with span("sender"):
            otel_forge.inject(carrier)
        with otel_forge.extract(carrier), span("receiver"):
            pass
        assert _tree(captured)["receiver"] == "sender"
        with otel_forge.extract({"traceparent": "rubbish"}), span("alone"):
            pass
        assert _tree(captured)["alone"] == ""


def test_off_means_that_nothing_happens() -> None:
    with span("x"), trace("y", metrics_only=True):
        pass
    assert otel_forge.pipeline.spans == []


# --- instrument ----------------------------------------------------------------------------------------------------------


@instrument
class Worker:
    """A docstring."""

    size = 3

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run(self, x: int, *, y: int = 2) -> int:
        """Of run."""
        return self._helper(x) + y

    def _helper(self, x: int) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def make(cls) -> type:
        return cls

    @property
    def costly(self) -> int:
        raise RuntimeError("a property was run")

    @no_instrument
    def quiet(self) -> None: ...

    async def wait(self) -> int:
        return 1

    @functools.lru_cache  # noqa: B019 - that it is left alone is tested
    def cached(self) -> int:
        return 5


class Sub(Worker):
    def run(self, x: int, *, y: int = 2) -> int:
        return super().run(x, y=y) + 1


def test_every_public_method_is_traced_by_the_running_class_s_name() -> None:
    with capture() as captured:
        assert Worker().run(1) == 3
        assert Worker.static(4) == 4
        assert Worker().static(x=5) == 5
        assert Sub.make() is Sub
        assert asyncio.run(Worker().wait()) == 1
        Worker().quiet()
        assert Sub().run(1) == 4
        names = [item.name for item in captured.spans]
    assert names == ["Worker/run", "Worker/static", "Worker/static", "Sub/make", "Worker/wait", "Sub/run"]


def test_signature_docstring_kind_and_identity_stay() -> None:
    assert str(inspect.signature(Worker.run)) == "(self, x: 'int', *, y: 'int' = 2) -> 'int'"
    assert (Worker.run.__doc__, Worker.run.__qualname__) == ("Of run.", "Worker.run")
    assert inspect.iscoroutinefunction(Worker.wait)
    assert pickle.loads(pickle.dumps(Worker())).run(1) == 3
    assert pickle.loads(pickle.dumps(Worker)) is Worker
    assert Worker.cached.cache_info().hits == 0


def test_twice_is_once_and_uninstrument_restores() -> None:
    class Base:
        def inherited(self) -> int:
            return 1

    class Thing(Base):
        def own(self) -> int:
            return 2

    before = dict(vars(Thing))
    assert instrument(instrument(Thing)) is Thing
    with capture() as captured:
        assert (Thing().own(), Thing().inherited(), Base().inherited()) == (2, 1, 1)
        assert [item.name for item in captured.spans] == ["Thing/own", "Thing/inherited"]
    uninstrument(Thing)
    assert {name: value for name, value in vars(Thing).items() if not name.startswith("__")} == {
        name: value for name, value in before.items() if not name.startswith("__")
    }


def test_include_exclude_and_private_names() -> None:
    @instrument(include=["a*", "_special"], exclude="abort")
    class Picky:
        def apply(self) -> None: ...
        def abort(self) -> None: ...
        def other(self) -> None: ...
        def _special(self) -> None: ...

    with capture() as captured:
        thing = Picky()
        for method in (thing.apply, thing.abort, thing.other, thing._special):
            method()
        assert [item.name for item in captured.spans] == ["Picky/apply", "Picky/_special"]


def test_dataclasses_slots_and_abstract_classes_keep_their_ways() -> None:
    @instrument
    @dataclasses.dataclass(slots=True)
    class Point:
        x: int

        def double(self) -> int:
            return self.x * 2

    @instrument
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> float: ...

    with capture() as captured:
        assert Point(2).double() == 4
        with pytest.raises(TypeError):
            Shape()  # type: ignore[abstract]
        assert [item.name for item in captured.spans] == ["Point/double"]


def test_what_cannot_be_traced_is_refused_clearly() -> None:
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(UsageError, match="enum"):
        instrument(Color)
    with pytest.raises(UsageError, match="expected a class or a function"):
        instrument(3)


def test_a_module_of_torch_keeps_its_state_and_compiles_its_hooks_once() -> None:
    import torch

    @instrument
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    hooked: list[int] = []
    net = Net()
    net.register_forward_hook(lambda *_: hooked.append(1))
    with capture() as captured:
        net(torch.ones(1, 2))
        assert [item.name for item in captured.spans] == ["Net/forward"]
    assert (hooked, list(net.state_dict())) == ([1], ["linear.weight", "linear.bias"])


def test_a_generator_keeps_its_busy_and_its_total_time() -> None:
    @trace("numbers")
    def numbers() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            yield number

    @trace("waiting")
    async def waiting() -> None:
        time.sleep(0.01)
        await asyncio.sleep(0.05)

    with capture() as captured:
        for _ in numbers():
            time.sleep(0.03)
        asyncio.run(waiting())
        otel_forge.flush(0)
        spans = {found.name: found for found in captured.spans}
        metrics = captured.rows[0]["metrics"]
    for name, busy, total in (("numbers", 0.03, 0.12), ("waiting", 0.01, 0.06)):
        assert busy <= spans[name].attributes["forge.busy_time_s"] < total <= spans[name].duration_s
        assert metrics[f"{name}/busy_duration_avg_s"] == spans[name].attributes["forge.busy_time_s"]
        assert metrics[f"{name}/total_duration_avg_s"] >= total


def test_a_tracer_used_by_two_tasks_is_said_once_and_mixes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    shared = Tracer("shared")

    async def one() -> None:
        shared.start()
        await asyncio.sleep(0.02)
        shared.step("mine")
        shared.stop()

    async def other() -> None:
        await asyncio.sleep(0.01)
        for _ in range(2):
            shared.step("theirs")
            shared.stop()

    async def both() -> None:
        await asyncio.gather(one(), other())

    with capture() as captured:
        asyncio.run(both())
        otel_forge.flush(0)
        keys = set(captured.rows[0]["metrics"])
    assert "shared/mine/duration_avg_s" in keys
    assert not any("theirs" in key for key in keys)
    assert ["two threads or tasks" in record.getMessage() for record in caplog.records] == [True]


def test_the_tail_is_named_by_stop_and_steps_keep_the_order_they_were_started() -> None:
    with capture() as captured:
        tracer = Tracer("t")
        tracer.start()
        for name in ("b", "a", "c"):
            tracer.step(name)
        tracer.stop("rest")
        otel_forge.flush(0)
        starts = [found.name for found in captured.spans]
        keys = [key for key in captured.rows[0]["metrics"] if key.endswith("duration_avg_s")]
    assert starts == ["t/b", "t/a", "t/c", "t/rest", "t"]
    assert set(keys) == {"t/b/duration_avg_s", "t/a/duration_avg_s", "t/c/duration_avg_s", "t/rest/duration_avg_s", "t/total_duration_avg_s"}


def test_a_scope_that_hangs_is_seen_while_it_hangs() -> None:
    with capture() as captured:
        announcer = otel_forge.pipeline.current()._worker._announcer  # type: ignore[union-attr]
        assert announcer is not None
        announcer._after_ns = 20_000_000
        otel_forge.flush(0)
        tracer = Tracer("outer")
        tracer.start()
        tracer.step("data")
        with span("inner"):
            deadline = time.monotonic() + 10
            while len(captured.spans) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            found = {one.name: one for one in captured.spans}
        tracer.stop()
        otel_forge.flush(1)
        names = [one.name for one in captured.spans]
    outer, inner = found["outer (still running)"], found["inner (still running)"]
    assert outer.attributes["forge.pending"] is True
    assert outer.attributes["forge.last_step"] == "data"
    assert inner.parent_id == outer.span_id
    assert {"outer", "inner", "outer/data", "outer/tail"} <= set(names)


def test_spans_are_kept_of_every_nth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture() as captured:
        current = otel_forge.pipeline.current()
        assert current is not None
        current.config = current.config.model_copy(update={"tracing": current.config.tracing.model_copy(update={"every": 3})})
        for number in range(7):
            with otel_forge.step(number), span("x"):
                pass
        steps = [found.attributes["step"] for found in captured.spans if found.name == "x"]
    assert steps == [0, 3, 6]


def test_a_stride_of_steps_is_sampled_when_it_stands_for_a_multiple() -> None:
    from otel_forge.steps import StepTracker

    tracker = StepTracker()
    tracker.seal(10)
    tracker.seal(20)
    assert tracker.opening == 21
    assert tracker.is_sampled(10)
    assert not tracker.is_sampled(50)


def test_a_pool_s_threads_and_asyncio_hang_their_spans_under_the_open_scope() -> None:
    @trace("work")
    def work(number: int) -> int:
        return number

    with capture() as captured:
        with span("step"), concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(otel_forge.carry(work), range(4))) == [0, 1, 2, 3]
            asyncio.run(asyncio.to_thread(work, 5))
        otel_forge.flush(0)
        spans = captured.spans
    (parent,) = [found for found in spans if found.name == "step"]
    assert [found.parent_id for found in spans if found.name == "work"] == [parent.span_id] * 5


def test_what_was_extracted_is_in_the_sender_s_trace() -> None:
    carrier: dict[str, str] = {}
    with capture() as captured:
        otel_forge.flush(0)
        captured.rows  # noqa: B018 - the run is known
        with span("ask"):
            otel_forge.inject(carrier)
        otel_forge.flush(1)
        with otel_forge.extract(carrier), span("answer"), span("inside"):
            pass
        with span("own"):
            pass
        otel_forge.flush(2)
        found = {one.name: one for one in captured.spans}
    assert found["answer"].trace_id == found["inside"].trace_id == found["ask"].trace_id
    assert found["answer"].parent_id == found["ask"].span_id
    assert found["inside"].parent_id == found["answer"].span_id
    assert found["own"].trace_id != found["ask"].trace_id


def test_spans_of_the_user_s_own_tracer_nest_in_the_open_scope() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("http")
    with capture() as captured:
        otel_forge.flush(0)
        captured.rows  # noqa: B018 - the run is known
        with span("step"), tracer.start_as_current_span("GET"), tracer.start_as_current_span("connect"):
            pass
        with tracer.start_as_current_span("alone"):
            pass
        otel_forge.flush(1)
        (ours,) = captured.spans
    theirs = {one.name: one for one in exporter.get_finished_spans()}
    get, connect = theirs["GET"], theirs["connect"]
    assert (format(get.context.trace_id, "032x"), format(get.parent.span_id, "016x")) == (ours.trace_id, ours.span_id)
    assert connect.parent.span_id == get.context.span_id
    assert theirs["alone"].parent is None
    with tracer.start_as_current_span("after"):
        pass
    assert exporter.get_finished_spans()[-1].parent is None


def test_context_travels_in_an_environment_to_a_process_pool_s_worker() -> None:
    with capture() as captured:
        otel_forge.flush(0)
        captured.rows  # noqa: B018 - the run is known
        with span("ask") as _:
            carrier: dict[str, str] = {}
            otel_forge.inject(carrier)
        with otel_forge.extract({"TRACEPARENT": carrier["traceparent"]}), span("answer"):
            pass
        otel_forge.flush(1)
        found = {one.name: one for one in captured.spans}
    assert found["answer"].parent_id == found["ask"].span_id
    for broken in ("", "00-abc", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "g" * 32 + "-" + "1" * 16 + "-01"):
        with otel_forge.extract({"TRACEPARENT": broken}):
            assert otel_forge.tracing.current_span_id() == 0


@pytest.mark.parametrize("name", ["DISABLE_PERF_METRICS", "FORGE_DISABLE_METRICS"])
def test_scopes_that_are_off_time_nothing_and_say_nothing(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(name, "true")

    @trace("decorated")
    def work() -> int:
        return 3

    otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {}})
    tracer = Tracer("t")
    tracer.start()
    tracer.step("a")
    tracer.stop()
    with trace("scope") as scope, span("s"):
        scope.record("loss", 1.0)
        assert work() == 3
    assert not otel_forge.pipeline.spans
    assert {key for key, _ in otel_forge.metrics.registry().series} == ({"scope/loss"} if name == "DISABLE_PERF_METRICS" else set())
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "file", "expected"), [("true", {}, "gpu"), ("false", {}, "cpu"), ("true", {"timer": "gpu_sync"}, "gpu_sync"), ("", {}, "auto")]
)
def test_torchforge_s_variable_chooses_the_timer_where_the_file_does_not(
    value: str, file: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otel_forge.config import load_config, timer

    monkeypatch.setenv("METRIC_TIMER_USES_GPU", value)
    assert timer(load_config({"tracing": file})) == expected
