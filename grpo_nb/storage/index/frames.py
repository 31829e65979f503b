"""Rows of a log as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.printable import clean_logger
from grpo_nb.storage import schema
from grpo_nb.storage.index.packing import Floats
from grpo_nb.storage.index.rows import LogRows

logger = clean_logger(__name__)

Row = dict[str, Any]

DROPPED = "metrics_dropped"
"""Key in the `attrs` of a table: the number of keys that it leaves out."""
FEW_ROWS = 5_000
"""A table of so many is made of the rows; of more it is made of columns, and nothing else stays in memory."""

CELLS, CELLS_PER_VALUE = 1_000_000, 16
"""Cells of a table: so many, and so many more for each value that the log has. A log of few values in many keys and
rows would be a table of any size."""


def frame(rows: Sequence[Row], *columns: str) -> pd.DataFrame:
    """Table with one row per row, one column per key; without rows a table of these columns.

    In a long table numbers other than the step are floats, also where they are integers. Keys beyond
    `schema.MOST_KEYS`, and those that almost no row has in a table that would be empty for the most part, are left out;
    a warning and `attrs["metrics_dropped"]` give their number.
    """
    if not len(rows):
        return pd.DataFrame(columns=list(columns))
    if not isinstance(rows, LogRows) or len(rows) <= FEW_ROWS:
        narrow, beyond = schema.narrow(rows)
        counts = Counter(key for row in narrow for key in row)
        kept = _frequent(counts, len(narrow))
        table = pd.DataFrame(narrow, columns=kept)
    else:
        every = rows.keys
        beyond, counts = len(every), Counter({key: _count(rows, key) for key in every[: schema.MOST_KEYS]})
        beyond, kept = rows.dropped + beyond - len(counts), _frequent(counts, len(rows))
        table = pd.DataFrame({key: _column(rows, key) for key in kept}, copy=False)
    if dropped := beyond + len(counts) - len(kept):
        logger.warning("the table leaves out %d keys that few of its %d rows have", dropped, len(rows))
        table.attrs[DROPPED] = dropped
    return table


def narrowed(rows: Sequence[Row], *columns: str) -> pd.DataFrame:
    """Table of a few rows as from `frame`, without a warning: for a view that is drawn again and again."""
    narrow, dropped = schema.narrow(rows)
    table = pd.DataFrame(narrow) if narrow else pd.DataFrame(columns=list(columns))
    if dropped:
        table.attrs[DROPPED] = dropped
    return table


def _frequent(counts: Mapping[str, int], rows: int) -> list[str]:
    """The keys of a table, in their order; the rarest are left out where there are too many cells."""
    most = max((CELLS + CELLS_PER_VALUE * sum(counts.values())) // rows, 1)
    if len(counts) <= most:
        return [*counts]
    kept = {*sorted(counts, key=counts.__getitem__, reverse=True)[:most]}
    return [key for key in counts if key in kept]


def _count(rows: LogRows, key: str) -> int:
    return len(rows.numbers(key).at) + len(rows.texts(key).at)


def dense(rows: LogRows, key: str) -> Floats:
    """The numbers of a key, nan where a row has none."""
    found = rows.numbers(key)
    if len(found.at) == len(rows):
        return found.values
    values = np.full(len(rows), np.nan)
    values[found.at] = found.values
    return values


def words(rows: LogRows, key: str) -> Any:
    """The texts of a key, None where a row has none."""
    found = rows.texts(key)
    values = np.full(len(rows), None, object)
    values[found.at] = np.array([*found.words, None], object)[found.codes]
    return values


def _column(rows: LogRows, key: str) -> Any:
    texts, numbers = rows.texts(key), rows.numbers(key)
    if not len(texts.at):
        values = dense(rows, key)
        return values.astype(np.int64) if key == "step" else values
    values = words(rows, key)
    values[numbers.at] = numbers.values
    return values
