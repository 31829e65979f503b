"""Rows of a log as a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.storage import schema
from grpo_nb.storage.index.packing import Floats
from grpo_nb.storage.index.rows import LogRows

Row = dict[str, Any]

FEW_ROWS = 5_000
"""A table of so many is made of the rows; of more it is made of columns, and nothing else stays in memory."""


def frame(rows: Sequence[Row], *columns: str) -> pd.DataFrame:
    """One row a row, one column a key; of no rows a table of these columns.

    In a long table numbers other than the step are floats, also where they are whole.
    """
    if not len(rows):
        return pd.DataFrame(columns=list(columns))
    if not isinstance(rows, LogRows) or len(rows) <= FEW_ROWS:
        return pd.DataFrame(schema.narrow(list(rows)))
    return pd.DataFrame({key: _column(rows, key) for key in rows.keys[: schema.MOST_KEYS]}, copy=False)


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
