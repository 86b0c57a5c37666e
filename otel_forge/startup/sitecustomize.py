"""What `otel-forge run` puts first on the path of the programs it starts: Python imports it before the program. It must never be in the way."""

import sys

try:
    from otel_forge import autoload

    autoload.activate()
except ImportError as error:
    if error.name is None or not error.name.startswith("otel_forge"):
        raise
    sys.stderr.write(f"otel-forge: {sys.executable} has no otel_forge: nothing is instrumented here\n")


def _run_the_next() -> None:
    """The sitecustomize that this one hides, if there is one."""
    import importlib.machinery
    import importlib.util
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_run_the_next()
