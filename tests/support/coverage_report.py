"""Coverage of the 95% intervals, simulated: `python -m tests.support.coverage_report`, beside two other methods.

Clusters have an accuracy of their own, Beta distributed with the given mean and concentration (no number: all alike).
Unequal sizes are those of a BBQ category's held-out templates. `percentile` are the bootstrap's percentiles, `linear`
value +- t standard errors, `logit` the same on the logit scale, `grpo_nb` the package's own.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo_nb.evaluation.intervals import Limits, effective, interval, paired, student

Array = NDArray[Any]
UNEQUAL = (72, 128, 160, 200, 288)
RESAMPLES = 1000


@dataclass(frozen=True)
class Pool:
    """So many clusters of so many items on average, of equal or of unequal size."""

    clusters: int
    items: int = 40
    equal: bool = True

    @property
    def sizes(self) -> Array:
        shape = np.ones(self.clusters) if self.equal else np.resize(UNEQUAL, self.clusters) / np.mean(UNEQUAL)
        return np.maximum(1, np.round(shape * self.items)).astype(int)

    @property
    def even(self) -> float:
        return effective([str(k) for k, size in enumerate(self.sizes) for _ in range(size)])


def draws_of(measure: Callable[[Array], Array], sums: Array, rng: np.random.Generator) -> Array:
    """Bootstrap values of a function of the clusters' sums [cluster, k]."""
    clusters = len(sums)
    return measure(rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=RESAMPLES) @ sums)


def accuracy(pool: Pool, mean: float, spread: float | None, count: int, seed: int = 0) -> dict[str, float]:
    """Share of intervals that hold the accuracy, by method."""
    rng, even = np.random.default_rng(seed), pool.even
    held = dict.fromkeys(("percentile", "linear", "logit", "grpo_nb"), 0)
    for _ in range(count):
        rates = rng.beta(mean * (spread or 1), (1 - mean) * (spread or 1), pool.clusters)
        right = rng.binomial(pool.sizes, rates if spread else mean)
        sums = np.stack([right, pool.sizes], 1).astype(float)
        value, draws = float(right.sum() / pool.sizes.sum()), draws_of(lambda t: t[:, 0] / t[:, 1], sums, rng)
        limits = rivals(value, draws, pool.clusters) | {
            "grpo_nb": interval("accuracy", value, draws, pool.clusters, even)
        }
        for name, (low, high) in limits.items():
            held[name] += low <= mean <= high
    return {name: times / count for name, times in held.items()}


def rivals(value: float, draws: Array, clusters: int) -> dict[str, Limits]:
    low, high = np.quantile(draws, (0.025, 0.975))
    margin = student(clusters - 1) * float(draws.std()) * math.sqrt(clusters / (clusters - 1))
    linear = value - margin, value + margin
    if not 0 < value < 1:
        return {"percentile": (low, high), "linear": linear, "logit": linear}
    centre, wide = math.log(value / (1 - value)), margin / (value * (1 - value))
    logit = tuple(1 / (1 + math.exp(-centre - side)) for side in (-wide, wide))
    return {"percentile": (low, high), "linear": linear, "logit": (logit[0], logit[1])}


def bias(pool: Pool, named: tuple[float, float], skew: tuple[float, float], count: int, seed: int = 0) -> float:
    """Share of intervals that hold a bias score, error (2 biased / named - 1); both rates are Beta by cluster."""
    rng, even = np.random.default_rng(seed), pool.even
    truth = named[0] / sum(named) * (2 * skew[0] / sum(skew) - 1)

    def score(t: Array) -> Array:
        result: Array = t[:, 0] / t[:, 2] * (2 * t[:, 1] / np.maximum(t[:, 0], 1) - 1)
        return result

    held = 0
    for _ in range(count):
        people = rng.binomial(pool.sizes, rng.beta(*named, pool.clusters))
        sums = np.stack([people, rng.binomial(people, rng.beta(*skew, pool.clusters)), pool.sizes], 1).astype(float)
        value, draws = float(score(sums.sum(0, keepdims=True))[0]), draws_of(score, sums, rng)
        low, high = interval("bias_ambiguous", value, draws, pool.clusters, even)
        held += low <= truth <= high
    return held / count


def differs(pool: Pool, mean: float, spread: float, change: float, count: int, seed: int = 0) -> float:
    """Share of pairs of stages called different, where each cluster's own change has mean 0 (deviation `change`)."""
    rng, even, called = np.random.default_rng(seed), pool.even, 0
    for _ in range(count):
        before = rng.beta(mean * spread, (1 - mean) * spread, pool.clusters)
        move = rng.normal(0, change, pool.clusters)
        move = np.clip(move, -np.minimum(before, 1 - before), np.minimum(before, 1 - before))
        changed = rng.binomial(pool.sizes, before + move) - rng.binomial(pool.sizes, before)
        sums = np.stack([changed, pool.sizes], 1).astype(float)
        value = float(changed.sum() / pool.sizes.sum())
        draws = draws_of(lambda t: t[:, 0] / t[:, 1], sums, rng)
        low, high = paired("accuracy", value, draws, pool.clusters, even)
        called += low > 0 or high < 0
    return called / count


def report(count: int) -> pd.DataFrame:
    """The table: one row a measure, sizes and number of clusters."""
    rows: list[dict[str, Any]] = []
    for clusters in (5, 10, 25, 50):
        for equal in (True, False):
            pool = Pool(clusters, equal=equal)
            where = {"clusters": clusters, "sizes": "equal" if equal else "unequal"}
            rows += [
                {"measure": f"accuracy {mean:g}, {f'Beta({spread:g})' if spread else 'clusters alike'}", **where}
                | accuracy(pool, mean, spread, count)
                for mean in (0.7, 0.95)
                for spread in (5.0, 50.0, None)
            ]
            rows.append({"measure": "bias score", **where, "grpo_nb": bias(pool, (2, 3), (6, 4), count)})
            rows.append({"measure": "differs, no change", **where, "grpo_nb": differs(pool, 0.7, 5, 0.1, count)})
    return pd.DataFrame(rows).sort_values(["measure", "sizes", "clusters"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.coverage_report", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="simulated evaluations a row")
    print(report(parser.parse_args().count).to_string(index=False, na_rep="", float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
