"""A stretch of a log as columns: where its rows lie, its numbers and texts by key, and the lines that are no rows."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from grpo_nb.storage import schema
from grpo_nb.storage.index.packing import MOST_ROWS, Numbers, Places, Texts

Row = dict[str, Any]
Parse = Callable[[bytes, int], tuple[Row | None, str | None]]
"""The row in a line that ends at a byte of the log, or why it has none; neither for an empty line."""
Kind = Literal["begins", "lengths", "numbers", "texts"]
"""Kind of a part of a chunk."""
_NUMBERS = {int, float, bool}


@dataclass(frozen=True)
class Head:
    """Header of a chunk: bytes `start` to `stop` of the log, which begin and end at lines."""

    start: int
    stop: int
    rows: int
    bad: int
    """Lines left out."""
    why: str
    """Reason for the first of them."""
    digest: bytes
    """SHA-256 of the bytes."""
    numbers: tuple[str, ...]
    """Keys with numbers."""
    texts: tuple[str, ...]
    """Keys with texts."""
    dropped: int = 0
    """Keys beyond `schema.MOST_KEYS`, which have no column."""

    def keys(self, kind: Kind) -> Collection[str]:
        """Keys that have a part of a kind; the places of the rows are under the empty one."""
        return self.texts if kind == "texts" else self.numbers if kind == "numbers" else ("",)

    def listed(self) -> list[Any]:
        """The header as JSON can hold it."""
        counts = [self.start, self.stop, self.rows, self.bad, self.dropped]
        return [*counts, self.why, self.digest.hex(), self.numbers, self.texts]

    @classmethod
    def of(cls, listed: Any) -> "Head":
        """Header from a `listed` one.

        Raises:
            ValueError: it is invalid.
        """
        start, stop, rows, bad, dropped, why, digest, numbers, texts = listed
        if not all(type(count) is int for count in (start, stop, rows, bad, dropped)) or not isinstance(why, str):
            raise ValueError("no head of a chunk")
        if (
            not 0 <= start < stop
            or not 0 <= rows <= MOST_ROWS
            or not (bad >= 0 and 0 <= dropped <= stop - start >= bad)
        ):
            raise ValueError(f"{rows} rows and {bad} other lines in bytes {start} to {stop}")
        if not all(isinstance(key, str) for keys in (numbers, texts) for key in keys):
            raise ValueError("keys that are no texts")
        return cls(start, stop, rows, bad, why, bytes.fromhex(digest), (*numbers,), (*texts,), dropped)


@dataclass(frozen=True)
class Chunk:
    """A head with its columns."""

    head: Head
    begins: Numbers
    """Byte at which each row begins, from the beginning of the chunk."""
    lengths: Numbers
    """Bytes of each row, without its newline."""
    numbers: dict[str, Numbers]
    texts: dict[str, Texts]

    def part(self, kind: Kind, key: str) -> Numbers | Texts | None:
        """One of its columns; None where no row has the key."""
        if kind in ("begins", "lengths"):
            return self.begins if kind == "begins" else self.lengths
        return self.texts.get(key) if kind == "texts" else self.numbers.get(key)


def chunk_of(data: bytes, start: int, parse: Parse, keys: Collection[str] | None) -> Chunk:
    """The chunk of complete lines that begins at byte `start` of a log; of more than `MOST_ROWS` rows the first ones.

    A last line without a newline is a row if it is one, and no bad line if it is not: it may be being written.

    Args:
        keys: those that get columns; None: all of a flat row.
    """
    rows: list[Row] = []
    begins: list[int] = []
    lengths: list[int] = []
    bad, why, end = 0, "", 0
    for line, begin in _lines(data):
        end = min(begin + len(line) + 1, len(data))
        row, reason = parse(line, start + end)
        if row is not None:
            rows.append(row if keys is None else {key: row[key] for key in keys if key in row})
            begins.append(begin)
            lengths.append(len(line))
            if len(rows) == MOST_ROWS:
                break
        elif reason and end > begin + len(line):
            bad, why = bad + 1, why or reason
    numbers, texts, dropped = columns(rows)
    digest = hashlib.sha256(data[:end]).digest()
    head = Head(start, start + end, len(rows), bad, why, digest, (*numbers,), (*texts,), dropped)
    everywhere = np.arange(len(rows))
    return Chunk(
        head,
        Numbers(everywhere, np.array(begins, float)),
        Numbers(everywhere, np.array(lengths, float)),
        numbers,
        texts,
    )


def _lines(data: bytes) -> Iterator[tuple[bytes, int]]:
    begin = 0
    for line in data.split(b"\n"):
        if begin < len(data):
            yield line, begin
        begin += len(line) + 1


def columns(rows: Sequence[Row]) -> tuple[dict[str, Numbers], dict[str, Texts], int]:
    """Numbers (booleans are 0 and 1) and texts of rows by key; None, lists and objects are in no column.

    Of more than `schema.MOST_KEYS` keys those that most rows have are columns; how many are not comes last.
    """
    rows, dropped = schema.narrow(rows)
    alike: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(tuple(row), []).append(place)
    at: dict[str, list[Places]] = {}
    values: dict[str, list[tuple[Any, ...]]] = {}
    for names, places in alike.items():
        here = np.array(places, np.int64)
        for name, column in zip(names, zip(*(rows[place].values() for place in places), strict=True), strict=True):
            at.setdefault(name, []).append(here)
            values.setdefault(name, []).append(column)
    numbers: dict[str, Numbers] = {}
    texts: dict[str, Texts] = {}
    for name, found in values.items():
        _sort_in(name, *_in_order(at[name], found), numbers, texts)
    return numbers, texts, dropped


def _in_order(at: list[Places], values: list[tuple[Any, ...]]) -> tuple[Places, Sequence[Any]]:
    """Stretches of a column as one, by place."""
    if len(at) == 1:
        return at[0], values[0]
    places, column = np.concatenate(at), list(chain.from_iterable(values))
    order = np.argsort(places, kind="stable")
    return places[order], [column[place] for place in order.tolist()]


def _sort_in(
    name: str, at: Places, column: Sequence[Any], numbers: dict[str, Numbers], texts: dict[str, Texts]
) -> None:
    """Put a key's values with the numbers, with the texts, or with both."""
    kinds = set(map(type, column))
    if kinds <= _NUMBERS:
        numbers[name] = Numbers(at, np.fromiter(column, float, len(column)))
    elif kinds == {str}:
        texts[name] = Texts.of(at, column)
    else:
        own = [n for n, value in enumerate(column) if type(value) in _NUMBERS]
        if own:
            numbers[name] = Numbers(at[own], np.array([column[n] for n in own], float))
        if words := [n for n, value in enumerate(column) if type(value) is str]:
            texts[name] = Texts.of(at[words], [column[n] for n in words])
