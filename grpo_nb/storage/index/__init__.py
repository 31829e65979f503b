"""An index of a long log of JSON lines: its columns by key and the place of each row, kept apart from the run folder.

The JSON lines are the log; an index can be made anew from them at any time, and is where it is absent, of other
lines, or damaged. It grows by chunks of some MiB: only what follows the last full chunk is parsed when a log is opened.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from grpo_nb.storage import schema
from grpo_nb.storage.files import clear_errors
from grpo_nb.storage.index.chunks import Chunk, Head, Parse, Row, chunk_of
from grpo_nb.storage.index.packing import Numbers, Texts
from grpo_nb.storage.index.rows import Log, LogRows, Ways
from grpo_nb.storage.index.store import Damaged, InMemory, Kept, Store, store_of
from grpo_nb.storage.lines import Endless, most_passed, settled
from grpo_nb.storage.safe_open import RunError, opened

__all__ = ["Index", "LogRows", "Numbers", "Row", "Texts"]

CHUNK_BYTES = 4 << 20
_BLOCK = 1 << 20


class Index:
    """The index of one log. Several processes may read and extend it; each chunk is written by one of them."""

    def __init__(self, path: Path, parse: Parse, keys: Collection[str] | None = None) -> None:
        """
        Args:
            path: of the log.
            parse: one line of it.
            keys: those that get columns; None: all, of a log of flat rows.
        """
        self._path, self._parse, self._keys = path, parse, keys
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._seen: tuple[int, ...] = ()
        self._settled = False
        """Whether the file cannot have changed in that state."""
        self._heads: list[Head] = []
        self._tail: Head | None = None
        self._rows: LogRows | None = None

    def rows(self) -> LogRows:
        """The rows of the log as it is now; made anew only if it has changed.

        Raises:
            RunError: it cannot be read, or is no regular file.
            Endless: it has too many bytes in lines too long to be rows.
        """
        with self._lock, clear_errors("read", self._path):
            try:
                fd = opened(self._path)
            except FileNotFoundError:
                return LogRows(self._log(-1, None))
            try:
                seen = _state(fd)
                if self._rows is None or seen != self._seen or not self._still(fd, seen):
                    log = self._log(fd, self._extend(fd, seen))
                    self._seen, self._rows = seen, LogRows(log)
                    fd = -1
                return self._rows
            finally:
                if fd >= 0:
                    os.close(fd)

    def lacks(self) -> int:
        """Bytes of the log that are in no chunk that is kept, by its size alone."""
        with clear_errors("read", self._path):
            try:
                fd = opened(self._path)
            except FileNotFoundError:
                return 0
            try:
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        with self._lock:
            if size <= CHUNK_BYTES:
                return size
            try:
                self._store = self._store or store_of(self._path)
                heads = self._store.heads()
            except Damaged:
                return size
            return size - (heads[-1].stop if heads and heads[-1].stop <= size else 0)

    def _still(self, fd: int, seen: tuple[int, ...]) -> bool:
        """Whether a file whose times are unchanged still has the bytes that were read."""
        if self._settled:
            return True
        self._settled = settled(*seen[3:])
        heads = [*self._heads, *([self._tail] if self._tail else [])]
        return len(_valid(fd, heads, 0, seen[2])) == len(heads)

    def _log(self, fd: int, tail: Chunk | None) -> Log:
        heads = self._heads if fd >= 0 else []
        ways = Ways(self._parse, functools.partial(self._remade, fd), functools.partial(self._restored, fd))
        return Log(self._path, fd, heads, tail, self._store or InMemory(), ways)

    def _extend(self, fd: int, seen: tuple[int, ...]) -> Chunk | None:
        """Bring the chunks up to date; the last one, which is not full."""
        self._settled = settled(*seen[3:])
        for again in (True, False):
            try:
                chunk = self._extended(fd, seen)
                self._tail = chunk.head if chunk else None
                return chunk
            except Damaged:
                self._heads, self._seen = [], ()
                self._drop(for_good=not again)
        raise AssertionError("memory is never damaged")

    def _extended(self, fd: int, seen: tuple[int, ...]) -> Chunk | None:
        size = seen[2]
        if size <= CHUNK_BYTES and ((chunk := self._chunk(fd, 0, size)) is None or chunk.head.stop == size):
            self._heads = []  # none is full
            return chunk
        self._store = store = self._store or store_of(self._path)
        self._heads = heads = self._still_of(fd, seen, store)
        start = heads[-1].stop if heads else 0
        while (chunk := self._chunk(fd, start, size)) is not None and chunk.head.stop < size:
            if store.add(chunk):
                heads.append(chunk.head)
            else:  # another process was first, or took chunks away
                heads[:] = _valid(fd, store.heads(), 0, size)
            start = heads[-1].stop if heads else 0
        if self._settled and store.state() != _stamp(seen, heads):
            store.keep_state(_stamp(seen, heads))
        return chunk

    def _still_of(self, fd: int, seen: tuple[int, ...], store: Store) -> list[Head]:
        """The chunks that are kept and are of this file; all are looked at, for whoever appends may have edited."""
        heads, size = store.heads(), seen[2]
        if store.state() == _stamp(seen, heads):
            return heads
        valid = _valid(fd, heads, 0, size)
        if len(valid) < len(heads):
            store.cut(len(valid))
        return valid

    def _chunk(self, fd: int, start: int, size: int) -> Chunk | None:
        """The chunk that begins at `start`; the last one ends with the file, the others with a line."""
        if start >= size:
            return None
        data = os.pread(fd, min(CHUNK_BYTES, size - start), start)
        if start + len(data) < size:
            data = data[: data.rfind(b"\n") + 1]
            if not data:
                passed = sum(head.stop - head.start for head in self._heads if _too_long(head.stop - head.start))
                return self._of_a_long_line(fd, start, size, most_passed() - passed)
        return chunk_of(data, start, self._parse, self._keys)

    def _of_a_long_line(self, fd: int, start: int, size: int, most: int | None = None) -> Chunk | None:
        """A chunk of one line that is longer than others; of one too long to be a row nothing is kept.

        Raises:
            Endless: it has more than `most` bytes.
        """
        limit = size if most is None else min(size, start + most)
        stop = next(_newlines(fd, start, limit), limit)
        if stop == limit < size:
            raise Endless
        if stop - start <= schema.LONGEST_LINE + 1:
            return chunk_of(os.pread(fd, stop - start, start), start, self._parse, self._keys)
        _, why = self._parse(b"x" * (schema.LONGEST_LINE + 1), stop)
        torn = os.pread(fd, 1, stop - 1) != b"\n"
        empty = chunk_of(b"", start, self._parse, self._keys)
        head = Head(start, stop, 0, int(not torn), "" if torn else why or "", _digest(fd, start, stop), (), ())
        return Chunk(head, empty.begins, empty.lengths, {}, {})

    def _remade(self, fd: int, head: Head) -> Chunk:
        chunk = self._chunk_again(fd, head)
        if chunk is None or chunk.head.digest != head.digest:
            raise RunError(
                f"{self._path} was changed while it was read. What was read must stay as it is; read it again"
            )
        return chunk

    def _chunk_again(self, fd: int, head: Head) -> Chunk | None:
        if _too_long(head.stop - head.start):
            return self._of_a_long_line(fd, head.start, head.stop)
        return chunk_of(os.pread(fd, head.stop - head.start, head.start), head.start, self._parse, self._keys)

    def _restored(self, fd: int, heads: Sequence[Head], damaged: bool) -> Store:
        """Store with these chunks, in the place of one that is damaged or has other lines by now."""
        with self._lock:
            store: Store = InMemory()
            if damaged and heads == self._heads:
                self._drop()
                self._store = store = store_of(self._path)
                self._seen, self._rows = (), None
            for head in heads:
                store.add(self._remade(fd, head))
            return store

    def _drop(self, for_good: bool = False) -> None:
        """Remove the stored chunks; `for_good`: keep chunks in memory from here on."""
        if isinstance(self._store, Kept):
            self._store.remove()
        self._store = InMemory() if for_good else None


def _too_long(size: int) -> bool:
    """Whether a chunk of so many bytes is one line that is too long to be a row."""
    return size > max(CHUNK_BYTES, schema.LONGEST_LINE + 1)


def _state(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _stamp(seen: tuple[int, ...], heads: Sequence[Head]) -> str:
    """Store a state of the log and the chunks that were checked against it."""
    return f"{seen} {len(heads)} {hashlib.sha256(b''.join(head.digest for head in heads)).hexdigest()}"


def _valid(fd: int, heads: Sequence[Head], start: int, size: int) -> list[Head]:
    """The first of the chunks, as far as they follow each other from `start` on and match the file."""
    valid: list[Head] = []
    for head in heads:
        if head.start != start or head.stop > size or _digest(fd, start, head.stop) != head.digest:
            break
        valid.append(head)
        start = head.stop
    return valid


def _digest(fd: int, start: int, stop: int) -> bytes:
    digest = hashlib.sha256()
    for place in range(start, stop, _BLOCK):
        digest.update(os.pread(fd, min(_BLOCK, stop - place), place))
    return digest.digest()


def _newlines(fd: int, start: int, size: int) -> Iterator[int]:
    """The byte after each block's first newline."""
    for place in range(start, size, _BLOCK):
        found = os.pread(fd, min(_BLOCK, size - place), place).find(b"\n")
        if found >= 0:
            yield place + found + 1
