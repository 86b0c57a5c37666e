"""The exporter: takes payloads, makes them durable, assembles rows, and lets every backend of every run have them.

One thread stores and assembles; each backend has its own. The in-process shape and the exporter process run this same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_forge import wire
from otel_forge.config import BackendConfig, ForgeConfig, parse_backends
from otel_forge.delivery import Lane, Packet
from otel_forge.errors import ConfigError
from otel_forge.otlp_http import Poster
from otel_forge.spill import SpillStore
from otel_forge_exporters import tombstones
from otel_forge_exporters.assembler import Assembler, Revision, rank_row, with_attempt
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.decode import Control, Decoded, RowId, Sender, StreamValue, Unit, decode
from otel_forge_exporters.outbox import Outbox, end_all
from otel_forge_exporters.rows import Row, from_stored, to_stored
from otel_forge_exporters.spool import Spool, pack_row_id
from otel_forge_exporters.step_spans import StepSpans
from otel_forge_exporters.stragglers import StragglerWatch

logger = logging.getLogger("otel_forge.exporter")

TICK_S = 0.05
PENDING_BYTES = 512 << 20
"""Payloads that wait to be stored; more are answered with "come again"."""
MAX_ASIDE = 20
STORE_TIMEOUT_S = 30.0
"""A payload that is not on disk by then is refused; if it is stored after all, its resend is recognized."""
SILENT_S = 600.0
"""A run without a packet for so long has crashed."""
SETTLE_S = 10.0
"""A run whose members are all done ends after so long without a packet (a restarted attempt comes sooner)."""


class Unavailable(Exception):
    """The payload was not stored: send it again."""


@dataclass
class _Incoming:
    body: bytes
    decoded: Decoded
    stored: threading.Event = field(default_factory=threading.Event)
    failed: str | None = None


@dataclass
class _Run:
    info: RunInfo
    outboxes: list[Outbox] = field(default_factory=list)
    last_packet: float = 0.0
    worlds: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(role, replica, attempt) → world size."""
    left: dict[tuple[str, int, int], dict[int, int]] = field(default_factory=dict)
    """(role, replica, attempt) → rank → exit code."""
    finished: bool = False

    def all_left(self) -> bool:
        """Whether every member of each role's newest attempt has said that it is done."""
        newest: dict[tuple[str, int], int] = {}
        for role, replica, attempt in self.worlds:
            newest[role, replica] = max(attempt, newest.get((role, replica), attempt))
        groups = [(role, replica, attempt) for (role, replica), attempt in newest.items()]
        return bool(groups) and all(len(self.left.get(group, {})) >= self.worlds[group] for group in groups)

    def exit_code(self) -> int:
        """The first exit code that is not 0."""
        return next((code for group in self.left.values() for code in group.values() if code), 0)


RECONNECT_S = 4.0
"""A Collector that has lost its exporter tries again after pauses that grow to this."""


class Service:
    """Everything between a payload and the backends."""

    def __init__(
        self,
        config: ForgeConfig,
        *,
        state_dir: Path | None,
        work_dir: Path,
        trace_endpoint: str | None = None,
        explicit: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`state_dir` None keeps the spool in memory. `explicit` False: the configuration is the default one, so a run's own backends are used."""
        self._config = config
        self._explicit = explicit
        self._work_dir = work_dir
        self._clock = clock
        self._aside = state_dir / "undecodable" if state_dir else None
        self._spool = Spool(state_dir / "spool.sqlite" if state_dir else None)
        self._grace_s = 2 * config.collector.window_s + 1.0 if state_dir else 0.0
        self._assembler = Assembler(
            deadline_s=config.collector.row_deadline_s, horizon_s=config.collector.amend_horizon_s, grace_s=self._grace_s,
            divides=config.collector.gateway == "reduce", recall=self._recall,
        )  # fmt: skip
        self._traces = _trace_lane(trace_endpoint)
        self._stragglers = StragglerWatch()
        self._roots = StepSpans(self._send_spans, deadline_s=config.collector.row_deadline_s, every=config.tracing.every)
        self._incoming: queue.SimpleQueue[_Incoming | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._runs: dict[str, _Run] = {}
        self._row_payloads: dict[Any, list[int]] = {}
        self._payload_rows: dict[int, int] = {}
        self._parts: dict[tuple[Sender, RowId], dict[int, Unit]] = {}
        self._ordinals: dict[tuple[str, int], int] = {}
        self._counts = {"payloads": 0, "foreign_points": 0, "bad_points": 0, "undecodable": 0, "failed_payloads": 0, "rows": 0, "spans_dropped": 0}
        self._owed: list[Revision] = []
        """Revisions that the assembler has made and the disk has not taken yet: it makes each once."""
        self._owed_rows: list[Row] = []
        """The same of rows of one member."""
        self._complained: set[str] = set()
        self._last_close = self._clock()
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._last_payload = self._clock()
        self._busy = False
        self._recovered = False
        """Whether this process goes on where an earlier one ended."""
        self._stopped = False
        self._recheck_up_to = max((row.seq for row in self._spool.last_revisions()), default=0)
        self._thread = threading.Thread(target=self._loop, name="otel-forge-assemble", daemon=True)

    # --- what arrives, from any thread ----------------------------------------------------------------------------

    def accept_metrics(self, body: bytes) -> None:
        """Take one ExportMetricsServiceRequest; it is stored when this returns. Raises Unavailable, or Undecodable."""
        if self._stopped:
            raise Unavailable("the exporter is stopping")
        if self._pending_bytes > PENDING_BYTES or self._spool.is_full:
            self._last_payload = self._clock()
            raise Unavailable("the exporter has too much to do" if not self._spool.is_full else "the exporter's spool is full")
        try:
            decoded = decode(body)
        except Exception:
            self._keep_aside(body)
            raise
        incoming = _Incoming(body, decoded)
        with self._lock:
            self._pending_bytes += len(body)
        self._incoming.put(incoming)
        if not incoming.stored.wait(STORE_TIMEOUT_S):
            raise Unavailable("storing takes too long")
        if incoming.failed:
            self._last_payload = self._clock()  # the sender comes again: it is not quiet
            raise Unavailable(incoming.failed)

    def _keep_aside(self, body: bytes) -> None:
        """Bytes that are no OTLP: the first of them are kept for whoever wants to know what they were."""
        number = self._counts["undecodable"] = self._counts["undecodable"] + 1
        if self._aside is not None and number <= MAX_ASIDE:
            with contextlib.suppress(OSError):
                self._aside.mkdir(parents=True, exist_ok=True)
                (self._aside / f"{time.time_ns()}.bin").write_bytes(body[:1_000_000])
        self._complain("undecodable", "bytes that are no OTLP metrics were refused (the first %d are kept in %s)", MAX_ASIDE, self._aside)

    def accept_traces(self, body: bytes) -> None:
        """Pass spans on to where traces are kept; without such a place they are counted and left out."""
        self._send_spans(body)

    def _send_spans(self, body: bytes) -> None:
        if self._traces is None:
            self._counts["spans_dropped"] += 1
        else:
            self._traces.put(Packet(payload=body, signal="traces", route_offset=None, window=False, packet_id=""))

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take up what an earlier process left, and start."""
        self._recover()
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was received is in rows and every backend has them.

        Values may still be under way in a Collector: all that the members say they flushed is waited for; where one has not said so (it was
        killed), a quiet time of two windows; after a restart of this exporter, longer by what a Collector takes to find it again.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._is_drained():
                return True
            with self._idle:
                self._idle.wait(TICK_S)
        return self._is_drained()

    def _is_drained(self) -> bool:
        if self._busy or not self._incoming.empty() or self._assembler.waiting() or self._owed or self._owed_rows or self._is_writing():
            return False
        everything_came = self._assembler.everything_came()
        if everything_came is not None:
            return everything_came
        quiet_s = self._grace_s + (RECONNECT_S if self._recovered and self._grace_s else 0.0)
        return self._clock() - self._last_payload >= quiet_s

    def _is_writing(self) -> bool:
        return any(outbox.is_worth_waiting_for() for run in list(self._runs.values()) for outbox in run.outboxes)

    def stop(self, timeout_s: float, exit_code: int | None = None) -> None:
        """Stop taking payloads and end every backend. A run whose members are not all done ends with `exit_code`; None: it goes on later."""
        self._stopped = True
        self._incoming.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        threads = []
        for run in self._runs.values():
            if not run.finished:
                code = run.exit_code() if run.all_left() else exit_code
                threads.append(threading.Thread(target=self._finish, args=(run, code, timeout_s), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * timeout_s + 2)
        if self._traces is not None:
            self._traces.flush(min(timeout_s, 2.0))
            self._traces.stop()
        self._spool.close()

    def status(self) -> dict[str, Any]:
        """What it does, for `/status` and `otel-forge status`."""
        return {
            **self._counts,
            "waiting_rows": self._assembler.waiting(),
            "late_units": self._assembler.late_units,
            "runs": {
                run.info.run_id: {
                    "finished": run.finished,
                    "members": len(run.info.members),
                    "backends": {
                        outbox.name: {"mode": outbox.mode, "written": outbox.written, "error": outbox.last_error, "location": outbox.location()}
                        for outbox in run.outboxes
                    },
                }
                for run in list(self._runs.values())
            },
        }

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        for closed, tombstone in self._spool.closed_rows():
            self._assembler.mark_closed(_row_id(closed), tombstones.from_text(tombstone))
        for stored in self._spool.last_revisions():
            row_id = _row_id(stored.row_id or "")
            self._assembler.restore(Revision(row_id, _with_token(stored.row, row_id), frozenset(json.loads(stored.chosen or "[]"))))
        now = self._clock()
        for run_id, kind, member, body in self._spool.controls():
            self._take_control(_control(run_id, kind, member, json.loads(body)), now, store=False)
        payloads = self._spool.payloads()
        for payload_id, payload in payloads:
            self._apply_safely(payload_id, decode(payload), now)
        for run_id in self._spool.run_ids():
            self._run(run_id)
        self._recovered = bool(payloads or self._spool.run_ids())
        if payloads:
            logger.info("%d stored payloads of an earlier process were taken up", len(payloads))

    def _recall(self, row_id: RowId) -> Row | None:
        stored = self._spool.newest_row(pack_row_id(dataclasses.astuple(row_id)))
        return _with_token(stored, row_id) if stored is not None else None

    def _loop(self) -> None:
        while True:
            batch, stopping = self._next_batch()
            self._busy = True
            try:
                self._store_and_apply(batch)
                self._write_due()
            except sqlite3.Error as error:
                self._complain("disk", "rows cannot be stored (%s): they are kept and stored later", error)
            except Exception:
                logger.exception("a batch of payloads could not be handled; it is stored, and the rest goes on")
            finally:
                self._busy = False
            with self._idle:
                self._idle.notify_all()
            if stopping:
                return

    def _next_batch(self) -> tuple[list[_Incoming], bool]:
        batch: list[_Incoming] = []
        try:
            item = self._incoming.get(timeout=TICK_S)
            while True:
                if item is None:
                    return batch, True
                batch.append(item)
                if len(batch) >= 256:
                    return batch, False
                item = self._incoming.get_nowait()
        except queue.Empty:
            return batch, False

    def _store_and_apply(self, batch: list[_Incoming]) -> None:
        if not batch:
            return
        try:
            ids = self._spool.store([item.body for item in batch])
        except sqlite3.Error as error:
            self._complain("disk", "payloads cannot be stored (%s): senders are told to come again", error)
            for item in batch:
                item.failed = f"cannot store: {error}"
                item.stored.set()
            return
        finally:
            with self._lock:
                self._pending_bytes -= sum(len(item.body) for item in batch)
        for item in batch:
            item.stored.set()
        now = self._last_payload = self._clock()
        self._counts["payloads"] += len(batch)
        for payload_id, item in zip(ids, batch, strict=True):
            self._apply_safely(payload_id, item.decoded, now)

    def _apply_safely(self, payload_id: int, decoded: Decoded, now: float) -> None:
        """One payload that cannot be handled is counted and stays in the spool; the others of its batch, and of a restart, go on."""
        try:
            self._apply(payload_id, decoded, now)
        except Exception:
            self._counts["failed_payloads"] += 1
            logger.exception("a stored payload could not be handled")

    def _apply(self, payload_id: int, decoded: Decoded, now: float) -> None:
        """Bring one stored payload to the assembler; the payload is kept as long as a row needs it."""
        self._counts["foreign_points"] += decoded.foreign_points
        self._counts["bad_points"] += decoded.bad_points
        if decoded.foreign_points:
            self._complain("foreign", "%d points are not otel-forge's: left out and counted", decoded.foreign_points)
        for complaint in decoded.complaints[:3]:
            self._complain(complaint, "left out: %s", complaint)
        for control in decoded.controls:
            self._take_control(control, now, store=True)
        needed: set[Any] = set()
        for unit in decoded.units:
            self._run(unit.row.run_id).last_packet = now
            if self._assembler.add(unit, now):
                needed.add(unit.row)
        rows = [self._stream_row(value) for value in decoded.stream]
        for sender, unit in decoded.per_rank:
            row = self._take_rank_unit(sender, unit)
            if row is not None:
                rows.append(row)
            else:
                needed.add((sender, unit.row))
        self._store_rows(rows)
        if not needed:
            self._spool.forget([payload_id])
            return
        self._payload_rows[payload_id] = len(needed)
        for row_id in needed:
            self._row_payloads.setdefault(row_id, []).append(payload_id)

    def _take_rank_unit(self, sender: Sender, unit: Unit) -> Row | None:
        """The member's row, when all parts of its packet are there."""
        parts = self._parts.setdefault((sender, unit.row), {})
        parts[unit.part] = unit
        if len(parts) < unit.parts:
            return None
        del self._parts[sender, unit.row]
        self._release([(sender, unit.row)])
        return with_attempt(rank_row(sender, list(parts.values())), self._ordinal(sender.run_id, sender.attempt))

    def _stream_row(self, value: StreamValue) -> Row:
        sender = value.sender
        is_finite = math.isfinite(value.value)
        return Row(
            run_id=sender.run_id,
            mode="per_rank_no_reduce",
            role=sender.role,
            replica=sender.replica,
            rank=sender.rank,
            step=value.step,
            occurrence=0,
            attempt=self._ordinal(sender.run_id, sender.attempt),
            revision=1,
            time_unix=value.time_unix,
            ranks_reporting=1,
            world_size=sender.world_size,
            metrics={value.key: value.value if is_finite else None},
            nonfinite={} if is_finite else {value.key: 1},
            sequence=value.sequence,
        )

    def _store_rows(self, rows: list[Row]) -> None:
        """Store them, and those that a full disk did not take before; what it does not take now is owed."""
        self._owed_rows += rows
        if self._owed_rows:
            self._counts["rows"] += self._spool.add_revisions(
                [(row.run_id, row.mode, row.key, row.revision, None, None, to_stored(row)) for row in self._owed_rows]
            )
            owed, self._owed_rows = self._owed_rows, []
            for run_id in {row.run_id for row in owed}:
                self._wake(run_id)

    def _write_due(self) -> None:
        now = self._clock()
        if not self._owed:  # a revision counts on from the stored one before it
            self._owed = self._assembler.due(now)
        self._store_rows([])
        if self._owed:
            self._counts["rows"] += self._spool.add_revisions([self._stored_revision(revision) for revision in self._owed])
            revisions, self._owed = self._owed, []
            for revision in revisions:
                if revision.row.revision == 1:
                    self._stragglers.add(revision.row)
                    self._roots.add(dataclasses.replace(revision, row=self._with_ordinal(revision.row)), now)
            for run_id in {revision.row.run_id for revision in revisions}:
                self._wake(run_id)
        if now - self._last_close >= 1.0:
            self._last_close = now
            self._roots.tick(now)
            closed = self._assembler.close_due(now)
            self._release(
                list(closed), [(pack_row_id(dataclasses.astuple(row_id)), stone.to_text() if stone else "") for row_id, stone in closed.items()]
            )
            self._end_runs(now)

    def _stored_revision(self, revision: Revision) -> tuple[str, str, str, int, str, str, str]:
        row = self._with_ordinal(revision.row)
        row_id = pack_row_id(dataclasses.astuple(revision.row_id))
        return row.run_id, row.mode, row.key, row.revision, row_id, json.dumps(sorted(revision.chosen)), to_stored(row)

    def _with_ordinal(self, row: Row) -> Row:
        return with_attempt(row, self._ordinal(row.run_id, row.attempt))

    def _ordinal(self, run_id: str, token: int) -> int:
        key = (run_id, token)
        if key not in self._ordinals:
            self._ordinals[key] = self._spool.attempt_ordinal(run_id, token)
        return self._ordinals[key]

    def _release(self, row_ids: list[Any], closed: list[tuple[str, str]] | None = None) -> None:
        """Forget payloads that no row needs any more."""
        free = []
        for row_id in row_ids:
            for payload_id in self._row_payloads.pop(row_id, []):
                self._payload_rows[payload_id] -= 1
                if not self._payload_rows[payload_id]:
                    del self._payload_rows[payload_id]
                    free.append(payload_id)
        self._spool.forget(free, closed or [])

    # --- runs -------------------------------------------------------------------------------------------------------

    def _take_control(self, control: Control, now: float, *, store: bool) -> None:
        sender = control.sender
        run = self._run(sender.run_id)
        run.last_packet = now
        group = (sender.role, sender.replica, sender.attempt)
        run.worlds[group] = max(sender.world_size, run.worlds.get(group, 0))
        if control.kind == wire.PACKET_HELLO:
            run.info.members[f"{sender.role}/{sender.replica}.{sender.rank}"] = dict(control.body)
        elif control.kind == wire.PACKET_RUN_INFO:
            _update_info(run.info, control.body)
            self._own_backends(run, control.body.get("metric_logging"))
        elif control.kind == wire.PACKET_LAST:
            code = control.body.get("exit_code")
            run.left.setdefault(group, {})[sender.rank] = code if isinstance(code, int) else 0
        self._assembler.control(control, now)
        if store:
            member = json.dumps([sender.role, sender.replica, sender.rank, sender.world_size, sender.attempt, sender.nonce])
            with contextlib.suppress(sqlite3.Error):  # a full disk: the payload stays in the inbox, too
                self._spool.put_control(sender.run_id, control.kind, member, json.dumps(control.body))

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is not None and not run.finished:
            return run
        if run is not None:
            self._spool.unfinish(run_id)
            run.finished, run.outboxes = False, []
        else:
            run = self._runs[run_id] = _Run(RunInfo(run_id), last_packet=self._clock())
        if self._explicit:
            self._open_backends(run, self._config.metric_logging)
        return run

    def _own_backends(self, run: _Run, raw: Any) -> None:
        """Without a configuration of the exporter's own, a run's is used; only built-in backends may come by the wire."""
        if run.outboxes:
            return
        backends: Mapping[str, BackendConfig] = self._config.metric_logging
        if isinstance(raw, dict) and raw and not self._explicit:
            try:
                backends = parse_backends({name: options for name, options in raw.items() if "class" not in options})
            except (ConfigError, TypeError) as error:
                logger.error("the backends that run %s asks for cannot be used: %s", run.info.run_id, error)
        self._open_backends(run, backends)

    def _open_backends(self, run: _Run, backends: Mapping[str, BackendConfig]) -> None:
        for name, config in backends.items():
            outbox = Outbox(name, config, run.info, self._spool, self._work_dir, recheck_up_to=self._recheck_up_to)
            run.outboxes.append(outbox)
            outbox.start()

    def _wake(self, run_id: str) -> None:
        run = self._run(run_id)
        if not run.outboxes:
            self._open_backends(run, self._config.metric_logging)
        for outbox in run.outboxes:
            outbox.wake()

    def _end_runs(self, now: float) -> None:
        for run in self._runs.values():
            if run.finished or not run.outboxes:
                continue
            silent = now - run.last_packet
            if (silent >= SETTLE_S and run.all_left() and not self._assembler.waiting()) or silent >= SILENT_S:
                run.finished = True
                code = run.exit_code() if run.all_left() else 1
                threading.Thread(target=self._finish, args=(run, code, 60.0), name="otel-forge-finish", daemon=True).start()

    def _finish(self, run: _Run, exit_code: int | None, timeout_s: float) -> None:
        run.finished = True
        end_all(run.outboxes, exit_code, timeout_s)
        with contextlib.suppress(sqlite3.ProgrammingError):  # the spool was closed meanwhile: the next process ends the run
            if exit_code is not None and not any(outbox.backlog() or not outbox.has_ended for outbox in run.outboxes):
                self._spool.finish(run.info.run_id, exit_code)

    def _complain(self, kind: str, text: str, *values: object) -> None:
        """Each kind of complaint once."""
        if kind not in self._complained and len(self._complained) < 1000:
            self._complained.add(kind)
            logger.warning(text, *values)


def _trace_lane(endpoint: str | None) -> Lane | None:
    if endpoint is None:
        return None
    poster = Poster(endpoint.rstrip("/") + "/v1/traces", {}, 10.0, "gzip", None)
    return Lane(poster, SpillStore(None, ""), queue_bytes=64 << 20, window_s=1.0, clock=time.monotonic)


def _update_info(info: RunInfo, body: Mapping[str, Any]) -> None:
    if isinstance(body.get("run_config"), dict):
        info.run_config.update(body["run_config"])
    info.wandb_run_id = body.get("wandb_run_id") or info.wandb_run_id
    info.wandb_name = body.get("wandb_name") or info.wandb_name
    info.namespace = body.get("namespace") or info.namespace


def _control(run_id: str, kind: str, member: str, body: Mapping[str, Any]) -> Control:
    role, replica, rank, world_size, attempt, nonce = json.loads(member)
    return Control(kind, Sender(run_id, role, replica, rank, world_size, attempt, nonce), body)


def _with_token(stored: str, row_id: RowId) -> Row:
    """A stored row with the attempt as the wire has it."""
    return dataclasses.replace(from_stored(stored), attempt=row_id.attempt)


def _row_id(text: str) -> RowId:
    return RowId(*json.loads(text))
