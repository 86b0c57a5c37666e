"""One function, or one member of a class, in a scope of its own, and back. It must not know which members were asked for, or by whom."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from otel_forge import pipeline
from otel_forge.decorating import decorate
from otel_forge.tracing import trace

_MARK = "__otel_forge_mark__"
MAX_KEPT_NAMES = 1000
"""Classes whose names one method remembers; a program that makes classes without end does not keep them alive by that."""

OpenScope = Callable[[str, Any], Any]
"""(prefix, options of `scope_options`) → a context manager around one call."""


@dataclass(slots=True, eq=False)
class Mark:
    """What a wrapper stands for. `functools.wraps` copies it to wrappers of the wrapper, so it counts only on the function that it names."""

    wrapper: Any
    original: Any
    """The function without the scope."""
    inside: Any
    """What runs in the scope: the function, or what looks an inherited one up."""
    member: Any = None
    """What the class itself had under this name; None: the name was inherited."""
    of_class: bool = False
    """Whether `instrument` of the class put it there; else the method was decorated on its own."""


def plain(member: Any) -> Any:
    """The function inside a static or class method; anything else as it is."""
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def mark_of(function: Any) -> Mark | None:
    """The mark of a traced function; None for every other one, also for a decorator's wrapper around a traced one."""
    mark = function.__dict__.get(_MARK) if inspect.isfunction(function) else None
    return mark if isinstance(mark, Mark) and mark.wrapper is function else None


def is_traced(function: Any) -> bool:
    """Whether a call of it is a scope already, however many decorators are around that."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        if mark_of(function) is not None:
            return True
        seen.add(id(function))
        function = getattr(function, "__wrapped__", None)
    return False


def scope_options(options: Mapping[str, Any]) -> Any:
    """The options of `trace`, looked at once. Raises TypeError for one that `trace` does not have."""
    return trace("", **options)._options


def traced_function(target: Any, options: Mapping[str, Any], open_scope: OpenScope = trace._of) -> Any:
    """A function, static or class method in a scope of its name; a method in a class body is named by the class of the running object."""
    function = plain(target)
    qualified = function.__qualname__.rpartition("<locals>.")[2]
    asked = scope_options(options)
    if inspect.ismethod(function):
        owner = function.__self__ if isinstance(function.__self__, type) else type(function.__self__)
        make = _fixed(f"{owner.__name__}/{function.__name__}", asked, open_scope)
    elif "." in qualified and not isinstance(target, staticmethod):
        make = _by_running_class(function, function.__name__, qualified.replace(".", "/"), asked, open_scope)
    else:
        make = _fixed(qualified.replace(".", "/"), asked, open_scope)
    wrapper = decorate(function, make)
    setattr(wrapper, _MARK, Mark(wrapper, function, function))
    return type(target)(wrapper) if isinstance(target, (staticmethod, classmethod)) else wrapper


def traced_member(cls: type, name: str, member: Any, options: Mapping[str, Any], open_scope: OpenScope = trace._of) -> Any:
    """The traced form of what `cls` has, or inherits, under a name."""
    function = inside = plain(member)
    is_inherited = name not in vars(cls)
    asked = scope_options(options)
    if isinstance(member, staticmethod):
        make = _fixed(f"{cls.__name__}/{name}", asked, open_scope)
        wrapper = decorate(function, make)
        traced: Any = _InheritedStatic(wrapper, name, make) if is_inherited else staticmethod(wrapper)
    else:
        make = _by_running_class(function, name, f"{cls.__name__}/{name}", asked, open_scope)
        inside = _forwarding(cls, name, function) if is_inherited else function
        wrapper = decorate(function, make, call=inside)
        traced = classmethod(wrapper) if isinstance(member, classmethod) else wrapper
    if is_inherited:  # a reference by name, as pickle's, has to lead here
        wrapper.__module__, wrapper.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    setattr(wrapper, _MARK, Mark(wrapper, function, inside, None if is_inherited else member, of_class=True))
    return traced


def _fixed(prefix: str, options: Any, open_scope: OpenScope) -> Callable[[tuple[Any, ...]], Any]:
    return lambda _args: open_scope(prefix, options)


def _by_running_class(function: Any, name: str, fallback: str, options: Any, open_scope: OpenScope) -> Callable[[tuple[Any, ...]], Any]:
    """Scopes named `{Class}/{name}` after the class of the object that runs."""
    names: dict[type, str] = {}

    def make(args: tuple[Any, ...]) -> Any:
        if not args:
            return open_scope(fallback, options)
        owner = args[0] if isinstance(args[0], type) else type(args[0])
        prefix = names.get(owner)
        if prefix is None:
            prefix = f"{owner.__name__}/{name}"
            _renew_class_cell(function, name, owner)
            if len(names) < MAX_KEPT_NAMES:
                names[owner] = prefix
        return open_scope(prefix, options)

    return make


def _renew_class_cell(function: Any, name: str, owner: type) -> None:
    """Let `super()` and `__class__` in a method mean the class that it is in.

    `@dataclass(slots=True)` and attrs build a class anew around the same functions; attrs mends the cells of those that it finds, and a wrapper
    hides them.
    """
    original = inspect.unwrap(function)
    cells = dict(zip(getattr(getattr(original, "__code__", None), "co_freevars", ()), getattr(original, "__closure__", None) or (), strict=False))
    cell = cells.get("__class__")
    if cell is None or cell.cell_contents in owner.__mro__:
        return
    for base in owner.__mro__:
        mark = mark_of(plain(vars(base).get(name)))
        if mark is not None and mark.original is function:
            cell.cell_contents = base
            return


def _forwarding(cls: type, name: str, function: Any) -> Callable[..., Any]:
    """What the class inherits, looked up at each call: a later change of the base, and a mixin in front of it, count."""

    def forward(first: Any, *args: Any, **kwargs: Any) -> Any:
        owner = first if isinstance(first, type) else type(first)
        home = cls if cls in owner.__mro__ else _home(owner, name, function)
        if home is None:
            return getattr(super(cls, cls), name)(first, *args, **kwargs)  # called with an object of another kind, as in Class.method(other)
        found = getattr(super(home, first), name)
        if pipeline.is_compiling():
            return found(*args, **kwargs)
        mark = mark_of(getattr(found, "__func__", None))
        return found(*args, **kwargs) if mark is None else mark.inside(first, *args, **kwargs)  # one scope for each body that runs

    return forward


def _home(owner: type, name: str, function: Any) -> type | None:
    """The class that a wrapper lies in when the one it was made for was built anew."""
    for base in owner.__mro__:
        mark = mark_of(plain(vars(base).get(name)))
        if mark is not None and mark.original is function and mark.of_class:
            return base
    return None


class _InheritedStatic(staticmethod):  # type: ignore[type-arg]
    """A static method that a class inherits, found at each look-up behind the class that this lies in."""

    def __init__(self, wrapper: Any, name: str, make: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__(wrapper)
        self._name = name
        self._make = make
        self._last = (plain(wrapper.__wrapped__), wrapper)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        owner = type(instance) if owner is None else owner
        function = next(_behind(owner, self, self._name)).__get__(instance, owner)
        if function is not self._last[0]:
            self._last = (function, function if is_traced(function) else decorate(function, self._make))
        return self._last[1]


def _behind(owner: type, member: Any, name: str) -> Iterator[Any]:
    """What classes of the resolution order have under a name, behind the one that has `member`."""
    found = False
    for base in owner.__mro__:
        if name in vars(base):
            if found:
                yield vars(base)[name]
            found = found or vars(base)[name] is member


def restore_member(cls: type, name: str, member: Any) -> bool:
    """Give a class back what `instrument` replaced; False where it replaced nothing."""
    mark = mark_of(plain(member))
    if mark is None or not mark.of_class:
        return False
    if mark.member is None:
        delete(cls, name)
    else:
        assign(cls, name, mark.member)
    return True


def assign(cls: type, name: str, value: Any) -> None:
    """Set an attribute of a class, past a metaclass that has other ideas. Raises TypeError or AttributeError where that is impossible."""
    try:
        type.__setattr__(cls, name, value)
    except TypeError:  # a metaclass written in C insists on its own
        setattr(cls, name, value)


def delete(cls: type, name: str) -> None:
    """Take an attribute from a class."""
    try:
        type.__delattr__(cls, name)
    except TypeError:
        delattr(cls, name)


def original_of(function: Any) -> Any:
    """The function without its scope; what has none as it is. Static and class methods keep their form."""
    mark = mark_of(plain(function))
    if mark is None:
        return function
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(mark.original)
    return mark.original
