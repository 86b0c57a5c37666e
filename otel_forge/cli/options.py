"""What the commands share: their options, how they print, and their exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
FAILED = 1
"""The command did its work, and what it found is not good; or it could not do it."""
USAGE_ERROR = 2
"""What it was given cannot be used: a wrong option, configuration or file."""


def say(text: str) -> None:
    """A line of progress for people: on stderr, so that stdout holds results only."""
    click.echo(f"otel-forge: {text}", err=True)


def with_json(function: F) -> F:
    """The option that every command has."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")(function)


def with_config(function: F) -> F:
    """The option that names the configuration file."""
    return click.option("--config", "config_path", type=click.Path(path_type=Path), help="Configuration file [default: $OTEL_FORGE_CONFIG].")(
        function
    )


def show(as_json: bool, data: dict[str, Any], text: str) -> None:
    """Print a result in the form that was asked for."""
    click.echo(json.dumps(data) if as_json else text)


def load(config_path: Path | None) -> tuple[Any, Path | None]:
    """The configuration, and the absolute path of its file. Raises ConfigError."""
    from otel_forge.config import ENV_CONFIG, load_config

    path = config_path or (Path(os.environ[ENV_CONFIG]) if os.environ.get(ENV_CONFIG) else None)
    return load_config(path), path.absolute() if path else None
