"""`instrument`: every public method of a class, or one function, becomes a traced scope, without a change in how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from otel_forge import patterns
from otel_forge.members import SKIP, instrument_class, instrument_function
from otel_forge.notices import warn_once
from otel_forge.wrapping import original_of, plain, restore_member

T = TypeVar("T")


def no_instrument(function: T) -> T:
    """Mark a method that `instrument` leaves alone. Above other decorators, or below them."""
    try:
        setattr(plain(function), SKIP, True)
    except AttributeError:  # a property or the like, which is left alone anyhow
        pass
    return function


@overload
def instrument(
    target: T,
    *,
    include: Sequence[str] | str = ...,
    exclude: Sequence[str] | str = ...,
    methods: Mapping[str, Mapping[str, Any]] | None = ...,
    **options: Any,
) -> T: ...
@overload
def instrument(
    target: None = None,
    *,
    include: Sequence[str] | str = ...,
    exclude: Sequence[str] | str = ...,
    methods: Mapping[str, Mapping[str, Any]] | None = ...,
    **options: Any,
) -> Callable[[T], T]: ...
def instrument(
    target: Any = None,
    *,
    include: Sequence[str] | str = ("*",),
    exclude: Sequence[str] | str = (),
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Trace every call of a class's public methods, or of a function; also a decorator, with or without arguments.

    `target` may be a text, `"package.module:Class.*"` or `"package.module:function"`: what it names is traced now, or once the module is imported.
    `include` and `exclude` are patterns of method names; what begins with an underscore is traced when a pattern that does, too, matches it. Options
    are those of `trace` (`track_memory`, `timer`, `metrics_only`, `span_only`); `methods` gives single methods (patterns of names) others:
    `methods={"load": {"timer": "cpu"}}`. Names are `{Class}/{method}` of the running object.

    Inherited methods are traced on this class only, and a later change of the base is seen; those of torch and the standard library are left alone
    unless `include` has their name. So are properties, cached and abstract methods, nested classes and other callables. A second call changes
    nothing. A call of a traced method takes two frames of the interpreter's recursion limit (three where it is inherited) instead of one. Raises
    UsageError for what cannot be traced.
    """
    if target is None:
        return lambda found: instrument(found, include=include, exclude=exclude, methods=methods, **options)
    if isinstance(target, str):
        patterns.Watch((target,), _patterns(exclude), methods or {}, options).start()
        return target
    if isinstance(target, type):
        count = instrument_class(target, _patterns(include), _patterns(exclude), options, methods or {})
        if not count:
            warn_once(f"instrument {target!r}", f"instrument: {target.__qualname__} has no method to trace (include={include}, exclude={exclude})")
        return target
    return instrument_function(target, options)


def _patterns(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def uninstrument(target: T) -> T:
    """Undo `instrument` exactly on a class, a function (whose plain form is returned), or what a text names; anything else is given back as it is."""
    if isinstance(target, str):
        patterns.stop(target)
        return target
    if not isinstance(target, type):
        found: T = original_of(target)
        return found
    for name, member in list(vars(target).items()):
        restore_member(target, name, member)
    return target
