"""The in-process shape: the exporter's service inside the only training process. Nothing else of the rank side may import the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_forge.delivery import DeliveryReport, Packet

if TYPE_CHECKING:
    from otel_forge.config import ForgeConfig


class InProcessSender:
    """Hands packets straight to a Service: the same assembler and backends as in the exporter process, no network and no spool."""

    def __init__(self, config: ForgeConfig, *, traces_url: str | None = None, service: Any = None) -> None:
        if service is None:
            from otel_forge_exporters.service import Service

            trace_endpoint = traces_url.removesuffix("/v1/traces") if traces_url else None
            service = Service(config, state_dir=None, work_dir=Path.cwd(), trace_endpoint=trace_endpoint)
            service.start()
        self._service = service
        self._delivered = 0
        self._dropped = 0

    def put(self, packet: Packet) -> None:
        """Give one packet to the service; what it refuses is counted."""
        try:
            if packet.signal == "metrics":
                self._service.accept_metrics(packet.payload)
            else:
                self._service.accept_traces(packet.payload)
            self._delivered += 1
        except Exception:
            self._dropped += 1

    def flush(self, timeout_s: float) -> bool:
        """Wait until every row known so far is written."""
        return bool(self._service.drain(timeout_s))

    def shutdown(self, timeout_s: float) -> DeliveryReport:
        """Write what is left and end the backends."""
        self._service.drain(timeout_s)
        self._service.stop(timeout_s)
        return DeliveryReport(delivered=self._delivered, spilled=0, dropped=self._dropped)

    def stats(self) -> Mapping[str, float]:
        """Counts of packets."""
        return {"delivered": self._delivered, "dropped": self._dropped}

    def after_fork_in_child(self) -> None:
        """The service belongs to the parent: a child has none of its threads and never touches it."""
