"""Rows of a data set: from files, or from the Hugging Face hub with `datasets` where that is installed."""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_nb.tasks.records import DataError, Row, checked_row, find_files, read_rows

log = logging.getLogger(__name__)

_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w.-]+))?")
_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet", ".gz")


def load_rows(path: str | Path, patterns: tuple[str, ...], fields: Mapping[str, type]) -> list[Row]:
    """The rows that `path` names, each with `fields`: a file, a folder (files of the first fitting pattern), a glob.

    What is no path here but looks like a data set id, `owner/name`, is read from the Hugging Face hub.

    Raises:
        DataError: nothing is there, or a row is not as it must be.
    """
    if is_hub_id(path) and not Path(path).exists():
        return hub_rows(str(path), fields)
    return read_rows(find_files(path, patterns), fields)


def is_hub_id(path: str | Path) -> bool:
    """Whether a path that is not there can be a data set id: `owner/name`, `owner/name:config`, each with `@revision`.

    A file ending, a glob, an absolute path, or a first part that is a folder here makes it a path.
    """
    text = str(path)
    if not isinstance(path, str) or _ID.fullmatch(text) is None or text.lower().endswith(_FILES):
        return False
    return not Path(text.partition("/")[0]).is_dir()


def hub_rows(name: str, fields: Mapping[str, type]) -> list[Row]:
    """All rows of all splits of a data set, each with `fields` of these types.

    Raises:
        DataError: `datasets` is not installed, the data set cannot be loaded, or a row is not as it must be.
    """
    parts = _ID.fullmatch(name)
    assert parts is not None, "is_hub_id was asked before"
    absent = f"no file or folder at {name} (looked from {Path.cwd()})"
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            f"{absent}; to read it as a data set id of the Hugging Face hub, pip install 'grpo_nb[datasets]' ({error})"
        ) from None
    log.info("%s is not a path here: reading it as a data set of the Hugging Face hub", name)
    try:
        found = load_dataset(parts["name"], parts["config"], revision=parts["revision"])
    except Exception as error:
        raise DataError(
            f"{absent}, and as a data set of the Hugging Face hub it cannot be loaded ({type(error).__name__}: "
            f"{error}); correct `data`, or add a configuration as in {parts['name']}:NAME"
        ) from error
    rows = [checked_row(where, data, fields) for where, data in _all(name, found)]
    if not rows:
        raise DataError(f"data set {name} is empty")
    return rows


def _all(name: str, found: Any) -> Iterator[tuple[str, Any]]:
    splits = found if isinstance(found, Mapping) else {"all": found}
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            yield f"{name}, split {split}, row {number}", row
