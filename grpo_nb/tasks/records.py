"""Rows of data files with the fields that a task needs: any invalid one is one error, with file and line."""

import glob
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_nb.storage import file_stamps
from grpo_nb.tasks.file_formats import DataError as DataError
from grpo_nb.tasks.file_formats import records, shortened


@dataclass(frozen=True)
class Row:
    """One JSON object and its place, `Age.jsonl, line 12`, for error messages."""

    where: str
    data: Mapping[str, Any]


def find_files(path: str | Path, patterns: tuple[str, ...]) -> list[Path]:
    """Files that `path` names: itself, those in a folder that match the first fitting pattern, or a glob's.

    Raises:
        DataError: nothing was found.
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
    """All rows of data files (see `formats.records`), each an object that has `fields` with these types.

    Raises:
        DataError: a file that is empty or in an unsupported format, a field that is missing or mistyped.
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
            found = f"{type(data[name]).__name__} {shortened(repr(data[name]))}"
            raise DataError(f"{where}: field '{name}' is {found}, needs {kind.__name__}")
        if kind is str and not _is_text(data[name]):
            raise DataError(
                f"{where}: field '{name}' has half a character in it (a lone surrogate), which no tokenizer can read: "
                f"{shortened(ascii(data[name]))}; write the file anew as UTF-8"
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
    file_stamps.note(file)
    rows = [checked_row(where, data, fields) for where, data in records(file)]
    if not rows:
        raise DataError(f"{file} is empty; needs one JSON object a line")
    return rows


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
