"""Where this process's packets go: the shape, by the order of design — a given endpoint, a living `otel-forge up`, in-process, or the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from otel_forge import discovery, wire
from otel_forge.config import (
    ENV_ENDPOINT,
    ENV_MODES,
    ENV_OTLP_TRACES_ENDPOINT,
    ENV_SHAPE,
    ForgeConfig,
    LoggingMode,
    OtlpSettings,
    otlp_settings,
    state_dir,
)
from otel_forge.errors import ConfigError

Shape = Literal["inprocess", "direct", "collector", "spill"]


@dataclass(frozen=True, slots=True)
class Destination:
    """The shape and what it needs."""

    shape: Shape
    metrics_url: str | None
    traces_url: str | None
    modes: tuple[str, ...]
    settings: OtlpSettings

    @property
    def window(self) -> bool:
        """Whether a Collector's window reduces what is sent."""
        return self.shape in ("collector", "spill")

    @property
    def streams(self) -> bool:
        """Whether a backend wants every record as it happens."""
        return LoggingMode.PER_RANK_NO_REDUCE.value in self.modes


def resolve(config: ForgeConfig, *, explicit: bool, world_size: int, environ: Mapping[str, str]) -> Destination:
    """Decide the shape. `explicit`: the configuration came as an object, so that its endpoint beats the environment's."""
    settings = otlp_settings(environ)
    asked = config.collector.shape
    endpoint = config.collector.endpoint if explicit else None
    endpoint = endpoint or environ.get(ENV_ENDPOINT)
    given_shape = environ.get(ENV_SHAPE) or asked
    if endpoint is None and settings.metrics_url is None:
        endpoint = config.collector.endpoint
    if asked != "inprocess" and (endpoint or settings.metrics_url):
        if endpoint:
            settings = replace(settings, protocol="http/protobuf")  # our own endpoints are OTLP/HTTP; OTEL_*'s may be gRPC
        metrics_url = endpoint.rstrip("/") + "/v1/metrics" if endpoint else settings.metrics_url
        return _to(_shape_behind(given_shape), metrics_url, config, environ, settings)
    if asked in ("auto", "direct", "collector"):
        servers = discovery.living(state_dir(config))
        if servers is not None:
            traces = servers.traces_http.rstrip("/") + "/v1/traces" if servers.traces_http else None
            modes = tuple(sorted({*servers.modes, LoggingMode.GLOBAL_REDUCE.value}))
            shape: Shape = "direct" if servers.shape == "direct" else "collector"
            return Destination(shape, servers.otlp_http.rstrip("/") + "/v1/metrics", traces, modes, settings)
    if asked == "inprocess" or (asked == "auto" and world_size == 1):
        if world_size > 1:
            raise ConfigError([f"collector.shape: inprocess needs a world of one process, this one has {world_size}"])
        return Destination("inprocess", None, _traces_url(config, None, environ, settings), _modes(config, environ), settings)
    return Destination("spill", None, None, _modes(config, environ), settings)


def _shape_behind(shape: str) -> Shape:
    return "direct" if shape == "direct" else "collector"


def _to(shape: Shape, metrics_url: str | None, config: ForgeConfig, environ: Mapping[str, str], settings: OtlpSettings) -> Destination:
    return Destination(shape, metrics_url, _traces_url(config, metrics_url, environ, settings), _modes(config, environ), settings)


def _traces_url(config: ForgeConfig, metrics_url: str | None, environ: Mapping[str, str], settings: OtlpSettings) -> str | None:
    if environ.get(ENV_OTLP_TRACES_ENDPOINT):
        return settings.traces_url
    if config.tracing.endpoint:
        return config.tracing.endpoint.rstrip("/") + "/v1/traces"
    if settings.protocol == "grpc":
        return settings.traces_url or metrics_url
    if metrics_url and metrics_url.endswith("/v1/metrics"):
        return metrics_url.removesuffix("metrics") + "traces"
    return settings.traces_url


def _modes(config: ForgeConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What the backends need; the global reduction is always there, because the step's root span is made of it."""
    named = environ.get(ENV_MODES)
    modes = {item.strip() for item in named.split(",")} if named else {mode.value for mode in config.modes()}
    known = {mode.value for mode in LoggingMode}
    if modes - known:
        raise ConfigError([f"{ENV_MODES}: unknown logging mode {', '.join(sorted(modes - known))}; known: {', '.join(sorted(known))}"])
    return tuple(sorted(modes | {LoggingMode.GLOBAL_REDUCE.value}))


def modes_attribute(destination: Destination) -> str:
    """The value of `forge.modes`."""
    return wire.modes_value(destination.modes)
