"""Append-only JSON lines for metrics, samples and events, which anyone may tail.

A row is one write of one complete line. A kill can cut at most the last line; readers pass over it and the next append
removes it, so that no row is ever joined to it.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from grpo_nb.printable import clean_logger
from grpo_nb.storage import former_names, lines, schema
from grpo_nb.storage.appending import mend_tail, parse, write_whole
from grpo_nb.storage.files import clear_errors, flock, same_file, separate, sync, to_json, write_atomically
from grpo_nb.storage.lines import Place, Sought, Span
from grpo_nb.storage.safe_open import Irregular, RunError, opened, refuse_irregular

if TYPE_CHECKING:
    from grpo_nb.storage.index import Index, LogRows

logger = clean_logger(__name__)

Row = dict[str, Any]
_COLUMNS: Mapping[str, Collection[str] | None] = {
    "metrics.jsonl": None,
    "sft.jsonl": None,
    "samples.jsonl": ("step", "objective"),
    "events.jsonl": ("kind",),
    "evaluations.jsonl": ("stage", "step", "split", "mode", "objective"),
}
"""Keys that get columns, by log; None: all that its rows have."""
MOST_PASSED = 100_000
"""Lines in a row that a reader from the end of a log passes over, where it looks for a row and these are invalid."""


class Journal:
    """One .jsonl file.

    Rows are not fsynced one by one (that is 1 to 30 ms, depending on the disk, and a kill needs none):
    `sync` is called before each checkpoint, so that the rows of a checkpoint outlive a power cut.
    """

    def __init__(self, path: Path, *, remember: bool = False, trains: Callable[[], bool] = lambda: False) -> None:
        """With `remember`, parsed rows stay in memory, and reading again costs only the new ones.

        Where this process `trains` the run, a snapshot by hard links ends no training: a copy takes the file's place.
        """
        self.path = path
        self.bad_lines = 0
        """Lines that the newest reader of all rows left out: invalid in this log (an incomplete last one not counted).
        """
        self.bad_because = ""
        """Reason for the first of them."""
        self._warned = False
        self._remember, self._trains = remember, trains
        self.separated = False
        """Whether a copy was put in the place of a file that had other names."""
        self._reading = threading.Lock()
        self._index: Index | None = None
        self._seen = _Seen()
        self._stepwise = path.name.partition(".")[0] in schema.STEPWISE
        self._ends: tuple[tuple[int, ...], int] = ((), 0)
        """A state of the file, and the end of its last complete line: a long line may follow."""

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write the rows, one line each, with one system call: all of them or none.

        Raises:
            RunError: read-only folder or full disk; the file is as it was.
            TypeError: a value that JSON cannot hold.
            ValueError: a row that this log cannot hold; with the reason.
        """
        data = [to_json(row) for row in rows]
        if data:
            with clear_errors("append to", self.path), self._locked() as fd:
                end = mend_tail(fd, self.path)
                self._refuse_unreadable(data, end)
                write_whole(fd, [b"\n".join([*data, b""])], end)

    def _refuse_unreadable(self, data: Sequence[bytes], end: int) -> None:
        """Refuse to write a row that no reader would accept: the run would continue, and its steps would be lost."""
        for line in data:
            end += len(line) + 1
            if (why := self._row(line, end)[1]) is not None:
                raise ValueError(f"a row for {self.path.name} {why}, so no reader would accept it; log less in one row")

    def read(self) -> list[Row]:
        """All rows, oldest first. An incomplete last line is passed over; a bad line before it is logged and counted.

        The rows are shared with later reads: they must not be changed.

        Raises:
            RunError: it cannot be read, or has too many invalid lines.
        """
        with self._reading, self.unread(self._seen.place if self._remember else Place()) as part:
            if part is None or part.anew:
                self._seen = _Seen()
            if part is None:
                return []
            rows, bad, torn = list[Row](), 0, list[Row]()
            for line, end in part.lines():
                row, why = self._row(line, end)
                if row is not None:
                    (rows if end < part.place.end else torn).append(row)
                elif why and end < part.place.end:
                    bad, self.bad_because = bad + 1, self.bad_because or why
            self._seen.add(rows, bad, part.place)
            self._report(self._seen.bad)
            return self._seen.rows + torn

    def stored(self) -> "LogRows":
        """All rows, oldest first, parsed on demand; and their columns by key."""
        with self._bounded():
            rows = self._indexed().rows()
        self.bad_because = rows.bad_because
        self._report(rows.bad_lines)
        return rows

    def unindexed(self) -> int:
        """Bytes that `stored` would have to parse."""
        return self._indexed().lacks()

    def _indexed(self) -> "Index":
        if self._index is None:
            from grpo_nb.storage.index import Index  # numpy: 0.1 s, and most readers need none of it

            self._index = Index(self.path, self._row, _COLUMNS.get(self.path.name, ()))
        return self._index

    def backwards(self) -> Iterator[Row]:
        """Rows, newest first, read from the end as far as needed; invalid lines are left out."""
        with self._open() as file:
            if file is None:
                return
            torn, passed = True, 0  # the last line may still be being written
            for line, end in lines.backwards(file, file.seek(0, os.SEEK_END)):
                row, why = self._row(line, end)
                passed = 0 if row is not None else passed + 1
                if row is not None:
                    yield row
                elif passed > MOST_PASSED:
                    raise self._endless()
                elif why and not torn:
                    self._warn_once(why)
                torn = False

    def forwards(self) -> Iterator[Row]:
        """Rows, oldest first, in bounded memory; invalid lines are left out."""
        with self.unread(Place()) as part:
            if part is not None:
                yield from part.forwards()

    @contextmanager
    def unread(self, known: Place) -> "Iterator[Unread | None]":
        """Part of the log past `known`, all of it where the file no longer has that place; None without a file."""
        with self._open() as file:
            yield None if file is None else Unread(self, file, known)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO | None]:
        """The file for reading; None where it does not exist."""
        with clear_errors("read", self.path):
            try:
                file = os.fdopen(opened(self.path), "rb")
            except FileNotFoundError:
                yield None
                return
            with file, self._bounded():
                yield file

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """One clear error where invalid lines, such as the hole of a sparse file, do not end."""
        try:
            yield
        except lines.Endless:
            raise self._endless(f"{lines.most_passed():,} bytes in lines too long to be rows") from None

    def _complete(self, fd: int) -> tuple[int, int]:
        """Bytes of the open file, and the byte at which its last complete line ends."""
        found = os.fstat(fd)
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if state != self._ends[0]:
            known = state if lines.settled(*state[3:]) else ()
            self._ends = known, lines.complete(fd, found.st_size, lines.most_passed())
        return found.st_size, self._ends[1]

    def _endless(self, what: str = f"{MOST_PASSED:,} lines in a row") -> RunError:
        return RunError(
            f"{self.path} has more than {what} that are no rows of this log. They are not read further; remove them"
        )

    def _warn_once(self, why: str) -> None:
        if not (self._warned or self.bad_lines):
            self._warned = True
            logger.warning("%s: a line is left out: it %s", self.path, why)

    def _row(self, line: bytes, end: int) -> tuple[Row | None, str | None]:
        """The row in a line, or why it has none; neither for an empty line."""
        if not line.strip():
            return None, None
        if len(line) > schema.LONGEST_LINE:
            return None, f"is longer than {schema.LONGEST_LINE >> 20} MiB"
        row = parse(line)
        if row is None:
            return None, "is no JSON object"
        row = former_names.metrics(row) if self._stepwise else row
        why = schema.problem(self.path.name, row, end)
        return (row, None) if why is None else (None, why)

    def move(self, condition: Callable[[Row], bool], into: "Journal") -> int:
        """Take the rows that meet `condition` out and append them to `into`; returns their number.

        At no moment is a row in neither file: they are first written and synced there, then this file is
        replaced. Killed in between, the next call does the rest and adds nothing twice. Kept lines keep
        their bytes; an incomplete last line is dropped. The file need not fit into memory.
        """
        if not os.path.lexists(self.path):
            return 0
        with clear_errors("rewrite", self.path), self._bounded(), self._locked() as fd:
            mend_tail(fd, self.path)
            with os.fdopen(opened(self.path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                count, moved = _spans(file, size, condition)
                if moved:
                    into._append_once(file.fileno(), moved)
                    write_atomically(self.path, lines.blocks(file.fileno(), lines.between(moved, size)))
        return count

    def sync(self) -> None:
        """fsync the appended rows."""
        if os.path.lexists(self.path):
            with clear_errors("sync", self.path):
                refuse_irregular(self.path)
                sync(self.path)

    def _append_once(self, source: int, spans: Sequence[Span]) -> None:
        """Append these bytes of another file, unless this one ends with them."""
        with clear_errors("append to", self.path), self._locked() as fd:
            end = mend_tail(fd, self.path)
            start = place = end - sum(stop - first for first, stop in spans)
            for block in lines.blocks(source, spans) if start >= 0 else ():
                if os.pread(fd, len(block), place) != block:
                    break
                place += len(block)
            if place < end or start < 0:
                write_whole(fd, lines.blocks(source, spans), end)
            os.fsync(fd)
        sync(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file opened for appending, alone; `move` may have put a new one in its place while we waited."""
        while True:
            try:
                fd = opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            except Irregular:
                if not (self._trains() and separate(self.path)):
                    raise
                self.separated = True
                continue
            try:
                flock(fd, wait=True)
                if same_file(fd, self.path):
                    yield fd
                    return
            finally:
                os.close(fd)

    def _report(self, bad: int) -> None:
        # a dashboard reads every second, and several readers read one log: warn once
        if bad > self.bad_lines and bad != _reported.get(self.path):
            logger.warning("%s: %d line(s) are left out; the first %s", self.path, bad, self.bad_because)
            _reported[self.path] = bad
        self.bad_lines = bad


_reported: dict[Path, int] = {}
"""Damaged lines of each log that a warning was about."""


class Unread:
    """The part of an open log that was not read yet."""

    def __init__(self, journal: Journal, file: BinaryIO, known: Place) -> None:
        self.anew = not known.of(file)
        """Whether it is the complete file: it was never read, was replaced, or was cut."""
        self._start = 0 if self.anew else known.end
        self._size, end = journal._complete(file.fileno())
        self.place = Place.at(file, end)
        """The end of the last complete line, from which to read on the next time."""
        self._journal, self._file = journal, file

    def forwards(self, *, torn: bool = True) -> Iterator[Row]:
        """Its rows, oldest first; with `torn` also a last line without its end, if it can be read."""
        for line, end in self.lines(torn=torn):
            row, why = self._journal._row(line, end)
            if row is not None:
                yield row
            elif why and end < self.place.end:
                self._journal._warn_once(why)

    def lines(self, *, torn: bool = True) -> Iterator[tuple[bytes, int]]:
        """Lines of this part; see `lines.forwards`."""
        return lines.forwards(self._file, self._start, self._size if torn else self.place.end)

    @property
    def state(self) -> tuple[int, int, int]:
        """Size and times of the file: a file edited in place has its old size, and other times."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def backwards(self, sought: Sought, wanted: Callable[[Row], bool]) -> Iterator[tuple[Row, bool]]:
        """Its rows that are `wanted`, newest first, each with whether its line is complete.

        Only lines that `sought` accepts are parsed.

        Raises:
            RunError: more than MOST_PASSED of these in a row are no such rows.
        """
        passed = 0
        for line, end in lines.backwards(self._file, self._size, self._start, sought):
            if not sought(line):
                continue
            row = self._journal._row(line, end)[0]
            if row is not None and wanted(row):
                passed = 0
                yield row, end < self.place.end
            elif (passed := passed + 1) > MOST_PASSED:
                raise self._journal._endless()

    def read_anew(self) -> None:
        """Treat all of the file as unread."""
        self.anew, self._start = True, 0


@dataclass
class _Seen:
    """Rows that `read` has parsed, and bad lines, up to a place by which a replaced or cut file is noticed."""

    rows: list[Row] = field(default_factory=list)
    bad: int = 0
    place: Place = field(default_factory=Place)

    def add(self, rows: list[Row], bad: int, place: Place) -> None:
        self.rows += rows
        self.bad += bad
        self.place = place


def _spans(file: BinaryIO, size: int, condition: Callable[[Row], bool]) -> tuple[int, list[Span]]:
    """Number of rows among the first `size` bytes that meet a condition, and their spans, neighbours as one."""
    count, start, spans = 0, 0, list[Span]()
    for line, end in lines.forwards(file, 0, size):
        stop = min(end + 1, size)
        row = parse(line) if len(line) <= schema.LONGEST_LINE else None
        if row is not None and condition(row):
            count += 1
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        start = stop
    return count, spans
