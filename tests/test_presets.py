"""The preset `torch` and steps by themselves, in this process: real optimizers, DDP, FSDP, DataLoaders and checkpoints."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import otel_forge
from otel_forge import autoload, measuring
from otel_forge.automatic_steps import Cycle
from otel_forge.device import TorchAccelerator
from otel_forge.testing import Captured, capture
from tests.fake_accelerator import FakeCuda


@contextlib.contextmanager
def running(*instrument: str, step: str = "manual") -> Iterator[Captured]:
    """Instrumented from outside, in an initialised process."""
    with capture() as captured:
        autoload._start(instrument, step, None, before_script=False)
        try:
            yield captured
        finally:
            autoload.stop()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _scopes(row: dict[str, Any]) -> dict[str, int]:
    return {key.partition("/total_duration")[0]: 1 for key in row["metrics"] if key.endswith("total_duration_avg_s")}


def _names(captured: Captured) -> list[str]:
    return [item.name for item in captured.spans]


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _hooked() -> dict[str, Any]:
    """Everything that the preset or the steps may replace."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    owners: list[tuple[Any, str]] = [(torch, "save"), (torch, "load"), (torch.serialization, "save"), (torch.serialization, "load")]
    owners += [(dcp, "save"), (dcp, "load"), (dcp, "async_save"), (DistributedDataParallel, "forward"), (FullyShardedDataParallel, "forward")]
    owners += [(dataloader._BaseDataLoaderIter, "__next__"), (_runtime_utils, "_post_backward_final_callback"), (optimizer.Optimizer, "__init__")]
    owners += [(FSDPParamGroup, "wait_for_unshard"), (FSDPParamGroup, "finalize_backward")]
    hooks = {"pre": dict(optimizer._global_optimizer_pre_hooks), "post": dict(optimizer._global_optimizer_post_hooks)}
    return {f"{owner}.{name}": getattr(owner, name) for owner, name in owners} | hooks


def test_every_hook_is_put_and_taken_away_again() -> None:
    before = _hooked()
    with running("torch", step="optimizer"):
        during = _hooked()
        assert [name for name, value in before.items() if during[name] == value] == []
    assert _hooked() == before


# --- steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_step_ends_once_however_many_optimizers_it_has(count: int) -> None:
    with running("torch", step="optimizer") as captured:
        models = [nn.Linear(4, 1) for _ in range(count)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                _step(model, optimizer)
        rows = captured.rows
        names = _names(captured)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [set(_scopes(row)) for row in rows] == [{"step", "optimizer/step"}] * 4
    assert (names.count("rank 0"), names.count("optimizer/step")) == (4, 4 * count)


def test_optimizers_that_take_turns_or_come_later_still_end_steps() -> None:
    """One that steps five times for each step of another; one that takes over for good; one that is gone."""

    class Named:
        pass

    critic, generator, later = Named(), Named(), Named()
    cycle = Cycle()
    for item in (critic, generator):
        cycle.expects(item)
    assert [cycle.stepped(critic) for _ in range(5)] == [False, True, True, True, True]
    assert [cycle.stepped(generator), cycle.stepped(critic), cycle.stepped(critic)] == [False, True, True]
    cycle.expects(later)
    assert [cycle.stepped(later) for _ in range(4)] == [False, True, True, True]
    cycle = Cycle()
    for item in (critic, later):
        cycle.expects(item)
    del later, item
    gc.collect()
    assert cycle.stepped(critic)


def test_a_method_that_lasts_over_many_steps_is_no_parent_of_them_and_its_time_is_where_it_ends() -> None:
    from tests import training_loop

    with running("tests.training_loop:Loop.*", step="optimizer") as captured:
        training_loop.Loop().fit(3)
        rows, spans = captured.rows, captured.spans
    assert [set(_scopes(row)) for row in rows] == [{"step", "Loop/train_step"}] * 3
    by_step: dict[int, list[Any]] = {}
    for item in spans:
        by_step.setdefault(item.attributes["step"], []).append(item)
    for step in (0, 1, 2):
        names = {item.span_id: item.name for item in by_step[step]}
        parents = {item.name: names.get(item.parent_id, "") for item in by_step[step]}
        assert parents["Loop/train_step"] in ("rank 0", "Loop/fit")
        assert all(item.parent_id in names or item.name == "rank 0" for item in by_step[step])
        assert len({item.trace_id for item in by_step[step]}) == 1


def test_other_threads_do_not_end_steps() -> None:
    import threading

    with running("torch", step="optimizer") as captured:
        model = nn.Linear(4, 1)
        main = torch.optim.SGD(model.parameters(), lr=0.1)
        _step(model, main)
        other_model = nn.Linear(4, 1)
        thread = threading.Thread(target=_step, args=(other_model, torch.optim.SGD(other_model.parameters(), lr=0.1)))
        thread.start()
        thread.join()
        _step(model, main)
        assert [row["step"] for row in captured.rows] == [0, 1]


# --- what is measured -----------------------------------------------------------------------------------------------------


def test_an_optimizer_that_raises_leaves_nothing_open() -> None:
    with running("torch") as captured:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            raise ValueError("no loss")

        with otel_forge.span("around"), pytest.raises(ValueError, match="no loss"):
            optimizer.step(closure)
        with otel_forge.span("later"):
            _step(model, optimizer)
        spans = {item.name: item for item in captured.spans}
    assert spans["later"].parent_id == spans["around"].parent_id
    assert spans["optimizer/step"].parent_id == spans["later"].span_id


@pytest.mark.parametrize("workers", [0, 1])
def test_the_wait_for_data_is_that_of_the_loop(workers: int) -> None:
    with running("torch") as captured:
        assert len(list(DataLoader(list(range(6)), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None))) == 3
        names = _names(captured)
        errors = {item.error for item in captured.spans}
    assert (names, errors) == (["data/wait"] * 4, {None})  # the fourth found the end


def test_ddp_s_forward_and_its_wait_at_the_end_of_the_backward(group: None) -> None:
    """Not where gradients are only accumulated, nor without gradients; the gradients are those of the plain model."""
    torch.manual_seed(0)
    bare = nn.Linear(4, 1)
    with running("torch") as captured:
        model = DistributedDataParallel(bare)
        with otel_forge.span("synced"):
            model(torch.ones(1, 4)).sum().backward()
        with model.no_sync(), otel_forge.span("accumulated"):
            model(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 4))
        output = model(torch.ones(1, 4))
        del output
        spans = captured.spans
    assert torch.equal(bare.weight.grad, torch.full((1, 4), 2.0))  # type: ignore[arg-type]
    names = {item.span_id: item.name for item in spans}
    found = [(item.name, names.get(item.parent_id, "")) for item in spans if item.name.startswith("ddp")]
    assert found == [
        ("ddp/forward", "synced"),
        ("ddp/backward_wait", "synced"),
        ("ddp/forward", "accumulated"),
        ("ddp/forward", ""),
        ("ddp/forward", ""),
    ]


def test_what_a_ddp_model_gives_may_be_of_any_form(group: None) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"first": (self.linear(x), None), "second": [self.linear(2 * x), "text"]}

    with running("torch") as captured:
        output = DistributedDataParallel(Pair())(torch.ones(1, 4))
        (output["first"][0] + output["second"][0]).sum().backward()
        names = _names(captured)
    assert names.count("ddp/backward_wait") == 1


def test_fully_sharded_modules_wait_for_parameters_and_gradients(group: None) -> None:
    with running("torch") as captured:
        model = fully_shard(nn.Linear(4, 1), mesh=dist.init_device_mesh("cpu", (1,)))
        assert isinstance(model, FSDPModule)
        model(torch.ones(1, 4)).sum().backward()
        names = set(_names(captured))
    assert names >= {"fsdp/unshard_wait", "fsdp/backward_wait"}


@pytest.mark.filterwarnings("ignore")
def test_the_older_fsdp_has_its_forward_and_its_wait(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with running("torch") as captured:
        model = FullyShardedDataParallel(nn.Linear(4, 1), device_id=torch.device("cpu"))
        model(torch.ones(1, 4)).sum().backward()
        names = _names(captured)
    assert (names.count("fsdp/forward"), names.count("fsdp/backward_wait")) == (1, 1)


def test_device_memory_is_told_where_there_is_a_device() -> None:
    cuda = FakeCuda()
    with running("torch", step="optimizer") as captured:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _step(model, optimizer)
        measuring.use(TorchAccelerator(cuda, "cuda"))
        cuda.allocate(3 << 30)
        cuda.free(2 << 30)
        _step(model, optimizer)
        measuring.configure(timer="cpu", track_memory=False)
        without, with_device = ({key: value for key, value in row["metrics"].items() if "memory" in key} for row in captured.rows)
    assert (without, with_device) == ({}, {"device/memory_allocated_max_gb": 1.0, "device/memory_peak_max_gb": 3.0})


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_every_way(group: None, tmp_path: Path) -> None:
    state = {"weight": torch.ones(3)}
    with running("torch") as captured:
        torch.save(state, tmp_path / "one.pt")
        assert torch.equal(torch.load(tmp_path / "one.pt")["weight"], state["weight"])
        dcp.save(state, checkpoint_id=tmp_path / "many")
        dcp.load(state, checkpoint_id=tmp_path / "many")
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "none.pt")
        names = _names(captured)
        failed = [item.name for item in captured.spans if item.error]
    assert (names.count("checkpoint/save"), names.count("checkpoint/load"), failed) == (2, 3, ["checkpoint/load"])


def _compile_all() -> tuple[int, torch.Tensor]:
    """Graph breaks of a compiled module, optimizer and DDP model, and the weight that they come to."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 4)
    torch.compile(model, fullgraph=True, backend="eager")(x).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    torch.compile(DistributedDataParallel(model), backend="eager")(x).sum().backward()
    optimizer.step()
    return sum(torch._dynamo.utils.counters["graph_break"].values()), model.weight.detach().clone()


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_has_no_more_graph_breaks_with_every_hook_in_place(group: None) -> None:
    bare = _compile_all()
    with running("torch", step="optimizer"):
        hooked = _compile_all()
    assert hooked[0] == bare[0]
    assert torch.equal(hooked[1], bare[1])
