"""95% intervals by resampling whole clusters: all questions of one template, or on one text, count as one draw.

That is what makes them honest where questions resemble each other. Draws are a function of the seed and the
clusters alone, so measures of one pool are drawn in step and can be subtracted.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
COVERAGE = (0.025, 0.975)

Resamples = dict[str, NDArray[np.float64]]


def bootstrap(
    measure: Callable[[list[int]], Mapping[str, float]], clusters: Sequence[str], seed: int, count: int = RESAMPLES
) -> Resamples:
    """`count` values of every metric, each on a draw with replacement of whole clusters (Field & Welsh 2007).

    The draws hang on the seed and the clusters only, so two measures of one pool are drawn in step.
    """
    members: dict[str, list[int]] = {}
    for row, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(row)
    groups = list(members.values())
    picks = _picks(len(groups), seed, count)
    results = [measure([row for pick in picked for row in groups[pick]]) for picked in picks.tolist()]
    return {name: np.array([result[name] for result in results]) for name in results[0]}


def bootstrap_counts(
    counts: NDArray[np.float64], clusters: Sequence[str], seed: int, count: int = RESAMPLES
) -> NDArray[np.float64]:
    """[count, k] column sums of `counts` [n, k] on the draws that `bootstrap` makes, without looking at rows again.

    For measures that are functions of counts: thousands of times faster, and the same numbers.
    """
    order = {cluster: place for place, cluster in enumerate(dict.fromkeys(clusters))}
    sums = np.zeros((len(order), counts.shape[1]))
    np.add.at(sums, [order[cluster] for cluster in clusters], counts)
    times = [np.bincount(picked, minlength=len(order)) for picked in _picks(len(order), seed, count)]
    result: NDArray[np.float64] = np.array(times) @ sums
    return result


def interval(name: str, value: float, draws: NDArray[np.float64], clusters: int) -> tuple[float, float]:
    """95% percentiles; where a share was 0 or 1 in every draw, the rule of three (Hanley & Lippman-Hand 1983)."""
    low, high = percentiles(draws)
    if low == high == value and value in (0.0, 1.0) and any(word in name for word in ("accuracy", "rate", "share")):
        margin = min(1.0, 3 / clusters)
        return (1 - margin, 1.0) if value == 1 else (0.0, margin)
    return low, high


def percentiles(draws: NDArray[np.float64]) -> tuple[float, float]:
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, COVERAGE)
    return float(low), float(high)


def _picks(clusters: int, seed: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(clusters, size=(count, clusters))
