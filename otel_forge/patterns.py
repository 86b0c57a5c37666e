"""`"package.module:Class.*"`: what such a text names, found when its module is there. It must not know why it is to be traced.

A module is found by a post-import hook, so a text may come before the module; names that others took from it by `from module import function` before
that keep the plain function.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from otel_forge.errors import UsageError
from otel_forge.members import instrument_class, instrument_function
from otel_forge.notices import warn_once
from otel_forge.tracing import trace
from otel_forge.wrapping import OpenScope, mark_of, original_of, plain, restore_member

_FORM = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):((?:[\w*?\[\]]+\.)*[\w*?\[\]]+)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One text, taken apart."""

    text: str
    module: str
    owner: str
    """Path of a class inside the module, `Outer.Inner`; of a function or class in `Trainer`-like texts; may have wildcards."""
    member: str | None
    """Pattern of a method's name; None in a text without a dot: a function, or a class with all its public methods."""


def parse(text: str) -> Pattern:
    """Take a text apart. Raises UsageError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"instrument: {text!r} is not of the form 'package.module:Class.*', 'package.module:Class.method' or 'package.module:function'"
        )
    owner, dot, member = found.group(2).rpartition(".")
    return Pattern(text, found.group(1), owner if dot else member, member if dot else None)


def script_names(namespace: Mapping[str, Any]) -> set[str]:
    """Module names by which the running script can be meant: `__main__`, its file's stem, and what `python -m` was given."""
    names = {"__main__"}
    if namespace.get("__file__"):
        names.add(re.split(r"[/\\]", namespace["__file__"])[-1].removesuffix(".py"))
    spec = namespace.get("__spec__")
    if spec is not None:
        names.add(spec.name.removesuffix(".__main__"))
    return names


@dataclass(slots=True)
class _Taken:
    """What was replaced: a method of a class, or a name in a module."""

    owner: Any
    name: str
    wrapper: Any

    def give_back(self) -> None:
        if isinstance(self.owner, type):
            member = vars(self.owner).get(self.name)
            if plain(member) is plain(self.wrapper):
                restore_member(self.owner, self.name, member)
        elif self.owner.get(self.name) is self.wrapper:
            self.owner[self.name] = original_of(self.wrapper)


@dataclass(slots=True)
class Watch:
    """Traces what its texts name, now and as modules come."""

    texts: Iterable[str]
    exclude: tuple[str, ...] = ()
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    open_scope: OpenScope = trace._of
    patterns: tuple[Pattern, ...] = ()
    matched: set[str] = field(default_factory=set)
    """Texts that named something."""
    _taken: list[_Taken] = field(default_factory=list)
    _is_over: bool = False

    def __post_init__(self) -> None:
        self.patterns = tuple(parse(text) for text in self.texts)

    def start(self) -> None:
        """Trace what is there, and what will be imported. Raises UsageError for what is there and cannot be traced."""
        _watches.append(self)
        main = vars(sys.modules["__main__"])
        if any(pattern.module in script_names(main) for pattern in self.patterns):
            self.apply(main, script_names(main))
        for module in dict.fromkeys(pattern.module for pattern in self.patterns):
            if module in sys.modules:
                self.apply(vars(sys.modules[module]), {module})
            else:
                import wrapt

                wrapt.register_post_import_hook(self._imported, module)

    def _imported(self, module: Any) -> None:
        if not self._is_over:
            with_care(lambda: self.apply(vars(module), {module.__name__}))

    def apply(self, namespace: MutableMapping[str, Any], names: set[str]) -> None:
        """Trace what the patterns name in a module that goes by these names."""
        for pattern in self.patterns:
            if pattern.module in names:
                for owner, name, found in list(_named(namespace, pattern.owner)):
                    self._trace(pattern, owner, name, found)

    def class_made(self, cls: type, names: set[str]) -> None:
        """A class of the running script, before its decorators."""
        for pattern in self.patterns:
            if pattern.module in names and fnmatch.fnmatchcase(cls.__qualname__, pattern.owner):
                self._trace_class(pattern, cls)

    def _trace(self, pattern: Pattern, owner: Any, name: str, found: Any) -> None:
        if isinstance(found, type):
            self._trace_class(pattern, found)
        elif pattern.member is None and isinstance(owner, MutableMapping) and callable(plain(found)):
            wrapper = instrument_function(found, self.options, self.open_scope)
            self.matched.add(pattern.text)
            if wrapper is not found:
                owner[name] = wrapper
                self._taken.append(_Taken(owner, name, wrapper))

    def _trace_class(self, pattern: Pattern, cls: type) -> None:
        before = dict(vars(cls))
        include = (pattern.member or "*",)
        if instrument_class(cls, include, self.exclude, self.options, self.methods, self.open_scope):
            self.matched.add(pattern.text)
        for name, member in list(vars(cls).items()):
            if before.get(name) is not member and mark_of(plain(member)) is not None:
                self._taken.append(_Taken(cls, name, member))

    def unmatched(self) -> list[str]:
        """Texts that named nothing so far."""
        return [pattern.text for pattern in self.patterns if pattern.text not in self.matched]

    def stop(self) -> None:
        """Give back everything that was replaced, and look no further."""
        self._is_over = True
        while self._taken:
            self._taken.pop().give_back()
        if self in _watches:
            _watches.remove(self)


_watches: list[Watch] = []


def stop(text: str) -> None:
    """Undo what was traced for one text. Does nothing where there was none."""
    for watch in list(_watches):
        if text in tuple(watch.texts):
            watch.stop()


def _named(namespace: MutableMapping[str, Any], path: str) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, object) of what a path inside a module means. Wildcards mean classes and functions that the module itself defines."""
    first, _, rest = path.partition(".")
    for name, found in list(namespace.items()):
        if not fnmatch.fnmatchcase(name, first) or (name != first and not _is_own(namespace, name, found)):
            continue
        if not rest:
            yield namespace, name, found
        elif isinstance(found, type):
            for inner in _nested(found, rest):
                yield found, inner.__name__, inner


def _nested(cls: type, path: str) -> Iterator[type]:
    first, _, rest = path.partition(".")
    for name, found in list(vars(cls).items()):
        if isinstance(found, type) and fnmatch.fnmatchcase(name, first):
            yield from _nested(found, rest) if rest else (found,)


def _is_own(namespace: Mapping[str, Any], name: str, found: Any) -> bool:
    is_code = isinstance(found, type) or hasattr(found, "__code__")
    return is_code and not name.startswith("_") and getattr(found, "__module__", None) == namespace.get("__name__")


def with_care(act: Callable[[], object]) -> None:
    """Do something inside the program's own import or class statement: what fails is said once, and nothing is raised there."""
    try:
        act()
    except Exception as error:
        warn_once(f"instrument {error}", str(error) if isinstance(error, UsageError) else f"instrument: {error!r}")
