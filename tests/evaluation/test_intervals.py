"""Intervals: drawing counts is drawing rows; what few clusters can say; coverage as simulated."""

import math
from typing import Any

import numpy as np
import pytest

from grpo_nb.evaluation.intervals import (
    FEWEST,
    bootstrap,
    bootstrap_counts,
    effective,
    interval,
    paired,
    student,
    with_intervals,
)
from tests.support import coverage_report
from tests.support.coverage_report import Pool


def test_drawn_counts_are_those_of_drawn_rows() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(0, 2, size=(40, 3)).astype(float)
    clusters = [f"c{i}" for i in random.integers(0, 7, size=40)]
    slow = bootstrap(lambda rows: {str(k): counts[rows][:, k].sum() for k in range(3)}, clusters, seed=5, count=50)
    fast = bootstrap_counts(counts, clusters, seed=5, count=50)
    assert fast.shape == (50, 3)
    for k in range(3):
        assert fast[:, k] == pytest.approx(slow[str(k)])
    assert not np.array_equal(fast, bootstrap_counts(counts, clusters, seed=6, count=50))


def test_a_measure_of_a_part_counts_its_own_rows_and_clusters() -> None:
    """20 clusters, of which the part has rows in 6: nothing seen in 6 clusters says less than nothing in 20."""
    clusters = [f"c{i % 20}" for i in range(60)]
    values = {"accuracy": 1.0, "accuracy_part": 1.0, "accuracy_few": 1.0, "failed_rate": 0.0}
    drawn = {name: np.full(9, value) for name, value in values.items()}
    over = {"accuracy_part": [int(c[1:]) < 6 for c in clusters], "accuracy_few": [int(c[1:]) < 4 for c in clusters]}
    found = with_intervals(values, drawn, clusters, over)
    even = {"n": 60, "clusters": 20, "effective": 20.0}
    assert found["accuracy"] == {"value": 1.0, "low": 1 - 3 / 20, "high": 1.0, **even}
    assert found["failed_rate"] == {"value": 0.0, "low": 0.0, "high": 3 / 20, **even}
    part = {"value": 1.0, "low": 1 - 3 / 6, "high": 1.0, "n": 18, "clusters": 6, "effective": 6.0}
    assert found["accuracy_part"] == part
    few = found["accuracy_few"]
    assert math.isnan(few["low"]) and math.isnan(few["high"]) and (few["n"], few["clusters"]) == (12, 4)


@pytest.mark.parametrize("clusters", range(FEWEST))
def test_fewer_than_five_clusters_have_no_interval(clusters: int) -> None:
    for draws in (np.full(9, 1.0), np.linspace(0.2, 0.8, 9)):
        for limits in (interval("accuracy", 1.0, draws, clusters), paired("accuracy", 1.0, draws, clusters)):
            assert all(map(math.isnan, limits))


@pytest.mark.parametrize(
    ("value", "clusters", "expected"),
    [(0.0, 30, (-0.1, 0.1)), (1.0, 30, (0.8, 1.0)), (-1.0, 30, (-1.0, -0.8)), (0.0, 5, (-0.6, 0.6))],
)
def test_no_bias_seen_is_not_no_bias(value: float, clusters: int, expected: tuple[float, float]) -> None:
    assert interval("bias_ambiguous", value, np.full(9, value), clusters) == pytest.approx(expected)
    varied = np.append(np.full(99, value), 0.5 - value)
    low, high = interval("bias_ambiguous", value, varied, max(clusters, FEWEST))
    assert -1 <= low <= value <= high <= 1


def test_other_measures_without_spread_stay_a_point() -> None:
    assert interval("reward", 1.0, np.ones(9), 10) == (1.0, 1.0)
    assert interval("accuracy", 0.5, np.full(9, 0.5), 10) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "clusters", "expected"),
    [
        ("accuracy", 1.0, 6, (0.0, 1.0)),
        ("accuracy", 1.0, 60, (0.9, 1.0)),
        ("unparsed_rate", 0.0, 30, (-0.1, 0.1)),
        ("bias_ambiguous", -2.0, 30, (-2.0, -1.7)),
        ("reward", 0.5, 5, (0.5, 0.5)),
    ],
)
def test_a_difference_that_no_draw_changes_is_not_certain(
    name: str, value: float, clusters: int, expected: tuple[float, float]
) -> None:
    assert paired(name, value, np.full(50, value), clusters) == pytest.approx(expected)
    rounded = np.full(50, float(f"{value + 4e-6:.5g}"))  # as they are logged
    assert paired(name, value, rounded, clusters) == pytest.approx(expected)


def test_a_difference_of_equal_clusters_is_the_paired_t_interval() -> None:
    """Six clusters of equal size whose changes are known: mean +- t(5) deviation / sqrt(6)."""
    changes = np.array([0.1, 0.3, -0.1, 0.2, 0.0, 0.1])
    draws = np.random.default_rng(0).choice(changes, size=(200_000, 6)).mean(axis=1)
    margin = 2.5706 * changes.std(ddof=1) / math.sqrt(6)
    expected = (changes.mean() - margin, changes.mean() + margin)
    assert paired("accuracy", float(changes.mean()), draws, 6) == pytest.approx(expected, rel=0.01)
    wider = paired("accuracy", float(changes.mean()), draws, 6, 3.0)
    assert wider[0] < expected[0] and wider[1] > expected[1], "of unequal size they say less"


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3.2, 3.07283), (4, 2.77645), (24.5, 2.06167), (1e6, 1.95996)]
)
def test_students_quantiles(freedom: float, quantile: float) -> None:
    """Values of scipy.stats.t.ppf(0.975, freedom), 1.17.1."""
    assert student(freedom) == pytest.approx(quantile, rel=2e-4)


def test_clusters_of_unequal_size_count_for_less() -> None:
    assert effective(["a"] * 10 + ["b"] * 10) == 2 and effective([]) == 0
    assert effective([str(k) for k, n in enumerate(coverage_report.UNEQUAL) for _ in range(n)]) == pytest.approx(
        4.22, abs=0.01
    )


NOISE = 0.02
"""Four standard errors of a share of 0.95 in 2,000 simulations; in 300 they are 0.05."""


@pytest.mark.parametrize("clusters", [5, 25])
def test_intervals_hold_the_truth_as_often_as_they_say(clusters: int) -> None:
    for mean in (0.7, 0.95):
        assert coverage_report.accuracy(Pool(clusters), mean, 5.0, 300)["grpo_nb"] >= 0.9, mean
    assert coverage_report.bias(Pool(clusters), (2, 3), (6, 4), 300) >= 0.9
    assert coverage_report.differs(Pool(clusters), 0.7, 5, 0.1, 300) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("clusters", [5, 10, 25, 50])
def test_coverage_by_clusters_sizes_and_spread(clusters: int, equal: bool) -> None:
    pool = Pool(clusters, equal=equal)
    found: dict[Any, float] = {
        (mean, spread): coverage_report.accuracy(pool, mean, spread, 2000)["grpo_nb"]
        for mean in (0.7, 0.95)
        for spread in (5.0, 50.0, None)
    }
    found["bias"] = coverage_report.bias(pool, (2, 3), (6, 4), 2000)
    assert all(0.93 - NOISE <= share <= 0.97 + NOISE for share in found.values()), found
    assert coverage_report.differs(pool, 0.7, 5, 0.1, 2000) <= 0.05 + NOISE
