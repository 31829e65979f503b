"""Columns of a chunk as bytes, and back: numbers and texts, each with the rows that have it.

Equal values take no room, integers take what their range needs, other numbers 8 bytes. No byte is trusted: an
impossible length, row or word is a ValueError.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 1 << 14
"""Rows of a chunk."""
_HEAD = struct.Struct("<cId")
_KINDS: Mapping[bytes, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in ((b"1", "u1"), (b"2", "<u2"), (b"4", "<u4"), (b"f", "<f8"))
}
_CONSTANT = b"="
_EXACT = 2.0**53
_PLACE = np.dtype("<u2")

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Numbers:
    """The values of a key, in the rows (`at`, ascending) that have a number under it."""

    at: Places
    values: Floats

    def pack(self, rows: int) -> bytes:
        """Bytes for a chunk of `rows` rows."""
        return _pack_places(self.at, rows) + _pack(self.values)

    @classmethod
    def unpack(cls, data: bytes, rows: int) -> "Numbers":
        """Numbers that `pack` packed.

        Raises:
            ValueError: no column of a chunk of `rows` rows.
        """
        at, rest = _unpack_places(data, rows)
        return cls(at, _unpack(rest, len(at)))


@dataclass(frozen=True)
class Texts:
    """The texts of a key, in the rows (`at`, ascending) that have a text under it."""

    at: Places
    codes: Places
    """Places in `words`."""
    words: tuple[str, ...]

    @classmethod
    def of(cls, at: Places, texts: Iterable[str]) -> "Texts":
        known: dict[str, int] = {}
        codes = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
        return cls(at, codes, tuple(known))

    def pack(self, rows: int) -> bytes:
        """Bytes for a chunk of `rows` rows."""
        words = json.dumps(self.words).encode()
        return struct.pack("<I", len(words)) + words + Numbers(self.at, self.codes.astype(float)).pack(rows)

    @classmethod
    def unpack(cls, data: bytes, rows: int) -> "Texts":
        """Texts that `pack` packed.

        Raises:
            ValueError: no column of a chunk of `rows` rows.
        """
        size = _read(struct.Struct("<I"), data)[0] + 4
        words, numbers = json.loads(data[4:size]), Numbers.unpack(data[size:], rows)
        codes = numbers.values.astype(np.int64)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("the words of a column are no texts")
        if len(codes) and not (np.min(codes) >= 0 and np.max(codes) < len(words)):
            raise ValueError("a text of a column is none of its words")
        return cls(numbers.at, codes, tuple(words))


def _pack_places(at: Places, rows: int) -> bytes:
    everywhere = len(at) == rows
    return struct.pack("<?I", everywhere, len(at)) + (b"" if everywhere else at.astype(_PLACE).tobytes())


@lru_cache(4)
def _all_of(rows: int) -> Places:
    places = np.arange(rows)
    places.setflags(write=False)
    return places


def _unpack_places(data: bytes, rows: int) -> tuple[Places, bytes]:
    head = struct.Struct("<?I")
    everywhere, count = _read(head, data)
    if count > rows or rows > MOST_ROWS or (everywhere and count != rows):
        raise ValueError(f"a column of {count} values in a chunk of {rows} rows")
    size = head.size + (0 if everywhere else count * _PLACE.itemsize)
    if everywhere:
        return _all_of(rows), data[size:]
    at = np.frombuffer(data[head.size : size], _PLACE).astype(np.int64)
    if len(at) != count or (count and at[-1] >= rows) or (np.diff(at) <= 0).any():
        raise ValueError("the rows of a column are not ascending rows of its chunk")
    return at, data[size:]


def _pack(values: Floats) -> bytes:
    count, bits = len(values), values.view(np.uint64)
    if not count or (bits == bits[0]).all():
        return _HEAD.pack(_CONSTANT, count, float(values[0]) if count else 0.0)
    whole = np.isfinite(values).all() and (np.abs(values) < _EXACT).all() and (values == np.rint(values)).all()
    if whole and not (np.signbit(values) & (values == 0)).any():
        low = float(np.min(values))
        offsets = values - low
        for code, kind in _KINDS.items():
            if kind.kind == "u" and np.max(offsets) <= np.iinfo(kind).max:
                return _HEAD.pack(code, count, low) + offsets.astype(kind).tobytes()
    return _HEAD.pack(b"f", count, 0.0) + values.astype("<f8").tobytes()


def _unpack(data: bytes, count: int) -> Floats:
    code, found, low = _read(_HEAD, data)
    body = data[_HEAD.size :]
    if found != count or (code != _CONSTANT and code not in _KINDS):
        raise ValueError(f"a column of {found} values for {count} rows")
    if code == _CONSTANT:
        if body:
            raise ValueError("bytes after a column")
        return np.full(count, low)
    kind = _KINDS[code]
    if len(body) != count * kind.itemsize:
        raise ValueError(f"{len(body)} bytes for {count} values of {kind}")
    return (
        np.frombuffer(body, kind).astype(float) + low if kind.kind == "u" else np.frombuffer(body, kind).astype(float)
    )


def _read(head: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < head.size:
        raise ValueError(f"a column of {len(data)} bytes")
    return head.unpack_from(data)
