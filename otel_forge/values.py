"""What counts as a number: converters from a value's type to floats. It knows torch and numpy by their types' names only and imports neither."""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

LISTED_UP_TO = 1024
"""Elements of an array that are taken one by one, summed exactly; a larger one is folded vectorised."""
NOT_A_NUMBER = "a value must be a number (float, int, bool, Decimal, numpy or torch scalar or array)"


def converter(kind: type) -> Callable[[Any], Any]:
    """The function that turns values of this type into a float, a list of floats, a large numpy array, or a tensor on a device.

    That function raises TypeError or ValueError, with a text that says what would have been right.
    """
    if getattr(kind, "is_late", False):
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
    return value.astype("float64").ravel().tolist() if value.size <= LISTED_UP_TO else value


def _tensor(value: Any) -> Any:
    if value.is_complex():
        raise TypeError(f"{NOT_A_NUMBER}, got a complex tensor")
    if not is_host(value):
        if value.device.type == "meta":
            raise ValueError("a meta tensor has no value")
        return value
    if value.numel() == 1:
        return float(value.item())
    flat = value.detach().double().flatten()
    return flat.tolist() if value.numel() <= LISTED_UP_TO else _as_array(flat)


def _as_array(flat: Any) -> Any:
    try:
        return flat.numpy()
    except RuntimeError:  # a torch without numpy
        return flat.tolist()


def is_host(tensor: Any) -> bool:
    """Whether reading a tensor waits for no device."""
    return bool(tensor.device.type == "cpu")


def _dtensor(value: Any) -> Any:
    if not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"a DTensor that is {value.placements} has no value on this rank alone; record `x.full_tensor()` (a collective) or `x.to_local()`"
        )
    return _tensor(value.to_local())
