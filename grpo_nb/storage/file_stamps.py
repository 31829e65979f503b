"""Sources that a task was read from: files with their stamps, and data sets of the hub."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stamp:
    """Stamp by which a file is recognised without reading it again; the change time cannot be set back."""

    size: int
    mtime: int
    ctime: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """Stamp from the result of `stat`."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


@dataclass(frozen=True)
class FileRead:
    """One file that was read, with its stamp from before that."""

    path: Path
    stamp: Stamp

    def replaced(self) -> bool:
        """Whether the path now has another file, or none."""
        try:
            return Stamp.of(self.path.stat()) != self.stamp
        except OSError:
            return True


@dataclass(frozen=True)
class RowsRead:
    """Rows that were read from the hub; their digest is of the rows themselves."""

    name: str
    revision: str
    digest: str
    count: int


Read = FileRead | RowsRead

_RECORD: ContextVar[list[Read] | None] = ContextVar("record", default=None)


@contextmanager
def recorded() -> Iterator[list[Read]]:
    """Inside the block every file and data set that is read is added to the list, in order; also to that around it."""
    reads: list[Read] = []
    around = _RECORD.get()
    token = _RECORD.set(reads)
    try:
        yield reads
    finally:
        _RECORD.reset(token)
        if around is not None:
            around += reads


def note(file: Path) -> None:
    """Record that `file` is about to be read; a missing one is left to whoever opens it."""
    if (record := _RECORD.get()) is not None and file.is_file():
        record.append(FileRead(file, Stamp.of(file.stat())))


def add(found: Sequence[Read]) -> None:
    """Record content that was read earlier and is in memory."""
    if (record := _RECORD.get()) is not None:
        record += found


def note_rows(name: str, revision: str, rows: Sequence[Any]) -> None:
    """Record that `rows` came from the data set `name`."""
    if (record := _RECORD.get()) is not None:
        total = hashlib.sha256()
        for row in rows:
            total.update(canonical(row) + b"\n")
        record.append(RowsRead(name, revision, total.hexdigest(), len(rows)))


def canonical(value: Any) -> bytes:
    """JSON of a value, equal for equal values in any order of keys; other values count by type and text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=_plain, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if hasattr(value, "tolist"):  # an array or a tensor
        return value.tolist()
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text  # an address is another one in every process
