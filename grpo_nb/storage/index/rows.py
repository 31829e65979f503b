"""The rows of a long log, parsed on demand, and its columns."""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np

from grpo_nb.printable import clean_logger
from grpo_nb.storage.index.chunks import Chunk, Head, Kind, Parse, Row
from grpo_nb.storage.index.packing import Numbers, Places, Texts
from grpo_nb.storage.index.store import Damaged, Outdated, Store
from grpo_nb.storage.safe_open import RunError

logger = clean_logger(__name__)

A_FEW = 256
"""Rows that are read at once, and that a slice gives as a list."""


@dataclass(frozen=True)
class Ways:
    """Functions that turn a log's bytes into rows, and make its chunks again where the index fails."""

    parse: Parse
    remake: Callable[[Head], Chunk]
    restore: Callable[[Sequence[Head], bool], Store]


class Log:
    """A log at the time of opening: chunks whose columns are stored, and a last one that is not full yet."""

    def __init__(
        self, path: Path, fd: int, heads: Sequence[Head], tail: Chunk | None, store: Store, ways: Ways
    ) -> None:
        """Takes `fd` over (-1: there is no file), and closes it when nothing uses this object any more."""
        self._path, self._fd, self._tail, self._store, self._ways = path, fd, tail, store, ways
        if fd >= 0:
            weakref.finalize(self, os.close, fd)
        self._kept = len(heads)
        self.heads = [*heads, *([tail.head] if tail else [])]
        self._edges = [0, *accumulate(head.rows for head in self.heads)]
        self._places = lru_cache(2)(self._read_places)

    def __len__(self) -> int:
        return self._edges[-1]

    def numbers(self, key: str, first: int, last: int) -> Numbers:
        """The numbers of a key in rows `first` to before `last`, counted from `first`."""
        parts = list(self._columns("numbers", key, self._span(first, last)))
        values = np.concatenate([np.zeros(0), *(part.values for _, part in parts)])
        if len(values) == last - first and first in self._edges and last in self._edges:
            return Numbers(np.arange(last - first), values)
        at = [np.zeros(0, np.int64), *(part.at + (self._edges[n] - first) for n, part in parts)]
        return Numbers(*_within(np.concatenate(at), values, last - first))

    def texts(self, key: str, first: int, last: int) -> Texts:
        """The texts of a key in rows `first` to before `last`, counted from `first`."""
        words: dict[str, int] = {}
        at, codes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for n, part in self._columns("texts", key, self._span(first, last)):
            known = np.array([words.setdefault(word, len(words)) for word in part.words], np.int64)
            at.append(part.at + (self._edges[n] - first))
            codes.append(known[part.codes])
        return Texts(*_within(np.concatenate(at), np.concatenate(codes), last - first), (*words,))

    def rows(self, first: int, last: int) -> Iterator[Row]:
        """Rows `first` to before `last`, parsed on demand."""
        for n in self._span(first, last):
            begin, end = max(first, self._edges[n]), min(last, self._edges[n + 1])
            for start in range(begin, end, A_FEW):
                yield from self._parsed(n, start - self._edges[n], min(start + A_FEW, end) - self._edges[n])

    def _span(self, first: int, last: int) -> range:
        """The chunks that hold these rows."""
        if first >= last:
            return range(0)
        return range(bisect_right(self._edges, first) - 1, bisect_right(self._edges, last - 1))

    def _parsed(self, n: int, first: int, last: int) -> Iterator[Row]:
        begins, lengths = self._places(n)
        start, chunk = begins[first], self.heads[n].start
        data = os.pread(self._fd, begins[last - 1] + lengths[last - 1] - start, chunk + start)
        for begin, length in zip(begins[first:last], lengths[first:last], strict=True):
            row, _ = self._ways.parse(data[begin - start : begin - start + length], chunk + begin + length + 1)
            if row is None:
                raise self._changed()
            yield row

    def _read_places(self, n: int) -> tuple[list[int], list[int]]:
        kinds: tuple[Kind, ...] = ("begins", "lengths")
        begins, lengths = (
            part.values.astype(np.int64).tolist()
            for kind in kinds
            for _, part in self._columns(kind, "", range(n, n + 1))
        )
        return begins, lengths

    def _columns(self, kind: Kind, key: str, span: range) -> Iterator[tuple[int, Any]]:
        """Column of each of these chunks that has the key; from the JSON lines where the stored one is unusable."""
        done = span.start
        for _ in range(2):
            try:
                for digest, data in self._store.parts(kind, key, done, min(span.stop, self._kept)):
                    part = self._unpacked(kind, key, done, digest, data)
                    if part is not None:
                        yield done, part
                    done += 1
                break
            except (Damaged, ValueError) as error:
                logger.info("the index of %s is made anew: %s", self._path, error)
                self._store = self._ways.restore(self.heads[: self._kept], not isinstance(error, Outdated))
        for n in range(done, span.stop):
            chunk = self._tail if self._tail and n == self._kept else self._ways.remake(self.heads[n])
            part = chunk.part(kind, key)
            if part is not None:
                yield n, part

    def _unpacked(self, kind: Kind, key: str, n: int, digest: bytes, data: bytes | None) -> Any:
        head = self.heads[n]
        if digest != head.digest:
            raise Outdated(f"chunk {n} is of other lines by now")
        if data is None and key in head.keys(kind):
            raise Damaged(f"chunk {n} lacks the {kind} of {key!r}")
        part = None if data is None else (Texts if kind == "texts" else Numbers).unpack(data, head.rows)
        if kind in ("begins", "lengths") and isinstance(part, Numbers):
            inside = (part.values >= 0) & (part.values <= head.stop - head.start)
            if len(inside) < head.rows or not inside.all():
                raise Damaged(f"chunk {n} has rows that do not lie in it")
        return part

    def _changed(self) -> RunError:
        return RunError(f"{self._path} was changed while it was read. What was read must stay as it is; read it again")


class LogRows(Sequence[Row]):
    """Rows of a log, oldest first, as a list of them would be; a long slice is again of this kind.

    Long logs are read by column: `numbers` and `texts`.
    """

    def __init__(self, log: Log, first: int = 0, last: int | None = None) -> None:
        self._log, self._first = log, first
        self._last = len(log) if last is None else last
        self._slice = lru_cache(16)(self._few)

    @property
    def bad_lines(self) -> int:
        """Lines of the log that are no rows (an incomplete last one not counted)."""
        return sum(head.bad for head in self._log.heads)

    @property
    def bad_because(self) -> str:
        """Reason for the first of them."""
        return next((head.why for head in self._log.heads if head.bad), "")

    @property
    def dropped(self) -> int:
        """Keys that have no column, as there are too many: counted in each chunk."""
        return sum(head.dropped for head in self._log.heads)

    @property
    def keys(self) -> list[str]:
        """Keys with numbers or texts anywhere in the log, in the order in which they appeared."""
        heads = dict.fromkeys((head.numbers, head.texts) for head in self._log.heads)
        return list(dict.fromkeys(key for numbers, texts in heads for key in (*numbers, *texts)))

    def numbers(self, key: str) -> Numbers:
        """The numbers of a key with the places of their rows; nan and inf are numbers."""
        return self._log.numbers(key, self._first, self._last)

    def texts(self, key: str) -> Texts:
        """The texts of a key with the places of their rows."""
        return self._log.texts(key, self._first, self._last)

    def places(self, key: str, texts: Collection[str]) -> Places:
        """Places of the rows that have one of these texts under a key."""
        found = self.texts(key)
        wanted = np.array([word in texts for word in found.words], bool)
        return found.at[wanted[found.codes]] if len(found.at) else found.at

    def equal(self, key: str, number: float) -> Places:
        """Places of the rows that have this number under a key."""
        found = self.numbers(key)
        places: Places = found.at[found.values == number]
        return places

    def having(self, key: str, texts: Collection[str]) -> Iterator[Row]:
        """The rows that have one of these texts under a key, oldest first."""
        return self.at(self.places(key, texts))

    def at(self, places: Iterable[int] | Places) -> Iterator[Row]:
        """The rows at these places."""
        return (self[int(place)] for place in places)

    def __len__(self) -> int:
        return self._last - self._first

    def __iter__(self) -> Iterator[Row]:
        return self._log.rows(self._first, self._last)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        if isinstance(place, slice):
            first, last, stride = place.indices(len(self))
            if stride != 1:
                return [self[n] for n in range(first, last, stride)]
            if last - first <= A_FEW:
                return self._slice(first, max(last, first))
            return LogRows(self._log, self._first + first, self._first + last)
        n = range(len(self))[place]
        return self._slice(n, n + 1)[0]

    def _few(self, first: int, last: int) -> list[Row]:
        return list(self._log.rows(self._first + first, self._first + last))


def _within(at: Any, values: Any, rows: int) -> tuple[Any, Any]:
    low, high = np.searchsorted(at, [0, rows])
    return at[low:high], values[low:high]
