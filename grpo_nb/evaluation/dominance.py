"""Dominance between many evaluations, by intervals, and the front of those that no other dominates.

`least_gain` is the definition: the lower limit of the paired interval of a difference. The spread of a difference of
two rows' draws follows from their variances and covariance; a pair whose limit is near 0, or whose spread is near none,
is computed by the definition.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from grpo_nb.evaluation.compare import Draws, Row, drawn_from, draws
from grpo_nb.evaluation.intervals import FEWEST, ROUNDING, is_share, paired, student

NEITHER = frozenset({"abstention_rate", "unknown_rate"})
"""Rates of which neither more nor less is better by itself."""
AT_ONCE = 16
"""Rows that a row is compared with together."""
MOST_NAMED = 3
"""Rows that are named as dominating another one."""
NEAR = 1e-6
"""Distance from 0 below which a limit is computed by the definition."""
SAFE = 1e-7
"""Least variance of a difference, in units of the two variances, of which the product loses no digit that counts."""

Pairs = NDArray[np.bool_]
Places = NDArray[np.int64]


def orient(metric: str, values: Draws) -> Draws:
    """Values turned so that more is better: a bias is its distance from 0, a `_rate` counts something unwanted.

    >>> orient("bias_ambiguous", np.array([-0.2, 0.1])).tolist(), orient("unparsed_rate", np.array([0.3])).tolist()
    ([-0.2, -0.1], [-0.3])
    """
    if metric in NEITHER:
        raise ValueError(f"of {metric} neither more nor less is better; choose a metric with a direction, as accuracy")
    if metric.startswith("bias"):
        return np.asarray(-np.abs(values))
    return -values if metric.endswith("_rate") else values


def least_gain(before: Row, after: Row, metric: str) -> float:
    """The lower limit of the paired interval of the gain of `after`; NaN over too few clusters."""
    was, is_now = (orient(metric, np.array([row["metrics"][metric]["value"]])) for row in (before, after))
    gains = orient(metric, draws(after, metric)) - orient(metric, draws(before, metric))
    return paired(metric, float(is_now[0] - was[0]), gains, *drawn_from(after, metric))[0]


class Comparison:
    """Rows of one metric; comparing some of them with one costs nothing for the others.

    Raises:
        ValueError: as `orient`.
    """

    def __init__(self, rows: Sequence[Row], metric: str) -> None:
        self._rows, self._metric = rows, metric
        self.values = orient(metric, np.array([row["metrics"][metric]["value"] for row in rows], float))
        drawn = [draws(row, metric) for row in rows]
        self._alike = len({len(row) for row in drawn}) == 1 and all(len(r) and np.isfinite(r).all() for r in drawn)
        """Whether spreads of differences follow from the rows' own; else each pair is computed by the definition."""
        if not self._alike:
            return
        self._clusters, self._factors = _sizes(rows, metric)
        self._table = orient(metric, np.stack(drawn))
        self._spread = self._table - self._table.mean(axis=1, keepdims=True)
        self._variances, self._constant = (self._spread**2).mean(axis=1), np.ptp(self._table, axis=1) == 0
        self._bounded = is_share(metric) or "bias" in metric

    def better(self, after: Places, before: int) -> Pairs:
        """Whether `least_gain` of each of the rows `after` over the row `before` is above 0."""
        gains = self.values[after] - self.values[before]
        found = gains > 0  # a limit is never above the value
        if not self._alike:
            return self._by_definition(found, found, after, before)
        found &= self._clusters[after] >= FEWEST
        both = self._variances[after] + self._variances[before]
        products = np.einsum("ij,j->i", self._spread[after], self._spread[before]) / self._table.shape[1]
        variance = np.maximum(both - 2 * products, 0.0)
        low = gains - self._factors[after] * np.sqrt(variance)
        rounding = ROUNDING * np.maximum(1.0, np.abs(gains))
        unsure = (variance < np.maximum(SAFE * both, (2 * rounding) ** 2)) | (np.abs(low) < NEAR)
        flat = self._constant[after] & self._constant[before]  # no two resamples differ
        margins = np.minimum(1.0, 3 / self._clusters[after]) * (1 + np.abs(gains)) * self._bounded
        agree = np.abs(self._table[after, 0] - self._table[before, 0] - gains) < rounding / 2
        low = np.where(flat, gains - margins, low)
        unsure = np.where(flat & agree, np.abs(low) < NEAR, unsure)
        return self._by_definition(found & (low > 0), found & unsure, after, before)

    def _by_definition(self, found: Pairs, unsure: Pairs, after: Places, before: int) -> Pairs:
        """`found`, with the rows that are `unsure` computed one by one."""
        found = found.copy()
        for place in np.flatnonzero(unsure).tolist():
            found[place] = least_gain(self._rows[before], self._rows[int(after[place])], self._metric) > 0
        return found


def dominators(comparisons: Sequence[Comparison]) -> list[list[int]]:
    """Dominators of each row, a few at most: surely better in each of the comparisons, which have the same rows.

    Rows that nothing dominates are the front. The others name rows of the front, MOST_NAMED at most, where one
    dominates them. Rows are met from the best on, and of those before them the front is tried first, AT_ONCE at a time:
    a stage that is clearly dominated costs a few comparisons, however long the run is.
    """
    values = np.stack([comparison.values for comparison in comparisons], axis=1)
    found: list[list[int]] = [[] for _ in values]
    front, others = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for row in np.lexsort(-values.T).tolist():
        for rivals in (front, others):
            higher = rivals[(values[rivals] > values[row]).all(axis=1)]
            found[row] = found[row] or _first_better(comparisons, higher, row)
        if found[row]:
            others = np.append(others, row)
        else:
            front = _inserted(front, row, values.sum(axis=1))
    return found


def _inserted(front: Places, row: int, totals: NDArray[np.float64]) -> Places:
    """The front with a row in its place: those with the highest totals, which dominate most, come first."""
    return np.insert(front, np.searchsorted(-totals[front], -totals[row], "right"), row)


def _first_better(comparisons: Sequence[Comparison], rivals: Places, row: int) -> list[int]:
    for start in range(0, len(rivals), AT_ONCE):
        tried = rivals[start : start + AT_ONCE]
        for comparison in comparisons:
            tried = tried[comparison.better(tried, row)]
        if len(tried):
            return sorted(tried[:MOST_NAMED].tolist())
    return []


def _sizes(rows: Sequence[Row], metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Clusters of each row's metric, 1 at least, and the factor of the deviation of its resamples."""
    known = [drawn_from(row, metric) for row in rows]
    freedom = np.array([max((clusters if even is None else even) - 1.0, 1.0) for clusters, even in known])
    quantiles = np.array([student(float(value)) for value in freedom])
    return np.maximum([clusters for clusters, _ in known], 1).astype(float), quantiles * np.sqrt(1 + 1 / freedom)
