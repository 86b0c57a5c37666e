"""Every exception that otel-forge raises on purpose, one class per condition.

ForgeError
├── ConfigError            a configuration that cannot be used; the message names each field
├── UsageError             a public function was called in a way that has no meaning (raised only under strict=True)
│   ├── InvalidValueError  a recorded value is not a number
│   └── ReductionConflict  one key with two reductions
├── ServerError            a Collector, Jaeger or exporter process could not be got, started or stopped
│   └── BinaryNotFound     no Collector or Jaeger binary, and none could be fetched or built
├── InputError             a file, run or server that a command was told to read cannot be read, or holds nothing of use
├── StateError             the state directory cannot be used
├── BackendTimeout         a backend does not come back from a call in time
├── RunNotOpened           wandb does not open a run
└── RunNotEnded            a run could not be ended, or not all of it was uploaded

UserWarning
└── ExperimentalWarning    something that may change, or was not checked everywhere yet, is used for the first time
"""

from __future__ import annotations


class ForgeError(Exception):
    """Base of everything below."""


class ConfigError(ForgeError):
    """A configuration that cannot be used."""

    def __init__(self, problems: list[str], source: str | None = None) -> None:
        self.problems = problems
        """One sentence per problem, each with the path of its field."""
        where = f" in {source}" if source else ""
        super().__init__(f"configuration error{where}:\n" + "\n".join(f"  - {problem}" for problem in problems))


class UsageError(ForgeError):
    """A call that has no meaning; raised only under `strict=True`, logged once otherwise."""


class InvalidValueError(UsageError):
    """A recorded value is not a number."""


class ReductionConflict(UsageError):
    """One key was recorded with two reductions."""


class ServerError(ForgeError):
    """A server process could not be got, started or stopped."""


class BinaryNotFound(ServerError):
    """No Collector or Jaeger binary was found, and none could be fetched or built."""


class InputError(ForgeError):
    """A file, run or server that a command was told to read cannot be read, or holds nothing that it could use."""


class StateError(ForgeError):
    """The state directory cannot be used."""


class ExperimentalWarning(UserWarning):
    """Something is used that may change, or was not checked everywhere yet; said once per process."""


class BackendTimeout(ForgeError):
    """A backend does not come back from a call in time."""


class RunNotOpened(ForgeError):
    """wandb does not open a run: no network, a key that is refused, a project that is not there."""


class RunNotEnded(ForgeError):
    """A run could not be ended, or not all of it was uploaded: its rows are kept."""
