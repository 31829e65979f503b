"""95% intervals over clusters: all questions of one template, or on one text, count as one draw.

The spread comes from a bootstrap of complete clusters, so any function of the rows has an interval. Its percentiles are
too narrow over few clusters, so the limits come from Student's t: the standard error is the bootstrap's times
sqrt(k / (k - 1)), which makes it unbiased over k clusters (Davison & Hinkley 1997, 2.3). Shares are taken on the logit
scale (Korn & Graubard 1999, 2.2), other measures are corrected for skewness (Hall 1992). Draws are a function of the
seed and the clusters alone, so measures of one pool share their draws and can be subtracted.

Simulated coverage is in [0.93, 0.97] from 5 clusters up, but where a share is near 0 or 1 and its few clusters hold a
handful of events: `python -m tests.support.coverage_report` prints it. Fewer than 5 clusters have no interval.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
LEVEL = 0.95
FEWEST = 5
"""Clusters that an interval needs; fewer give too little information on the spread."""
TOO_FEW = f"[fewer than {FEWEST} clusters]"
"""Text in a table in place of an interval over too few clusters."""
TAIL_WEIGHT, TAIL_FLOOR = 0.3, 6
"""Share of the clusters' excess kurtosis that reduces the degrees of freedom of a share metric (the logit scale covers
the rest), and the least degrees of freedom. Chosen by simulation."""
ROUNDING = 2e-5
"""Rounding of logged draws, which have five digits: smaller differences are no spread."""

PARTS = {"value": "", "low": "_low", "high": "_high"}
"""The three numbers of a measure, and how the columns of a table that hold them end."""

Resamples = dict[str, NDArray[np.float64]]
Limits = tuple[float, float]

NO_INTERVAL: Limits = (math.nan, math.nan)


def bootstrap(
    measure: Callable[[list[int]], Mapping[str, float]], clusters: Sequence[str], seed: int, count: int = RESAMPLES
) -> Resamples:
    """`count` values of every metric, each on a draw with replacement of complete clusters (Field & Welsh 2007).

    The draws depend on the seed and the clusters only, so two measures of one pool share them.
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
    """[count, k] column sums of `counts` [n, k] on the draws of `bootstrap`, without reading rows again.

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
    """Value, low and high of every measure, its n and clusters, and `effective`, as `effective` returns it.

    Args:
        values, drawn: the measures, and their bootstrap.
        clusters: the cluster of every row.
        over: for a measure of a part of the rows, whether each row is in it; without, it is over all.
    """
    found = {}
    for name, value in values.items():
        rows = [
            cluster for cluster, there in zip(clusters, over.get(name, [True] * len(clusters)), strict=True) if there
        ]
        count, even = len(set(rows)), effective(rows)
        low, high = interval(name, value, drawn[name], count, even)
        found[name] = {"value": value, "low": low, "high": high, "n": len(rows), "clusters": count, "effective": even}
    return found


def effective(clusters: Sequence[str]) -> float:
    """Number of equal clusters with the same weight as these, (sum n)^2 / sum n^2 (Kish 1965); `clusters` of the rows.

    >>> effective("aabb"), effective("aaaaaab")
    (2.0, 1.324)
    """
    sizes = list(Counter(clusters).values())
    return round(sum(sizes) ** 2 / sum(n * n for n in sizes), 3) if sizes else 0.0


def interval(name: str, value: float, draws: NDArray[np.float64], clusters: int, even: float | None = None) -> Limits:
    """The 95% interval of a measure from its bootstrap; NaN below FEWEST clusters.

    Where every draw gave the same extreme, it follows the rule of three over the clusters: no event in k
    clusters, its rate is below 3 / k (Hanley & Lippman-Hand 1983). A share of 0 or 1 is such a case; so is a bias
    score of 0 (nobody was named wrongly) and of -1 or 1, whose scale is twice as long.

    Args:
        even: `effective` of the clusters, which gives the degrees of freedom; None: they are of equal size.
    """
    finite = draws[np.isfinite(draws)]
    if clusters < FEWEST or not len(finite) or math.isnan(value):
        return NO_INTERVAL
    if _no_spread(value, finite):
        return _without_spread(name, value, clusters)
    error, freedom = _error(finite, clusters), _freedom(clusters, even)
    if is_share(name) and 0 < value < 1:
        return _share_limits(value, error, clusters, freedom)
    low, high = _skewed_limits(value, error, finite, freedom)
    return (max(-1.0, low), min(1.0, high)) if name.startswith("bias") else (low, high)


def paired(name: str, value: float, draws: NDArray[np.float64], clusters: int, even: float | None = None) -> Limits:
    """The 95% interval of a difference of two measures of the same rows, value +- t error; NaN below FEWEST clusters.

    Where every draw gave the same value, no cluster was seen to differ: with k clusters at most a share of 3 / k
    does, each by at most 1 + |value|.
    """
    finite, end = draws[np.isfinite(draws)], 2.0 if "bias" in name else 1.0
    bounded = is_share(name) or "bias" in name
    if clusters < FEWEST or not len(finite) or math.isnan(value):
        return NO_INTERVAL
    if _no_spread(value, finite):
        margin = min(1.0, 3 / clusters) * (1 + abs(value)) if bounded else 0.0
    else:
        freedom = _freedom(clusters, even)
        inflation = math.sqrt((freedom + 1) / freedom * (clusters - 1) / clusters)
        margin = student(freedom) * _error(finite, clusters) * inflation
    return (max(-end, value - margin), min(end, value + margin)) if bounded else (value - margin, value + margin)


@lru_cache(maxsize=4096)
def student(freedom: float) -> float:
    """The quantile of Student's t at 0.975, for `freedom` of 1 or more, a fraction too.

    P(|T| < sqrt(f) tan(a)) is the part up to a of the integral of cos(x)^(f - 1) over [0, pi / 2].
    """
    freedom = min(freedom, 1e4)  # from there on it is the normal quantile, to four digits
    angles = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(LEVEL * area[-1], area, angles)))


def _no_spread(value: float, draws: NDArray[np.float64]) -> bool:
    return float(np.abs(draws - value).max()) <= ROUNDING * max(1.0, abs(value))


def _without_spread(name: str, value: float, clusters: int) -> Limits:
    margin = min(1.0, 3 / clusters)
    if value in (0.0, 1.0) and is_share(name):
        return (1 - margin, 1.0) if value == 1 else (0.0, margin)
    if value in (-1.0, 0.0, 1.0) and name.startswith("bias"):
        margin *= 1 + abs(value)
        return max(-1.0, value - margin), min(1.0, value + margin)
    return value, value


def is_share(name: str) -> bool:
    """Whether a metric lies in [0, 1], by its name."""
    return any(word in name for word in ("accuracy", "rate", "share"))


def _error(draws: NDArray[np.float64], clusters: int) -> float:
    return float(draws.std()) * math.sqrt(clusters / (clusters - 1))


def _freedom(clusters: int, even: float | None) -> float:
    return max((clusters if even is None else even) - 1.0, 1.0)


def _share_limits(value: float, error: float, clusters: int, freedom: float) -> Limits:
    """logit(value) +- t error / (value (1 - value))."""
    variance = value * (1 - value)
    tails = TAIL_WEIGHT * _beta_kurtosis(value, clusters * error**2 / variance)
    freedom = min(freedom, max(TAIL_FLOOR, 2 * clusters / (tails + 2 * clusters / (clusters - 1))))
    centre, margin = math.log(value / (1 - value)), student(freedom) * error / variance
    low, high = (0.5 + 0.5 * math.tanh((centre + side) / 2) for side in (-margin, margin))
    return low, high


def _beta_kurtosis(mean: float, correlation: float) -> float:
    """Excess kurtosis, 0 at least, of a Beta distribution by its mean and its variance / (mean (1 - mean)).

    Clusters that are nearly all right but for a few have heavy tails: the spread of a handful is a poor estimate.
    """
    total = 1 / min(max(correlation, 1e-9), 0.999) - 1
    a, b = mean * total, (1 - mean) * total
    excess = 6 * ((a - b) ** 2 * (total + 1) - a * b * (total + 2)) / (a * b * (total + 2) * (total + 3))
    return max(excess, 0.0)


def _skewed_limits(value: float, error: float, draws: NDArray[np.float64], freedom: float) -> Limits:
    """Limits value +- t error, each side widened by Hall's transformation for the skewness of the draws."""
    scaled = (draws - draws.mean()) / draws.std()
    skew, quantile = float((scaled**3).mean()), student(freedom)
    sides = [-quantile, quantile]
    if abs(skew) > 1e-6:
        sides += [3 / skew * (math.cbrt(1 + skew * (side - skew / 6)) - 1) for side in sides]
    return value - error * max(sides), value - error * min(sides)


def _picks(clusters: int, seed: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(clusters, size=(count, clusters))
