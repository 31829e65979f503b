"""Rows of a data set: from files, or from the Hugging Face hub with `datasets` where that is installed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_nb.printable import clean_logger
from grpo_nb.storage import file_stamps
from grpo_nb.tasks.records import DataError, Row, checked_row, find_files, read_rows

logger = clean_logger(__name__)

_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w.-]+))?")
_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet", ".gz")
PROBE_SECONDS = 5.0
"""Seconds that the hub has to answer; loading by itself would try for half a minute."""


def load_rows(path: str | Path, patterns: tuple[str, ...], fields: Mapping[str, type]) -> list[Row]:
    """The rows that `path` names, each with `fields`: a file, a folder (files of the first fitting pattern), a glob.

    A name that is no path here but looks like a data set id, `owner/name`, is read from the Hugging Face hub.

    Raises:
        DataError: nothing was found, or a row is invalid.
    """
    return rows_of(path, locate(path, patterns), fields)


def locate(path: str | Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files that `path` names; none where it is the id of a data set of the hub.

    Raises:
        DataError: nothing was found.
    """
    return [] if is_hub_id(path) and not Path(path).exists() else find_files(path, patterns)


def rows_of(path: str | Path, files: Sequence[Path], fields: Mapping[str, type]) -> list[Row]:
    """The rows of files that `locate` found for `path`, or of the hub's data set where it found none.

    Raises:
        DataError: a row is invalid, or the hub has no such data set.
    """
    return read_rows(files, fields) if files else hub_rows(str(path), fields)


def is_hub_id(path: str | Path) -> bool:
    """Whether a path that does not exist can be a data set id: `owner/name`, `owner/name:config`, each with
    `@revision`.

    A file ending, a glob, an absolute path, or a first part that is a folder here makes it a path.
    """
    text = str(path)
    if not isinstance(path, str) or _ID.fullmatch(text) is None or text.lower().endswith(_FILES):
        return False
    return not Path(text.partition("/")[0]).is_dir()


def hub_rows(name: str, fields: Mapping[str, type]) -> list[Row]:
    """All rows of all splits of a data set, each with `fields` of these types.

    Raises:
        DataError: `datasets` is not installed, the data set cannot be loaded, or a row is invalid.
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
    logger.info("%s is not a path here: reading it as a data set of the Hugging Face hub", name)
    silent = unreachable(parts["name"], parts["revision"])
    try:
        with _from_cache(silent is not None):
            found = load_dataset(parts["name"], parts["config"], revision=parts["revision"])
    except Exception as error:
        if silent is not None:
            raise DataError(
                f"{absent}, and the Hugging Face hub, which may have a data set of that name, cannot be reached "
                f"({silent}) and was never read before; correct `data`, or connect"
            ) from None
        raise DataError(
            f"{absent}, and as a data set of the Hugging Face hub it cannot be loaded ({type(error).__name__}: "
            f"{error}); correct `data`, or add a configuration as in {parts['name']}:NAME"
        ) from error
    rows = [checked_row(where, data, fields) for where, data in _all(name, found)]
    if not rows:
        raise DataError(f"data set {name} is empty")
    file_stamps.note_rows(name, _revision(found), [row.data for row in rows])
    return rows


def _revision(found: Any) -> str:
    """The commit of the hub that a data set was read at; empty where `datasets` does not give it."""
    for split in found.values() if isinstance(found, Mapping) else [found]:
        told = [*(getattr(getattr(split, "info", None), "download_checksums", None) or {})]
        told += [file.get("filename", "") for file in getattr(split, "cache_files", None) or []]
        commits = (re.search(r"\b[0-9a-f]{40}\b", place) for place in told)
        if (commit := next(filter(None, commits), None)) is not None:
            return commit[0]
    return ""


def unreachable(name: str, revision: str | None) -> str | None:
    """Error if the hub does not answer at all; None if it does, even with a refusal."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(name, revision=revision, timeout=PROBE_SECONDS)
    except HfHubHTTPError:
        return None  # loading raises the same, with a better message
    except Exception as error:  # the HTTP library's own, which differ from version to version
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _from_cache(only: bool) -> Iterator[None]:
    """Make no network requests inside the block if `only`: as if HF_HUB_OFFLINE had been set at the start."""
    if not only:
        yield
        return
    import datasets.config
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _all(name: str, found: Any) -> Iterator[tuple[str, Any]]:
    splits = found if isinstance(found, Mapping) else {"all": found}
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            yield f"{name}, split {split}, row {number}", row
