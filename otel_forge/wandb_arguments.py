"""What may stand in `metric_logging.wandb`, checked where the configuration is read. It must not import wandb (0.9 s)."""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping
from typing import Any

TEMPLATE_FIELDS = ("name", "role", "rank", "host")
OWN_FIELDS = {
    "entity": "entity", "project": "project", "dir": "dir", "id": "id", "name": "name", "notes": "notes", "tags": "tags", "group": "group",
    "job_type": "job_type", "mode": "mode", "resume": "resume", "config": "run_config of otel_forge.init",
}  # fmt: skip
"""Arguments of `wandb.init` that have a field of their own here."""
REFUSED = {"reinit": "one process owns several runs", "anonymous": "wandb has no such runs any more"}
EXTRA_ARGUMENTS = (
    "config_exclude_keys", "config_include_keys", "allow_val_change", "force", "resume_from", "fork_from", "save_code", "tensorboard",
    "sync_tensorboard", "monitor_gym", "settings",
)  # fmt: skip
"""The other arguments of `wandb.init`; a test compares them with the installed wandb."""


def checked_template(text: str) -> str:
    """The text, if its fields are those of a template. Raises ValueError."""
    for _, name, spec, conversion in string.Formatter().parse(text):
        if name is not None and (name not in TEMPLATE_FIELDS or spec or conversion):
            raise ValueError(f"unknown field {{{name}}}: known are {', '.join(f'{{{known}}}' for known in TEMPLATE_FIELDS)}")
    return text


def checked_extra(extra: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no argument of `wandb.init`, or is set by another field."""
    for key, value in extra.items():
        if key in OWN_FIELDS:
            raise ValueError(f"{key!r} is set by {OWN_FIELDS[key]}")
        if key in REFUSED:
            raise ValueError(f"{key!r} cannot be set: {REFUSED[key]}")
        if key not in EXTRA_ARGUMENTS:
            near = difflib.get_close_matches(key, [*EXTRA_ARGUMENTS, *OWN_FIELDS], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(EXTRA_ARGUMENTS))}"
            raise ValueError(f"{key!r} is no argument of wandb.init; {hint}")
        if key == "settings" and not isinstance(value, Mapping):
            raise ValueError("'settings' must be a mapping of wandb's settings")
