"""`instrument`: how a class or function is called, found and looked at stays as it was; faults that users of other tools met, one by one."""

from __future__ import annotations

import abc
import asyncio
import copy
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import logging
import multiprocessing
import pickle
import sys
import threading
import typing
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import otel_forge
from otel_forge import instrument, no_instrument, span, trace, uninstrument
from otel_forge.errors import UsageError
from otel_forge.testing import Captured, capture
from otel_forge.tracing import reset_warnings
from tests import instrumented
from tests.fresh_process import in_fresh_process


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    reset_warnings()


def _names(captured: Captured) -> list[str]:
    return [item.name for item in captured.spans]


def _visible(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}


# --- static and class methods, kinds of functions -----------------------------------------------------------------------


class Tools:
    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def make(cls) -> type:
        return cls


@pytest.mark.parametrize("call", [lambda c: c.double(1), lambda c: c().double(1), lambda c: c.double(number=1)])
def test_a_static_method_stays_one_however_it_is_called(call: Callable[[Any], int]) -> None:
    """Own and inherited."""
    own = instrument(type("Own", (), {"double": Tools.__dict__["double"]}))
    heir = instrument(type("Heir", (Tools,), {}))
    with capture() as captured:
        assert (call(own), call(heir)) == (2, 2)
        assert _names(captured) == ["Own/double", "Heir/double"]


def test_a_class_method_is_traced_and_knows_the_subclass() -> None:
    @instrument
    class Maker:
        @classmethod
        def make(cls) -> type:
            return cls

    class Sub(Maker): ...

    heir = instrument(type("Heir", (Tools,), {}))
    with capture() as captured:
        assert (Maker.make(), Sub.make(), Sub().make(), heir.make()) == (Maker, Sub, Sub, heir)  # type: ignore[attr-defined]
        assert _names(captured) == ["Maker/make", "Sub/make", "Sub/make", "Heir/make"]


def test_a_decorator_above_a_static_or_class_method_keeps_its_form() -> None:
    class Own:
        @instrument
        @staticmethod
        def fixed(number: int) -> int:
            return number

        @instrument
        @classmethod
        def make(cls) -> type:
            return cls

    with capture() as captured:
        assert (Own().fixed(3), Own.make()) == (3, Own)
        assert _names(captured) == ["Own/fixed", "Own/make"]


def test_every_kind_of_function_is_told_as_before() -> None:
    class Kinds:
        def plain(self) -> None: ...
        async def coroutine(self) -> None: ...
        def generator(self) -> Iterator[int]:
            yield 1

        async def asyncgen(self) -> AsyncIterator[int]:
            yield 1

    tellers = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction, inspect.isfunction, asyncio.iscoroutinefunction)
    names = ("plain", "coroutine", "generator", "asyncgen")

    def told(cls: type) -> list[list[bool]]:
        return [[teller(getattr(cls, name)) for teller in tellers] for name in names]

    class Heir(Kinds): ...

    bare = told(Kinds)
    assert told(instrument(Heir)) == bare
    assert told(instrument(Kinds)) == bare


def test_an_async_generator_gives_its_items_and_its_span_lasts_as_long_as_they_do() -> None:
    inside: list[str] = []

    @instrument
    class Source:
        async def items(self) -> AsyncIterator[int]:
            for number in range(3):
                await asyncio.sleep(0.02)
                with span("inside"):
                    yield number

    async def main() -> list[int]:
        return [number async for number in Source().items()]

    with capture() as captured:
        assert asyncio.run(main()) == [0, 1, 2]
        spans = {item.name: item for item in captured.spans}
        inside = [item.parent_id for item in captured.spans if item.name == "inside"]
    assert spans["Source/items"].duration_s >= 0.06
    assert set(inside) == {spans["Source/items"].span_id}


@instrument
class Streams:
    def numbers(self) -> Iterator[int]:
        yield from range(3)

    async def slowly(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number


def test_generators_left_early_end_their_spans_a_thousand_times_and_nothing_stays() -> None:
    alive: list[weakref.ref[Any]] = []

    def sync() -> None:
        for _ in Streams().numbers():
            break

    async def left_early() -> None:
        source = Streams().slowly()
        alive.append(weakref.ref(source))
        async for _ in source:
            break

    async def many() -> None:
        for _ in range(1000):
            await left_early()
        await asyncio.sleep(0.01)  # the loop closes generators in tasks of its own

    with capture() as captured:
        for _ in range(1000):
            sync()
        asyncio.run(many())
        gc.collect()
        names = _names(captured)
        errors = {item.error for item in captured.spans}
    assert (names.count("Streams/numbers"), names.count("Streams/slowly"), errors) == (1000, 1000, {None})
    assert [item for item in alive if item() is not None] == []


def test_an_async_generator_left_early_leaves_no_error_and_no_parent_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with span("caller"):
            async for _ in Streams().slowly():
                break
            gc.collect()
            with span("next"):
                pass

    with capture() as captured, caplog.at_level(logging.DEBUG):
        asyncio.run(main())
        spans = {item.name: item for item in captured.spans}
    assert spans["next"].parent_id == spans["Streams/slowly"].parent_id == spans["caller"].span_id
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# --- what is looked at, and what is left alone --------------------------------------------------------------------------


class Watched:
    """A descriptor with a side effect."""

    def __get__(self, instance: object, owner: type | None = None) -> int:
        raise RuntimeError("a descriptor was read")


def test_nothing_of_a_class_is_run_while_it_is_instrumented() -> None:
    ran: list[str] = []

    class Lazy:
        watched = Watched()

        @property
        def costly(self) -> int:
            ran.append("property")
            return 1

        @functools.cached_property
        def cached(self) -> int:
            ran.append("cached")
            return 2

        def work(self) -> int:
            return self.costly + self.cached

    instrument(Lazy)
    assert ran == []
    assert Lazy().work() == 3
    assert ran == ["property", "cached"]


def test_callables_that_are_no_functions_and_nested_classes_are_left_alone() -> None:
    class Mixed:
        part = functools.partial(max, 1)
        method_part: Any = functools.partialmethod(lambda self, number: number, 4)
        anonymous = lambda self: 5  # noqa: E731
        kind = int

        class Nested:
            def work(self) -> int:
                return 6

    before = _visible(Mixed)
    instrument(Mixed)
    changed = {name for name, value in _visible(Mixed).items() if before[name] is not value}
    with capture() as captured:
        mixed = Mixed()
        assert (mixed.part(2), mixed.method_part(), mixed.anonymous(), mixed.kind("3"), mixed.Nested().work()) == (2, 4, 5, 3, 6)
        assert _names(captured) == ["Mixed/anonymous"]
    assert changed == {"anonymous"}


def test_caches_and_single_dispatch_keep_their_ways() -> None:
    @instrument
    class Cached:
        calls = 0

        @functools.lru_cache  # noqa: B019 - that it is left alone is tested
        def square(self, number: int) -> int:
            Cached.calls += 1
            return number**2

        @functools.singledispatchmethod
        def show(self, value: object) -> str:
            return "object"

        @show.register
        def _(self, value: int) -> str:
            return "int"

        @torch.no_grad()
        def infer(self) -> bool:
            return torch.is_grad_enabled()

    cached = Cached()
    with capture() as captured:
        assert (cached.square(3), cached.square(3), Cached.calls, Cached.square.cache_info().hits) == (9, 9, 1, 1)
        Cached.square.cache_clear()
        Cached.__dict__["show"].register(list, lambda self, value: "list")
        assert (cached.show("a"), cached.show(1), cached.show([])) == ("object", "int", "list")
        assert cached.infer() is False
        assert _names(captured) == ["Cached/infer"]


def test_a_cached_function_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="put @instrument below"):
        instrument(functools.lru_cache(lambda: 1))


def test_special_methods_are_traced_only_by_name_and_arguments_are_never_shown() -> None:
    class Shy:
        def __init__(self) -> None:
            self.early()
            self.ready = True

        def __repr__(self) -> str:
            self.early()
            raise RuntimeError("an argument was shown")

        def early(self) -> None: ...

    called = instrument(type("Called", (Shy,), {"__call__": lambda self: 7}), include=["__call__", "early"])
    instrument(Shy)
    with capture() as captured:
        Shy().early()
        assert called()() == 7
        assert _names(captured) == ["Shy/early", "Shy/early", "Called/early", "Called/__call__"]


def test_a_hot_private_helper_costs_nothing() -> None:
    def count(self: Any) -> int:
        return sum(self._helper(number) for number in range(1000))

    bare = type("Bare", (), {"_helper": lambda self, number: number, "count": count})
    traced = instrument(type("Traced", (), {"_helper": lambda self, number: number, "count": count}))
    assert vars(traced)["_helper"].__code__ is not None
    with capture() as captured:
        assert traced().count() == bare().count()
        assert _names(captured) == ["Traced/count"]


def test_names_tell_classes_apart_also_where_the_method_is_inherited() -> None:
    @instrument
    class Loop:
        def step(self) -> None: ...

    class Trainer(Loop): ...

    class Rollout(Loop): ...

    with capture() as captured:
        Trainer().step()
        Rollout().step()
        assert _names(captured) == ["Trainer/step", "Rollout/step"]


def test_single_methods_have_options_of_their_own() -> None:
    @instrument(methods={"load*": {"span_only": True}})
    class Loader:
        def load_one(self) -> None: ...
        def parse(self) -> None: ...

    with capture() as captured:
        Loader().load_one()
        Loader().parse()
        otel_forge.flush(0)
        keys = {key.partition("/total")[0] for key in captured.rows[0]["metrics"] if "duration" in key}
        assert (_names(captured), keys) == (["Loader/load_one", "Loader/parse"], {"Loader/parse"})
    with pytest.raises(TypeError, match="track_memorry"):
        instrument(methods={"load": {"track_memorry": True}})(type("Typo", (), {"load": lambda self: None}))


# --- hierarchies --------------------------------------------------------------------------------------------------------


def test_one_span_for_each_body_that_runs() -> None:
    @instrument
    class Base:
        def both(self) -> int:
            return 1

        def inherited(self) -> int:
            return 2

    @instrument
    class Sub(Base):
        def both(self) -> int:
            return super().both() + 1

    before = _visible(Sub)
    instrument(Sub)
    assert _visible(Sub) == before
    with capture() as captured:
        assert (Sub().both(), Sub().inherited()) == (2, 2)
        assert _names(captured) == ["Sub/both", "Sub/both", "Sub/inherited"]


def test_a_later_change_of_the_base_is_seen() -> None:
    class Base:
        def greet(self) -> str:
            return "old"

        @staticmethod
        def fixed() -> str:
            return "old"

        @classmethod
        def make(cls) -> str:
            return f"old {cls.__name__}"

    @instrument
    class Sub(Base): ...

    with capture() as captured:
        assert (Sub().greet(), Sub.fixed(), Sub.make()) == ("old", "old", "old Sub")
        Base.greet = lambda self: "new"  # type: ignore[method-assign]
        Base.fixed = staticmethod(lambda: "new")  # type: ignore[assignment, method-assign]
        Base.make = classmethod(lambda cls: f"new {cls.__name__}")  # type: ignore[assignment, method-assign]
        assert (Sub().greet(), Sub.fixed(), Sub().fixed(), Sub.make()) == ("new", "new", "new", "new Sub")
        assert _names(captured) == ["Sub/greet", "Sub/fixed", "Sub/make", "Sub/greet", "Sub/fixed", "Sub/fixed", "Sub/make"]


def test_a_mixin_between_still_comes_first() -> None:
    class Base:
        def who(self) -> str:
            return "base"

        @staticmethod
        def fixed() -> str:
            return "base"

    @instrument
    class Middle(Base): ...

    class Mixin(Base):
        def who(self) -> str:
            return "mixin of " + super().who()

        @staticmethod
        def fixed() -> str:
            return "mixin"

    class Both(Middle, Mixin): ...

    assert (Both().who(), Both.fixed(), Both().fixed(), Middle().who()) == ("mixin of base", "mixin", "mixin", "base")
    assert Middle.who(Mixin()) == "base"  # type: ignore[arg-type]


def test_what_a_class_inherits_from_torch_or_python_is_left_alone_unless_named() -> None:
    class Work(threading.Thread):
        def run(self) -> None: ...

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert {name for name in vars(instrument(Work)) if not name.startswith("__")} == {"run"}
    assert {name for name in vars(instrument(Net)) if not name.startswith("__")} == {"forward"}
    with capture() as captured:
        instrument(Net, include=["train"])().train()
        assert _names(captured) == ["Net/train"]


def test_abstract_classes_stay_abstract_and_concrete_ones_work() -> None:
    @instrument
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> float:
            return 1.0

        @property
        @abc.abstractmethod
        def name(self) -> str: ...

        @staticmethod
        @abc.abstractmethod
        def sides() -> int: ...

        def show(self) -> str:
            return f"{self.name} {self.area()}"

    @instrument
    class Square(Shape):
        name = "square"

        def area(self) -> float:
            return super().area() + 3  # type: ignore[safe-super]

        @staticmethod
        def sides() -> int:
            return 4

    with pytest.raises(TypeError, match="abstract"):
        Shape()  # type: ignore[abstract]
    with capture() as captured:
        assert (Square().show(), Square.sides()) == ("square 4.0", 4)
        assert _names(captured) == ["Square/area", "Square/show", "Square/sides"]


# --- classes of every make ----------------------------------------------------------------------------------------------


class Ground:
    __slots__ = ()

    def where(self) -> str:
        return "ground"


def _slotted(decorate: Callable[[Any], Any]) -> Any:
    """A class with `super()` and `__class__`, given to decorators."""

    class Slotted(Ground):
        x: int

        def where(self) -> str:
            return f"{self.x} {super().where()} {__class__.__name__}"

    return decorate(Slotted)


def test_instrument_above_and_below_a_dataclass_with_slots() -> None:
    """Below it, `super()` works too, which before Python 3.14 it does not in such a class that is not instrumented."""
    above = _slotted(lambda cls: instrument(dataclasses.dataclass(slots=True)(cls)))
    below = _slotted(lambda cls: dataclasses.dataclass(slots=True)(instrument(cls)))
    with capture() as captured:
        assert (below(1).where(), above(2).where()) == ("1 ground Slotted", "2 ground Slotted")
        assert _names(captured) == ["Slotted/where", "Slotted/where"]
    for cls in (above, below):
        assert not hasattr(cls(1), "__dict__")


def test_instrument_above_and_below_attrs_with_slots() -> None:
    attr = pytest.importorskip("attr")
    above = _slotted(lambda cls: instrument(attr.s(auto_attribs=True, slots=True)(cls)))
    below = _slotted(lambda cls: attr.s(auto_attribs=True, slots=True)(instrument(cls)))
    with capture() as captured:
        assert (above(2).where(), below(1).where()) == ("2 ground Slotted", "1 ground Slotted")
        assert _names(captured) == ["Slotted/where", "Slotted/where"]
    assert not hasattr(below(1), "__dict__")


def test_a_class_built_anew_keeps_what_it_inherits_and_gives_everything_back() -> None:
    @dataclasses.dataclass(slots=True)
    @instrument
    class Point(Ground):
        x: int

        @staticmethod
        def origin() -> int:
            return 0

    with capture() as captured:
        assert (Point(1).where(), Point.origin()) == ("ground", 0)
        assert _names(captured) == ["Point/where", "Point/origin"]
    uninstrument(Point)
    with capture() as captured:
        assert (Point(1).where(), Point.origin(), "where" in vars(Point)) == ("ground", 0, False)
        assert _names(captured) == []


class Refusing(type):
    """A metaclass that lets nothing be set, and counts."""

    asked = 0

    def __setattr__(cls, name: str, value: object) -> None:
        Refusing.asked += 1
        raise AttributeError("frozen")


def test_a_metaclass_is_neither_asked_nor_in_the_way() -> None:
    class Frozen(metaclass=Refusing):
        def work(self) -> int:
            return 1

    original = vars(Frozen)["work"]
    with capture() as captured:
        assert instrument(Frozen)().work() == 1
        assert _names(captured) == ["Frozen/work"]
    uninstrument(Frozen)
    assert (vars(Frozen)["work"], Refusing.asked) == (original, 0)


def test_a_metaclass_s_own_methods_can_be_traced() -> None:
    @instrument
    class Meta(type):
        def register(cls) -> str:
            return cls.__name__

    class Thing(metaclass=Meta): ...

    with capture() as captured:
        assert Thing.register() == "Thing"
        assert _names(captured) == ["Thing/register"]


@pytest.mark.parametrize("target", [dict, int, torch.Size, type(sys)])
def test_classes_written_in_c_are_refused(target: type) -> None:
    with pytest.raises(UsageError, match="not written in Python"):
        instrument(target)


def test_enums_protocols_and_objects_are_refused_with_what_to_do() -> None:
    class Color(enum.Enum):
        RED = 1

    class Reads(typing.Protocol):
        def read(self) -> str: ...

    with pytest.raises(UsageError, match="Color is an enum"):
        instrument(Color)
    with pytest.raises(UsageError, match="instrument the classes that implement it"):
        instrument(Reads)
    for wrong in (3, Tools(), functools.partial(print), property(lambda self: 1)):
        with pytest.raises(UsageError, match="expected a class or a function"):
            instrument(wrong)

    class File(Reads):
        def read(self) -> str:
            return "text"

    with capture() as captured:
        assert instrument(File)().read() == "text"
        assert _names(captured) == ["File/read"]


def test_a_class_without_methods_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    instrument(type("Empty", (), {"x": 1}))
    instrument(type("Typo", (), {"train": lambda self: None}), include=["trian"])
    assert [("no method to trace" in record.getMessage()) for record in caplog.records] == [True, True]


# --- pickling, copies, other processes ----------------------------------------------------------------------------------


def test_objects_classes_methods_and_functions_pickle_and_copy() -> None:
    counter = instrumented.Counter(3)
    for item in (counter, counter.add, instrumented.Counter, instrumented.Counter.add, instrumented.double, instrumented.Child.greet):
        again = pickle.loads(pickle.dumps(item))
        assert again is item or isinstance(getattr(again, "__self__", again), instrumented.Counter)
    twin = copy.deepcopy(counter)
    assert (twin.add(1), counter.value, vars(twin)) == (4, 3, {"value": 4})
    assert (instrumented.Counter.__module__, instrumented.Counter.add.__qualname__) == ("tests.instrumented", "Counter.add")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_method_is_the_target_of_a_child_process(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with capture() as captured:
        child = context.Process(target=instrumented.Counter(41).put, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == 42
        child.join(60)
        assert child.exitcode == 0
        otel_forge.flush(0)
        keys = captured.rows[0]["metrics"]
    assert {"Counter/add/total_duration_avg_s", "Counter/put/total_duration_avg_s"} <= set(keys)


def _marked(function: Any) -> Any:
    function.endpoint = {"kind": "remote"}
    return function


def run_actor(path: str) -> None:
    """In another process, which gets the class by value."""
    actor_class = pickle.loads(Path(path).read_bytes())
    with capture() as captured:
        actor = actor_class()
        assert (actor.run(1), asyncio.run(actor.wait(5)), list(actor.items(2))) == (3, 5, [0, 1])
        assert _names(captured) == ["Actor/run", "Actor/wait", "Actor/items"]
    uninstrument(actor_class)
    assert not hasattr(actor_class.run, "__wrapped__")


def test_what_actor_frameworks_look_at_is_as_before(tmp_path: Path) -> None:
    """The signature, the function behind it, marks on it, and a copy by value in another place."""
    cloudpickle = pytest.importorskip("cloudpickle")

    class Actor:
        @_marked
        def run(self, x: int, *, y: int = 2) -> int:
            return x + y

        @_marked
        async def wait(self, x: int) -> int:
            return x

        @_marked
        def items(self, count: int) -> Iterator[int]:
            yield from range(count)

    bare = dict(vars(Actor))
    signatures = {name: inspect.signature(getattr(Actor, name)) for name in ("run", "wait", "items")}
    instrument(Actor)
    for name, signature in signatures.items():
        found = getattr(Actor, name)
        assert (inspect.signature(found), inspect.unwrap(found), found.endpoint) == (signature, bare[name], {"kind": "remote"})
    (tmp_path / "actor").write_bytes(cloudpickle.dumps(Actor))
    in_fresh_process("tests.test_instrumentation", "run_actor", tmp_path / "actor")


def test_a_class_instrumented_before_init_is_traced_after_it() -> None:
    counter = instrumented.Counter()
    assert counter.add(1) == 1
    with capture() as captured:
        assert counter.add(1) == 2
        assert _names(captured) == ["Counter/add"]


# --- threads, tasks, recursion ------------------------------------------------------------------------------------------


def test_coroutines_of_one_step_are_siblings_and_cancellation_is_marked() -> None:
    @instrument
    class Work:
        async def part(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

        def fails(self) -> None:
            raise ValueError("no")

        def stopped(self) -> None:
            raise KeyboardInterrupt

    async def main() -> None:
        work = Work()
        with trace("step"):
            tasks = [asyncio.create_task(work.part(0.01 * number)) for number in (1, 2, 500)]
            await asyncio.gather(*tasks[:2])
            tasks[2].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[2]

    with capture() as captured:
        asyncio.run(main())
        for method, kind in ((Work().fails, ValueError), (Work().stopped, KeyboardInterrupt)):
            with pytest.raises(kind):
                method()
        spans = captured.spans
    step = next(item for item in spans if item.name == "step")
    parts = [item for item in spans if item.name == "Work/part"]
    assert {item.parent_id for item in parts} == {step.span_id}
    assert [item.error for item in parts] == [None, None, "CancelledError"]
    assert parts[0].duration_s < parts[1].duration_s
    assert [(item.name, item.error) for item in spans[-2:]] == [("Work/fails", "no"), ("Work/stopped", "KeyboardInterrupt")]


class Deep:
    def down(self, depth: int) -> int:
        return 0 if depth == 0 else 1 + self.down(depth - 1)


def _deepest(run: Callable[[int], int]) -> int:
    """The greatest depth that does not end in a RecursionError."""
    low, high = 1, 20_000
    while low < high - 1:
        middle = (low + high) // 2
        try:
            run(middle)
            low = middle
        except RecursionError:
            high = middle
    return low


def test_recursion_300_deep_is_traced_and_reaches_half_of_what_it_reached_bare() -> None:
    """A wrapper is a frame, so one traced call counts as two; no more than that, but for the few frames of the last scope itself."""
    bare = _deepest(Deep().down)
    traced = instrument(type("Traced", (), {"down": Deep.down}))
    with capture() as captured:
        assert traced().down(300) == 300
        spans = [item for item in captured.spans if item.name == "Traced/down"]
        parents = {item.span_id: item.parent_id for item in spans}
        assert len(spans) == 301
        top, depth = spans[0].span_id, 0
        while top in parents:
            top, depth = parents[top], depth + 1
        assert depth == 301
    assert _deepest(traced().down) >= bare // 2 - 20


def test_a_recursion_error_leaves_no_parent_behind() -> None:
    traced = instrument(type("Traced", (), {"down": Deep.down}))
    with capture(strict=False) as captured:
        with span("caller"), pytest.raises(RecursionError):
            traced().down(100_000)
        with span("after"):
            pass
        parents = {item.name: item.parent_id for item in captured.spans if item.name in ("caller", "after")}
    assert parents["after"] == parents["caller"]


# --- torch --------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.linear(x))

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@instrument
class Inherits(Layer):
    @staticmethod
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.filterwarnings("ignore")
def test_a_module_whose_forward_is_inherited_runs_hooks_once_and_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    module, bare = Inherits(), Layer()
    bare.load_state_dict(module.state_dict())
    hooked: list[int] = []
    x = torch.ones(1, 2)
    with capture() as captured:
        handle = module.register_forward_hook(lambda *_: hooked.append(1))
        assert torch.equal(module(x), bare(x))
        handle.remove()
        assert _names(captured) == ["Inherits/scale", "Inherits/forward"]
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), bare(x))
        assert torch.equal(torch.compile(Inherits().helper, fullgraph=True, backend="eager")(x), x + 1)
    assert (hooked, list(copy.deepcopy(module).state_dict())) == ([1], ["linear.weight", "linear.bias"])


# --- undoing, and texts -------------------------------------------------------------------------------------------------


def test_uninstrument_gives_back_the_very_members_and_keeps_what_was_decorated_before() -> None:
    class Base:
        def inherited(self) -> int:
            return 1

    class Thing(Base):
        def own(self) -> int:
            return 2

        @staticmethod
        def fixed() -> int:
            return 3

        @classmethod
        def make(cls) -> type:
            return cls

        @instrument(metrics_only=True)
        def on_its_own(self) -> int:
            return 4

        @no_instrument
        @property
        def left(self) -> int:
            return 5

    before = _visible(Thing)
    instrument(Thing)
    assert set(_visible(Thing)) == set(before) | {"inherited"}
    uninstrument(Thing)
    assert {name: value is before.get(name) for name, value in _visible(Thing).items()} == dict.fromkeys(before, True)


def test_a_decorator_of_the_user_s_own_around_a_traced_function_is_kept() -> None:
    calls: list[int] = []

    @instrument
    def inner(number: int) -> int:
        return number

    @functools.wraps(inner)
    def outer(number: int) -> int:
        calls.append(number)
        return inner(number)

    assert instrument(outer) is outer
    assert uninstrument(outer) is outer
    with capture() as captured:
        assert (outer(3), calls) == (3, [3])
        assert _names(captured) == ["inner"]
    assert uninstrument(inner).__name__ == "inner"
    assert not hasattr(uninstrument(inner), "__wrapped__")


def test_texts_name_methods_classes_and_functions_of_modules() -> None:
    before = (dict(vars(instrumented.Plain)), instrumented.plain, instrumented.other)
    for text in ("tests.instrumented:Plain.wo*", "tests.instrumented:plain", "tests.instrumented:Plain.Inner.*"):
        assert instrument(text) == text
    with capture() as captured:
        plain = instrumented.Plain()
        assert (plain.work(1), plain.rest(), plain.Inner().work()) == (2, None, "inner")
        assert (instrumented.plain(1), instrumented.other(1)) == (3, 4)
        assert _names(captured) == ["Plain/work", "Inner/work", "plain"]
    for text in ("tests.instrumented:Plain.wo*", "tests.instrumented:plain", "tests.instrumented:Plain.Inner.*"):
        uninstrument(text)
    assert (dict(vars(instrumented.Plain)), instrumented.plain, instrumented.other) == before


def test_a_text_may_come_before_its_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comes_later.py").write_text("class Later:\n    def work(self): return 1\ndef run(): return 2\ndef _hidden(): return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    instrument("comes_later:*")
    module = importlib.import_module("comes_later")
    with capture() as captured:
        assert (module.Later().work(), module.run(), module._hidden()) == (1, 2, 3)
        assert _names(captured) == ["Later/work", "run"]
    uninstrument("comes_later:*")
    assert not hasattr(module.run, "__wrapped__")


@pytest.mark.parametrize("text", ["train.Trainer.*", "train:", ":x", "a b:c", "train:Trainer.*()"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not of the form"):
        instrument(text)
