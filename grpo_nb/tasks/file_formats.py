"""JSON objects out of a data file, whatever its format: JSON lines, a JSON array, pretty-printed JSON, Parquet.

Text may be compressed by gzip, bzip2 or xz. The file's first bytes decide the format, not its ending.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from grpo_nb.printable import Clean


class DataError(Clean, ValueError):
    """Raised for a wrong data file or row; the message has the place, what was found and what is needed."""


LARGEST = 2 << 30
"""Bytes of a data file's text: a small file that unpacks to more is no data."""

_COMPRESSED: dict[bytes, Callable[[io.BytesIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_REFUSED = {
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it"),
    b"ARROW1": ("an Arrow file", "save it as JSON lines or Parquet"),
    b"SQLite format 3": ("an SQLite database", "export the table as JSON lines"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
}
"""First bytes of formats that are not read: what to call them, what to do."""
_TABLES = {".csv": "CSV", ".tsv": "TSV", ".yaml": "YAML", ".yml": "YAML", ".pkl": "a pickle", ".pickle": "a pickle"}
"""Formats that have no first bytes of their own, by the file's ending."""


def records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object of a file, with the place that error messages name: `Age.jsonl, line 12`, `qa.json, element 3`.

    Raises:
        DataError: it cannot be read, has an unsupported format, or holds something other than JSON objects.
    """
    data = _read(file)
    if data.startswith(b"PAR1"):
        yield from _parquet(file)
        return
    text = _text(file, data)
    first, _, more = (part.strip() for part in text.strip().partition("\n"))
    if first.startswith("[") and not (more and first.endswith("]")):
        yield from _array(file, text)
    elif _is_cut(first):
        yield from _spread(file, text)
    else:
        yield from _lines(file, text)


def shortened(text: str, limit: int = 60) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def _read(file: Path) -> bytes:
    """The bytes of a regular file; whoever opened a FIFO would wait for a writer."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{file} is no regular file; needs one JSON object a line")
            if found.st_size > LARGEST:
                raise DataError(f"{file} has {found.st_size} bytes, {LARGEST} are read at most; split it into files")
            return opened.read()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}); needs one JSON object a line") from None


def _text(file: Path, data: bytes) -> str:
    for magic, unpacked in _COMPRESSED.items():
        if data.startswith(magic):
            try:
                data = unpacked(io.BytesIO(data)).read(LARGEST + 1)
            except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
                raise DataError(f"{file}: cannot be decompressed ({error}); copy it anew") from None
            if len(data) > LARGEST:
                raise DataError(f"{file} unpacks to more than {LARGEST} bytes; split it into smaller files")
            break
    for magic, (name, todo) in _REFUSED.items():
        if data.startswith(magic):
            raise DataError(f"{file} is {name}, which is not read; {todo}, and name the file of JSON lines")
    if table := _TABLES.get(file.suffix.lower()):
        raise DataError(f"{file} is {table}, which is not read; save it as JSON lines or Parquet")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({error}); needs one JSON object a line") from None


def _is_cut(line: str) -> bool:
    """Whether a first line begins an object that continues below, as in pretty-printed JSON."""
    return line.startswith("{") and (line == "{" or line.endswith((",", "{", "[", ":")))


def _lines(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _object(where, _parsed(where, line), line)


def _array(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, value in enumerate(_parsed(str(file), text)):
        where = f"{file}, element {number}"
        yield where, _object(where, value, str(value))


def _spread(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects one after the other, each over several lines."""
    decoder, position = json.JSONDecoder(), 0
    while (position := _next(text, position)) < len(text):
        where = f"{file}, line {text.count(chr(10), 0, position) + 1}"
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            _refuse(where, error, text[position : position + 200])
        yield where, _object(where, value, str(value))


def _next(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{file} is Parquet, which needs pyarrow; pip install 'grpo_nb[datasets]', or save it as JSON lines"
        ) from None
    try:
        rows = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these
        raise DataError(f"{file}: Parquet that cannot be read ({error}); copy it anew") from None
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows))


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(where, error, text)


def _refuse(where: str, error: Exception, text: str) -> NoReturn:
    if isinstance(error, json.JSONDecodeError):
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}): {shortened(text)}") from None
    if isinstance(error, RecursionError):
        raise DataError(
            f"{where}: brackets are nested too deep to be read, needs one flat object: {shortened(text)}"
        ) from None
    raise DataError(f"{where}: cannot be read ({error}): {shortened(text)}") from None  # a number of too many digits


def _object(where: str, value: Any, text: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: found a JSON {type(value).__name__}, needs one object a line or an array of them: "
            f"{shortened(text)}"
        )
    return value
