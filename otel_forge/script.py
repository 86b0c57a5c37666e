"""Classes and functions of the script itself, which no import hook sees: traced between their definition and their first use.

A class is met by `builtins.__build_class__`. A function has no such place; but a script compares `__name__` with `"__main__"` when everything is
defined, and the text that it compares there is one that notices.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from typing import Any

import wrapt

from otel_forge.patterns import Watch, script_names, with_care

MAIN_NAMES = ("__main__", "__mp_main__")
"""`__mp_main__`: the script once more, in a child that multiprocessing has spawned."""


class _Name(str):
    """`"__main__"`, which tells when it is compared. Pickled, it is a plain text."""

    script: ScriptWatch | None = None

    def __eq__(self, other: object) -> bool:
        if self.script is not None and isinstance(other, str) and str.__eq__(self, "__main__") and str(other) == "__main__":
            self.script.functions_are_there()
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)


class ScriptWatch:
    """Traces what patterns name in the running script, as soon as it is defined."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        self._watches = list(watches)
        self._build_class = builtins.__build_class__
        self._name: _Name | None = None
        self._run_code: Any = None
        self._is_looking = False

    def start(self) -> None:
        """From now on; before the script runs."""
        builtins.__build_class__ = self._class_built  # type: ignore[assignment]
        if not any(pattern.member is None for watch in self._watches for pattern in watch.patterns):
            return
        self._name = _Name("__main__")
        self._name.script = self
        sys.modules["__main__"].__dict__["__name__"] = self._name
        if "-m" in sys.orig_argv[1:]:
            self._watch_runpy()
        if "--multiprocessing-fork" in sys.orig_argv:
            wrapt.register_post_import_hook(self._watch_spawn, "multiprocessing.spawn")

    def _watch_runpy(self) -> None:
        """`python -m` gives the script its name anew."""
        import runpy

        self._run_code = runpy._run_code  # type: ignore[attr-defined]

        def run_code(code: Any, run_globals: Any, init_globals: Any = None, mod_name: Any = None, *more: Any, **named: Any) -> Any:
            runpy._run_code = self._run_code  # type: ignore[attr-defined]
            return self._run_code(code, run_globals, init_globals, self._name if mod_name == "__main__" else mod_name, *more, **named)

        runpy._run_code = run_code  # type: ignore[attr-defined]

    def _watch_spawn(self, spawn: Any) -> None:
        """A spawned child imports the script under another name, and compares nothing."""
        prepare = spawn.prepare

        def prepare_and_look(data: Any) -> None:
            spawn.prepare = prepare
            prepare(data)
            self.functions_are_there()

        spawn.prepare = prepare_and_look

    def _class_built(self, function: Any, name: str, *bases: Any, **keywords: Any) -> Any:
        cls = self._build_class(function, name, *bases, **keywords)
        namespace = function.__globals__
        if str.__str__(namespace.get("__name__", "")) in MAIN_NAMES and isinstance(cls, type):
            for watch in self._watches:
                with_care(lambda watch=watch: watch.class_made(cls, script_names(namespace)))  # type: ignore[misc]
            self._stop_when_all_is_found()
        return cls

    def functions_are_there(self) -> None:
        """The script has come to its `if __name__ == "__main__":`."""
        if self._is_looking:
            return
        self._is_looking = True
        namespace = vars(sys.modules["__main__"])
        for watch in self._watches:
            with_care(lambda watch=watch: watch.apply(namespace, script_names(namespace)))  # type: ignore[misc]
        self._stop_when_all_is_found()
        self._is_looking = False

    def _stop_when_all_is_found(self) -> None:
        if not any(watch.unmatched() for watch in self._watches):
            self.stop()

    def stop(self) -> None:
        """Look no further; the script gets the plain name back, and so does what was defined in it."""
        if builtins.__build_class__ == self._class_built:  # type: ignore[comparison-overlap]
            builtins.__build_class__ = self._build_class
        if self._name is not None:
            namespace = vars(sys.modules["__main__"])
            self._name.script = None
            if namespace.get("__name__") is self._name:
                namespace["__name__"] = "__main__"
            for value in list(namespace.values()):
                _name_plainly(value)
            self._name = None


def _name_plainly(value: Any) -> None:
    """`__module__` as a plain text, in a class and what it has, or in a function."""
    if type(getattr(value, "__dict__", {}).get("__module__") if isinstance(value, type) else getattr(value, "__module__", None)) is not _Name:
        return
    try:
        value.__module__ = "__main__"
    except (TypeError, AttributeError):
        return
    _name_plainly(getattr(value, "__wrapped__", None))
    if isinstance(value, type):
        for member in list(vars(value).values()):
            _name_plainly(getattr(member, "__func__", member))
