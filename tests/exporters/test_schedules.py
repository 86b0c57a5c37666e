"""A short run of `python -m tests.schedules`, and a proof that it would notice."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
from otel_forge_exporters import assembler
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.cover import Cover
from otel_forge_exporters.tombstones import Tombstone

from tests.schedules import run_seeds


def test_600_random_schedules_violate_nothing() -> None:
    assert run_seeds(range(600)) == ({}, {})


@pytest.mark.parametrize(
    ("broken", "name", "instead", "noticed"),
    [
        (Cover, "choose", lambda cover, previous=frozenset(): list(range(len(cover.candidates))), "a wrong number"),
        (Assembler, "restore", lambda assembler, revision: None, "a row and revision twice"),
        (Assembler, "mark_closed", lambda assembler, row_id, tombstone=None: None, "a row and revision twice"),
        (assembler, "divided", lambda values, times: values, "a wrong number"),
        (Tombstone, "is_new", lambda tombstone, member: False, "a row is not whole although nothing was lost"),
        (assembler, "marked", lambda row, late: dataclasses.replace(row, metrics={}, revision=row.revision + 1), "values of a closed row changed"),
    ],
)
def test_an_assembler_without_one_of_its_rules_is_noticed(
    broken: type | ModuleType, name: str, instead: object, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, name, instead)
    violations, _ = run_seeds(range(600))
    assert violations[noticed] > 0
