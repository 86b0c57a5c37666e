"""A short run of `python -m tests.outages`: exporter, Collector and one backend are away, one after the other."""

from __future__ import annotations

from pathlib import Path

from tests.outages import Plan, is_sound, run


def test_every_row_is_there_in_order_once_after_each_outage(tmp_path: Path) -> None:
    """The healthy backend gets its rows while the other one is down."""
    result = run(Plan(exporter_s=3.0, collector_s=3.0, backend_s=3.0, between_s=1.5, ranks=4, series=4, interval_s=0.2, quiet_s=3.0), tmp_path)
    assert is_sound(result), result
