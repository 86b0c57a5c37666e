"""The configuration: one pydantic model for file, dict and environment. It must not import the SDK, torch or an exporter.

Every environment variable that otel-forge reads is named here and read here.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import tempfile
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from otel_forge.errors import ConfigError
from otel_forge.modes import LoggingMode as LoggingMode
from otel_forge.wandb_arguments import checked_extra, checked_template

ENV_CONFIG = "OTEL_FORGE_CONFIG"
"""Path of the configuration file, when `init` is given none."""
ENV_ENDPOINT = "OTEL_FORGE_ENDPOINT"
"""Base URL of the Collector's (or, with shape direct, the exporter process's) OTLP/HTTP receiver."""
ENV_SHAPE = "OTEL_FORGE_SHAPE"
"""`inprocess`, `direct` or `collector`: what stands behind the endpoint."""
ENV_RUN_ID = "OTEL_FORGE_RUN_ID"
"""The run id, the same in every process of a run. `otel-forge run` sets it."""
ENV_ROLE = "OTEL_FORGE_ROLE"
"""The role of the process, when `init` is given none."""
ENV_MODES = "OTEL_FORGE_MODES"
"""Comma-separated logging modes that the exporter's backends need. `otel-forge run` sets it."""
ENV_STATE_DIR = "OTEL_FORGE_STATE_DIR"
"""The node-local directory for spilled packets, the exporter's spool and the servers' state."""
ENV_COLLECTOR_BIN = "OTEL_FORGE_COLLECTOR_BIN"
ENV_LOADBALANCING_BIN = "OTEL_FORGE_LOADBALANCING_BIN"
ENV_JAEGER_BIN = "OTEL_FORGE_JAEGER_BIN"
ENV_INSTRUMENT = "OTEL_FORGE_INSTRUMENT"
"""Comma-separated texts (`train:Trainer.*`) and presets (`torch`) to instrument; instead of the file's `instrument`."""
ENV_STEP = "OTEL_FORGE_STEP"
"""`optimizer`, `manual`, or the method whose end is the end of a step (`train:Trainer.train_step`); instead of the file's `step`."""
ENV_DISABLED = ("OTEL_SDK_DISABLED", "FORGE_DISABLE_METRICS")
"""Any of them set to true turns everything off. The second is torchforge's name."""
ENV_SCOPES_DISABLED = "DISABLE_PERF_METRICS"
"""torchforge's name: true turns scopes (Tracer, trace, span, instrument) off, and nothing else."""
ENV_TIMER_USES_GPU = "METRIC_TIMER_USES_GPU"
"""torchforge's name: true or false is `tracing.timer: gpu` or `cpu`, where the file says nothing."""
ENV_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENV_OTLP_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENV_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
ENV_SERVICE_NAME = "OTEL_SERVICE_NAME"
DEFAULT_TIMEOUT_S = 10.0

MAX_WINDOW_S = 60.0


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class BackendConfig(_Model):
    """What every backend can be told; a backend's own options are fields of its subclass or, for the user's own, kept in `model_extra`."""

    logging_mode: LoggingMode = LoggingMode.GLOBAL_REDUCE
    every: int = Field(default=1, ge=1)
    """Write every n-th step; the values of the steps between are merged in, not skipped. (Rows of one record are not merged: others are left out.)"""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    """Key patterns (fnmatch). A row of which nothing is left is not written."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Key → the name it has in this place."""

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("rename")
    @classmethod
    def _no_two_alike(cls, value: dict[str, str]) -> dict[str, str]:
        for key, name in value.items():
            first = next(other for other, given in value.items() if given == name)
            if first != key:
                raise ValueError(f"{first!r} and {key!r} would both be {name!r}")
        return value


class WandbConfig(BackendConfig):
    project: str = Field(default="otel-forge", min_length=1, max_length=128)
    entity: str | None = None
    name: str | None = None
    """`name`, `group`, `job_type`, `notes` and `tags` may have `{name}` (WANDB_NAME, else the run id), `{role}`, `{rank}` and `{host}`."""
    group: str | None = None
    id: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    job_type: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    """None: what WANDB_MODE says, else online with an API key and offline without."""
    dir: Path | None = None
    per_rank_share_run: bool = False
    """Per-rank modes: one ordinary run with keys `key/role_rank` instead of a run for each member."""
    shared: bool = False
    """Open runs in wandb's shared mode, so that other processes can log to them too. Online only."""
    resume: Literal["continue", "overwrite", "fork"] = "continue"
    """What a training that starts again under the same run id (a further attempt) does: go on in its runs, replace them, or open runs of its own."""
    init_timeout: float = Field(default=30.0, ge=1)
    """Seconds, for opening one run."""
    finish_timeout: float = Field(default=60.0, gt=0)
    """Seconds, for ending all runs, side by side."""
    offline_fallback: bool = False
    """Open runs offline when they cannot be opened online, instead of trying again and again; `wandb sync` uploads them."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `wandb.init`."""

    @field_validator("name", "group", "job_type", "notes")
    @classmethod
    def _is_template(cls, value: str | None) -> str | None:
        return checked_template(value) if value is not None else None

    @field_validator("tags")
    @classmethod
    def _are_templates(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_template(tag) for tag in value)

    @field_validator("id")
    @classmethod
    def _is_id(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^:;,#?/'\\%\s]{1,100}", value):
            raise ValueError("must be 1 to 100 characters, without space and none of : ; , # ? / ' \\ %")
        return value

    @field_validator("extra")
    @classmethod
    def _are_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        checked_extra(value)
        return value

    @model_validator(mode="after")
    def _is_online_when_shared(self) -> WandbConfig:
        if self.shared and self.mode == "offline":
            raise ValueError("shared: wandb's shared mode needs mode: online")
        return self


class JsonlConfig(BackendConfig):
    path: Path | None = None
    """None: `otel-forge-runs/<run id>/metrics.jsonl` in the exporter's working directory."""
    max_bytes: int | None = Field(default=None, ge=1)
    """A file that would grow beyond it is renamed to `<name>.1` first, that one to `<name>.2`, …"""
    keep: int = Field(default=5, ge=0)
    """So many renamed files are kept."""


class ConsoleConfig(BackendConfig):
    style: Literal["auto", "table", "line"] = "auto"
    """auto: a table at a terminal, a line per row elsewhere."""


class TensorboardConfig(BackendConfig):
    dir: Path | None = None
    """None: `otel-forge-runs/<run id>/tensorboard`."""


def _url(value: str | None) -> str | None:
    if value is not None and not re.match(r"https?://[^/]+", value):
        raise ValueError(f"must be a URL such as http://127.0.0.1:4318, not {value!r}")
    return value


class OtlpConfig(BackendConfig):
    endpoint: str
    """Base URL of an OTLP/HTTP receiver; `/v1/metrics` is added where it does not end so."""
    headers: dict[str, str] = Field(default_factory=dict)
    timeout_s: float = Field(default=10.0, gt=0)
    """Of one request."""
    ca_file: Path | None = None

    _is_url = field_validator("endpoint")(_url)


class ParquetConfig(BackendConfig):
    dir: Path | None = None
    """None: `otel-forge-runs/<run id>/parquet/<mode>`."""


class MlflowConfig(BackendConfig):
    tracking_uri: str | None = None
    """Of the tracking server; None: the database `mlflow.db` in the exporter's working directory."""
    experiment: str = "otel-forge"
    name: str | None = None
    """Of the run; None: the run id."""


class TrackioConfig(BackendConfig):
    project: str = "otel-forge"
    name: str | None = None
    """Of the run, or of the group in per-rank modes; None: the run id."""
    dir: Path | None = None
    """None: what TRACKIO_DIR says, else Trackio's own default."""
    space_id: str | None = None
    """A Hugging Face Space to log to; None: a local database."""


class CustomConfig(BackendConfig):
    """A backend of the user's own: a class, and everything else that it is told."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)
    class_: str | None = Field(default=None, alias="class")
    """Dotted path `package.module:Class`. None: the entry point in the group `otel_forge.backends` that has the section's name."""
    call_timeout_s: float = Field(default=10.0, gt=0)
    """A call that takes longer counts as hanging: the end of the run does not wait for it."""

    @field_validator("class_")
    @classmethod
    def _is_path(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError("must be a dotted path such as my.package:Backend")
        return value


BACKENDS: dict[str, type[BackendConfig]] = {
    "wandb": WandbConfig,
    "jsonl": JsonlConfig,
    "console": ConsoleConfig,
    "tensorboard": TensorboardConfig,
    "otlp": OtlpConfig,
    "parquet": ParquetConfig,
    "mlflow": MlflowConfig,
    "trackio": TrackioConfig,
}
"""The backends that come with otel-forge, by the name they have in `metric_logging`."""
ENTRY_POINTS = "otel_forge.backends"
"""Group of entry points; each names a class, and is a name for `metric_logging`."""
DEFAULT_BACKENDS: dict[str, BackendConfig] = {"jsonl": JsonlConfig(), "console": ConsoleConfig(every=10, exclude=("*duration*", "forge/*"))}
"""Without `metric_logging`: everything in a file, and every tenth step's main values at the terminal."""


class TracingConfig(_Model):
    enabled: bool = True
    endpoint: str | None = None
    """Base URL for spans, when they do not go the metrics' way."""
    timer: Literal["auto", "cpu", "gpu", "gpu_sync"] = "auto"
    track_memory: bool = False
    every: int = Field(default=1, ge=1)
    max_spans_per_step: int = Field(default=2000, ge=1)
    pending_after_s: float = Field(default=30.0, gt=0)


class SystemMetricsConfig(_Model):
    """Figures of each node's GPUs and host, with `otel-forge[system]`."""

    enabled: bool = True
    interval_s: float = Field(default=5.0, ge=0.1)


class StepConfig(_Model):
    on: Literal["manual", "optimizer", "method"] = "manual"
    """What ends a step. Not given, and something is to be instrumented before the program runs: optimizer, until the program names a step itself."""
    method: str | None = None
    """For `method`: `train:Trainer.train_step`."""

    @model_validator(mode="after")
    def _names_its_method(self) -> StepConfig:
        if (self.on == "method") != (self.method is not None):
            raise ValueError('`on: method` and `method: "module:Class.method"` go together')
        return self


class TlsConfig(_Model):
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class CollectorConfig(_Model):
    shape: Literal["auto", "inprocess", "direct", "collector"] = "auto"
    endpoint: str | None = None
    window_s: float = Field(default=1.0, gt=0, le=MAX_WINDOW_S)
    row_deadline_s: float = Field(default=10.0, gt=0)
    amend_horizon_s: float = Field(default=3600.0, gt=0)
    gateway: Literal["forward", "reduce"] = "forward"
    tls: TlsConfig | None = None
    token: str | None = None

    _is_url = field_validator("endpoint")(_url)


class ForgeConfig(_Model):
    """The whole configuration; see README for the file's form."""

    metric_logging: dict[str, BackendConfig] = Field(default_factory=dict)
    """Backends by name. Empty: `jsonl` and `console`, both `global_reduce`."""
    merge_roles: bool = False
    tracing: TracingConfig = TracingConfig()
    system_metrics: SystemMetricsConfig = SystemMetricsConfig()
    instrument: tuple[str, ...] = ()
    step: StepConfig = StepConfig()
    collector: CollectorConfig = CollectorConfig()
    resource: dict[str, str | int | float | bool] = Field(default_factory=dict)
    state_dir: Path | None = None

    def modes(self) -> frozenset[LoggingMode]:
        """The logging modes that the backends need."""
        return frozenset(backend.logging_mode for backend in self.metric_logging.values())


def default_state_dir() -> Path:
    """Node-local, private to the user: OTEL_FORGE_STATE_DIR, else `/var/tmp/otel-forge-$UID`."""
    given = os.environ.get(ENV_STATE_DIR)
    if given:
        return Path(given)
    base = Path("/var/tmp") if os.path.isdir("/var/tmp") else Path(tempfile.gettempdir())
    return base / f"otel-forge-{os.getuid()}"


def state_dir(config: ForgeConfig) -> Path:
    """The configured state directory, made absolute. It is not created here."""
    return (config.state_dir or default_state_dir()).expanduser().absolute()


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("true", "1", "yes")


def is_disabled() -> bool:
    """Whether an environment variable turns all telemetry off."""
    return any(_is_true(name) for name in ENV_DISABLED)


def is_exporter_off(signal: str) -> bool:
    """Whether OTEL_METRICS_EXPORTER or OTEL_TRACES_EXPORTER (`signal`: METRICS or TRACES) says that nothing is exported."""
    return os.environ.get(f"OTEL_{signal}_EXPORTER", "").strip() == "none"


def are_scopes_disabled() -> bool:
    """Whether an environment variable turns scopes off."""
    return _is_true(ENV_SCOPES_DISABLED)


def timer(config: ForgeConfig) -> str:
    """What scopes are timed by: the file's word, else torchforge's variable, else `auto`."""
    if "timer" in config.tracing.model_fields_set or not os.environ.get(ENV_TIMER_USES_GPU):
        return config.tracing.timer
    return "gpu" if _is_true(ENV_TIMER_USES_GPU) else "cpu"


def instrument_texts(config: ForgeConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What to instrument: OTEL_FORGE_INSTRUMENT, else the file's `instrument`."""
    given = environ.get(ENV_INSTRUMENT)
    return config.instrument if given is None else tuple(text.strip() for text in given.split(",") if text.strip())


def step_settings(config: ForgeConfig, environ: Mapping[str, str]) -> StepConfig:
    """What ends a step: OTEL_FORGE_STEP, else the file's `step`. Raises ConfigError."""
    given = environ.get(ENV_STEP, "").strip()
    if not given:
        return config.step
    if ":" in given:
        return StepConfig(on="method", method=given)
    if given not in ("optimizer", "manual"):
        raise ConfigError([f"{ENV_STEP}: expected optimizer, manual or module:Class.method, got {given!r}"])
    return StepConfig.model_validate({"on": given})


@dataclass(frozen=True)
class OtlpSettings:
    """What OpenTelemetry's own variables say about sending, by the rules of its specification (a signal's variable beats the general one)."""

    metrics_url: str | None
    """Full URL, `/v1/metrics` included; None when no endpoint is set."""
    traces_url: str | None
    headers: dict[str, str]
    timeout_s: float
    compression: str | None
    ca_file: str | None
    protocol: str = "http/protobuf"
    """`http/protobuf` or `grpc`."""


def otlp_settings(environ: Mapping[str, str] = os.environ) -> OtlpSettings:
    """Read OTEL_EXPORTER_OTLP_* and their METRICS and TRACES forms. A value that cannot be read is ignored, as the specification asks."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    grpc = protocol.strip().lower() == "grpc"
    return OtlpSettings(
        protocol="grpc" if grpc else "http/protobuf",
        metrics_url=_signal_url(environ, "METRICS", "" if grpc else "/v1/metrics"),
        traces_url=_signal_url(environ, "TRACES", "" if grpc else "/v1/traces"),
        headers=_headers(environ.get("OTEL_EXPORTER_OTLP_METRICS_HEADERS") or environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")),
        timeout_s=_timeout_s(environ.get("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT") or environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", "")),
        compression=environ.get("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION") or environ.get("OTEL_EXPORTER_OTLP_COMPRESSION"),
        ca_file=environ.get("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE") or environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE"),
    )


def user_resource(config: ForgeConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str | int | float | bool]:
    """The user's resource attributes: the file's, over them OTEL_RESOURCE_ATTRIBUTES, over them OTEL_SERVICE_NAME."""
    found: dict[str, str | int | float | bool] = dict(config.resource)
    for item in environ.get(ENV_RESOURCE, "").split(","):
        name, equals, value = item.partition("=")
        if equals and name.strip():
            found[name.strip()] = urllib.parse.unquote(value.strip())
    if environ.get(ENV_SERVICE_NAME):
        found["service.name"] = environ[ENV_SERVICE_NAME]
    return found


def _signal_url(environ: Mapping[str, str], signal: str, path: str) -> str | None:
    specific = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    general = environ.get(ENV_OTLP_ENDPOINT)
    return specific or (general.rstrip("/") + path if general else None)


def _headers(text: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {urllib.parse.unquote(name).strip().lower(): urllib.parse.unquote(value).strip() for name, _, value in pairs}


def _timeout_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return DEFAULT_TIMEOUT_S
    return seconds if seconds > 0 else DEFAULT_TIMEOUT_S


def load_config(source: Any = None) -> ForgeConfig:
    """Make a ForgeConfig from a path, dict, DictConfig or ForgeConfig; None means OTEL_FORGE_CONFIG's file, or the defaults.

    Raises ConfigError with every problem at once; an unknown key is named with the nearest right one.
    """
    if isinstance(source, ForgeConfig):
        return source
    if source is None:
        source = os.environ.get(ENV_CONFIG) or {}
    if isinstance(source, (str, os.PathLike)):
        return _parse(_read_yaml(Path(source)), str(source))
    return _parse(_plain(source), None)


class _Loader(yaml.SafeLoader):
    """YAML in which only true and false are truth values, as in YAML 1.2: `on` is a key of `step`."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if tag != "tag:yaml.org,2002:bool"] for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF"))


def _read_yaml(path: Path) -> object:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot read it: {error.strerror}"], str(path)) from error
    try:
        return yaml.load(text, Loader=_Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError([f"not valid YAML: {error}"], str(path)) from error


def _plain(source: object) -> object:
    """A dict from any Mapping, DictConfig included (which is one only by duck type)."""
    if hasattr(source, "items"):
        return {str(key): _plain(value) for key, value in source.items()}
    if isinstance(source, (list, tuple)) or type(source).__name__ == "ListConfig":
        return [_plain(value) for value in source]  # type: ignore[attr-defined]
    return source


_TOP_FIELDS = set(ForgeConfig.model_fields) - {"merge_roles"}


def _parse(raw: object, source: str | None) -> ForgeConfig:
    if not isinstance(raw, Mapping):
        raise ConfigError([f"expected a mapping of settings, got {type(raw).__name__}"], source)
    raw = dict(raw)
    problems: list[str] = []
    for key in list(raw):
        if key not in _TOP_FIELDS:
            problems.append(_unknown(str(key), "", _TOP_FIELDS))
            del raw[key]
    logging_raw = raw.get("metric_logging") or {}
    if isinstance(logging_raw, Mapping):
        logging_raw = dict(logging_raw)
        raw["merge_roles"] = logging_raw.pop("merge_roles", False)
        raw["metric_logging"] = _parse_backends(logging_raw, problems)
    config: ForgeConfig | None = _validate(ForgeConfig, raw, "", problems)
    if problems or config is None:
        raise ConfigError(problems, source)
    if not config.metric_logging:
        config = config.model_copy(update={"metric_logging": dict(DEFAULT_BACKENDS)})
    return config


def parse_backends(raw: Mapping[Any, Any]) -> dict[str, BackendConfig]:
    """The backends of a `metric_logging` mapping. Raises ConfigError."""
    problems: list[str] = []
    backends = _parse_backends(raw, problems)
    if problems:
        raise ConfigError(problems)
    return backends


def installed_backends() -> set[str]:
    """Names of the backends that installed packages bring."""
    return importlib.metadata.entry_points(group=ENTRY_POINTS).names


def _parse_backends(raw: Mapping[Any, Any], problems: list[str]) -> dict[str, BackendConfig]:
    backends: dict[str, BackendConfig] = {}
    for name, options in raw.items():
        path = f"metric_logging.{name}"
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            problems.append(f"{path}: expected a mapping of options, got {options!r}")
            continue
        model = BACKENDS.get(str(name)) or (CustomConfig if "class" in options or str(name) in installed_backends() else None)
        if model is None:
            known = set(BACKENDS) | {"merge_roles"} | installed_backends()
            problems.append(_unknown(str(name), "metric_logging", known, "backend") + " (a backend of your own needs `class`)")
            continue
        backend = _validate(model, dict(options), path, problems)
        if backend is not None:
            backends[str(name)] = backend
    return backends


def _validate(model: type[Any], raw: Mapping[Any, Any], path: str, problems: list[str]) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        for item in error.errors():
            where = ".".join(str(part) for part in (path, *item["loc"]) if part != "")
            if item["type"] == "extra_forbidden":
                known = _fields_at(model, item["loc"][:-1])
                problems.append(_unknown(str(item["loc"][-1]), where.rpartition(".")[0], known))
            else:
                problems.append(f"{where}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})")
        return None


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> set[str]:
    for part in loc:
        annotation = model.model_fields[str(part)].annotation if part in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)]
        if not nested:
            return set()
        model = nested[0]
    return set(model.model_fields)


def _unknown(key: str, path: str, known: set[str], what: str = "key") -> str:
    where = f"{path}.{key}" if path else key
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"{where}: unknown {what}; {hint}"
