"""Lines of a growing file, read from either end in bounded memory; and places in it, from which to read on."""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from grpo_nb.printable import Clean
from grpo_nb.storage import schema

Sought = Callable[[bytes], bool]
Span = tuple[int, int]
"""Bytes of a file, from the first to before the last."""

BLOCK = 1 << 16
LEAP = 1 << 30
"""Bytes of a hole that are passed at once."""
"""Bytes of one read."""
FINGERPRINT = 512
"""Bytes before a place by which a file is recognised."""
ENDLESS = 16
"""Times `schema.LONGEST_LINE` that a reader passes over in lines too long to be rows."""
SETTLED_NS = 3_000_000_000
"""A file that was written so recently can be written again without a change of its times: FAT counts 2 s."""


class Endless(Clean, ValueError):
    """Raised when a file has more bytes in lines too long to be rows than a reader passes over."""


@dataclass(frozen=True)
class Place:
    """The end of a complete line, up to which a file was read; another file, or one that was cut, does not have it."""

    file: tuple[int, int] = (0, 0)
    """Device and inode."""
    end: int = 0
    before: bytes = b""
    """The bytes before `end`, FINGERPRINT of them at most."""

    @classmethod
    def at(cls, file: BinaryIO, end: int) -> "Place":
        """A place of an open file."""
        found, size = os.fstat(file.fileno()), min(end, FINGERPRINT)
        return cls((found.st_dev, found.st_ino), end, os.pread(file.fileno(), size, end - size))

    def of(self, file: BinaryIO) -> bool:
        """Whether an open file still has this place, so that the part before it is unchanged."""
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != self.file or found.st_size < self.end:
            return False
        return os.pread(file.fileno(), len(self.before), self.end - len(self.before)) == self.before


def forwards(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Lines between byte `start` (where a line begins) and `end`, oldest first, each with the byte that it ends at.

    The last one may have no newline. Of a line too long to be a row only the beginning is given.

    Raises:
        Endless: as `backwards`.
    """
    position, passed = file.seek(start), 0
    while position < end:
        line = part = file.readline(min(schema.LONGEST_LINE + 2, end - position))
        begin, position = position, position + len(part)
        while part and not part.endswith(b"\n") and position < end:
            part = file.readline(min(BLOCK, end - position))
            position += len(part)
            if passed + position - begin > most_passed():
                raise Endless
        if not part:  # it was cut meanwhile
            return
        passed += position - begin if len(line) > schema.LONGEST_LINE + 1 else 0
        yield line.removesuffix(b"\n"), position - part.endswith(b"\n")


def backwards(file: BinaryIO, end: int, floor: int = 0, sought: Sought | None = None) -> Iterator[tuple[bytes, int]]:
    """Lines between bytes `floor` (where a line begins) and `end`, newest first, each with the byte that it ends at.

    With `sought`, a test of the bytes that may hold a wanted row, other lines may be passed over a block at a time. Of
    a line too long to be a row only the beginning is given.

    Raises:
        Endless: such lines have more than ENDLESS times the bytes of the longest row: a sparse file has any number.
    """
    position, line, passed = end, _Line(), 0
    while position > floor:
        size = min(BLOCK, position - floor)
        position = file.seek(position - size)
        block = file.read(size)
        first, newline, rest = block.partition(b"\n")
        if not newline:
            line.prepend(block)
            if passed + line.length > most_passed():
                raise Endless
            continue
        inner, newline, last = rest.rpartition(b"\n")
        line.prepend(last)
        yield line.text(), end
        end -= line.length + 1
        passed += line.length if line.length > schema.LONGEST_LINE else 0
        if newline and sought is not None and not sought(inner):
            end -= len(inner) + 1
        elif newline:
            for part in reversed(inner.split(b"\n")):
                yield part, end
                end -= len(part) + 1
        line = _Line(first)
    yield line.text(), end


def most_passed() -> int:
    """Bytes in lines too long to be rows that a reader passes over."""
    return ENDLESS * schema.LONGEST_LINE


def complete(fd: int, size: int, most: int | None = None) -> int:
    """The byte at which the last complete line of an open file of `size` bytes ends; 0 where it has none.

    Raises:
        Endless: more than `most` bytes follow it.
    """
    floor = 0 if most is None else size - most
    while size > 0:
        if size < floor:
            raise Endless
        if size > LEAP and _hole(fd, size - LEAP, size):
            size -= LEAP
            continue
        part = min(BLOCK, size)
        newline = os.pread(fd, part, size - part).rfind(b"\n")
        size -= part
        if newline >= 0:
            return size + newline + 1
    return 0


def _hole(fd: int, start: int, end: int) -> bool:
    """Whether the file has no data there: a sparse file takes no space for it, and no newline is in it."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA) >= end
    except OSError as error:  # none from there to the file's end; or this file system does not support it
        return error.errno == errno.ENXIO
    except AttributeError:  # nor can this operating system
        return False


def between(spans: Sequence[Span], size: int) -> list[Span]:
    """Spans of a file between these spans."""
    edges = [0, *chain.from_iterable(spans), size]
    return [(first, stop) for first, stop in zip(edges[::2], edges[1::2], strict=True) if first < stop]


def blocks(fd: int, spans: Iterable[Span]) -> Iterator[bytes]:
    """The bytes of an open file in these spans."""
    for first, stop in spans:
        for place in range(first, stop, BLOCK):
            yield os.pread(fd, min(BLOCK, stop - place), place)


def settled(*times_ns: int) -> bool:
    """Whether any later write to a file of these times changes them.

    Where the clock of the file system is ahead of this machine's, they are never settled.
    """
    return time.time_ns() - max(times_ns) > SETTLED_NS


class _Line:
    """A line that is met from its end; no more of it is kept than a row may have."""

    def __init__(self, part: bytes = b"") -> None:
        self.length = len(part)
        self._parts = [part]

    def prepend(self, part: bytes) -> None:
        if self.length <= schema.LONGEST_LINE:
            self._parts.append(part)
        self.length += len(part)

    def text(self) -> bytes:
        return b"".join(reversed(self._parts))
