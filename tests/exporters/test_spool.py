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


@pytest.mark.parametrize("version", [VERSION - 1 or 7, VERSION + 1])
def test_another_version_is_refused_and_left_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path)
    spool.store([b"kept"])
    spool.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={version}")
    db.close()
    with pytest.raises(StateError, match=rf"{path} was written by another version \({version}, this one writes {VERSION}\): .* move it away"):
        Spool(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT body FROM inbox").fetchall() == [(b"kept",)]
    db.close()


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
