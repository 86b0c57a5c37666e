"""The scale bench says of itself whether every row was exact, in one tier and in two."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import Cli

KEYS = {
    "rows", "exact_rows", "marked_rows", "points_in", "collector_cpu_us_per_point", "collector_rss_mb", "exporter_rss_mb", "exporter_cpu_s",
    "row_latency_s_median",
}  # fmt: skip


@pytest.mark.parametrize("more", [["--tiers", "1"], ["--tiers", "2"], ["--tiers", "2", "--gateway-mode", "reduce"]])
def test_every_row_of_24_ranks_is_exact(more: list[str], cli: Cli) -> None:
    done = cli("bench", "scale", "--ranks", "24", "--series", "10", "--steps", "4", "--interval", "0.1", "--json", *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= KEYS
    assert (found["rows"], found["exact_rows"], found["marked_rows"], found["points_in"]) == (4, 4, 0, 24 * 4 * 15)


def test_it_is_measured_alone(cli: Cli) -> None:
    done = cli("bench", "scale", "record")
    assert done.returncode == 2
    assert "scale is measured alone" in done.stderr
