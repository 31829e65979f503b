"""95% intervals by resampling whole clusters: all questions of one template, or on one text, count as one draw.

That is what makes them honest where questions resemble each other. Draws are a function of the seed and the
clusters alone, so measures of one pool are drawn in step and can be subtracted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
COVERAGE = (0.025, 0.975)

PARTS = {"value": "", "low": "_low", "high": "_high"}
"""The three numbers of a measure, and how the columns of a table that hold them end."""

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


def with_intervals(
    values: Mapping[str, float],
    drawn: Resamples,
    clusters: Sequence[str],
    over: Mapping[str, Sequence[bool]] = MappingProxyType({}),
) -> dict[str, dict[str, float]]:
    """value, low and high of every measure, and n and clusters, the rows that it is over and the draws they make.

    Args:
        values, drawn: the measures, and their bootstrap.
        clusters: of every row.
        over: for a measure of a part of the rows, whether each row is in it; without, it is over all.
    """
    found = {}
    for name, value in values.items():
        rows = [
            cluster for cluster, there in zip(clusters, over.get(name, [True] * len(clusters)), strict=True) if there
        ]
        low, high = interval(name, value, drawn[name], len(set(rows)))
        found[name] = {"value": value, "low": low, "high": high, "n": len(rows), "clusters": len(set(rows))}
    return found


def interval(name: str, value: float, draws: NDArray[np.float64], clusters: int) -> tuple[float, float]:
    """95% percentiles; where every draw gave one and the same extreme, the rule of three over the clusters there are.

    No event in k clusters: its rate is below 3 / k (Hanley & Lippman-Hand 1983). A share of 0 or 1 is such a case; so
    is a bias score of 0 (nobody was named wrongly) and of -1 or 1, whose scale is twice as long.
    """
    low, high = percentiles(draws)
    if not low == high == value:
        return low, high
    margin = min(1.0, 3 / clusters) if clusters else 1.0
    if value in (0.0, 1.0) and any(word in name for word in ("accuracy", "rate", "share")):
        return (1 - margin, 1.0) if value == 1 else (0.0, margin)
    if value in (-1.0, 0.0, 1.0) and name.startswith("bias"):
        margin *= 1 + abs(value)
        return max(-1.0, value - margin), min(1.0, value + margin)
    return low, high


def paired(name: str, value: float, draws: NDArray[np.float64], clusters: int) -> tuple[float, float]:
    """`interval` of a difference of two measures of the same rows.

    Where every draw gave one and the same, no cluster is known to have gone another way: with k clusters at most a
    share of 3 / k did, each by at most 1 + |value|.
    """
    low, high = percentiles(draws)
    if not low == high == value or not any(word in name for word in ("accuracy", "rate", "share", "bias")):
        return low, high
    margin, end = (min(1.0, 3 / clusters) if clusters else 1.0) * (1 + abs(value)), 2.0 if "bias" in name else 1.0
    return max(-end, value - margin), min(end, value + margin)


def percentiles(draws: NDArray[np.float64]) -> tuple[float, float]:
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, COVERAGE)
    return float(low), float(high)


def _picks(clusters: int, seed: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(clusters, size=(count, clusters))
