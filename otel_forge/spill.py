"""Packets on disk: append-only files per process, claimed whole by who replays them. It must not know why a packet is spilled.

A file holds records `lengths, header JSON, payload`; a torn last record (a crash while writing) is left out. A file is named `*.spill` as written
and `*.tried` from before its first window send: who finds `.tried` sends direct only. Who writes or replays a file holds its lock (flock), so a
file that can be locked has no living owner, whatever process namespace that was in.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger("otel_forge")

_LENGTHS = struct.Struct("<II")


class SpillStore:
    """The spill directory of one run: `spool_dir/<run id>/`. Writes may come from any thread."""

    def __init__(self, spool_dir: Path | None, run_id: str) -> None:
        self._dir = spool_dir / run_id if spool_dir else None
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._claimed: list[tuple[Path, int]] = []

    def write(self, packet: dict[str, Any]) -> None:
        """Append one packet. Raises OSError when the disk does not take it."""
        payload = packet["payload"]
        header = json.dumps({key: value for key, value in packet.items() if key != "payload"}).encode()
        with self._lock:
            file = self._file or self._create()
            start = file.tell()
            try:
                file.write(_LENGTHS.pack(len(header), len(payload)) + header + payload)
                file.flush()
            except OSError:
                file.truncate(start)
                raise

    def _create(self) -> BinaryIO:
        if self._dir is None:
            raise OSError("no spool directory")
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._dir / f"{uuid.uuid4().hex}.spill", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file = open(descriptor, "r+b", buffering=0)
        return self._file

    def close(self) -> None:
        """Make what was written durable and free to be claimed; remove what was replayed."""
        with self._lock:
            if self._file is not None:
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    logger.warning("otel-forge: packets kept in %s may be incomplete: %s", self._dir, error)
                self._file.close()
                self._file = None
        self.release()

    def replay(self) -> Iterator[dict[str, Any]]:
        """Claim every file of the run that no living process holds, and give its packets; the files stay until `release`.

        The claim renames a file to `.tried` before the first packet is given, so that a crash in between never sends by the window twice.
        """
        if self._dir is None or not self._dir.is_dir():
            return
        for path in sorted(self._dir.iterdir()):
            claim = _claim(path)
            if claim is None:
                continue
            self._claimed.append(claim)
            for packet in read_packets(claim[0]):
                yield _as_direct(packet) if path.suffix == ".tried" else packet

    def release(self) -> None:
        """Remove the claimed files: everything in them was delivered, or spilled anew."""
        with self._lock:
            claimed, self._claimed = self._claimed, []
        for path, descriptor in claimed:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _claim(path: Path) -> tuple[Path, int] | None:
    """The file under its `.tried` name and the descriptor that holds its lock; None for what is no spill file or belongs to somebody alive."""
    if path.suffix not in (".spill", ".tried"):
        return None
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claimed = path.with_suffix(".tried")
        path.rename(claimed)
    except OSError:  # held by another process, or replayed and gone
        os.close(descriptor)
        return None
    return claimed, descriptor


def _as_direct(packet: dict[str, Any]) -> dict[str, Any]:
    offset = packet["route_offset"]
    if packet["window"] and offset is not None:
        payload = packet["payload"]
        return {**packet, "payload": payload[:offset] + b"direct" + payload[offset + 6 :], "window": False}
    return packet


def read_packets(path: Path) -> Iterator[dict[str, Any]]:
    """The packets of one file; a torn or foreign rest is said and left out."""
    data = path.read_bytes()
    position = 0
    while position < len(data):
        try:
            header_length, payload_length = _LENGTHS.unpack_from(data, position)
            end = position + _LENGTHS.size + header_length + payload_length
            if end > len(data):
                raise ValueError("torn")
            header = json.loads(data[position + _LENGTHS.size : position + _LENGTHS.size + header_length])
        except (struct.error, ValueError):
            logger.warning("otel-forge: %s is damaged from byte %d on; the rest is set aside as %s.bad", path, position, path.stem)
            path.with_suffix(".bad").write_bytes(data[position:])
            return
        yield {**header, "payload": data[end - payload_length : end]}
        position = end
