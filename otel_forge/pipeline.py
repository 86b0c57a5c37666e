"""The state of this process: one pipeline from `init` to `shutdown`, and the public calls of a training loop.

Everything per process lives here and is given back by `reset`. What a training loop calls never raises after `init`, except under `strict=True`.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from otel_forge import measuring, metrics, wire
from otel_forge.errors import InvalidValueError
from otel_forge.modes import LoggingMode
from otel_forge.relay import ENV_RELAY, RelayServer, arm
from otel_forge.steps import StepTracker

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

    from otel_forge.config import ForgeConfig, OtlpSettings
    from otel_forge.delivery import DeliveryReport, PosterLike
    from otel_forge.destination import Destination
    from otel_forge.identity import Member, Run
    from otel_forge.points import AttributeValue
    from otel_forge.spans import SpanRecord
    from otel_forge.system_metrics import SystemMetrics
    from otel_forge.worker import Identified, SenderLike, Worker

logger = logging.getLogger("otel_forge")

MAX_WAITING_SPANS = 100_000
"""Finished spans that wait for the sending thread; more are counted as dropped."""

spans: list[Any] = []
"""Finished spans; tracing appends, the sending thread takes from the front. Each is one list operation, so no lock is needed."""


recording_spans = False
"""Whether spans go anywhere: between `init` and `shutdown`, unless tracing is disabled. What every scope asks first."""


scopes_off = False
"""Whether scopes do nothing at all: telemetry is disabled or has ended, or DISABLE_PERF_METRICS says so. What a decorated function asks first."""
remote_trace: contextvars.ContextVar[bytes | None] = contextvars.ContextVar("otel_forge_remote_trace", default=None)
"""The trace of another process that this context works for; None: that of the open step."""
open_scope_ids: Callable[[], tuple[bytes, bytes] | None] | None = None
"""(trace id, span id) of the open scope; set by `propagation`."""
has_remote_traces = False
"""Whether any context ever did."""


def _never() -> bool:
    return False


is_compiling: Callable[[], bool] = _never
"""torch.compiler.is_compiling once torch is there: a scope inside a compiled region stands back, so that the graph does not break on it."""


def _watch_torch() -> None:
    """Once torch is there, whenever that is: what it tells of compiled and of recomputed code."""
    import wrapt

    wrapt.register_post_import_hook(_torch_is_there, "torch")
    wrapt.register_post_import_hook(_dynamo_is_there, "torch._dynamo")


def _torch_is_there(torch: Any) -> None:
    global is_compiling
    from otel_forge import measuring
    from otel_forge.torch_hooks import watch_recomputation

    is_compiling = torch.compiler.is_compiling
    measuring.find()
    watch_recomputation()


def _dynamo_is_there(_dynamo: Any) -> None:
    from otel_forge.torch_hooks import record_in_graphs

    record_in_graphs()


class Pipeline:
    """From the first flush on: one member's way from records to its sender."""

    def __init__(
        self, config: ForgeConfig, *, explicit: bool, given: Mapping[str, Any], registry: metrics.Registry, root: Pipeline | None = None
    ) -> None:
        """`root`: the process's own pipeline, whose way to a receiver a further role shares."""
        from otel_forge.identity import process_facts
        from otel_forge.open_spans import Announcer
        from otel_forge.otel_spans import Nesting
        from otel_forge.providers import Instruments, Tracers
        from otel_forge.self_observation import SelfObservation
        from otel_forge.span_limits import SpanLimit
        from otel_forge.spans import encode
        from otel_forge.worker import Worker

        self.config = config
        self.given = given
        self.registry = registry
        self.root = root
        self.spans: list[Any] = spans if root is None else []
        self.roles: dict[tuple[str, int], Pipeline] = {}
        self.steps = StepTracker()
        self.facts = process_facts()
        self.run_config: dict[str, Any] = dict(given["run_config"] or {})
        self.exit_code: int | None = None
        self._explicit = explicit
        self._member: Member | None = None
        self._opened_unix_nano = time.time_ns()
        self._run_info_sent: dict[str, Any] | None = None
        self._stream_sequence = 0
        self._flushes = 0
        self._lock = threading.Lock()
        self._streaming: list[Any] | None = [] if self._wants_streams() else None
        self._sender_lock = threading.Lock()
        self._instruments = Instruments()
        self._tracers = Tracers()
        self._nesting = Nesting()
        self._system: SystemMetrics | None = None
        self._sender: SenderLike | None = given["sender"]
        self._worker: Worker = Worker(
            identify=self._identify,
            spans=self.spans,
            stream=self._streaming,
            observe=SelfObservation().figures,
            limit=SpanLimit(config.tracing.max_spans_per_step),
            announcer=Announcer(config.tracing.pending_after_s) if root is None else None,
            may_identify=self._is_member_certain,
            encode_spans=encode,
            settle=measuring.settle,
        )
        self._worker.start()
        self._relay = self._listen() if root is None else None
        streaming = self._streaming is not None
        registry.set_mode(off=False, bounded=False, stream=self.stream if streaming else None, stamp=self.stamp if streaming else None)

    def _listen(self) -> RelayServer | None:
        """Let child processes send what they record."""
        try:
            relay = RelayServer(self.registry, self._take_span)
        except OSError as error:
            logger.warning("what child processes record is not relayed: %s", error)
            return None
        os.environ[ENV_RELAY] = relay.path
        return relay

    def _take_span(self, record: SpanRecord) -> None:
        """A child process's span, in the step that is open here; it has no parent here but the step's root."""
        if self.config.tracing.enabled and len(self.spans) < MAX_WAITING_SPANS:
            self.spans.append(replace(record, step=self.steps.opening))

    def _wants_streams(self) -> bool:
        """Decided at init, before the rank is known: by the configuration, the environment or a living `up`."""
        from otel_forge.destination import resolve

        if self.given["sender"] is not None:
            return LoggingMode.PER_RANK_NO_REDUCE in self.config.modes()
        return resolve(self.config, explicit=self._explicit, world_size=1, environ=os.environ).streams

    # --- identity, at the first flush ------------------------------------------------------------------------------

    def member(self) -> Member:
        """Who this process is, fixed by the first call."""
        if self._member is None:
            from otel_forge.identity import resolve_member

            given = self.given
            self._member = resolve_member(given["role"], given["replica"], given["rank"], given["world_size"], os.environ)
        return self._member

    def _is_member_certain(self) -> bool:
        """Whether the rank would be the same at any later time: given, by the launcher or by torch.distributed."""
        from otel_forge.identity import ENV_RANK

        if self._member is not None or self.given["rank"] is not None or ENV_RANK in os.environ:
            return True
        torch = sys.modules.get("torch")
        return torch is not None and torch.distributed.is_available() and bool(torch.distributed.is_initialized())

    def _identify(self, stopped: Any) -> Identified:
        """Run, attempt, destination and sender; on the worker's thread, because rank 0's word may have to be waited for."""
        from otel_forge.config import state_dir
        from otel_forge.destination import modes_attribute, resolve
        from otel_forge.identity import resolve_run
        from otel_forge.packets import PacketBuilder
        from otel_forge.worker import Identified, hello_body, resource_attributes

        member = self.member()
        state = state_dir(self.config)
        run = resolve_run(self.given["run_id"], member, os.environ, self.facts, launches_dir=state / "launches", stopped=stopped)
        destination = resolve(self.config, explicit=self._explicit, world_size=member.world_size, environ=os.environ)
        if self.given["sender"] is not None:
            destination = replace(
                destination, shape="inprocess", modes=tuple(sorted(mode.value for mode in {*self.config.modes(), LoggingMode.GLOBAL_REDUCE}))
            )
        sender = (self.root or self).sender(destination, run.run_id, state)
        device = _device_name()
        resource = resource_attributes(member, run.run_id, self.facts, device, self._user_resource())
        builder = PacketBuilder(
            member,
            run,
            resource,
            nonce=self.facts.nonce,
            modes=modes_attribute(destination),
            window=destination.window,
            contribute=self.given["contribute"],
        )
        now = time.time_ns()
        sender.put(builder.control(wire.PACKET_HELLO, hello_body(member, run, self.facts, device), now))
        if member.rank == 0 and member.replica == 0:
            self._run_info_sent = self._run_info()
            sender.put(builder.control(wire.PACKET_RUN_INFO, self._run_info_sent, now))
        if self.root is None and destination.metrics_url is not None and self.given["sender"] is None:
            self._provide_for_others(destination, builder.resource)
        if self.root is None and open_scope_ids is not None and self.config.tracing.enabled:
            self._nesting.begin(open_scope_ids)
        self._watch_system(member)
        return Identified(run, builder, sender, builder.resource)

    def _provide_for_others(self, destination: Destination, resource: Mapping[str, AttributeValue]) -> None:
        """What other packages measure and trace goes the same way, where nobody else takes it."""
        from otel_forge.providers import Receiver

        settings = destination.settings
        how = (self._headers(settings.headers), settings.timeout_s, settings.protocol)
        if destination.metrics_url is not None:
            self._instruments.install(Receiver(destination.metrics_url, *how), resource)
        if destination.traces_url is not None and self.config.tracing.enabled:
            self._tracers.install(Receiver(destination.traces_url, *how), resource)

    def _watch_system(self, member: Member) -> None:
        """Record the node's own figures, in one process of each node."""
        from otel_forge.identity import resolve_node
        from otel_forge.system_metrics import SystemMetrics

        settings = self.config.system_metrics
        node, local_rank = resolve_node(member, os.environ)
        if self.root is None and settings.enabled and local_rank == 0 and member.replica == 0:
            self._system = SystemMetrics(node, self._record_mean, interval_s=settings.interval_s)
            self._system.start()

    def _record_mean(self, key: str, value: float) -> None:
        self.registry.record(key, value, metrics.Reduce.MEAN, None)

    def sender(self, destination: Destination, run_id: str, state: Path) -> SenderLike:
        """The process's one way to a receiver, made by whoever asks first."""
        with self._sender_lock:
            if self._sender is None:
                self._sender = self._make_sender(destination, run_id, state)
            return self._sender

    def _make_sender(self, destination: Destination, run_id: str, state: Path) -> SenderLike:
        if destination.shape == "inprocess":
            from otel_forge.inprocess import InProcessSender

            return InProcessSender(self.config, traces_url=destination.traces_url)
        from otel_forge.delivery import Sender

        if destination.shape == "spill":
            logger.warning(
                "nothing to send to: packets of run %s are kept in %s. Start training with `otel-forge run -- …`, or read them later with "
                "`otel-forge replay %s`.", run_id, state / "spool", run_id,
            )  # fmt: skip
        settings = destination.settings
        return Sender(
            metrics_url=destination.metrics_url,
            traces_url=destination.traces_url,
            headers=self._headers(settings.headers),
            spool_dir=state / "spool",
            run_id=run_id,
            window_s=self.config.collector.window_s,
            timeout_s=settings.timeout_s,
            compression=settings.compression or "gzip",
            ssl_context=ssl_context_of(self.config, settings.ca_file),
            make_poster=self._grpc_poster(settings) if settings.protocol == "grpc" else None,
            to_window=destination.window,
        )

    def _grpc_poster(self, settings: OtlpSettings) -> Callable[[str, str], PosterLike]:
        from otel_forge.otlp_grpc import GrpcPoster

        headers, compression = self._headers(settings.headers), settings.compression or "gzip"
        return lambda url, signal: GrpcPoster(url, signal, headers, settings.timeout_s, compression, settings.ca_file)

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        token = self.config.collector.token
        return {"authorization": f"Bearer {token}", **headers} if token else headers

    def _user_resource(self) -> dict[str, AttributeValue]:
        from otel_forge.config import user_resource

        return user_resource(self.config, os.environ)

    def _run_info(self) -> dict[str, Any]:
        from otel_forge.config import ENV_CONFIG

        backends = {name: backend.model_dump(mode="json", by_alias=True, exclude_unset=True) for name, backend in self.config.metric_logging.items()}
        explicit = self._explicit or bool(os.environ.get(ENV_CONFIG))
        return {
            "run_config": self.run_config,
            "metric_logging": backends if explicit else None,
            "merge_roles": self.config.merge_roles,
            "wandb_run_id": os.environ.get("WANDB_RUN_ID"),
            "wandb_name": os.environ.get("WANDB_NAME"),
            "namespace": self.config.resource.get("service.namespace"),
            "argv": sys.argv[:50],
        }

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything flushed so far is with its receiver."""
        deadline = time.monotonic() + timeout_s
        for role in list(self.roles.values()):
            role._worker.wait_idle(timeout_s)
        if not self._worker.wait_idle(timeout_s) or self._worker.identified is None:
            return False
        return self._worker.identified.sender.flush(max(0.0, deadline - time.monotonic()))

    def run(self) -> Run | None:
        """The run and attempt; None before the first flush was handled."""
        identified = self._worker.identified
        return identified.run if identified is not None else None

    # --- the training loop ---------------------------------------------------------------------------------------------

    def flush(self, step: int, wait_s: float | None) -> bool:
        """Seal what was recorded since the last flush as `step`."""
        from otel_forge.packets import Sealed

        self.member()
        began = time.perf_counter()
        with self._lock:
            trace_step = self.steps.opening
            occurrence = self.steps.seal(step)
            self._flushes += 1
            taken = self.registry.drain()
            start, end = self._opened_unix_nano, time.time_ns()
            self._opened_unix_nano = end
        done = threading.Event() if wait_s is not None else None
        self._worker.seal(Sealed(step, trace_step, occurrence, min(start, end), end, taken, time.perf_counter() - began, self.registry.dropped), done)
        if wait_s is None or done is None:
            return True
        deadline = time.monotonic() + wait_s
        if not done.wait(wait_s):
            return False
        identified = self._worker.identified
        return identified is not None and identified.sender.flush(max(0.0, deadline - time.monotonic()))

    def mark_start(self) -> None:
        """The open step begins now, not at the last flush."""
        self._opened_unix_nano = time.time_ns()

    def stream(self, key: str, value: float) -> None:
        """Keep one record for the stream packets; the sequence number orders and dedupes them."""
        from otel_forge.packets import StreamPoint

        assert self._streaming is not None
        with self._lock:
            self._streaming.append(StreamPoint(key, value, *self._stamp()))

    def stamp(self) -> tuple[int, int, int]:
        """Time, step and place in the order of a record whose value is read later."""
        with self._lock:
            return self._stamp()

    def _stamp(self) -> tuple[int, int, int]:
        sequence = self._stream_sequence
        self._stream_sequence = sequence + 1
        return time.time_ns(), self.steps.opening, sequence

    def set_run_config(self, values: Mapping[str, Any]) -> None:
        """Merge into the run's configuration, and send it again if it was sent."""
        self.run_config.update(values)
        if self._run_info_sent is not None:
            self._worker.control(wire.PACKET_RUN_INFO, self._run_info())

    def shutdown(self, timeout_s: float, exit_code: int | None) -> DeliveryReport:
        """Send what is left under the opening step, say that this member is done, and stop within the time."""
        from otel_forge.delivery import DeliveryReport

        deadline = time.monotonic() + timeout_s
        if self._relay is not None:
            self._relay.close()
            os.environ.pop(ENV_RELAY, None)
        for pipeline in [*self.roles.values(), self]:
            pipeline.finish(deadline, exit_code if exit_code is not None else self.exit_code)
        if self._system is not None:  # after the members: one that never flushed is identified, and begins to watch, at its end
            self._system.stop()
        self._nesting.end()
        for provider in (self._tracers, self._instruments):
            provider.shutdown(max(0.1, (deadline - time.monotonic()) / 2))
        if self._sender is None:
            return DeliveryReport(delivered=0, spilled=0, dropped=0)
        return self._sender.shutdown(max(0.1, deadline - time.monotonic()))

    def finish(self, deadline: float, exit_code: int | None) -> None:
        """Hand what is left of this member to the sender, and say that it is done; then its worker ends."""
        if not self.registry.is_empty():
            self.flush(self.steps.opening, None)
        if self._worker.identified is not None or self.steps.last_flushed is not None or self.spans or measuring.is_pending():
            self._worker.wait_idle(max(0.1, deadline - time.monotonic()))
            self._worker.control(wire.PACKET_LAST, {"exit_code": exit_code or 0, "flushes": self._flushes})
        self._worker.stop(max(0.1, deadline - time.monotonic()))
        self.registry.set_mode(off=True, bounded=False, stream=None)

    def role(self, name: str, replica: int, rank: int | None, world_size: int | None) -> Pipeline:
        """The pipeline of a further member in this process, made at first sight."""
        with self._lock:
            found = self.roles.get((name, replica))
            if found is None:
                given = {**self.given, "role": name, "replica": replica, "rank": rank, "world_size": world_size}
                found = Pipeline(self.config, explicit=self._explicit, given=given, registry=metrics.Registry(), root=self)
                found.registry.strict = self.registry.strict
                self.roles[name, replica] = found
            return found

    def after_fork_in_child(self) -> None:
        """Leave the parent's data to the parent; what the child records is relayed to it."""
        if self._relay is not None:
            self._relay.close()
            arm(self.registry, self._relay.path, spans)
        if self._sender is not None:
            self._sender.after_fork_in_child()


def _device_name() -> str:
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            return str(torch.cuda.get_device_name())
    return "cpu"


def ssl_context_of(config: ForgeConfig, ca_file: str | None) -> Any:
    """What `collector.tls` and OTEL_EXPORTER_OTLP_CERTIFICATE say, as an ssl.SSLContext; None where they say nothing."""
    tls = config.collector.tls
    if tls is None and ca_file is None:
        return None
    import ssl

    context = ssl.create_default_context(cafile=str(tls.ca_file) if tls and tls.ca_file else ca_file)
    if tls and tls.cert_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context


on_init: list[Callable[[ForgeConfig], None]] = []
"""Called with the configuration when `init` has started telemetry."""
on_reset: list[Callable[[], None]] = []
"""Called by `reset`, for what lives above this module."""

# --- the process's pipeline ------------------------------------------------------------------------------------------------

_pipeline: Pipeline | None = None
_init_lock = threading.Lock()
_hooked = False
_early_steps = StepTracker()
"""The step before `init` and while telemetry is off: `get_step` works all the same."""
_previous_excepthook: Any = None
_role: contextvars.ContextVar[Pipeline | None] = contextvars.ContextVar("otel_forge_role", default=None)
"""The further member that this context acts as; None: the process's own."""
several_roles = False
"""Whether any context ever acted as a further member."""


if os.environ.get(ENV_RELAY):
    recording_spans = True
    arm(metrics.registry(), os.environ[ENV_RELAY], spans)  # a spawned child of a member; `init` makes it a member of its own


def current() -> Pipeline | None:
    """The pipeline between `init` and `shutdown`: the process's own, or that of the role this context acts as."""
    if not several_roles:
        return _pipeline
    return _role.get() or _pipeline


def waiting_spans() -> list[Any]:
    """Where a span that finished in this context goes."""
    if not several_roles:
        return spans
    found = _role.get()
    return found.spans if found is not None else spans


@contextlib.contextmanager
def role(name: str, *, replica: int = 0, rank: int | None = None, world_size: int | None = None) -> Iterator[None]:
    """Act as another member inside the block: its values, steps and spans are its own, and it flushes for itself.

    For a process in which several loops run, a trainer and a generator say, each in its thread or asyncio task; a thread enters it itself. `rank`
    and `world_size` are those of the role, by default the process's. Needs `init`; without, the block changes nothing.
    """
    global several_roles
    if _pipeline is None:
        yield
        return
    found = _pipeline.role(name, replica, rank, world_size)
    if not several_roles:
        several_roles = True
        _sample_spans()
        metrics.registry().set_route(_registry_of_context)
    token = _role.set(found)
    try:
        yield
    finally:
        _role.reset(token)


def _registry_of_context() -> metrics.Registry | None:
    found = _role.get()
    return found.registry if found is not None else None


def init(
    config: Any = None,
    *,
    role: str | None = None,
    replica: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
    run_config: Mapping[str, Any] | None = None,
    contribute: bool = True,
    strict: bool = False,
    sender: SenderLike | None = None,
    metric_exporter: MetricExporter | None = None,
    span_exporter: SpanExporter | None = None,
) -> None:
    """Start telemetry in this process. A second call does nothing.

    `config` is a path, dict, DictConfig or ForgeConfig; None means OTEL_FORGE_CONFIG or the defaults. `role`, `replica`, `rank` and `world_size`
    say who this process is where the launcher does not. `run_config` is shown as the run's configuration. `contribute=False` keeps this process's
    values out of the global rows (a tensor-parallel copy). `metric_exporter` and `span_exporter`, exporters of the OpenTelemetry SDK, take what
    would go to a server, in the wire's form: one point per series and step; `sender` takes the packets themselves. Raises ConfigError; after that,
    nothing raises unless `strict`.
    """
    global _pipeline, recording_spans, scopes_off
    from otel_forge.config import are_scopes_disabled, is_disabled, load_config, timer

    if is_disabled():
        metrics.registry().set_mode(off=True, bounded=False, stream=None)
        scopes_off = True
        return
    scopes_off = are_scopes_disabled()
    with _init_lock:
        if _pipeline is not None:
            _pipeline.set_run_config(run_config or {})  # a program that was instrumented from outside gets its own word in
            return
        if metric_exporter is not None:
            from otel_forge.sdk_exporters import SdkSender

            sender = SdkSender(metric_exporter, span_exporter)
        explicit = config is not None and not isinstance(config, (str, os.PathLike))
        given: dict[str, Any] = {"role": role, "replica": replica, "rank": rank, "world_size": world_size, "run_id": run_id}
        given |= {"run_config": run_config, "contribute": contribute, "sender": sender}
        registry = metrics.registry()
        registry.strict, registry.ended = strict, 0
        registry.first_record = None
        pipeline = Pipeline(load_config(config), explicit=explicit, given=given, registry=registry)
        if _early_steps.opening:
            pipeline.steps.set(_early_steps.opening)
        _pipeline = pipeline
        _sample_spans()
        measuring.configure(timer=timer(pipeline.config), track_memory=pipeline.config.tracing.track_memory)
        _install_hooks()
    for act in on_init:
        act(pipeline.config)


def _sample_spans() -> None:
    """Whether the spans of the open step are kept: every n-th step's are, the same ones on every rank. With several roles in a process, all are."""
    global recording_spans
    if _pipeline is not None:
        tracing = _pipeline.config.tracing
        recording_spans = tracing.enabled and not scopes_off and (tracing.every == 1 or several_roles or _pipeline.steps.is_sampled(tracing.every))


def _install_hooks() -> None:
    global _hooked, _previous_excepthook
    if _hooked:
        return
    _hooked = True
    _watch_torch()
    atexit.register(shutdown)
    os.register_at_fork(after_in_child=_after_fork_in_child)
    _previous_excepthook = sys.excepthook
    sys.excepthook = _note_failure
    with contextlib.suppress(ValueError):  # not the main thread: signals are not ours there
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)


def _note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _pipeline is not None and not issubclass(kind, SystemExit):
        _pipeline.exit_code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    _previous_excepthook(kind, error, trace)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Only where the program left SIGTERM to its default: keep what was recorded, then end by the signal as before."""
    with contextlib.suppress(Exception):
        shutdown(timeout_s=2.0, exit_code=128 + number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _after_fork_in_child() -> None:
    """A child owns none of the parent's data and has none of its threads."""
    global _pipeline, _init_lock, recording_spans, several_roles
    pipeline, _pipeline = _pipeline, None
    several_roles = False
    recording_spans = False
    _init_lock = threading.Lock()
    spans.clear()
    metrics.registry().after_fork_in_child()
    if pipeline is not None:
        pipeline.after_fork_in_child()
        recording_spans = pipeline.config.tracing.enabled and metrics.registry().first_record is not None


def _step_number(step: Any, opening: int) -> int:
    """The step as an int; what is not one is said once, and the opening step is used."""
    try:
        number = operator.index(step)
        if number >= 0:
            return number
    except TypeError:
        pass
    metrics.registry().problem("flush", "step", f"a step must be an int ≥ 0, got {step!r}; step {opening} is used", InvalidValueError)
    return opening


def flush(step: int, *, wait_s: float | None = None) -> bool:
    """Seal what was recorded since the last flush as `step` and send it; returns at once.

    With `wait_s` it waits up to so many seconds and tells whether the step was acknowledged; without, True means queued. False before `init`.
    """
    pipeline = current()
    if pipeline is None:
        _early_steps.seal(_step_number(step, _early_steps.opening))
        return False
    try:
        sealed = pipeline.flush(_step_number(step, pipeline.steps.opening), wait_s)
        _sample_spans()
        return sealed
    except Exception as error:
        metrics.registry().problem("flush", "flush", f"flush({step!r}) failed: {error!r}", InvalidValueError)
        return False


def set_step(step: int) -> None:
    """Name the step that is open now: spans and streamed records carry it."""
    pipeline = current()
    steps = pipeline.steps if pipeline is not None else _early_steps
    steps.set(_step_number(step, steps.opening))
    _sample_spans()


def get_step() -> int:
    """The open step: the one given to `set_step`, else the last flushed one + 1, else 0."""
    pipeline = current()
    return (pipeline.steps if pipeline is not None else _early_steps).opening


def set_run_config(values: Mapping[str, Any]) -> None:
    """Add to the configuration that the run shows (in wandb, its config). Only rank 0's is used."""
    if _pipeline is not None:
        _pipeline.set_run_config(values)


def shutdown(timeout_s: float = 5.0, exit_code: int | None = None) -> DeliveryReport:
    """Send what is left, within `timeout_s` seconds; what could not be sent is spilled to disk. Says what became of the packets.

    `exit_code` is the run's; by default 0, or 1 after an uncaught exception. Runs by itself when the program ends.
    """
    global _pipeline, recording_spans, scopes_off, several_roles
    from otel_forge.delivery import DeliveryReport

    with _init_lock:
        pipeline, _pipeline = _pipeline, None
        recording_spans = False
    if pipeline is None:
        return DeliveryReport(delivered=0, spilled=0, dropped=0)
    try:
        report = pipeline.shutdown(timeout_s, exit_code)
    finally:
        measuring.close()
        several_roles = False
        metrics.registry().route = None
        metrics.registry().ended = 1
        scopes_off = True
        metrics.registry().set_mode(off=True, bounded=False, stream=None)
    if report.dropped:
        logger.warning("otel-forge: %d packets delivered, %d kept on disk, %d lost", report.delivered, report.spilled, report.dropped)
    return report


def reset() -> None:
    """Back to the state before the first `init`, for tests: shuts down, forgets keys, steps and spans."""
    global _early_steps, scopes_off
    for act in on_reset:
        act()
    shutdown(timeout_s=1.0)
    scopes_off = False
    measuring.reset()
    metrics.registry().clear()
    spans.clear()
    _early_steps = StepTracker()
