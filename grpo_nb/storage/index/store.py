"""Storage of chunks: an SQLite file a log in this user's cache folder, or memory where no file can be written.

Not in the run folder: that may come from anybody, and nothing in it may give other figures than its JSON lines do.
A file is disposable. One that is damaged, or that somebody without this user's key wrote, is removed and made anew; one
that was not used for `KEPT_DAYS` is swept.
"""

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_nb import fingerprint
from grpo_nb.printable import clean_logger
from grpo_nb.storage import user_cache
from grpo_nb.storage.index.chunks import Chunk, Head, Kind
from grpo_nb.storage.safe_open import Irregular, RunError, refuse_for_writing

logger = clean_logger(__name__)

VERSION = 4
"""Version of the files' content; part of their folder's name."""
RULES = (
    "metrics/keys.py",
    "storage/appending.py",
    "storage/files.py",
    "storage/former_names.py",
    "storage/schema.py",
    "storage/index/chunks.py",
    "storage/index/packing.py",
)
"""Sources that decide how a line becomes a row and its columns; an index depends on these alone."""
KEPT_DAYS = 30
WAIT_SECONDS = 60.0
"""Seconds to wait for another process that writes a chunk."""
_TABLES = (
    "log (one INTEGER PRIMARY KEY, seal INTEGER NOT NULL, state TEXT NOT NULL)",
    "chunk (n INTEGER PRIMARY KEY, digest BLOB NOT NULL, seal INTEGER NOT NULL, head TEXT NOT NULL)",
    "part (kind TEXT NOT NULL, key TEXT NOT NULL, chunk INTEGER NOT NULL, seal INTEGER NOT NULL, data BLOB NOT NULL, "
    "PRIMARY KEY (kind, key, chunk))",
)


def folder() -> Path:
    """This user's folder of indexes, another one for other rules of reading."""
    return user_cache.folder() / f"index-{VERSION}-{rules(fingerprint.ROOT)}"


@functools.cache
def rules(package: Path) -> str:
    """Digest of the rules of reading in the folder of a package."""
    total = hashlib.sha256()
    for name in RULES:
        total.update(name.encode() + b"\0" + (package / name).read_bytes())
    return total.hexdigest()[:12]


def store_of(log: Path) -> "Kept | InMemory":
    """Store of a log's chunks: the file of its path, else memory."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(log))).hexdigest()[:40]
    try:
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = place / f"{name}.sqlite"
        if not path.exists():
            _sweep(place)
        return Kept(path)
    except (OSError, RuntimeError, RunError, sqlite3.Error, Damaged) as error:
        logger.info("the index of %s is kept in memory: %s", log, error)
        return InMemory()


def _sweep(place: Path) -> None:
    """Remove files that were not used for `KEPT_DAYS`, of earlier versions too."""
    for file in place.parent.glob("index-*/*.sqlite"):
        with contextlib.suppress(OSError):
            if time.time() - file.lstat().st_mtime > KEPT_DAYS * 86400:
                file.unlink()


class Damaged(Exception):
    """Raised when stored chunks cannot be used: they must be made anew from the JSON lines."""


class Outdated(Damaged):
    """Raised when stored chunks belong to a later state of the log than the one that is being read."""


class Kept:
    """Chunks in an SQLite file. A kill leaves complete chunks; several processes may read and extend it.

    Raises:
        Damaged: the file cannot be used, and could not be made anew.
        RunError, OSError: this user has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._key = path, user_cache.key()
        self._make()

    def heads(self) -> list[Head]:
        """Headers of all chunks, in order."""
        with self._opened() as file:
            found = list(file.execute("SELECT n, seal, head FROM chunk ORDER BY n"))
            heads = [self._head(*row) for row in found]
        places = [0, *(head.stop for head in heads)]
        if [row[0] for row in found] != list(range(len(found))) or any(
            h.start != p for h, p in zip(heads, places, strict=False)
        ):
            raise Damaged(f"{self._path} lacks a chunk")
        return heads

    def state(self) -> str:
        """State that `keep_state` stored last; empty at first."""
        with self._opened() as file:
            seal, state = file.execute("SELECT seal, state FROM log").fetchone() or (0, "")
            return state if isinstance(state, str) and seal == self._seal(state.encode(), "state") else ""

    def keep_state(self, state: str) -> None:
        """Store the state of the log when all chunks were checked against it."""
        with self._opened() as file, _alone(file):
            file.execute("INSERT OR REPLACE INTO log VALUES (1, ?, ?)", (self._seal(state.encode(), "state"), state))

    def add(self, chunk: Chunk) -> bool:
        """Append a chunk; False where the last one does not end where it begins, since another process was first."""
        with self._opened() as file, _alone(file):
            last = file.execute("SELECT n, seal, head FROM chunk ORDER BY n DESC LIMIT 1").fetchone()
            n, stop = (last[0] + 1, self._head(*last).stop) if last else (0, 0)
            if stop != chunk.head.start:
                return False
            head, digest = json.dumps(chunk.head.listed()), chunk.head.digest
            file.execute("INSERT INTO chunk VALUES (?, ?, ?, ?)", (n, digest, self._seal(head.encode(), n), head))
            packed = ((kind, _name(key), data) for kind, key, data in _packed(chunk))
            rows = ((kind, key, n, self._seal(data, kind, key, n, digest.hex()), data) for kind, key, data in packed)
            file.executemany("INSERT INTO part VALUES (?, ?, ?, ?, ?)", rows)
            return True

    def cut(self, count: int) -> None:
        """Keep the first `count` chunks."""
        with self._opened() as file, _alone(file):
            file.execute("DELETE FROM chunk WHERE n >= ?", (count,))
            file.execute("DELETE FROM part WHERE chunk >= ?", (count,))

    def parts(self, kind: Kind, key: str, first: int, last: int) -> Iterator[tuple[bytes, bytes | None]]:
        """Digests of chunks `first` to before `last`, each with its packed column of a key."""
        query = (
            "SELECT c.n, c.digest, p.seal, p.data FROM chunk c LEFT JOIN part p "
            "ON p.chunk = c.n AND p.kind = ? AND p.key = ? WHERE c.n >= ? AND c.n < ? ORDER BY c.n"
        )
        with self._opened() as file:
            for n, digest, seal, data in file.execute(query, (kind, _name(key), first, last)):
                of = (kind, _name(key), n, digest.hex() if isinstance(digest, bytes) else "")
                if data is not None and (not isinstance(data, bytes) or self._seal(data, *of) != seal):
                    raise Damaged(f"a part of {self._path}")
                yield digest, data

    def remove(self) -> None:
        """Remove the file; an entry that is no file of its own, e.g. a link, is removed as such."""
        for name in (
            self._path,
            *(self._path.with_name(self._path.name + end) for end in ("-journal", "-wal", "-shm")),
        ):
            with contextlib.suppress(OSError):
                name.unlink()

    def _head(self, n: int, seal: int, text: Any) -> Head:
        if not isinstance(text, str) or self._seal(text.encode(), n) != seal:
            raise Damaged(f"the head of chunk {n} of {self._path}")
        return Head.of(json.loads(text))

    def _seal(self, data: bytes, *of: str | int) -> int:
        return user_cache.seal(self._key, data, self._path.name, *of)

    def _make(self) -> None:
        """Open the file, or make it; anew where it is none."""
        for again in (True, False):
            try:
                with self._opened() as file:
                    file.execute("PRAGMA page_size = 16384")
                    file.executescript(";".join(f"CREATE TABLE IF NOT EXISTS {table}" for table in _TABLES))
                    made = {sql for (sql,) in file.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
                if made != {f"CREATE TABLE {table}" for table in _TABLES}:  # views and triggers could do anything
                    raise Damaged(f"{self._path} has other tables")
                os.utime(self._path)
                return
            except Damaged:
                if not again:
                    raise
                self.remove()

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            refuse_for_writing(self._path)
            file = sqlite3.connect(self._path, timeout=WAIT_SECONDS, isolation_level=None)
        except (Irregular, OSError, sqlite3.Error) as error:
            raise Damaged(str(error)) from error
        try:
            file.execute("PRAGMA synchronous = OFF")  # a kill loses nothing, and after a power cut it is made anew
            yield file
        except (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, OverflowError) as error:
            raise Damaged(f"{self._path}: {error}") from error
        finally:
            file.close()


class InMemory:
    """Chunks in memory, packed; otherwise as `Kept`."""

    def __init__(self) -> None:
        self._state = ""
        self._chunks: list[tuple[Head, dict[tuple[str, str], bytes]]] = []

    def heads(self) -> list[Head]:
        return [head for head, _ in self._chunks]

    def state(self) -> str:
        return self._state

    def keep_state(self, state: str) -> None:
        self._state = state

    def add(self, chunk: Chunk) -> bool:
        self._chunks.append((chunk.head, {(kind, key): data for kind, key, data in _packed(chunk)}))
        return True

    def cut(self, count: int) -> None:
        del self._chunks[count:]

    def parts(self, kind: Kind, key: str, first: int, last: int) -> Iterator[tuple[bytes, bytes | None]]:
        for head, parts in self._chunks[first:last]:
            yield head.digest, parts.get((kind, key))


Store = Kept | InMemory


def _packed(chunk: Chunk) -> Iterator[tuple[Kind, str, bytes]]:
    rows = chunk.head.rows
    yield "begins", "", chunk.begins.pack(rows)
    yield "lengths", "", chunk.lengths.pack(rows)
    for key, numbers in chunk.numbers.items():
        yield "numbers", key, numbers.pack(rows)
    for key, texts in chunk.texts.items():
        yield "texts", key, texts.pack(rows)


def _name(key: str) -> str:
    """A key as ASCII: a log may hold what has no UTF-8."""
    return json.dumps(key)


@contextmanager
def _alone(file: sqlite3.Connection) -> Iterator[None]:
    """One transaction of one process at a time, stored completely or not at all."""
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            file.execute("ROLLBACK")
        raise
    file.execute("COMMIT")
