"""What counts as a number: converters from a value's type to floats. It knows torch and numpy by their types' names only and imports neither."""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

NOT_A_NUMBER = "a value must be a number (float, int, bool, Decimal, numpy or torch scalar or array)"


def converter(kind: type) -> Callable[[Any], Any]:
    """The function that turns values of this type into a float, a list of floats, or a device tensor to be read later.

    That function raises TypeError or ValueError, with a text that says what would have been right.
    """
    if hasattr(kind, "read_numbers"):
        return _late
    if issubclass(kind, (str, bytes)):
        return _refuse
    if issubclass(kind, (int, float, decimal.Decimal, fractions.Fraction)):
        return float
    names = {base.__module__.partition(".")[0] + "." + base.__name__ for base in kind.__mro__}
    if "torch.DTensor" in names:
        return _dtensor
    if "torch.Tensor" in names:
        return _tensor
    if names & {"numpy.generic", "numpy.ndarray", "ml_dtypes.bfloat16"}:
        return _array
    if hasattr(kind, "__float__") or hasattr(kind, "__index__"):
        return float
    if hasattr(kind, "__array__"):
        return lambda value: _array(value.__array__())
    return _refuse


def _late(value: Any) -> Any:
    """A value that is known later (device_time.Duration): kept as it is."""
    return value


def _refuse(value: Any) -> Any:
    raise TypeError(f"{NOT_A_NUMBER}, got {type(value).__name__} {str(value)[:40]!r}")


def _array(value: Any) -> Any:
    if value.dtype.kind not in "biuf" and value.dtype.name != "bfloat16":
        raise TypeError(f"{NOT_A_NUMBER}, got a numpy array of {value.dtype}")
    if value.size == 1:
        return float(value.item())
    return value.astype("float64").ravel().tolist()


def _tensor(value: Any) -> Any:
    if value.is_complex():
        raise TypeError(f"{NOT_A_NUMBER}, got a complex tensor")
    if value.device.type != "cpu":
        if value.device.type == "meta":
            raise ValueError("a meta tensor has no value")
        return value.detach().clone()
    if value.numel() == 1:
        return float(value.item())
    return value.detach().double().flatten().tolist()


def _dtensor(value: Any) -> Any:
    if not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"a DTensor that is {value.placements} has no value on this rank alone; record `x.full_tensor()` (a collective) or `x.to_local()`"
        )
    return _tensor(value.to_local())


def is_ready(items: list[tuple[Any, float | None]]) -> bool:
    """Whether all can be read without a wait. What has no `is_ready` is taken as it is."""
    return all(ready() for ready in (getattr(item, "is_ready", None) for item, _ in items) if ready is not None)


def read_deferred(items: list[tuple[Any, float | None]]) -> tuple[list[float], list[tuple[float, float]]]:
    """(values, weighted pairs) of device tensors, read with one transfer per device and kind. Called off the training thread."""
    values: list[float] = []
    weighted: list[tuple[float, float]] = []
    for tensor, weight in items:
        if hasattr(tensor, "read_numbers"):
            numbers = tensor.read_numbers()
        else:
            numbers = tensor.double().flatten().tolist() if tensor.device.type != "mps" else tensor.cpu().double().flatten().tolist()
        for number in numbers:
            if weight is None:
                values.append(number)
            else:
                weighted.append((number, weight))
    return values, weighted
