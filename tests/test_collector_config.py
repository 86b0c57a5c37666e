"""The committed files are what the code renders."""

from __future__ import annotations

import json

import pytest
import yaml

from otel_forge import wire
from otel_forge.cli.binaries import files_dir
from otel_forge.cli.collector_config import FILES, single_node


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_the_rendered_one(name: str) -> None:
    assert (files_dir() / name).read_text() == FILES[name](), f"run: otel-forge collector config --out collector-config {name}"


def test_the_collector_keeps_apart_what_the_wire_keeps_apart() -> None:
    statement = yaml.safe_load(single_node())["processors"]["transform/reduce"]["metric_statements"][0]["statements"][0]
    assert json.loads(statement.partition(", ")[2].removesuffix(")")) == list(wire.SERIES_ATTRIBUTES)


def test_without_jaeger_no_queue_waits_for_it() -> None:
    assert "jaeger" not in single_node(jaeger=False)
