"""Lines of a file that grows and is renamed when it is full, each once and whole, as `tail -F` would give them. It knows no rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from otel_forge.cli.run_files import rotated
from otel_forge.errors import InputError

BLOCK = 1 << 20
FileId = tuple[int, int]
"""Device and inode: a file is the same under another name."""


class Follower:
    """Reads on from where it was at every call. A last line without its line break is left for later: its writer may be in the middle of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[int] = []
        """Open files, the oldest first; the first is being read. They are opened before they are due, because their names change."""
        self._done: dict[FileId, int] = {}
        """Files that were read to their end and still have a name; held open so that no new file gets their inode."""
        self._offset = 0
        """In the first file, behind the last whole line; a writer that finds a torn line cuts it off, never more."""

    def lines(self) -> Iterator[bytes]:
        """Every whole line since the last call. A file that is not there (yet) has none. Raises InputError when it cannot be read."""
        try:
            yield from self._read_on()
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Let go of all files."""
        for file in (*self._waiting, *self._done.values()):
            os.close(file)
        self._waiting, self._done = [], {}

    def _read_on(self) -> Iterator[bytes]:
        while True:
            if not self._waiting and not self._open_unread():
                return
            yield from self._whole_lines()
            if len(self._waiting) == 1:
                if _has_name(self._waiting[0], self._path):
                    return
                if not self._open_unread():
                    return
                yield from self._whole_lines()  # what was written between the last read and the new name
            read = self._waiting.pop(0)
            self._done[_id(read)] = read
            self._offset = 0

    def _open_unread(self) -> bool:
        """Open what has the name or a full file's and was not read; whether there was any. The newest comes first: a file's number only grows."""
        known = {_id(file) for file in self._waiting}
        found: dict[FileId, int] = {}
        while True:
            order = []
            for path in reversed(rotated(self._path)):
                try:
                    file = os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    continue
                order.append(_id(file))
                if found.setdefault(_id(file), file) != file:
                    os.close(file)
            if len(set(order)) == len(found):  # otherwise it was renamed under our hands, or deleted: look again
                break
            for gone in set(found) - set(order):
                os.close(found.pop(gone))
        self._forget(set(found))
        for item in [item for item in found if item in known or item in self._done]:
            os.close(found.pop(item))
        self._waiting += [found[item] for item in dict.fromkeys(reversed(order)) if item in found]
        return bool(found)

    def _forget(self, there: set[FileId]) -> None:
        for gone in set(self._done) - there:
            os.close(self._done.pop(gone))

    def _whole_lines(self) -> Iterator[bytes]:
        file = self._waiting[0]
        if os.fstat(file).st_size < self._offset:
            self._offset = 0  # somebody emptied it: what is there now is new
        while True:
            block = os.pread(file, BLOCK, self._offset)
            while b"\n" not in block and len(block) >= BLOCK:  # a line that is longer than a block
                more = os.pread(file, BLOCK, self._offset + len(block))
                if not more:
                    return
                block += more
            end = block.rfind(b"\n") + 1
            if not end:
                return
            self._offset += end
            yield from block[:end].splitlines()


def _id(file: int) -> FileId:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _has_name(file: int, path: Path) -> bool:
    """Whether an open file is the one at a path, or nothing is."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return True
