"""The wandb-core process behind all wandb runs of this process: loaded once, started again when it was killed. It knows no rows and no configuration.

What wandb's public interface does not give is read here and nowhere else: whether wandb-core lives, its pid, and how to give back the id of a run
that could not be opened. Where another wandb has them elsewhere, a killed wandb-core is not started again, and rows wait for the next exporter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import Any

from otel_forge.errors import ConfigError

logger = logging.getLogger("otel_forge.exporter")

RELEASE_TIMEOUT_S = 5.0


class WandbCore:
    """The wandb of this process and its wandb-core. Any thread may call."""

    def __init__(self) -> None:
        self.generation = 0
        """Counts how often wandb-core was started anew: runs of an older generation are gone."""
        self._lock = threading.Lock()
        self._wandb: Any = None
        self._is_ours = False

    def load(self) -> Any:
        """The wandb module. Raises ConfigError when it is not installed."""
        with self._lock:
            if self._wandb is None:
                self._is_ours = "wandb" not in sys.modules
                os.environ["WANDB_ERROR_REPORTING"] = "false"  # else the user's OTLP headers travel to the W&B server
                if self._is_ours:
                    os.environ.pop("WANDB_SERVICE", None)  # of a process that this one was started from
                try:
                    import wandb
                except ImportError as error:
                    raise ConfigError([f"metric_logging.wandb: wandb is not installed ({error}): pip install 'otel-forge[wandb]'"]) from error
                self._wandb = wandb
                if self._is_ours:
                    logging.getLogger("wandb").propagate = False  # it has a file of its own, and tells every step of opening a run
            if self._is_ours:
                self._wandb.setup(self._wandb.Settings(silent=True))
            return self._wandb

    def pid(self) -> int | None:
        """Of wandb-core; None when none was started, or this wandb does not tell."""
        process = self._process()
        return process.pid if process is not None else None

    def is_dead(self) -> bool:
        """Whether wandb-core was started and has ended."""
        process = self._process()
        return process is not None and process.poll() is not None

    def revive(self) -> None:
        """Start wandb-core anew, unless another caller has done it meanwhile."""
        with self._lock:
            if self.is_dead():
                self.generation += 1
                self._tear_down()
                self._wandb.setup(self._wandb.Settings(silent=True) if self._is_ours else None)

    def forget_if_dead(self) -> None:
        """Leave nothing behind of a wandb-core that has ended, so that the end of the process is quiet."""
        with self._lock:
            if self._wandb is not None and self.is_dead():
                self.generation += 1
                self._tear_down()

    def _tear_down(self) -> None:
        try:
            self._wandb.teardown()
        except (Exception, SystemExit) as error:  # it wants to say goodbye to wandb-core, and to end this process with wandb-core's exit code
            logger.debug("wandb.teardown: %r", error)

    def release(self, run_id: str) -> None:
        """Let an id be used again whose run could not be opened: wandb-core keeps it ("run ID … is in use") until the run has ended."""
        with contextlib.suppress(Exception):
            from wandb.sdk.interface.interface_sock import InterfaceSock

            service = _service()
            interface = InterfaceSock(service._asyncer, service._client, stream_id=run_id)
            interface.deliver_exit(1).wait_or(timeout=RELEASE_TIMEOUT_S)
            service.inform_finish(run_id)

    def _process(self) -> Any:
        if self._wandb is None:
            return None
        try:
            return _service()._proc._process
        except Exception:
            return None


def _service() -> Any:
    from wandb.sdk import wandb_setup

    return wandb_setup.singleton().assert_service()


core = WandbCore()
