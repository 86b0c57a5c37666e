"""Which members of a class are traced, and which functions can be. It must not know how a user asks for it."""

from __future__ import annotations

import enum
import fnmatch
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from otel_forge.errors import UsageError
from otel_forge.tracing import trace
from otel_forge.wrapping import OpenScope, assign, is_traced, mark_of, plain, traced_function, traced_member

SKIP = "__otel_forge_skip__"
"""Attribute of a function that is left alone."""
_IMMUTABLE, _HEAP = 1 << 8, 1 << 9
"""Py_TPFLAGS_IMMUTABLETYPE and Py_TPFLAGS_HEAPTYPE: a class that cannot be changed has the first, or lacks the second."""


def instrument_function(target: Any, options: Mapping[str, Any], open_scope: OpenScope = trace._of) -> Any:
    """The traced form of a function, a static or a class method. Raises UsageError for anything else."""
    function = plain(target)
    if not (inspect.isfunction(function) or inspect.ismethod(function) or inspect.isbuiltin(function)):
        kind = type(target).__name__
        raise UsageError(f"instrument: expected a class or a function, got {kind}. A decorated function that is none: put @instrument below")
    if is_traced(function) or hasattr(function, SKIP):
        return target
    return traced_function(target, options, open_scope)


def instrument_class(
    cls: type,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    options: Mapping[str, Any],
    methods: Mapping[str, Mapping[str, Any]],
    open_scope: OpenScope = trace._of,
) -> int:
    """Trace the methods of a class that are asked for; how many of them are traced now. Raises UsageError for a class that cannot be changed."""
    _check_class(cls)
    count = 0
    for name, found in _members(cls):
        if not _is_wanted(name, include, exclude) or not _is_traceable(found):
            continue
        if name not in vars(cls) and name not in include and _is_foreign(plain(found)):
            continue
        count += 1
        if is_traced(plain(found)):
            continue
        special = next((value for pattern, value in methods.items() if fnmatch.fnmatchcase(name, pattern)), {})
        traced = traced_member(cls, name, found, {**options, **special}, open_scope)
        try:
            assign(cls, name, traced)
        except (TypeError, AttributeError) as error:
            raise UsageError(f"instrument: {cls.__qualname__}.{name} cannot be replaced: {error}") from error
    return count


def _check_class(cls: type) -> None:
    if issubclass(cls, enum.Enum):
        raise UsageError(f"instrument: {cls.__qualname__} is an enum: its members are made, there is nothing to time in it")
    if getattr(cls, "_is_protocol", False):
        raise UsageError(f"instrument: {cls.__qualname__} is a Protocol: instrument the classes that implement it")
    if cls.__flags__ & _IMMUTABLE or not cls.__flags__ & _HEAP:
        raise UsageError(f"instrument: {cls.__qualname__} is not written in Python and cannot be changed; instrument a subclass")


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Name and raw form of what a class has or inherits, as look-up finds it; nothing is run for it."""
    seen: set[str] = set()
    for base in cls.__mro__:
        for name, found in list(vars(base).items()):
            if name not in seen:
                seen.add(name)
                yield name, found


def _is_wanted(name: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
        return False
    if name.startswith("_"):
        include = tuple(pattern for pattern in include if pattern.startswith("_") and (not name.startswith("__") or pattern == name))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in include)


def _is_traceable(found: Any) -> bool:
    """Properties, nested classes, and callables that are no functions, as cached ones, are left alone; so are abstract methods."""
    function = plain(found)
    is_method = type(found) in (staticmethod, classmethod) or found is function or mark_of(function) is not None
    return is_method and inspect.isfunction(function) and not hasattr(function, SKIP) and not getattr(function, "__isabstractmethod__", False)


def _is_foreign(function: Any) -> bool:
    top = (function.__module__ or "").partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names
