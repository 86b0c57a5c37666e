"""The spool is bounded, refuses what it does not know, sets damaged files aside, and a full disk costs nothing that was acknowledged."""

from __future__ import annotations

import logging
import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from otel_forge_exporters import spool as spool_module
from otel_forge_exporters.service import Service, Unavailable
from otel_forge_exporters.spool import VERSION, Spool

from otel_forge.config import load_config
from otel_forge.errors import StateError
from tests.exporters.packets import Ranks, mean
from tests.integration.conftest import rows_of, wait_for


def test_what_is_stored_is_there_for_the_next_process_and_counts(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool.sqlite")
    ids = first.store([b"one", b"two"])
    first.close()
    second = Spool(tmp_path / "spool.sqlite")
    assert second.payloads() == list(zip(ids, [b"one", b"two"], strict=True))
    second.forget(ids[:1])
    assert second.payloads() == [(ids[1], b"two")]
    second.close()


def test_a_full_spool_takes_nothing_until_rows_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds over a restart; senders are told to come again, and then are heard."""
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    ranks = Ranks(2)
    body = ranks.send(0, 0, mean(1.0))
    monkeypatch.setattr(spool_module, "MAX_BYTES", len(body))
    for _ in range(2):
        service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
        service.start()
        if not service._spool.is_full:
            service.accept_metrics(body)
        with pytest.raises(Unavailable, match="spool is full"):
            service.accept_metrics(ranks.send(1, 0, mean(3.0)))
        service.stop(5.0)
    monkeypatch.setattr(spool_module, "MAX_BYTES", 10 * len(body))
    service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    service.start()
    service.accept_metrics(ranks.send(1, 0, mean(3.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 1, 10, "the row")
    service.stop(5.0)
    assert rows_of(tmp_path / "rows.jsonl")[0]["metrics"]["loss"] == 2.0


def test_bytes_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MAX_BYTES", 100)
    spool = Spool(tmp_path / "spool.sqlite")
    ids = spool.store([b"x" * 100])
    assert spool.is_full
    spool.forget(ids)
    assert not spool.is_full
    spool.close()


@pytest.mark.parametrize(("version", "words"), [(VERSION + 1, "a newer version"), (-1, "which no otel-forge has written")])
def test_a_version_that_is_not_known_is_refused_and_left_as_it_is(tmp_path: Path, version: int, words: str) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path)
    spool.store([b"kept"])
    spool.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={version}")
    db.close()
    with pytest.raises(StateError, match=rf"{path} (is|was) .*{words}.* move the file away"):
        Spool(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT body FROM inbox").fetchall() == [(b"kept",)]
        assert db.execute("PRAGMA user_version").fetchone() == (version,)
    db.close()


def old_spool(path: Path) -> None:
    """What the first version's exporter left when it was killed: step 0 closed, step 1 complete, step 2 with rank 0 of 2 only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as db:
        db.executescript((Path(__file__).parent / "spool_v1.sql").read_text())
    db.close()


def test_a_spool_of_the_first_version_is_migrated_and_its_run_goes_on(tmp_path: Path) -> None:
    old_spool(tmp_path / "state" / "spool.sqlite")
    service = Service(
        load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}}), state_dir=tmp_path / "state", work_dir=tmp_path
    )
    service.start()
    ranks = Ranks(2)
    service.accept_metrics(ranks.send(1, 2, mean(7.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 3, 10, "the row that was open, and the two that the new file lacks")
    service.stop(5.0)
    assert [(row["step"], row["revision"], row["metrics"]["loss"]) for row in rows_of(tmp_path / "rows.jsonl")] == [
        (0, 1, 2.0),
        (1, 1, 3.0),
        (2, 1, 6.0),
    ]
    with sqlite3.connect(tmp_path / "state" / "spool.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        migrated = {(name, sql) for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE type='index' AND sql IS NOT NULL")}
    db.close()
    fresh = Spool(None)
    assert migrated == set(fresh._db.execute("SELECT name, sql FROM sqlite_master WHERE type='index' AND sql IS NOT NULL"))
    fresh.close()


def test_a_migration_that_is_cut_off_leaves_the_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spool.sqlite"
    old_spool(path)
    with monkeypatch.context() as patched:
        patched.setitem(spool_module._MIGRATIONS, 1, spool_module._MIGRATIONS[1] + "INSERT INTO no_such_table VALUES (1);")
        with pytest.raises(StateError, match="no_such_table"):
            Spool(path)
    spool = Spool(path)
    assert [row_id for row_id, _ in spool.closed_rows()] == ['["r","trainer",1000,0,0]']
    assert len(spool.payloads()) == 3
    spool.close()


def test_who_comes_after_a_row_was_closed_is_named_in_it_once_also_over_a_restart(tmp_path: Path) -> None:
    """The values stay; the first revision named the rank as missing, the next one as doubtful. A resend of it makes no third."""
    now = [0.0]
    config = load_config(
        {"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}, "collector": {"row_deadline_s": 2, "amend_horizon_s": 5}}
    )
    ranks = Ranks(2)
    late = ranks.send(1, 0, mean(3.0))

    def start() -> Service:
        service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path, clock=lambda: now[0])
        service.start()
        return service

    service = start()
    service.accept_metrics(ranks.send(0, 0, mean(1.0)))
    now[0] = 3.0
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 1, 10, "the row without rank 1")
    now[0] = 20.0
    wait_for(lambda: len(service._spool.closed_rows()) == 1, 10, "the row to be closed")
    service.stop(5.0)
    service = start()
    for _ in range(2):
        service.accept_metrics(late)
        wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 2, 10, "the revision that names rank 1")
        now[0] += 2.0
        wait_for(lambda service=service: not service._spool.payloads(), 10, "the late payload to be given back")  # type: ignore[misc]
        service.stop(5.0)
        service = start()
    service.stop(5.0)
    first, second = rows_of(tmp_path / "rows.jsonl")
    assert (first["revision"], first["ranks_missing"], first.get("ranks_doubtful")) == (1, ["1"], None)
    assert (second["revision"], second.get("ranks_missing"), second["ranks_doubtful"]) == (2, None, ["1"])
    assert (second["metrics"]["loss"], second["ranks_reporting"]) == (first["metrics"]["loss"], 1) == (1.0, 1)


@pytest.mark.parametrize("damage", ["rubbish", "half", "page"])
def test_a_damaged_file_is_set_aside_with_a_message_and_work_goes_on(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path)
    spool.store([os.urandom(20_000) for _ in range(20)])
    spool.close()
    whole = path.read_bytes()
    bad = {"rubbish": b"no database at all" * 500, "half": whole[: len(whole) // 2], "page": whole[:4096] + os.urandom(8192) + whole[12288:]}[damage]
    path.write_bytes(bad)
    with caplog.at_level(logging.ERROR):
        again = Spool(path)
    assert f"{path} is damaged" in caplog.text
    assert [aside.read_bytes() for aside in tmp_path.glob("spool.sqlite.damaged-*") if not aside.name.endswith(("-wal", "-shm"))] == [bad]
    again.forget(again.store([b"works"]))
    again.close()


def test_a_directory_that_cannot_hold_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=str(tmp_path / "file")):
        Spool(tmp_path / "file" / "spool.sqlite")


DISK_FULL = """
import resource, signal, sys
from pathlib import Path
from otel_forge_exporters.service import Service, Unavailable
from otel_forge.config import load_config
from tests.exporters.packets import Ranks, mean

folder = Path(sys.argv[1])
config = load_config({"metric_logging": {"jsonl": {"path": str(folder / "rows.jsonl")}}})
service = Service(config, state_dir=folder / "state", work_dir=folder)
service.start()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
ranks = Ranks(2)
refused = []
for step in range(40):
    if step == 10:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))   # from here no file grows
    if step == 30:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for rank in range(2):
        body = ranks.send(rank, step, mean(float(rank)))
        try:
            service.accept_metrics(body)
        except Unavailable:
            refused.append(body)
for body in refused:
    service.accept_metrics(body)
assert service.drain(30.0)
service.stop(5.0, 0)
print(len(refused))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="stands in for a full disk")
def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path) -> None:
    """What cannot be stored is refused for now and comes again; rows that could not be written are written later, each once."""
    done = subprocess.run([sys.executable, "-c", DISK_FULL, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == 40
    rows = rows_of(tmp_path / "rows.jsonl")
    assert sorted(row["step"] for row in rows) == list(range(40))
    assert {row["metrics"]["loss"] for row in rows} == {0.5}
