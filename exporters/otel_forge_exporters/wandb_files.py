"""Reading wandb's own transaction logs (`run-<id>.wandb`) back: which rows are there. It opens no run."""

from __future__ import annotations

import contextlib
import glob
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def run_dirs(folder: Path, run_id: str) -> list[Path]:
    """The directories of a run below `folder/wandb`, oldest first."""
    return sorted({path.parent for path in (folder / "wandb").glob(f"*/run-{glob.escape(run_id)}.wandb")})


_FILE_HEADER = struct.Struct("<4sHB")
_BLOCK_BYTES = 32768
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of one transaction log; a torn end (its writer was killed) ends them.

    The format is LevelDB's log with a header of its own: blocks of 32 KiB, chunks of `crc32, length, kind`, padding of under 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    for data in _chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        try:
            record.ParseFromString(data)
        except Exception:  # torn in the middle: nothing behind it can be trusted
            return
        yield record


def is_finished(path: Path) -> bool:
    """Whether the log ends with the record of the run's exit; only its last blocks are read."""
    from wandb.proto import wandb_internal_pb2

    try:
        with path.open("rb") as log:
            start = max(0, log.seek(0, 2) // _BLOCK_BYTES - 1) * _BLOCK_BYTES
            log.seek(start)
            tail = log.read()
    except OSError:
        return False
    for data in _chunks(tail, at_start=start == 0):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):  # the first one may have begun before the tail
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "exit":
                return True
    return False


def _chunks(log: bytes, *, at_start: bool = True) -> Iterator[bytes]:
    if at_start and (len(log) < _FILE_HEADER.size or _FILE_HEADER.unpack_from(log)[0] != b":W&B"):
        return
    position = _FILE_HEADER.size if at_start else 0
    whole = b""
    while position + _CHUNK.size <= len(log):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _CHUNK.size:
            position += left
            continue
        crc, length, kind = _CHUNK.unpack_from(log, position)
        start, position = position + _CHUNK.size, position + _CHUNK.size + length
        piece = log[start:position]
        if not _FULL <= kind <= _LAST or len(piece) < length or zlib.crc32(bytes([kind]) + piece) != crc:
            return
        whole = piece if kind in (_FULL, _FIRST) else whole + piece
        if kind in (_FULL, _LAST):
            yield whole


def history(folder: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """The logged rows of a run as dicts, over all its directories."""
    for run_dir in run_dirs(folder, run_id):
        for path in sorted(run_dir.glob("*.wandb")):
            for record in records(path):
                if record.WhichOneof("record_type") == "history":
                    yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def logged_rows(folder: Path, run_id: str) -> Iterator[tuple[str, int]]:
    """(row key, revision) of every row of ours in a run."""
    for row in history(folder, run_id):
        if "forge/row" in row:
            yield row["forge/row"], int(row["forge/row_revision"])
