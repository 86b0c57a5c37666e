"""OpenTelemetry instrumentation for distributed PyTorch training: metrics reduced exactly across ranks, one trace per step, runs in wandb.

Importing this package loads the standard library only; `init` loads what sending needs.
"""

from typing import Any

from otel_forge import pipeline
from otel_forge.instrumentation import instrument, no_instrument, uninstrument
from otel_forge.metrics import Reduce, record_metric, record_metrics
from otel_forge.modes import LoggingMode
from otel_forge.pipeline import flush, get_step, init, role, set_run_config, set_step, shutdown
from otel_forge.propagation import carry, extract, inject
from otel_forge.tracing import Tracer, span, step, trace

__version__ = "0.1.0"

__all__ = [
    "LoggingMode",
    "Reduce",
    "Tracer",
    "carry",
    "extract",
    "flush",
    "get_step",
    "init",
    "inject",
    "instrument",
    "no_instrument",
    "record_metric",
    "record_metrics",
    "role",
    "set_run_config",
    "set_step",
    "shutdown",
    "span",
    "step",
    "trace",
    "uninstrument",
]


def _start_what_is_configured(config: Any) -> None:
    from otel_forge.autoload import configured

    configured(config)


pipeline.on_init.append(_start_what_is_configured)
