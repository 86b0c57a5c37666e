"""The configuration files of the Collector and of Jaeger, rendered from the wire's list of attributes. It must not start anything.

Ports and directories come from the environment of the server, with the usual ones as defaults, so that one file serves every host.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from otel_forge import wire

ENV_OTLP_GRPC = "FORGE_OTLP_GRPC"
ENV_OTLP_HTTP = "FORGE_OTLP_HTTP"
ENV_WINDOW_GRPC = "FORGE_WINDOW_GRPC"
ENV_EXPORTER = "FORGE_EXPORTER"
ENV_JAEGER_OTLP = "FORGE_JAEGER_OTLP"
ENV_JAEGER_OTLP_HTTP = "FORGE_JAEGER_OTLP_HTTP"
ENV_JAEGER_QUERY = "FORGE_JAEGER_QUERY"
ENV_JAEGER_QUERY_GRPC = "FORGE_JAEGER_QUERY_GRPC"
ENV_HEALTH = "FORGE_HEALTH"
ENV_COLLECTOR_STATE = "FORGE_COLLECTOR_STATE"
ENV_WINDOW = "FORGE_WINDOW"
ENV_TELEMETRY_PORT = "FORGE_TELEMETRY_PORT"

MAX_RECEIVED_MIB = 16
"""One packet of a rank stays under 8 MiB."""
MAX_WINDOW_MIB = 256
"""A whole window of packets in one request, on every hop behind it."""
WINDOW_BYTES = 64 << 20
"""A window that grows to this size leaves before its time."""
HEADER = "# Rendered by `otel-forge collector config`; a test compares. Change otel_forge/cli/collector_config.py instead.\n"


def _env(name: str, default: str) -> str:
    return f"${{env:{name}:-{default}}}"


def _queue(**batch: Any) -> dict[str, Any]:
    queue: dict[str, Any] = {"storage": "file_storage/queue", "num_consumers": 1, "queue_size": 20000, "block_on_overflow": True}
    return queue | ({"batch": batch} if batch else {})


def _sender(endpoint: str, queue: dict[str, Any]) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "tls": {"insecure": True},
        "timeout": "10s",
        "retry_on_failure": {"enabled": True, "initial_interval": "200ms", "max_interval": "2s", "max_elapsed_time": "0s"},
        "sending_queue": queue,
    }


def single_node(*, jaeger: bool = True) -> str:
    """The Collector of one node: it reduces over ranks by step, in a window that survives kill -9. Without Jaeger, spans are left out."""
    per_rank = f'resource.attributes["{wire.ROUTE}"] != "{wire.ROUTE_DIRECT}" and resource.attributes["{wire.MODES}"] == "global_reduce"'
    window = f'resource.attributes["{wire.ROUTE}"] == "{wire.ROUTE_DIRECT}" or not IsMatch(resource.attributes["{wire.MODES}"], "global_reduce")'
    step = f'datapoint.attributes["{wire.STEP}"]'
    exporter = _env(ENV_EXPORTER, "127.0.0.1:4327")
    config: dict[str, Any] = {
        "extensions": {
            "health_check": {"endpoint": _env(ENV_HEALTH, "127.0.0.1:13133")},
            "file_storage/queue": {
                "directory": _env(ENV_COLLECTOR_STATE, "/var/tmp/otel-forge-collector"),
                "create_directory": True,
                "timeout": "2s",
            },
        },
        "receivers": {
            "otlp": {
                "protocols": {
                    "grpc": {"endpoint": _env(ENV_OTLP_GRPC, "127.0.0.1:4317"), "max_recv_msg_size_mib": MAX_RECEIVED_MIB},
                    "http": {"endpoint": _env(ENV_OTLP_HTTP, "127.0.0.1:4318")},
                }
            },
            "otlp/window": {
                "protocols": {"grpc": {"endpoint": _env(ENV_WINDOW_GRPC, "127.0.0.1:4319"), "max_recv_msg_size_mib": MAX_WINDOW_MIB}},
            },
        },
        "connectors": {"forward/in": None},
        "processors": {
            "memory_limiter": {"check_interval": "500ms", "limit_mib": 1536, "spike_limit_mib": 300},
            "filter/window": {"error_mode": "ignore", "metric_conditions": [window]},
            "filter/ranks": {"error_mode": "ignore", "metric_conditions": [per_rank]},
            "transform/strip_rank": {
                "error_mode": "ignore",
                "metric_statements": [
                    {"context": "resource", "statements": [f'keep_keys(resource.attributes, ["{wire.RUN_ID}"])']},
                    {
                        "context": "datapoint",
                        "statements": [
                            "set(datapoint.start_time_unix_nano, 0)",
                            f"set(datapoint.time_unix_nano, {step} + 1) where {step} != nil",
                        ],
                    },
                ],
            },
            "groupbyattrs/compact": {},
            "transform/reduce": {
                "error_mode": "ignore",
                "metric_statements": [
                    {"context": "metric", "statements": [f'aggregate_on_attributes("sum", {json.dumps(list(wire.SERIES_ATTRIBUTES))})']},
                    {"context": "resource", "statements": [f'set(resource.attributes["{wire.BATCH_ID}"], UUID())']},
                ],
            },
        },
        "exporters": {
            "otlp_grpc/window": _sender(
                _env(ENV_WINDOW_GRPC, "127.0.0.1:4319"), _queue(flush_timeout=_env(ENV_WINDOW, "1s"), sizer="bytes", min_size=WINDOW_BYTES)
            ),
            "otlp_grpc/rows": _sender(exporter, _queue()),
            "otlp_grpc/ranks": _sender(exporter, _queue()),
            **({"otlp_grpc/jaeger": _sender(_env(ENV_JAEGER_OTLP, "127.0.0.1:4337"), _queue())} if jaeger else {"debug": {"verbosity": "basic"}}),
        },
        "service": {
            "extensions": ["health_check", "file_storage/queue"],
            "telemetry": {
                "metrics": {
                    "level": "normal",
                    "readers": [{"pull": {"exporter": {"prometheus": {"host": "127.0.0.1", "port": _env(ENV_TELEMETRY_PORT, "8888")}}}}],
                },
                "logs": {"level": "warn"},
            },
            "pipelines": {
                "traces": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": ["otlp_grpc/jaeger" if jaeger else "debug"]},
                "metrics/in": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": ["forward/in"]},
                "metrics/window": {
                    "receivers": ["forward/in"],
                    "processors": ["filter/window", "transform/strip_rank"],
                    "exporters": ["otlp_grpc/window"],
                },
                "metrics/reduce": {
                    "receivers": ["otlp/window"],
                    "processors": ["groupbyattrs/compact", "transform/reduce"],
                    "exporters": ["otlp_grpc/rows"],
                },
                "metrics/ranks": {"receivers": ["forward/in"], "processors": ["filter/ranks"], "exporters": ["otlp_grpc/ranks"]},
            },
        },
    }
    return HEADER + yaml.safe_dump(config, sort_keys=False, width=140)


def jaeger() -> str:
    """Jaeger with traces in memory."""
    config = {
        "extensions": {
            "healthcheckv2": {"use_v2": True, "http": {"endpoint": _env(ENV_HEALTH, "127.0.0.1:13134")}},
            "jaeger_query": {
                "storage": {"traces": "memory"},
                "http": {"endpoint": _env(ENV_JAEGER_QUERY, "127.0.0.1:16686")},
                "grpc": {"endpoint": _env(ENV_JAEGER_QUERY_GRPC, "127.0.0.1:16685")},
            },
            "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 100000}}}},
        },
        "receivers": {
            "otlp": {
                "protocols": {
                    "grpc": {"endpoint": _env(ENV_JAEGER_OTLP, "127.0.0.1:4337"), "max_recv_msg_size_mib": 64},
                    "http": {"endpoint": _env(ENV_JAEGER_OTLP_HTTP, "127.0.0.1:4338")},
                }
            }
        },
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query", "healthcheckv2"],
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "warn"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
        },
    }
    return HEADER + yaml.safe_dump(config, sort_keys=False, width=140)


FILES = {"single-node.yaml": single_node, "jaeger.yaml": jaeger}
"""The files of collector-config/ that are rendered."""
