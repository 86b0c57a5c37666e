"""`instrument`: every public method of a class, or one function, becomes a traced scope, without a change in how it is called."""

from __future__ import annotations

import enum
import fnmatch
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from otel_forge.errors import UsageError
from otel_forge.tracing import trace

T = TypeVar("T")
_ORIGINAL = "__otel_forge_original__"
_SKIP = "__otel_forge_skip__"


def no_instrument(function: T) -> T:
    """Mark a method that `instrument` leaves alone."""
    target = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    setattr(target, _SKIP, True)
    return function


@overload
def instrument(target: T, *, include: Sequence[str] | str = ..., exclude: Sequence[str] | str = ..., **options: Any) -> T: ...
@overload
def instrument(
    target: None = None, *, include: Sequence[str] | str = ..., exclude: Sequence[str] | str = ..., **options: Any
) -> Callable[[T], T]: ...
def instrument(target: Any = None, *, include: Sequence[str] | str = ("*",), exclude: Sequence[str] | str = (), **options: Any) -> Any:
    """Trace every call of a class's public methods, or of a function; also a decorator, with or without arguments.

    `include` and `exclude` are patterns of method names; a name in `include` is traced even if it begins with an underscore. Options are those of
    `trace` (`track_memory`, `timer`, `metrics_only`, `span_only`). Names are `{Class}/{method}` of the running object. Inherited methods are traced
    on this class only. A second call changes nothing. Raises UsageError for what cannot be traced.
    """
    if target is None:
        return lambda found: instrument(found, include=include, exclude=exclude, **options)
    include = (include,) if isinstance(include, str) else tuple(include)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    if isinstance(target, type):
        return _instrument_class(target, include, exclude, options)
    if callable(target) and hasattr(target, "__qualname__"):
        return target if hasattr(target, _ORIGINAL) else _wrap(target, None, options)
    raise UsageError(f"instrument: expected a class or a function, got {type(target).__name__}")


def _instrument_class(cls: type, include: tuple[str, ...], exclude: tuple[str, ...], options: dict[str, Any]) -> type:
    if issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False):
        raise UsageError(f"instrument: {cls.__qualname__} is an enum or a Protocol: there is nothing to time in it")
    for name in dir(cls):
        if not _wanted(name, include, exclude):
            continue
        found = inspect.getattr_static(cls, name)
        wrapped = _wrap_member(found, name, options, inherited=name not in cls.__dict__)
        if wrapped is None:
            continue
        try:
            setattr(cls, name, wrapped)
        except (TypeError, AttributeError) as error:
            raise UsageError(f"instrument: {cls.__qualname__} cannot be changed ({error}): it is not written in Python") from error
    return cls


def _wanted(name: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
        return False
    if name.startswith("_"):
        return name in include
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in include)


def _wrap_member(found: Any, name: str, options: dict[str, Any], *, inherited: bool) -> Any:
    """The traced form of a class's member; None for what is left alone (properties, nested classes, callables that are no functions)."""
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if (
        not inspect.isfunction(function)
        or hasattr(function, _ORIGINAL)
        or hasattr(function, _SKIP)
        or getattr(function, "__isabstractmethod__", False)
    ):
        return None
    if inherited and function.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
        return None
    wrapped = _wrap(function, None if not isinstance(found, staticmethod) else function.__qualname__.replace(".", "/"), options)
    if isinstance(found, (staticmethod, classmethod)):
        return type(found)(wrapped)
    return wrapped


def _wrap(function: Any, prefix: str | None, options: dict[str, Any]) -> Any:
    if prefix is None and "." not in function.__qualname__.rpartition("<locals>.")[2]:
        prefix = function.__qualname__  # a function; a method is named by the class of the running object
    wrapped = trace(prefix, **options)(function)
    setattr(wrapped, _ORIGINAL, function)
    return wrapped


def uninstrument(target: T) -> T:
    """Undo `instrument` on a class or function exactly; what was not instrumented is given back as it is."""
    if not isinstance(target, type):
        original: T = getattr(target, _ORIGINAL, target)
        return original
    for name, found in list(vars(target).items()):
        function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        original_function = vars(function).get(_ORIGINAL) if inspect.isfunction(function) else None
        if original_function is None:
            continue
        inherited = next((vars(base)[name] for base in target.__mro__[1:] if name in vars(base)), None)
        plain = inherited.__func__ if isinstance(inherited, (staticmethod, classmethod)) else inherited
        if plain is original_function:
            delattr(target, name)
        else:
            setattr(target, name, type(found)(original_function) if isinstance(found, (staticmethod, classmethod)) else original_function)
    return target
