"""The configuration files of the Collector and of Jaeger, rendered from the wire's list of attributes. It must not start anything.

Ports and directories come from the environment of the server, with the usual ones as defaults, so that one file serves every host. What may not be
changed by an accident of the environment (who may connect, which gateways there are) is in the options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from otel_forge import wire
from otel_forge.config import CollectorConfig, TlsConfig
from otel_forge.errors import ConfigError
from otel_forge.otlp_http import is_loopback

ENV_OTLP_GRPC = "FORGE_OTLP_GRPC"
ENV_OTLP_HTTP = "FORGE_OTLP_HTTP"
ENV_WINDOW_GRPC = "FORGE_WINDOW_GRPC"
ENV_EXPORTER = "FORGE_EXPORTER"
ENV_GATEWAY = "FORGE_GATEWAY"
ENV_JAEGER_OTLP = "FORGE_JAEGER_OTLP"
ENV_JAEGER_OTLP_HTTP = "FORGE_JAEGER_OTLP_HTTP"
ENV_JAEGER_QUERY = "FORGE_JAEGER_QUERY"
ENV_JAEGER_QUERY_GRPC = "FORGE_JAEGER_QUERY_GRPC"
ENV_HEALTH = "FORGE_HEALTH"
ENV_COLLECTOR_STATE = "FORGE_COLLECTOR_STATE"
ENV_WINDOW = "FORGE_WINDOW"
ENV_TELEMETRY_PORT = "FORGE_TELEMETRY_PORT"
ENV_TOKEN = "FORGE_TOKEN"
"""The token itself is never in a file: the server reads it from this variable."""

MAX_RECEIVED_MIB = 16
"""One packet of a rank stays under 8 MiB."""
MAX_WINDOW_MIB = 256
"""A whole window of packets in one request, on every hop behind it."""
WINDOW_BYTES = 4 << 20
"""A window that grows to this size leaves before its time, as another partial of the same rows. A byte here is about 15 in the Collector's memory,
and several times: with 64 MiB, one that was started again with a backlog grew to 1.8 GB and then only collected garbage.
"""
SETTLING_S = 1.0
"""A payload needs about so long besides the windows; a row deadline below their sum would cut rows that are on their way."""
HEADER = "# Rendered by `otel-forge collector config`; a test compares. Change otel_forge/cli/collector_config.py instead.\n"
Tier = Literal["single", "agent", "gateway"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a Collector's file can be told. The defaults are those of the committed files."""

    listen: str | None = None
    """The address that the receivers bind; None: loopback. Another needs `tls_cert` or `token`."""
    window_s: float | None = None
    """How long packets of one step may be apart; None: the server's FORGE_WINDOW, else 1 s."""
    deadline_s: float = 10.0
    """The exporter's `row_deadline_s`: the windows on the way must fit into it."""
    queue_size: int = 20_000
    """Requests that each persistent queue holds before senders are told to wait."""
    memory_mib: int = 1536
    """Above it the receivers refuse until memory is free again."""
    exporter: str | None = None
    """host:port of the exporter process; None: the server's FORGE_EXPORTER, else 127.0.0.1:4327."""
    gateways: tuple[str, ...] = ()
    """host:port of each gateway, for agents; none: the server's FORGE_GATEWAY, else 127.0.0.1:4417. Several need the loadbalancing exporter."""
    gateway_dns: str | None = None
    """host:port of a name with one address per gateway, looked up anew every few seconds (a headless service). Needs the loadbalancing exporter."""
    gateway: Literal["forward", "reduce"] = "forward"
    """What gateways do with the partials of the agents."""
    jaeger: bool = True
    """False: spans end here and are counted only."""
    jaeger_endpoint: str | None = None
    """host:port of Jaeger's OTLP/gRPC; None: the server's FORGE_JAEGER_OTLP, else 127.0.0.1:4337."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """Files of the certificate that the receivers show."""
    tls_ca: str | None = None
    """File of the authority that the next hop's certificate is checked against; it turns TLS on towards the gateways or the exporter."""
    token: bool = False
    """Receivers ask for the bearer token in FORGE_TOKEN, and the next hop is shown it."""

    def check(self, tier: Tier) -> None:
        """Raise ConfigError when a Collector with these options would be open to everybody, or could not work."""
        problems = [*self._bind_problems(), *self._window_problems(tier), *self._gateway_problems(tier)]
        for name, value in (("exporter", self.exporter), ("jaeger", self.jaeger_endpoint), ("gateway-dns", self.gateway_dns)):
            problems += _endpoint_problems(name, value)
        if problems:
            raise ConfigError(problems, f"{tier}.yaml")

    def _bind_problems(self) -> list[str]:
        problems = []
        if self.listen is not None and not is_loopback(self.listen) and not (self.tls_cert or self.token):
            problems.append(
                f"listen: {self.listen} can be reached from other machines; add tls-cert and tls-key, or token, so that not everybody can send"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("tls-cert, tls-key: both files are needed, or none")
        return problems

    def _window_problems(self, tier: Tier) -> list[str]:
        problems = []
        window = 1.0 if self.window_s is None else self.window_s
        count = 2 if tier != "single" and self.gateway == "reduce" else 1
        if not 0.01 <= window <= 60:
            problems.append(f"window: must be between 0.01 and 60 seconds, not {window:g}")
        elif count * window + SETTLING_S > self.deadline_s:
            problems.append(
                f"window: {count} × {window:g} s and {SETTLING_S:g} s on the way do not fit into the deadline of {self.deadline_s:g} s: "
                "every row would be written before it is whole"
            )
        if self.queue_size < 1:
            problems.append(f"queue-size: must be at least 1, not {self.queue_size}")
        if self.memory_mib < 128:
            problems.append(f"memory-mib: must be at least 128, not {self.memory_mib}")
        return problems

    def _gateway_problems(self, tier: Tier) -> list[str]:
        problems = [problem for gateway in self.gateways for problem in _endpoint_problems("gateway", gateway)]
        if len(set(self.gateways)) < len(self.gateways):
            problems.append("gateway: one is named twice")
        if self.gateways and self.gateway_dns:
            problems.append("gateway, gateway-dns: name the gateways or one DNS name, not both")
        return problems


DEFAULTS = Options()


def options_of(config: CollectorConfig, given: Mapping[str, Any]) -> Options:
    """The options that were given (those that are not None), and for the others what the configuration's `collector` section says."""
    tls = config.tls or TlsConfig()
    said: dict[str, Any] = {"deadline_s": config.row_deadline_s, "gateway": config.gateway, "token": config.token is not None}
    said |= {name: str(path) for name, path in (("tls_cert", tls.cert_file), ("tls_key", tls.key_file), ("tls_ca", tls.ca_file)) if path}
    if "window_s" in config.model_fields_set:
        said["window_s"] = config.window_s
    return Options(**(said | {name: value for name, value in given.items() if value is not None}))


def _endpoint_problems(name: str, value: str | None) -> list[str]:
    if value is None or value.startswith("${"):
        return []
    host, _, port = value.rpartition(":")
    if host and port.isdigit() and 0 < int(port) < 65536 and "/" not in host:
        return []
    return [f"{name}: {value!r} is not host:port"]


def _env(name: str, default: str) -> str:
    return f"${{env:{name}:-{default}}}"


# --- parts that every tier is made of ---------------------------------------------------------------------------------


def _queue(options: Options, **batch: Any) -> dict[str, Any]:
    queue: dict[str, Any] = {"storage": "file_storage/queue", "num_consumers": 1, "queue_size": options.queue_size, "block_on_overflow": True}
    return queue | ({"batch": batch} if batch else {})


def _retry() -> dict[str, Any]:
    """For ever: what a persistent queue holds is given up by nobody."""
    return {"enabled": True, "initial_interval": "200ms", "max_interval": "2s", "max_elapsed_time": "0s"}


def _sender(endpoint: str, options: Options, **batch: Any) -> dict[str, Any]:
    """To a neighbour on the same machine."""
    return {
        "endpoint": endpoint,
        "tls": {"insecure": True},
        "timeout": "10s",
        "retry_on_failure": _retry(),
        "sending_queue": _queue(options, **batch),
    }


def _credentials(options: Options) -> dict[str, Any]:
    """What a sender shows the next hop. The token goes as a header: the authenticator's client side refuses to work without TLS."""
    shown: dict[str, Any] = {"tls": {"ca_file": options.tls_ca} if options.tls_ca else {"insecure": True}}
    return shown | ({"headers": {"authorization": f"Bearer ${{env:{ENV_TOKEN}}}"}} if options.token else {})


def _next_hop(endpoint: str, options: Options) -> dict[str, Any]:
    """To the next hop, which may be another machine."""
    return _sender(endpoint, options) | _credentials(options)


def _loadbalancing(options: Options, *, traces: bool = False) -> dict[str, Any]:
    """To several gateways, every run to one of them. The queue is at the top: inside `protocol` its endpoints would fight over one file."""
    routing: dict[str, Any] = {"routing_key": "traceID"} if traces else {"routing_key": "attributes", "routing_attributes": [wire.RUN_ID]}
    if options.gateway_dns:
        host, _, port = options.gateway_dns.rpartition(":")
        resolver: dict[str, Any] = {"dns": {"hostname": host, "port": port, "interval": "5s", "timeout": "2s"}}
    else:
        resolver = {"static": {"hostnames": list(options.gateways)}}
    inner = {**_credentials(options), "timeout": "10s", "retry_on_failure": {"enabled": False}, "sending_queue": {"enabled": False}}
    return {
        **routing,
        "timeout": "10s",
        "retry_on_failure": _retry(),
        "sending_queue": _queue(options),
        "protocol": {"otlp": inner},
        "resolver": resolver,
    }


def _receiver(options: Options, *, grpc_port: int, http_port: int, max_mib: int) -> dict[str, Any]:
    """The OTLP receiver. A `listen` address is fixed in the file: the environment of the server cannot open it further."""
    shared: dict[str, Any] = {}
    if options.tls_cert:
        shared["tls"] = {"cert_file": options.tls_cert, "key_file": options.tls_key}
    if options.token:
        shared["auth"] = {"authenticator": "bearertokenauth"}
    listen = options.listen
    grpc_endpoint = f"{listen}:{grpc_port}" if listen else _env(ENV_OTLP_GRPC, f"127.0.0.1:{grpc_port}")
    http_endpoint = f"{listen}:{http_port}" if listen else _env(ENV_OTLP_HTTP, f"127.0.0.1:{http_port}")
    return {
        "protocols": {
            "grpc": {"endpoint": grpc_endpoint, "max_recv_msg_size_mib": max_mib, **shared},
            "http": {"endpoint": http_endpoint, **({"max_request_body_size": max_mib << 20} if max_mib > 20 else {}), **shared},
        }
    }


def _window_receiver(port: int) -> dict[str, Any]:
    """The Collector's own second receiver, behind the window. It is on loopback whatever the other one is."""
    return {"protocols": {"grpc": {"endpoint": _env(ENV_WINDOW_GRPC, f"127.0.0.1:{port}"), "max_recv_msg_size_mib": MAX_WINDOW_MIB}}}


def _window_sender(options: Options, port: int) -> dict[str, Any]:
    timeout = _env(ENV_WINDOW, "1s") if options.window_s is None else f"{round(options.window_s * 1000)}ms"
    sender = _sender(_env(ENV_WINDOW_GRPC, f"127.0.0.1:{port}"), options, flush_timeout=timeout, sizer="bytes", min_size=WINDOW_BYTES)
    return sender | {"compression": "none"}  # it is loopback: gzip would cost a tenth of the Collector's CPU


def _extensions(options: Options, *, health_port: int, state: str) -> dict[str, Any]:
    host = options.listen if options.listen and not is_loopback(options.listen) else "127.0.0.1"
    extensions: dict[str, Any] = {
        "health_check": {"endpoint": _env(ENV_HEALTH, f"{host}:{health_port}")},
        "file_storage/queue": {"directory": _env(ENV_COLLECTOR_STATE, state), "create_directory": True, "timeout": "2s"},
    }
    return extensions | ({"bearertokenauth": {"token": f"${{env:{ENV_TOKEN}}}"}} if options.token else {})


def _limiter(options: Options) -> dict[str, Any]:
    return {"check_interval": "500ms", "limit_mib": options.memory_mib, "spike_limit_mib": options.memory_mib // 5}


def _telemetry(port: int) -> dict[str, Any]:
    """The Collector's own metrics, for whoever scrapes Prometheus."""
    reader = {"pull": {"exporter": {"prometheus": {"host": "127.0.0.1", "port": _env(ENV_TELEMETRY_PORT, str(port))}}}}
    return {"metrics": {"level": "normal", "readers": [reader]}, "logs": {"level": "warn"}}


def _reduction() -> dict[str, Any]:
    """The processors of a window: before it the rank goes and times become the step, behind it the points of one series and step are added up."""
    step = f'datapoint.attributes["{wire.STEP}"]'
    resource = f'keep_keys(resource.attributes, ["{wire.RUN_ID}"])'
    restamp = ["set(datapoint.start_time_unix_nano, 0)", f"set(datapoint.time_unix_nano, {step} + 1) where {step} != nil"]
    add_up = f'aggregate_on_attributes("sum", {json.dumps(list(wire.SERIES_ATTRIBUTES))})'
    name = f'set(resource.attributes["{wire.BATCH_ID}"], UUID())'
    return {
        "transform/strip_rank": {
            "error_mode": "ignore",
            "metric_statements": [{"context": "resource", "statements": [resource]}, {"context": "datapoint", "statements": restamp}],
        },
        "groupbyattrs/compact": {},
        "transform/reduce": {
            "error_mode": "ignore",
            "metric_statements": [{"context": "metric", "statements": [add_up]}, {"context": "resource", "statements": [name]}],
        },
    }


def _drop(condition: str) -> dict[str, Any]:
    return {"error_mode": "ignore", "metric_conditions": [condition]}


def _reducing(*, rows: str, ranks: str, traces: str) -> dict[str, Any]:
    """The pipelines of a Collector with a window. `rows`, `ranks` and `traces` name its last exporters."""
    return {
        "traces": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": [traces]},
        "metrics/in": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": ["forward/in"]},
        "metrics/window": {
            "receivers": ["forward/in"],
            "processors": ["filter/window", "transform/strip_rank"],
            "exporters": ["otlp_grpc/window"],
        },
        "metrics/reduce": {"receivers": ["otlp/window"], "processors": ["groupbyattrs/compact", "transform/reduce"], "exporters": [rows]},
        "metrics/ranks": {"receivers": ["forward/in"], "processors": ["filter/ranks"], "exporters": [ranks]},
    }


class _Dumper(yaml.SafeDumper):
    """Writes what is there twice twice: files are for people."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _render(config: dict[str, Any]) -> str:
    return HEADER + yaml.dump(config, Dumper=_Dumper, sort_keys=False, width=140)


def _service(config: dict[str, Any], telemetry_port: int, pipelines: dict[str, Any]) -> dict[str, Any]:
    return {"extensions": list(config["extensions"]), "telemetry": _telemetry(telemetry_port), "pipelines": pipelines}


def _rank_filters() -> dict[str, Any]:
    """What goes into the window, and what goes past it: packets by the direct route, and those that some backend wants per rank."""
    direct = f'resource.attributes["{wire.ROUTE}"] == "{wire.ROUTE_DIRECT}"'
    window = f'{direct} or not IsMatch(resource.attributes["{wire.MODES}"], "global_reduce")'
    ranks = f'resource.attributes["{wire.ROUTE}"] != "{wire.ROUTE_DIRECT}" and resource.attributes["{wire.MODES}"] == "global_reduce"'
    return {"filter/window": _drop(window), "filter/ranks": _drop(ranks)}


def _with_window(options: Options, *, state: str, exporters: dict[str, Any], pipelines: dict[str, Any]) -> str:
    """A Collector that ranks send to: it reduces over the ranks it hears."""
    config: dict[str, Any] = {
        "extensions": _extensions(options, health_port=13133, state=state),
        "receivers": {
            "otlp": _receiver(options, grpc_port=4317, http_port=4318, max_mib=MAX_RECEIVED_MIB),
            "otlp/window": _window_receiver(4319),
        },
        "connectors": {"forward/in": None},
        "processors": {"memory_limiter": _limiter(options), **_rank_filters(), **_reduction()},
        "exporters": {"otlp_grpc/window": _window_sender(options, 4319), **exporters},
    }
    return _render(config | {"service": _service(config, 8888, pipelines)})


def _jaeger_exporter(options: Options) -> tuple[str, dict[str, Any]]:
    if not options.jaeger:
        return "debug", {"verbosity": "basic"}
    return "otlp_grpc/jaeger", _sender(options.jaeger_endpoint or _env(ENV_JAEGER_OTLP, "127.0.0.1:4337"), options)


# --- the files ----------------------------------------------------------------------------------------------------------


def single_node(options: Options = DEFAULTS) -> str:
    """The Collector of one node: it reduces over ranks by step, in a window that survives kill -9. Raises ConfigError."""
    options.check("single")
    exporter = options.exporter or _env(ENV_EXPORTER, "127.0.0.1:4327")
    name, traces = _jaeger_exporter(options)
    exporters = {"otlp_grpc/rows": _next_hop(exporter, options), "otlp_grpc/ranks": _next_hop(exporter, options), name: traces}
    pipelines = _reducing(rows="otlp_grpc/rows", ranks="otlp_grpc/ranks", traces=name)
    return _with_window(options, state="/var/tmp/otel-forge-collector", exporters=exporters, pipelines=pipelines)


def needs_loadbalancing(options: Options) -> bool:
    """Whether an agent with these options needs a Collector with the loadbalancing exporter."""
    return len(options.gateways) > 1 or options.gateway_dns is not None


def agent(options: Options = DEFAULTS) -> str:
    """The Collector of each node of many: it reduces over the node's ranks and sends one partial a window on to a gateway. Raises ConfigError."""
    options.check("agent")
    if needs_loadbalancing(options):
        kind = "loadbalancing"
        exporters = {f"{kind}/{name}": _loadbalancing(options, traces=name == "traces") for name in ("rows", "ranks", "traces")}
    else:
        kind = "otlp_grpc"
        gateway = options.gateways[0] if options.gateways else _env(ENV_GATEWAY, "127.0.0.1:4417")
        exporters = {f"{kind}/{name}": _next_hop(gateway, options) for name in ("rows", "ranks", "traces")}
    pipelines = _reducing(rows=f"{kind}/rows", ranks=f"{kind}/ranks", traces=f"{kind}/traces")
    return _with_window(options, state="/var/tmp/otel-forge-agent", exporters=exporters, pipelines=pipelines)


def gateway(options: Options = DEFAULTS) -> str:
    """The Collector behind the agents, beside the exporter. It forwards the agents' partials, which the exporter merges, or reduces them first.

    Forwarding is exact whatever is killed. Reducing is for thousands of nodes: a kill can add an agent's partial twice; that row is marked.
    Raises ConfigError.
    """
    options.check("gateway")
    exporter = options.exporter or _env(ENV_EXPORTER, "127.0.0.1:4327")
    name, traces = _jaeger_exporter(options)
    config: dict[str, Any] = {
        "extensions": _extensions(options, health_port=13143, state="/var/tmp/otel-forge-gateway"),
        "receivers": {"otlp": _receiver(options, grpc_port=4417, http_port=4418, max_mib=MAX_WINDOW_MIB)},
        "processors": {"memory_limiter": _limiter(options)},
        "exporters": {"otlp_grpc/rows": _next_hop(exporter, options), name: traces},
    }
    if options.gateway == "reduce":
        pipelines = _reducing(rows="otlp_grpc/rows", ranks="otlp_grpc/ranks", traces=name)
        reduced = f'resource.attributes["{wire.BATCH_ID}"]'
        config["receivers"]["otlp/window"] = _window_receiver(4419)
        config["connectors"] = {"forward/in": None}
        config["processors"] |= {"filter/window": _drop(f"{reduced} == nil"), "filter/ranks": _drop(f"{reduced} != nil"), **_reduction()}
        config["exporters"] |= {"otlp_grpc/window": _window_sender(options, 4419), "otlp_grpc/ranks": _next_hop(exporter, options)}
    else:
        pipelines = {
            "traces": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": [name]},
            "metrics": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": ["otlp_grpc/rows"]},
        }
    return _render(config | {"service": _service(config, 8898, pipelines)})


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
    return _render(config)


RENDERERS: dict[Tier, Callable[[Options], str]] = {"single": single_node, "agent": agent, "gateway": gateway}
"""What renders a tier's file."""
FILE_NAMES: dict[Tier, str] = {"single": "single-node.yaml", "agent": "agent.yaml", "gateway": "gateway.yaml"}
FILES: dict[str, Callable[[], str]] = {"single-node.yaml": single_node, "agent.yaml": agent, "gateway.yaml": gateway, "jaeger.yaml": jaeger}
"""The files of collector-config/ that are rendered."""
