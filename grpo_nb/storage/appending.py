"""Writes the end of a log so that it has complete lines only."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_nb.printable import clean_logger
from grpo_nb.storage import lines, schema
from grpo_nb.storage.files import from_json

logger = clean_logger(__name__)


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None without one."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def mend_tail(fd: int, path: Path) -> int:
    """Make the file end with a complete line, and return where that is."""
    end = os.fstat(fd).st_size
    start = lines.complete(fd, end)
    if start == end:
        return end
    # one too long to be a row, which no reader shows, is not read
    tail = os.pread(fd, end - start, start) if end - start <= schema.LONGEST_LINE else b""
    if parse(tail) is not None:  # complete but for its newline, e.g. saved by an editor: readers have shown it
        return end + os.write(fd, b"\n")
    logger.warning("%s: removed an incomplete last line of %d bytes, left by a killed writer", path, end - start)
    os.ftruncate(fd, start)
    return start


def write_whole(fd: int, parts: Iterable[bytes], end: int) -> None:
    """Append all of the parts, or nothing."""
    try:
        for part in parts:
            if os.write(fd, part) < len(part):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(fd, end)
        raise
