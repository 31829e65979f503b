"""Reading JSON-lines files so that whatever is wrong with one is said once, with its file and line."""

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A data file or a row of it is wrong: the message says where, what was found and what is needed."""


@dataclass(frozen=True)
class Row:
    """One JSON object and where it stands, `Age.jsonl, line 12`, for error messages."""

    where: str
    data: Mapping[str, Any]


def find_files(path: str | Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files that `path` names: itself, those in a folder that match the first fitting pattern, or a glob's.

    Raises:
        DataError: nothing is there.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        return [folder]
    if folder.is_dir():
        hits = next((found for p in patterns if (found := sorted(folder.glob(p)))), [])
        if not hits:
            raise DataError(f"folder {folder} has no {' or '.join(patterns)}; point `data` to the file itself")
        return hits
    hits = sorted(Path(hit) for hit in glob.glob(str(folder)))
    if not hits:
        raise DataError(f"no file or folder at {folder} (looked from {Path.cwd()}); correct the path in `data`")
    return hits


def read_rows(files: Iterable[Path], fields: Mapping[str, type]) -> list[Row]:
    """All rows of JSON-lines files, each an object that has `fields` with these types. Blank lines are skipped.

    Raises:
        DataError: a file that is empty or not text, a line that is not JSON, a field that is missing or mistyped.
    """
    return [row for file in files for row in _rows_of(file, fields)]


def checked_row(where: str, data: Mapping[str, Any], fields: Mapping[str, type]) -> Row:
    """The row, if it has `fields` with these types.

    Raises:
        DataError: a field is missing or mistyped.
    """
    for name, kind in fields.items():
        if name not in data:
            raise DataError(f"{where}: field '{name}' is missing; found {', '.join(data) or 'no fields'}")
        if not isinstance(data[name], kind) or (kind is int and isinstance(data[name], bool)):
            found = f"{type(data[name]).__name__} {_short(repr(data[name]))}"
            raise DataError(f"{where}: field '{name}' is {found}, needs {kind.__name__}")
        if kind is str and not _is_text(data[name]):
            raise DataError(
                f"{where}: field '{name}' has half a character in it (a lone surrogate), which no tokenizer can read: "
                f"{_short(ascii(data[name]))}; write the file anew as UTF-8"
            )
    return Row(where, data)


def held_out(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """The groups that are kept for testing: `share` of them, at least one where there are two or more.

    A group's place in the order is a hash of (seed, group), so it does not hang on the order of files or rows.
    """
    order = sorted(set(groups), key=lambda group: hashlib.blake2b(f"{seed}|{group}".encode()).hexdigest())
    count = round(share * len(order))
    return set(order[: max(count, 1) if len(order) > 1 else 0])


def check_share(test_share: float) -> None:
    """Raises DataError unless 0 < test_share < 1."""
    if not 0 < test_share < 1:
        raise DataError(f"test_share={test_share}; needs a share between 0 and 1, 0.2 is usual")


def _rows_of(file: Path, fields: Mapping[str, type]) -> list[Row]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({error}); needs one JSON object a line") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise DataError(f"{file} is empty; needs one JSON object a line")
    return [_row(f"{file}, line {number}", line, fields) for number, line in lines]


def _row(where: str, line: str, fields: Mapping[str, type]) -> Row:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}): {_short(line)}") from None
    except ValueError as error:  # a number of more digits than Python takes
        raise DataError(f"{where}: cannot be read ({error}): {_short(line)}") from None
    except RecursionError:
        raise DataError(
            f"{where}: brackets are nested too deep to be read, needs one flat object: {_short(line)}"
        ) from None
    if not isinstance(data, dict):
        raise DataError(f"{where}: found a JSON {type(data).__name__}, needs one object a line: {_short(line)}")
    return checked_row(where, data, fields)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
