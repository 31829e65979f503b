"""Append-only JSON lines: what metrics, samples and events are kept in, and anyone may tail.

A row is one write of one whole line. A kill can tear at most the last line; readers pass over it and the
next append cuts it off, so that no row is ever glued to it.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_nb.durable import clear_errors, flock, from_json, same_file, sync, to_json, write_atomically

logger = logging.getLogger(__name__)

Row = dict[str, Any]
_BLOCK = 1 << 16


class Journal:
    """One .jsonl file.

    Rows are not fsynced one by one (that is 1 to 30 ms, depending on the disk, and a kill needs none):
    `sync` is called before each checkpoint, so that what a checkpoint stands on outlives a power cut.
    """

    def __init__(self, path: Path, *, remember: bool = False) -> None:
        """With `remember`, what was parsed stays in memory, and reading again costs only what is new."""
        self.path = path
        self.bad_lines = 0
        """Lines that the last `read` passed over because they are no JSON object (a torn last one not counted)."""
        self._remember = remember
        self._reading = threading.Lock()
        self._seen = _Seen()

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write the rows, one line each, with one system call: all of them or none.

        Raises:
            RunError: read-only folder or full disk; the file is as it was.
            TypeError: a value that JSON cannot hold.
        """
        data = b"".join(to_json(row) + b"\n" for row in rows)
        if data:
            with clear_errors("append to", self.path), self._locked() as fd:
                _write_whole(fd, data, _mend_tail(fd, self.path))

    def read(self) -> list[Row]:
        """All rows, oldest first. A torn last line is passed over; a bad line before it is logged and counted.

        The rows are shared with later reads: they are to be looked at, not changed.
        """
        with self._reading:
            data = self._unseen()
            *lines, last = data.split(b"\n")
            parsed = [_parse(line) for line in lines if line.strip()]
            rows = [row for row in parsed if row is not None]
            self._seen.add(rows, len(parsed) - len(rows), data[: len(data) - len(last)])
            self._report(self._seen.bad)
            torn = _parse(last)
            return self._seen.rows + ([] if torn is None else [torn])

    def backwards(self) -> Iterator[Row]:
        """Rows, newest first, read from the end as far as they are asked for; bad lines are passed over."""
        if not self.path.exists():
            return
        with clear_errors("read", self.path), open(self.path, "rb") as file:
            position, rest = file.seek(0, os.SEEK_END), b""
            while position > 0:
                size = min(_BLOCK, position)
                position = file.seek(position - size)
                first, *lines = (file.read(size) + rest).split(b"\n")
                rest = first
                yield from filter(None, map(_parse, reversed(lines)))
            yield from filter(None, [_parse(rest)])

    def move(self, condition: Callable[[Row], bool], into: "Journal") -> int:
        """Take the rows that meet `condition` out and append them to `into`; how many they were.

        At no moment is a row in neither file: they are first written and synced there, then this file is
        replaced. Killed in between, the next call does the rest and adds nothing twice. Kept lines keep
        their bytes; a torn last line is dropped.
        """
        if not self.path.exists():
            return 0
        with clear_errors("rewrite", self.path), self._locked() as fd:
            _mend_tail(fd, self.path)
            kept: list[bytes] = []
            moved: list[bytes] = []
            for line in self.path.read_bytes().splitlines(keepends=True):
                row = _parse(line)
                (moved if row is not None and condition(row) else kept).append(line)
            if moved:
                into._append_once(b"".join(moved))
                write_atomically(self.path, b"".join(kept))
        return len(moved)

    def sync(self) -> None:
        """fsync what was appended so far."""
        if self.path.exists():
            with clear_errors("sync", self.path):
                sync(self.path)

    def _append_once(self, data: bytes) -> None:
        with clear_errors("append to", self.path), self._locked() as fd:
            end = _mend_tail(fd, self.path)
            if os.pread(fd, len(data), max(end - len(data), 0)) != data:
                _write_whole(fd, data, end)
            os.fsync(fd)
        sync(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file opened for appending, alone; `move` may have put a new one in its place while we waited."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                flock(fd, wait=True)
                if same_file(fd, self.path):
                    yield fd
                    return
            finally:
                os.close(fd)

    def _unseen(self) -> bytes:
        """What lies past what was read before; all of it, if that is no longer what the file begins with."""
        with clear_errors("read", self.path):
            try:
                with open(self.path, "rb") as file:
                    file.seek(max(self._seen.end - len(self._seen.tail), 0))
                    if not self._remember or file.read(len(self._seen.tail)) != self._seen.tail:
                        self._seen = _Seen()
                        file.seek(0)
                    return file.read()
            except FileNotFoundError:
                self._seen = _Seen()
                return b""

    def _report(self, bad: int) -> None:
        if bad > self.bad_lines:  # a dashboard reads every second: say it once
            logger.warning("%s: %d line(s) are no JSON object and were passed over", self.path, bad)
        self.bad_lines = bad


@dataclass
class _Seen:
    """What `read` has parsed: rows, bad lines, and the last bytes, by which a replaced or cut file is noticed."""

    rows: list[Row] = field(default_factory=list)
    bad: int = 0
    end: int = 0
    tail: bytes = b""

    def add(self, rows: list[Row], bad: int, data: bytes) -> None:
        self.rows += rows
        self.bad += bad
        self.end += len(data)
        self.tail = (self.tail + data)[-512:]


def _parse(line: bytes) -> Row | None:
    try:
        row = from_json(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _mend_tail(fd: int, path: Path) -> int:
    """Make the file end with a whole line, and return where that is."""
    end = os.fstat(fd).st_size
    start = _last_line_start(fd, end)
    tail = os.pread(fd, end - start, start)
    if not tail:
        return end
    if _parse(tail) is not None:  # whole but for its newline, e.g. saved by an editor: readers have shown it
        return end + os.write(fd, b"\n")
    logger.warning("%s: cut off a torn last line of %d bytes, left by a killed writer", path, len(tail))
    os.ftruncate(fd, start)
    return start


def _last_line_start(fd: int, end: int) -> int:
    position = end
    while position > 0:
        size = min(_BLOCK, position)
        newline = os.pread(fd, size, position - size).rfind(b"\n")
        position -= size
        if newline >= 0:
            return position + newline + 1
    return 0


def _write_whole(fd: int, data: bytes, end: int) -> None:
    if os.write(fd, data) < len(data):
        os.ftruncate(fd, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
