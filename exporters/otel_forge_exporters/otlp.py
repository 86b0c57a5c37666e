"""Rows onward as OTLP metrics, to Prometheus, a Collector, Grafana or whatever else takes OTLP over HTTP.

A value of a row is a gauge point at the row's time: a step's sum, too, because it is the sum of that step and of no other. A histogram is cumulative
over the steps, which is what Prometheus can take. The step is a gauge of its own: as an attribute it would make a new series of each step.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from otel_forge import wire
from otel_forge.config import OtlpConfig
from otel_forge.otlp_http import Poster, Verdict
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue, Row

logger = logging.getLogger("otel_forge.exporter")

STEP = "forge/step"
RANKS_REPORTING = "forge/ranks_reporting"
POINTS_A_REQUEST = 5_000
"""About a megabyte: far below what receivers take."""


@dataclass
class _Cumulative:
    """A histogram since this process began to send it."""

    start_unix_nano: int
    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0


class OtlpBackend:
    """Sends the first revision of each row. A row that a receiver refuses for good is left out, said once."""

    def __init__(self, config: OtlpConfig, run: RunInfo, work_dir: Path) -> None:
        base = config.endpoint.rstrip("/")
        self._url = base if base.endswith("/v1/metrics") else f"{base}/v1/metrics"
        self._config = config
        self._run = run
        self._poster: Poster | None = None
        self._histograms: dict[tuple[Any, ...], _Cumulative] = {}
        self._batch: tuple[str, ...] = ()
        self._requests: list[bytes] = []
        """What is left of a batch that could not be sent whole: the same bytes are sent again, so that nothing is added up twice."""
        self._complained = False

    def open(self) -> None:
        """Nothing is sent before the first row. Raises OSError when the CA file cannot be read."""
        context = ssl.create_default_context(cafile=str(self._config.ca_file)) if self._config.ca_file else None
        self._poster = Poster(self._url, self._config.headers, self._config.timeout_s, "gzip", context)

    def write(self, rows: Sequence[Row]) -> None:
        """Send them, in requests of about a megabyte."""
        batch = tuple(row.key for row in rows)
        if batch != self._batch:
            self._requests += [request.SerializeToString() for request in self._encode([row for row in rows if row.revision == 1])]
            self._batch = batch
        while self._requests:
            self._post(self._requests[0])
            del self._requests[0]
        self._batch = ()

    def _post(self, body: bytes) -> None:
        assert self._poster is not None
        outcome = self._poster.post(body)
        refused = outcome.verdict is Verdict.REJECTED
        if not refused and outcome.verdict is not Verdict.ACCEPTED:
            raise ConnectionError(f"{self._url}: {outcome.detail}")
        if outcome.detail and not self._complained:
            self._complained = True
            logger.warning("%s refused %s of a request for good: %s", self._url, "all" if refused else "a part", outcome.detail)

    def has(self, row: Row) -> bool | None:
        """There is nobody to ask: after a crash the last rows are sent again, with the same times."""
        return None

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Close the connection."""
        if self._poster is not None:
            self._poster.close()

    def location(self) -> str | None:
        """Where it sends to."""
        return self._url

    # --- encoding ----------------------------------------------------------------------------------------------------

    def _encode(self, rows: Sequence[Row]) -> Iterator[ExportMetricsServiceRequest]:
        request = _Request()
        for row in rows:
            metrics = request.metrics_of(self._resource(row))
            attributes = self._attributes(row)
            time_unix_nano = int(row.time_unix * 1e9)
            for key, number in {**row.flat(), STEP: row.step, RANKS_REPORTING: row.ranks_reporting}.items():
                point = _named(metrics, key).gauge.data_points.add(time_unix_nano=time_unix_nano)
                point.as_double = math.nan if number is None else number
                _put(point, attributes, key)
                request.points += 1
            for key, value in row.metrics.items():
                if isinstance(value, HistogramValue):
                    self._add_histogram(_named(metrics, key), key, value, attributes, row)
                    request.points += 1
            if request.points >= POINTS_A_REQUEST:
                yield request.message
                request = _Request()
        if request.points:
            yield request.message

    def _add_histogram(self, metric: Any, key: str, value: HistogramValue, attributes: Mapping[str, str | int], row: Row) -> None:
        time_unix_nano = int(row.time_unix * 1e9)
        series = (row.role, key, value.bounds, *attributes.items())
        total = self._histograms.setdefault(series, _Cumulative(time_unix_nano - 1, value.bounds, [0] * len(value.counts)))
        total.counts = [before + count for before, count in zip(total.counts, value.counts, strict=True)]
        total.sum += value.sum or 0.0
        metric.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        point = metric.histogram.data_points.add(
            start_time_unix_nano=total.start_unix_nano, time_unix_nano=time_unix_nano, count=sum(total.counts), sum=total.sum,
            bucket_counts=total.counts, explicit_bounds=total.bounds,
        )  # fmt: skip
        _put(point, attributes, key)

    def _resource(self, row: Row) -> tuple[tuple[str, str | int], ...]:
        member = "" if row.rank is None else f"-{row.role}-{row.replica or 0}-{row.rank}"
        named: dict[str, str | int] = {"service.name": row.role, "service.instance.id": f"{row.run_id}{member}", "forge.run": row.run_id}
        named["forge.attempt"] = row.attempt
        if self._run.namespace:
            named["service.namespace"] = self._run.namespace
        return tuple(named.items())

    def _attributes(self, row: Row) -> dict[str, str | int]:
        """The point's own, few on purpose: each value of one is a series at the other end."""
        attributes: dict[str, str | int] = {"run": row.run_id, "role": row.role}
        if row.rank is not None:
            attributes |= {"rank": row.rank} | ({"replica": row.replica} if row.replica else {})
        if row.occurrence:
            attributes["occurrence"] = row.occurrence
        return attributes


class _Request:
    """One message under construction: a resource for each member, a metric for each name."""

    def __init__(self) -> None:
        self.message = ExportMetricsServiceRequest()
        self.points = 0
        self._scopes: dict[tuple[tuple[str, str | int], ...], tuple[Any, dict[str, Any]]] = {}

    def metrics_of(self, resource: tuple[tuple[str, str | int], ...]) -> tuple[Any, dict[str, Any]]:
        """The scope of a resource, and its metrics by name."""
        if resource not in self._scopes:
            added = self.message.resource_metrics.add()
            for key, value in resource:
                _set(added.resource.attributes.add(key=key).value, value)
            scope = added.scope_metrics.add()
            scope.scope.name = wire.SCOPE
            self._scopes[resource] = (scope, {})
        return self._scopes[resource]


def _named(metrics: tuple[Any, dict[str, Any]], key: str) -> Any:
    scope, known = metrics
    name = wire.metric_name(key)
    if name not in known:
        known[name] = scope.metrics.add(name=name)
    return known[name]


def _put(point: Any, attributes: Mapping[str, str | int], key: str) -> None:
    for name, value in attributes.items():
        _set(point.attributes.add(key=name).value, value)
    if wire.metric_name(key) != key:
        _set(point.attributes.add(key=wire.KEY).value, key)


def _set(target: Any, value: str | int) -> None:
    if isinstance(value, str):
        target.string_value = value
    else:
        target.int_value = value
