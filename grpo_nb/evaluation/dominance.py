"""Which of many evaluations of one metric are surely better than which others: all pairs by one matrix product.

`least_gain` is the definition: the lower limit of the paired interval of a difference. The spread of a difference of
two rows' draws follows from their variances and covariance, so that of all pairs it is a product of matrices; a pair
whose limit is near 0, or whose spread is near none, is computed by the definition.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from grpo_nb.evaluation.compare import Draws, Row, drawn_from, draws
from grpo_nb.evaluation.intervals import FEWEST, ROUNDING, is_share, paired, student

NEITHER = frozenset({"abstention_rate", "unknown_rate"})
"""Rates of which neither more nor less is better by itself."""
BLOCK = 256
"""Rows whose pairs are in memory together."""
NEAR = 1e-6
"""Limits as near to 0 are computed by the definition."""
SAFE = 1e-7
"""Least variance of a difference, in units of the two variances, of which the product loses no digit that counts."""

Pairs = NDArray[np.bool_]


def orient(metric: str, values: Draws) -> Draws:
    """Values turned so that more is better: a bias is its distance from 0, a `_rate` is of what should not be.

    >>> orient("bias_ambiguous", np.array([-0.2, 0.1])).tolist(), orient("unparsed_rate", np.array([0.3])).tolist()
    ([-0.2, -0.1], [-0.3])
    """
    if metric in NEITHER:
        raise ValueError(f"of {metric} neither more nor less is better; choose a metric with a direction, as accuracy")
    if metric.startswith("bias"):
        return np.asarray(-np.abs(values))
    return -values if metric.endswith("_rate") else values


def least_gain(before: Row, after: Row, metric: str) -> float:
    """The lower limit of the paired interval of what `after` is better by; NaN over too few clusters."""
    was, is_now = (orient(metric, np.array([row["metrics"][metric]["value"]])) for row in (before, after))
    gains = orient(metric, draws(after, metric)) - orient(metric, draws(before, metric))
    return paired(metric, float(is_now[0] - was[0]), gains, *drawn_from(after, metric))[0]


def surely_better(rows: Sequence[Row], metric: str) -> Pairs:
    """[after, before]: whether `least_gain` of each pair of rows is above 0."""
    values = orient(metric, np.array([row["metrics"][metric]["value"] for row in rows], float))
    found = values[:, None] > values[None, :]  # a limit is never above the value
    drawn = [draws(row, metric) for row in rows]
    if len({len(row) for row in drawn}) > 1 or not all(len(row) and np.isfinite(row).all() for row in drawn):
        return _by_definition(rows, metric, found, found)
    clusters, factors = _sizes(rows, metric)
    found &= (clusters >= FEWEST)[:, None]
    table = orient(metric, np.stack(drawn))
    spread = table - table.mean(axis=1, keepdims=True)
    variances, constant = (spread**2).mean(axis=1), np.ptp(table, axis=1) == 0
    bounded = is_share(metric) or "bias" in metric
    for start in range(0, len(rows), BLOCK):
        own = slice(start, start + BLOCK)
        gains = values[own, None] - values[None, :]
        both = variances[own, None] + variances[None, :]
        variance = np.maximum(both - 2 * (spread[own] @ spread.T) / table.shape[1], 0.0)
        low = gains - factors[own, None] * np.sqrt(variance)
        rounding = ROUNDING * np.maximum(1.0, np.abs(gains))
        unsure = (variance < np.maximum(SAFE * both, (2 * rounding) ** 2)) | (np.abs(low) < NEAR)
        flat = constant[own, None] & constant[None, :]  # no draw differs from another
        margins = np.minimum(1.0, 3 / clusters[own, None]) * (1 + np.abs(gains)) * bounded
        agree = np.abs(table[own, None, 0] - table[None, :, 0] - gains) < rounding / 2
        low = np.where(flat, gains - margins, low)
        unsure = np.where(flat & agree, np.abs(low) < NEAR, unsure)
        found[own] = _by_definition(rows, metric, found[own] & (low > 0), found[own] & unsure, start)
    return found


def _by_definition(rows: Sequence[Row], metric: str, found: Pairs, unsure: Pairs, start: int = 0) -> Pairs:
    """`found`, whose first row is of row `start`, with the pairs that are `unsure` computed one by one."""
    found = found.copy()
    for after, before in np.argwhere(unsure).tolist():
        found[after, before] = least_gain(rows[before], rows[start + after], metric) > 0
    return found


def _sizes(rows: Sequence[Row], metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each row the clusters of its metric, 1 at least, and what the deviation of draws is multiplied by."""
    known = [drawn_from(row, metric) for row in rows]
    freedom = np.array([max((clusters if even is None else even) - 1.0, 1.0) for clusters, even in known])
    quantiles = np.array([student(float(value)) for value in freedom])
    return np.maximum([clusters for clusters, _ in known], 1).astype(float), quantiles * np.sqrt(1 + 1 / freedom)
