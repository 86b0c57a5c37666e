"""The preset `torch`: where a training step's time goes, by hooks around torch's own parts.

| scope | what it is |
|---|---|
| `data/wait` | the loop waits for the DataLoader's next batch |
| `ddp/forward`, `fsdp/forward` | the forward of the wrapped model |
| `ddp/backward_wait`, `fsdp/backward_wait` | the backward is done with computing and waits for the gradients' communication |
| `fsdp/unshard_wait` | fully_shard waits for parameters |
| `optimizer/step` | one optimizer's step |
| `checkpoint/save`, `checkpoint/load` | torch.save, torch.load and torch.distributed.checkpoint's |

Each costs a scope, some microseconds; inside torch.compile they stand back.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from otel_forge import measuring, pipeline, tracing
from otel_forge.decorating import decorate
from otel_forge.memory import GIB
from otel_forge.metrics import Reduce, record_metric
from otel_forge.presets import Preset
from otel_forge.presets.backward import watch_backward
from otel_forge.training_process import is_training
from otel_forge.wrapping import scope_options

_options = scope_options({})
_CHECKPOINT = "torch.distributed.checkpoint"


def put(preset: Preset) -> None:
    """Put every hook, each once its part of torch is there."""
    _optimizer(preset)
    preset.when_imported("torch", lambda: _checkpoints(preset))
    preset.when_imported("torch.utils.data.dataloader", lambda: _data(preset))
    preset.when_imported("torch.nn.parallel.distributed", lambda: _ddp(preset))
    preset.when_imported("torch.distributed.fsdp", lambda: _fsdp(preset))
    preset.when_imported(_CHECKPOINT, lambda: _distributed_checkpoints(preset))


def _replace(preset: Preset, owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute; taken back unless somebody else has replaced it meanwhile."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    preset.undo_with(undo)


def _scope_around(preset: Preset, owner: Any, name: str, prefix: str) -> None:
    """Every call of a function of torch's is a scope. Says when torch has no such function (any more)."""
    original = getattr(owner, name, None)
    if not callable(original):
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {name}: {prefix} is not measured")
    _replace(preset, owner, name, decorate(original, lambda _args: preset.scopes(prefix, _options)))


def _optimizer(preset: Preset) -> None:
    running: list[tuple[int, Any]] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if pipeline.is_compiling() or not is_training():
            return
        parent = tracing.current_span_id()
        while any(key == id(optimizer) for key, _ in running):
            running.pop()[1].__exit__(None, None, None)  # its last step raised
            tracing._parent.set(parent)
        scope = preset.scopes("optimizer/step", _options)
        scope.__enter__()
        running.append((id(optimizer), scope))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if pipeline.is_compiling():
            return
        while any(key == id(optimizer) for key, _ in running):
            running.pop()[1].__exit__(None, None, None)
        _device_memory()

    preset.undo_with(register_optimizer_step_pre_hook(before).remove)
    preset.undo_with(register_optimizer_step_post_hook(after).remove)


def _device_memory() -> None:
    """What tensors hold on the device now, and the most so far; nothing where the program uses none."""
    found = measuring.device_memory_bytes()
    if found is not None:
        record_metric("device/memory_allocated_max_gb", found[0] / GIB, Reduce.MAX)
        record_metric("device/memory_peak_max_gb", found[1] / GIB, Reduce.MAX)


def _data(preset: Preset) -> None:
    iterator = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
    original: Callable[[Any], Any] = iterator.__next__

    def make(_args: Any) -> Any:
        if preset.steps is not None and is_training():
            preset.steps.waits_for_data()
        return preset.scopes("data/wait", _options)

    _replace(preset, iterator, "__next__", decorate(original, make))


def _ddp(preset: Preset) -> None:
    owner = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
    original = owner.forward
    in_scope = decorate(original, lambda _args: preset.scopes("ddp/forward", _options))

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if pipeline.is_compiling() or not is_training():
            return original(self, *inputs, **kwargs)
        output = in_scope(self, *inputs, **kwargs)
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            watch_backward(output, lambda: preset.scopes("ddp/backward_wait", _options))
        return output

    forward.__wrapped__ = original  # type: ignore[attr-defined]
    _replace(preset, owner, "forward", forward)


def _fsdp(preset: Preset) -> None:
    fsdp = sys.modules["torch.distributed.fsdp"]
    _scope_around(preset, fsdp.FullyShardedDataParallel, "forward", "fsdp/forward")
    _scope_around(preset, importlib.import_module("torch.distributed.fsdp._runtime_utils"), "_post_backward_final_callback", "fsdp/backward_wait")
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    _scope_around(preset, group, "wait_for_unshard", "fsdp/unshard_wait")
    _scope_around(preset, group, "finalize_backward", "fsdp/backward_wait")


class _Checkpoint:
    """A scope around saving or loading; what that saves or loads inside itself is part of it."""

    _open = threading.local()

    def __init__(self, scope: Any) -> None:
        self._scope = None if getattr(self._open, "is_open", False) else scope

    def __enter__(self) -> None:
        if self._scope is not None:
            self._open.is_open = True
            self._scope.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._scope is not None:
            self._open.is_open = False
            self._scope.__exit__(*error)


def _checkpoint_around(preset: Preset, owner: Any, name: str, prefix: str) -> None:
    _replace(preset, owner, name, decorate(getattr(owner, name), lambda _args: _Checkpoint(preset.scopes(prefix, _options))))


def _checkpoints(preset: Preset) -> None:
    for name, prefix in (("save", "checkpoint/save"), ("load", "checkpoint/load")):
        _checkpoint_around(preset, torch, name, prefix)
        _replace(preset, torch.serialization, name, getattr(torch, name))


def _distributed_checkpoints(preset: Preset) -> None:
    package = sys.modules[_CHECKPOINT]
    for name, module, prefix in (
        ("save", "state_dict_saver", "checkpoint/save"),
        ("async_save", "state_dict_saver", "checkpoint/save"),
        ("load", "state_dict_loader", "checkpoint/load"),
    ):
        _checkpoint_around(preset, package, name, prefix)
        _replace(preset, importlib.import_module(f"{_CHECKPOINT}.{module}"), name, getattr(package, name))
