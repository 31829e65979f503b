"""Rows of a log as points of a picture: a panel is a few hundred pixels wide, and a run may have a million steps.

Up to MOST_POINTS rows are drawn one by one. Of more, stretches of rows share a point: the mean of each key, at the
step of the stretch's last row, with its lowest and highest value as `min:<key>` and `max:<key>`, so that no extreme
is lost. Skipped steps share no point with others, and the first and newest rows stay alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo_nb.metrics import limits
from grpo_nb.metrics.counted import Columns
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.frames import dense, frame, words
from grpo_nb.storage.index.packing import Floats

MOST_POINTS = 2000
FIRST_ALONE, NEWEST_ALONE = 5, 10
"""Rows at either end that stay as they are: the numbers next to a curve are means of them."""
LOW, HIGH = "min:", "max:"
_STATUS = ("ok", "clipped", "skipped", "rolled_back")
"""Statuses by rank; a stretch of rows gets the last of these that one of its rows has."""
UNDONE = ["skipped", "rolled_back"]
"""Statuses of steps that changed no weight."""


def ordered(rows: pd.DataFrame | LogRows) -> pd.DataFrame:
    """Points by step, of equal steps the last row."""
    if isinstance(rows, LogRows) and len(rows) <= MOST_POINTS:
        rows = frame(rows, "step")
    if not len(rows) or "step" not in (rows.keys if isinstance(rows, LogRows) else rows):
        return pd.DataFrame({"step": pd.Series(dtype=float)})
    if isinstance(rows, LogRows):
        return _thinned(dense(rows, "step"), rows.keys, lambda key: dense(rows, key), lambda key: words(rows, key))
    rows = rows.sort_values("step", kind="stable").drop_duplicates("step", keep="last").reset_index(drop=True)
    if len(rows) <= MOST_POINTS:
        return rows
    table = rows
    return _thinned(
        table["step"].to_numpy(float),
        [*map(str, table.columns)],
        lambda key: pd.to_numeric(table[key], errors="coerce").to_numpy(float),
        lambda key: np.array([v if isinstance(v, str) else None for v in table[key]], object),
    )


def extremes(rows: pd.DataFrame, values: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Lowest and highest value among the rows of each point of a column; the values themselves without thinning."""
    if f"{LOW}{values.name}" not in rows:
        return values, values
    known = values.notna()
    return rows[f"{LOW}{values.name}"].where(known), rows[f"{HIGH}{values.name}"].where(known)


def _thinned(
    steps: Floats, keys: list[str], numbers: Callable[[str], Floats], texts: Callable[[str], NDArray[np.object_]]
) -> pd.DataFrame:
    status = texts("status") if "status" in keys else np.full(len(steps), None, object)
    points, columns = _Points(steps, np.isin(status, UNDONE)), Columns(keys, numbers)
    table: dict[str, object] = {"step": points.steps}
    for key in keys:
        if key == "status":
            table[key] = points.status(status)
        elif key != "step":
            table |= points.columns(key, columns[key], texts)
    return pd.DataFrame(table)


class _Points:
    """Assignment of rows to shared points."""

    def __init__(self, steps: Floats, skipped: NDArray[np.bool_]) -> None:
        order = np.argsort(steps, kind="stable")
        order = order[np.append(np.diff(steps[order]) != 0, True)]
        count, inner = len(order), len(order) - FIRST_ALONE - NEWEST_ALONE
        shared = FIRST_ALONE + np.arange(MOST_POINTS) * inner // MOST_POINTS
        edges = np.unique([*range(FIRST_ALONE), *shared, *range(count - NEWEST_ALONE, count)])
        group = 2 * np.searchsorted(edges, np.arange(count), "right") + skipped[order]
        by_group = np.argsort(group, kind="stable")
        self._rows, group = order[by_group], group[by_group]
        self._starts = np.flatnonzero(np.diff(group, prepend=-1))
        newest = steps[self._rows[np.append(self._starts[1:], count) - 1]]
        self._by_step = np.argsort(newest, kind="stable")
        self.steps = newest[self._by_step].astype(np.int64)

    def columns(
        self, key: str, values: Floats, texts: Callable[[str], NDArray[np.object_]]
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Mean, lowest and highest number of a key; its last text where it has texts only."""
        values = limits.bounded(key, np.where(np.isfinite(values), values, np.nan))[self._rows]
        if np.isnan(values).all():
            yield key, self._last(texts(key))
            return
        known = ~np.isnan(values)
        with np.errstate(all="ignore"):
            yield key, (self._each(np.add, np.where(known, values, 0.0)) / self._each(np.add, known.astype(float)))
        low, high = self._each(np.fmin, values), self._each(np.fmax, values)
        if not np.array_equal(low, high, equal_nan=True):
            yield f"{LOW}{key}", low
            yield f"{HIGH}{key}", high

    def status(self, status: NDArray[np.object_]) -> NDArray[Any]:
        """Status of each point: the worst of its rows'."""
        rank = np.zeros(len(status), np.int64)
        for place, word in enumerate(_STATUS):
            rank[status == word] = place
        names: NDArray[Any] = np.array(_STATUS, object)[self._each(np.maximum, rank[self._rows])]
        return names

    def _last(self, texts: NDArray[np.object_]) -> NDArray[Any]:
        texts = texts[self._rows]
        places = self._each(np.maximum, np.where(texts.astype(bool), np.arange(len(texts)), -1))
        found: NDArray[Any] = texts[places]
        found[places < self._starts[self._by_step]] = None
        return found

    def _each(self, what: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = what.reduceat(values, self._starts)[self._by_step]
        return found
