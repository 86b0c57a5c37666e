"""A short run of `python -m tests.schedules`, and a proof that it would notice."""

from __future__ import annotations

import pytest
from otel_forge_exporters.assembler import Assembler
from otel_forge_exporters.cover import Cover

from tests.schedules import run_seeds


def test_600_random_schedules_violate_nothing() -> None:
    assert run_seeds(range(600)) == ({}, {})


@pytest.mark.parametrize(
    ("broken", "name", "instead", "noticed"),
    [
        (Cover, "choose", lambda cover, previous=frozenset(): list(range(len(cover.candidates))), "a wrong number"),
        (Assembler, "restore", lambda assembler, revision: None, "a row and revision twice"),
        (Assembler, "mark_closed", lambda assembler, row_id: None, "a row and revision twice"),
    ],
)
def test_an_assembler_without_one_of_its_rules_is_noticed(
    broken: type, name: str, instead: object, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, name, instead)
    violations, _ = run_seeds(range(400))
    assert violations[noticed] > 0
