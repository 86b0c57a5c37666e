"""Lines are given once and whole, however the file grows, is renamed, torn or emptied."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.jsonl import JsonlBackend

from otel_forge.cli.following import Follower
from otel_forge.config import JsonlConfig
from tests.cli.rows import row, write


def _steps(follower: Follower) -> list[int]:
    return [json.loads(line)["step"] for line in follower.lines()]


@pytest.fixture
def follow() -> Iterator[Callable[[Path], Follower]]:
    """Followers whose files are closed at the end."""
    made: list[Follower] = []

    def make(path: Path) -> Follower:
        made.append(Follower(path))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


@pytest.mark.parametrize("seed", range(20))
def test_every_row_once_and_in_order_while_the_real_backend_rotates(tmp_path: Path, seed: int, follow: Callable[[Path], Follower]) -> None:
    """Rows of about 250 bytes in files of at most 1,000: the file is renamed every few rows, several times between two looks."""
    source = random.Random(seed)
    path = tmp_path / "rows.jsonl"
    backend = JsonlBackend(JsonlConfig(path=path, max_bytes=1000, keep=100), RunInfo("r"), tmp_path)
    backend.open()
    backend.write([row(step) for step in range(source.randrange(20))])
    written = sum(len(file.read_bytes().splitlines()) for file in tmp_path.glob("rows.jsonl*"))
    follower, found = follow(path), []
    for _ in range(30):
        more = source.randrange(12)
        backend.write([row(step) for step in range(written, written + more)])
        written += more
        if source.random() < 0.5:
            found += _steps(follower)
    found += _steps(follower)
    backend.close(0, 1.0)
    assert found == list(range(written))
    assert len(list(tmp_path.glob("rows.jsonl.*"))) > 3


def test_a_torn_last_line_is_waited_for_and_given_whole(tmp_path: Path, follow: Callable[[Path], Follower]) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0)])
    follower = follow(path)
    assert _steps(follower) == [0]
    line = row(1).to_json().encode()
    with path.open("ab") as file:
        file.write(line[:40])
    assert _steps(follower) == []
    with path.open("ab") as file:
        file.write(line[40:] + b"\n")
    assert _steps(follower) == [1]


def test_a_torn_line_that_the_next_writer_cuts_off_is_never_given(tmp_path: Path, follow: Callable[[Path], Follower]) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0)])
    with path.open("ab") as file:
        file.write(b'{"run_id": "r", "torn')
    follower = follow(path)
    assert _steps(follower) == [0]
    write(path, [row(1)])
    assert _steps(follower) == [1]


def test_a_file_that_is_not_there_yet_is_waited_for_and_an_emptied_one_read_anew(tmp_path: Path, follow: Callable[[Path], Follower]) -> None:
    path = tmp_path / "rows.jsonl"
    follower = follow(path)
    assert _steps(follower) == []
    write(path, [row(0), row(1)])
    assert _steps(follower) == [0, 1]
    path.write_bytes(b"")
    assert _steps(follower) == []
    write(path, [row(2)])
    assert _steps(follower) == [2]


def test_a_line_longer_than_one_read_is_given_whole(tmp_path: Path, follow: Callable[[Path], Follower]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"step": 1, "text": "x" * (3 << 20)}) + "\n" + json.dumps({"step": 2}) + "\n")
    assert _steps(follow(path)) == [1, 2]


def test_files_that_are_gone_before_they_were_read_cost_only_their_own_lines(tmp_path: Path, follow: Callable[[Path], Follower]) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0)])
    follower = follow(path)
    assert _steps(follower) == [0]
    write(path, [row(step) for step in range(1, 40)], max_bytes=1000, keep=1)
    found = _steps(follower)
    assert found == sorted(set(found))
    assert found[-1] == 39
    assert 1 in found, "the file that was open is read to its end though it has no name any more"
    path.rename(tmp_path / "moved.jsonl")
    write(path, [row(40)])
    assert _steps(follower) == [40]


def test_a_writer_and_a_follower_at_once_agree_on_every_row(tmp_path: Path, follow: Callable[[Path], Follower]) -> None:
    """The writer is a thread of its own that renames its file every few rows, while this one reads without a pause."""
    path = tmp_path / "rows.jsonl"
    writer = threading.Thread(target=lambda: [write(path, [row(step)], max_bytes=1000, keep=1000) for step in range(300)])
    follower, found = follow(path), []
    writer.start()
    while writer.is_alive():
        found += _steps(follower)
    writer.join()
    found += _steps(follower)
    assert found == list(range(300))
