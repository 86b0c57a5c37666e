"""Whether this process trains, for what instruments it without its knowing; and the start of its telemetry at the first sign that it does.

A launcher, a DataLoader worker and a helper process load the same modules as a rank, so nothing is decided before something of the training runs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence

from otel_forge import pipeline
from otel_forge.errors import ForgeError
from otel_forge.relay import ENV_RELAY

logger = logging.getLogger("otel_forge")

_answer: bool | None = None
"""What was found; None: not yet, or not for good."""
_is_forked = False
_has_inherited_group = False


def is_training() -> bool:
    """Whether this process is a member, or one that becomes it now: then `init` has run when this returns. Costs next to nothing once it is known."""
    answer = _answer
    return _decide() if answer is None else answer


def _decide() -> bool:
    global _answer
    if pipeline.current() is not None:
        _answer = True
        return True
    if _is_data_worker() or _is_helper():
        _answer = False
        return False
    if _is_child() and not _is_rank():
        return False  # a child may become a rank yet, when it joins a process group
    try:
        pipeline.init()
    except ForgeError as error:
        logger.error("otel-forge: nothing is recorded: %s", error)
    _answer = pipeline.current() is not None
    return _answer


def _is_data_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and hasattr(data, "get_worker_info") and data.get_worker_info() is not None


def _is_child() -> bool:
    return _is_forked or multiprocessing.parent_process() is not None


def _is_helper() -> bool:
    """A program that a member has started, which is no child of multiprocessing."""
    return not _is_child() and bool(os.environ.get(ENV_RELAY))


def _is_rank() -> bool:
    """A child that joined a process group itself, or was told a rank while its parent is no member."""
    if _group_is_initialised() and not _has_inherited_group:
        return True
    return bool(os.environ.get("RANK")) and not os.environ.get(ENV_RELAY)


def _group_is_initialised() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _after_fork_in_child() -> None:
    global _answer, _is_forked, _has_inherited_group
    _answer, _is_forked, _has_inherited_group = None, True, _group_is_initialised()


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_launcher(argv: Sequence[str]) -> bool:
    """Whether a command line (`sys.orig_argv`) is that of a launcher, of multiprocessing's own helpers, or of no script at all."""
    line = " ".join(argv[1:6])
    if re.search(r"-m (torch\.distributed\.(run|launch)|otel_forge\.cli|pip)\b", line):
        return True
    if re.search(r"-c from multiprocessing\.(resource_tracker|semaphore_tracker|forkserver)\b", line):
        return True
    return any(re.split(r"[/\\]", item)[-1] in _LAUNCHERS for item in argv[1:3])


_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "opentelemetry-instrument", "otel-forge", "pip")


def is_worth_a_word(argv: Sequence[str]) -> bool:
    """Whether this is the process to tell the user something once: rank 0, or a script that is no rank and no one's child."""
    if _is_child() or os.environ.get(ENV_RELAY) or os.environ.get("RANK", "0") != "0":
        return False
    return _answer is True or (len(argv) > 1 and "-c" not in argv[1:4])


def reset() -> None:
    """Forget what was found, for tests."""
    global _answer
    _answer = None
