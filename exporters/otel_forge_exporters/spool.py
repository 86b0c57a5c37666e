"""What survives a crash: payloads until their rows are closed, revisions until every backend has them. It must not know what they mean.

One SQLite file in WAL mode. Payloads are stored in groups, each group with one fsync, before their senders get an answer. `path` None keeps the same
tables in memory, for the in-process shape and for tests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from otel_forge.errors import StateError

logger = logging.getLogger("otel_forge.exporter")

VERSION = 2
MAX_BYTES = 8 << 30
"""A spool of this size takes nothing more: senders are told to come again."""
MAX_PARAMETERS = 500
"""SQLite takes 999 in a statement where it is old."""

_SCHEMA = """
CREATE TABLE inbox (id INTEGER PRIMARY KEY, received REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE revisions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, mode TEXT NOT NULL, row_key TEXT NOT NULL, revision INTEGER NOT NULL,
    row_id TEXT, chosen TEXT, row TEXT NOT NULL, UNIQUE (run_id, row_key, revision));
CREATE INDEX revisions_of_mode ON revisions (run_id, mode, seq);
CREATE TABLE cursors (run_id TEXT NOT NULL, backend TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (run_id, backend));
CREATE INDEX revisions_of_row ON revisions (row_id);
CREATE TABLE closed (row_id TEXT PRIMARY KEY, tombstone TEXT NOT NULL DEFAULT '');
CREATE TABLE controls (run_id TEXT NOT NULL, kind TEXT NOT NULL, member TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (run_id, kind, member));
CREATE TABLE attempts (run_id TEXT NOT NULL, token INTEGER NOT NULL, ordinal INTEGER NOT NULL, PRIMARY KEY (run_id, token));
CREATE TABLE finished (run_id TEXT PRIMARY KEY, exit_code INTEGER);
"""

_MIGRATIONS = {
    1: """
ALTER TABLE closed ADD COLUMN tombstone TEXT NOT NULL DEFAULT '';
CREATE INDEX revisions_of_row ON revisions (row_id);
""",
}
"""What makes the next version of a version; each runs in one transaction, so that a crash leaves the one or the other."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A revision on its way to the backends."""

    seq: int
    run_id: str
    mode: str
    row_key: str
    revision: int
    row_id: str | None
    chosen: str | None
    row: str


class Spool:
    """The tables. Every method may be called from any thread; each is one short transaction."""

    def __init__(self, path: Path | None) -> None:
        """Open or create it; a file of an older version is migrated. A file that is damaged is set aside with a message.

        Raises StateError when there can be none at all, or the file is of a newer version.
        """
        self._lock = threading.Lock()
        self._path = path
        self._bytes = 0
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = self._open()
        except (sqlite3.DatabaseError, OSError) as error:
            if path is None or not path.exists() or isinstance(error, (OSError, sqlite3.OperationalError)):
                raise StateError(f"the spool {path} cannot be opened: {error}") from error
            aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
            logger.error("the spool %s is damaged (%s): set aside as %s; what was in it and not yet written is lost", path, error, aside.name)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path or ":memory:", check_same_thread=False, isolation_level=None)
        try:
            if self._path is not None:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                db.execute("PRAGMA locking_mode=EXCLUSIVE")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={VERSION}; COMMIT;")
            self._check_version(version)
            problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            for older in range(version or VERSION, VERSION):
                db.executescript(f"BEGIN; {_MIGRATIONS[older]} PRAGMA user_version={older + 1}; COMMIT;")
                logger.info("the spool %s was brought from version %d to %d", self._path, older, older + 1)
            self._bytes = db.execute("SELECT coalesce(sum(length(body)), 0) FROM inbox").fetchone()[0]
        except BaseException:
            db.close()
            raise
        return db

    def _check_version(self, version: int) -> None:
        if version > VERSION:
            raise StateError(
                f"the spool {self._path} was written by a newer version of otel-forge ({version}, this one knows up to {VERSION}): "
                "use that one, or move the file away"
            )
        if version < 0:
            raise StateError(f"the spool {self._path} is of version {version}, which no otel-forge has written: move the file away")

    @property
    def is_durable(self) -> bool:
        """Whether another process can go on with it."""
        return self._path is not None

    @property
    def is_full(self) -> bool:
        """Whether it holds as many bytes of payloads as it may."""
        return self._bytes >= MAX_BYTES

    # --- payloads ------------------------------------------------------------------------------------------------

    def store(self, bodies: Sequence[bytes]) -> list[int]:
        """Store payloads in one transaction; they are on disk when this returns. Raises sqlite3.Error when the disk does not take them."""
        now = time.time()
        with self._lock, self._transaction():
            ids = [self._insert_body(now, body) for body in bodies]
        self._bytes += sum(map(len, bodies))
        return ids

    def _insert_body(self, now: float, body: bytes) -> int:
        return int(self._db.execute("INSERT INTO inbox (received, body) VALUES (?, ?)", (now, body)).lastrowid or 0)

    def payloads(self) -> list[tuple[int, bytes]]:
        """All stored payloads, oldest first."""
        with self._lock:
            return self._db.execute("SELECT id, body FROM inbox ORDER BY id").fetchall()

    def forget(self, ids: Sequence[int], closed: Sequence[tuple[str, str]] = ()) -> None:
        """Drop payloads that no open row needs, and remember rows as closed: (row id, tombstone) each."""
        if not ids and not closed:
            return
        with self._lock, self._transaction():
            for payload_id in ids:
                freed = self._db.execute("DELETE FROM inbox WHERE id = ? RETURNING length(body)", (payload_id,)).fetchone()
                self._bytes -= freed[0] if freed else 0
            self._db.executemany("INSERT OR REPLACE INTO closed VALUES (?, ?)", closed)

    def closed_rows(self) -> list[tuple[str, str]]:
        """Id and tombstone of the rows that were closed."""
        with self._lock:
            return self._db.execute("SELECT row_id, tombstone FROM closed").fetchall()

    # --- revisions -----------------------------------------------------------------------------------------------

    def add_revisions(self, rows: Sequence[tuple[str, str, str, int, str | None, str | None, str]]) -> int:
        """Store (run id, mode, row key, revision, row id, chosen, row) each, unless that revision is there already; how many were new."""
        with self._lock, self._transaction():
            before = self._db.total_changes
            self._db.executemany(
                "INSERT OR IGNORE INTO revisions (run_id, mode, row_key, revision, row_id, chosen, row) VALUES (?,?,?,?,?,?,?)", rows
            )
            return self._db.total_changes - before

    def rows_after(self, run_id: str, mode: str, seq: int, limit: int) -> list[StoredRow]:
        """Revisions of one mode in the order they were made."""
        query = (
            "SELECT seq, run_id, mode, row_key, revision, row_id, chosen, row FROM revisions WHERE run_id=? AND mode=? AND seq>? ORDER BY seq LIMIT ?"
        )
        with self._lock:
            return [StoredRow(*fields) for fields in self._db.execute(query, (run_id, mode, seq, limit))]

    def revisions_of(self, run_id: str, row_keys: Sequence[str], before: int | None) -> list[StoredRow]:
        """All revisions of some rows, in the order they were made; `before` a sequence number, where one is given."""
        found = []
        with self._lock:
            for start in range(0, len(row_keys), MAX_PARAMETERS):
                keys = row_keys[start : start + MAX_PARAMETERS]
                query = f"""SELECT seq, run_id, mode, row_key, revision, row_id, chosen, row FROM revisions
                            WHERE run_id=? AND row_key IN ({",".join("?" * len(keys))}) AND seq<?"""
                found += [StoredRow(*fields) for fields in self._db.execute(query, (run_id, *keys, before if before is not None else 1 << 62))]
        return sorted(found, key=lambda stored: stored.seq)

    def last_revisions(self) -> list[StoredRow]:
        """The newest revision of each global row that is not closed."""
        query = """SELECT seq, run_id, mode, row_key, max(revision), row_id, chosen, row FROM revisions
                   WHERE row_id IS NOT NULL AND row_id NOT IN (SELECT row_id FROM closed) GROUP BY run_id, row_key"""
        with self._lock:
            return [StoredRow(*fields) for fields in self._db.execute(query)]

    def newest_row(self, row_id: str) -> str | None:
        """The row of the newest revision of a global row, closed or not; None when its run has ended."""
        with self._lock:
            found = self._db.execute("SELECT row FROM revisions WHERE row_id=? ORDER BY revision DESC LIMIT 1", (row_id,)).fetchone()
        return found[0] if found else None

    def pending(self, run_id: str, mode: str, seq: int) -> int:
        """How many revisions of a mode come after a sequence number."""
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM revisions WHERE run_id=? AND mode=? AND seq>?", (run_id, mode, seq)).fetchone()[0])

    def seq_before(self, run_id: str, mode: str, seq: int, count: int) -> int:
        """The sequence number that `count` revisions of a mode, up to `seq`, come after."""
        query = "SELECT min(seq) - 1 FROM (SELECT seq FROM revisions WHERE run_id=? AND mode=? AND seq<=? ORDER BY seq DESC LIMIT ?)"
        with self._lock:
            found = self._db.execute(query, (run_id, mode, seq, count)).fetchone()[0]
        return seq if found is None else int(found)

    def cursor(self, run_id: str, backend: str) -> int:
        """The sequence number of the last revision that a backend is known to have."""
        with self._lock:
            found = self._db.execute("SELECT seq FROM cursors WHERE run_id=? AND backend=?", (run_id, backend)).fetchone()
        return int(found[0]) if found else 0

    def move_cursor(self, run_id: str, backend: str, seq: int) -> None:
        """Remember that a backend has everything up to a sequence number."""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?,?,?)", (run_id, backend, seq))

    # --- runs ----------------------------------------------------------------------------------------------------

    def put_control(self, run_id: str, kind: str, member: str, body: str) -> None:
        """Keep the newest control packet of a kind and member."""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR REPLACE INTO controls VALUES (?,?,?,?)", (run_id, kind, member, body))

    def controls(self) -> list[tuple[str, str, str, str]]:
        """(run id, kind, member, body) of every control packet kept, for runs that are not finished."""
        with self._lock:
            return self._db.execute("SELECT * FROM controls WHERE run_id NOT IN (SELECT run_id FROM finished)").fetchall()

    def attempt_ordinal(self, run_id: str, token: int) -> int:
        """0 for the first attempt token of a run that was seen, 1 for the next, …"""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR IGNORE INTO attempts SELECT ?, ?, (SELECT count(*) FROM attempts WHERE run_id = ?)", (run_id, token, run_id))
            return int(self._db.execute("SELECT ordinal FROM attempts WHERE run_id=? AND token=?", (run_id, token)).fetchone()[0])

    def run_ids(self) -> list[str]:
        """Runs with rows that are not finished."""
        with self._lock:
            query = "SELECT DISTINCT run_id FROM revisions WHERE run_id NOT IN (SELECT run_id FROM finished)"
            return [run_id for (run_id,) in self._db.execute(query)]

    def finish(self, run_id: str, exit_code: int | None) -> None:
        """Remember that a run has ended and all its backends are closed; its rows are not needed any more."""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR REPLACE INTO finished VALUES (?,?)", (run_id, exit_code))
            self._db.execute("DELETE FROM revisions WHERE run_id=?", (run_id,))

    def unfinish(self, run_id: str) -> None:
        """A run that had ended goes on."""
        with self._lock, self._transaction():
            self._db.execute("DELETE FROM finished WHERE run_id=?", (run_id,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def pack_row_id(fields: Sequence[str | int]) -> str:
    """A row id as text."""
    return json.dumps(list(fields), separators=(",", ":"))
